package rest

import (
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/internal/oipcodec"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

const jsonType = payload.JSONType

// readInputs reads the body into the request, and returns the format of the response.
func (h *handler) readInputs(out *request.Request, w http.ResponseWriter, r *http.Request, memory *budget.Account) (format, error) {
	f := formatOf(r.Header)
	kind, err := contentType(r.Header.Get("Content-Type"))
	if err != nil {
		return f, err
	}
	from := http.MaxBytesReader(w, transport.StallReader(w, r, h.settings), int64(h.settings.MaxMessageBytes))
	if kind.media == "multipart/form-data" {
		if err = memory.Reserve(transport.FormBytes); err == nil {
			out.Inputs, err = readForm(from, kind.params["boundary"], int64(h.settings.MaxMessageBytes))
		}
	} else {
		var data []byte
		if data, err = transport.ReadBody(from, r.ContentLength, int64(h.settings.MaxMessageBytes)); err == nil {
			err = h.takeBody(out, &f, kind, data, memory)
		}
	}
	if err != nil {
		return f, err
	}
	return f, payload.Validate("inputs", out.Inputs)
}

// takeBody takes a body that is not a form: tensors in the form of the Open Inference
// Protocol, in JSON or MessagePack, or one blob.
func (h *handler) takeBody(out *request.Request, f *format, kind kind, data []byte, memory *budget.Account) error {
	if len(data) == 0 {
		return emptyBody()
	}
	isJSON, isPacked := kind.media == jsonType, msgpack.Is(kind.media)
	if isPacked {
		if err := msgpack.Check(data); err != nil {
			return fault.Newf(fault.InvalidRequest, "the body is not valid MessagePack: %w", err)
		}
	}
	if isJSON || isPacked {
		hasTensors, err := kind.hasTensors(data, isPacked)
		if err != nil {
			return err
		}
		if hasTensors {
			return h.takeTensors(out, f, data, isPacked, memory)
		}
	}
	contentType := kind.full
	switch {
	case isJSON:
		contentType = jsonType
	case isPacked:
		contentType = msgpack.Type
	}
	out.Inputs = []payload.Part{payload.OfBlob("", contentType, data)}
	if isJSON || strings.HasSuffix(kind.media, "+json") {
		return oipjson.Check(data)
	}
	return nil
}

// takeTensors takes a request of the Open Inference Protocol, in which a BYTES tensor with a content
// type is a blob. The response has its form unless Accept asks for the other. The query wins over its parameters and outputs.
func (h *handler) takeTensors(out *request.Request, f *format, data []byte, isPacked bool, memory *budget.Account) (err error) {
	var request *oipjson.Request
	if isPacked {
		f.packed = !f.json
		request, err = oipjson.DecodePacked(data, h.settings.MaxMessageBytes, memory)
	} else {
		f.json = !f.packed
		request, err = oipjson.Decode(data, memory)
	}
	if err != nil {
		return err
	}
	if out.Inputs, err = request.Parts(); err != nil {
		return err
	}
	for i, part := range out.Inputs {
		if out.Inputs[i], err = oipcodec.AsBlob(part, false); err != nil {
			return fault.InField(fault.InvalidInput, payload.Path("inputs", i, part.Name), "%w", err)
		}
	}
	out.Parameters = payload.Merge(request.Parameters, out.Parameters)
	if out.Outputs == nil {
		out.Outputs = request.OutputNames()
	}
	f.id = request.ID
	return nil
}

func emptyBody() error {
	return fault.New(fault.InvalidRequest, "the body is empty; send the input, or inputs as multipart/form-data or JSON")
}

// kind is a parsed Content-Type.
type kind struct {
	// media is the lower-case media type, full the header's value.
	media, full string
	params      map[string]string
}

func contentType(value string) (kind, error) {
	out := kind{full: strings.TrimSpace(value)}
	if out.full == "" {
		return out, nil
	}
	var err error
	out.media, out.params, err = mime.ParseMediaType(out.full)
	if err != nil || !utf8.ValidString(out.full) {
		return out, fault.Newf(fault.UnsupportedMedia, "Content-Type %.*q is not a media type", fault.MaxQuoted, out.full)
	}
	if out.media == "application/x-www-form-urlencoded" {
		return out, fault.New(fault.UnsupportedMedia, "application/x-www-form-urlencoded is not accepted (it is curl's default); name the body's own type, such as Content-Type: image/jpeg")
	}
	return out, nil
}

// hasTensors reports whether a body of JSON or MessagePack is tensors rather than one blob:
// by the parameter form, or else by looks.
func (k kind) hasTensors(data []byte, isPacked bool) (bool, error) {
	switch form := k.params["form"]; {
	case form == "tensors":
		return true, nil
	case form == "blob":
		return false, nil
	case form != "":
		return false, fault.Newf(fault.UnsupportedMedia, "Content-Type has form=%.*q; there are tensors and blob", fault.MaxQuoted, form)
	case isPacked:
		return oipjson.DetectPacked(data), nil
	}
	return oipjson.Detect(data), nil
}

// textPlain is the type of a part that names none and is not a file, by RFC 7578. A file without a
// type has the one that the stage declares.
const textPlain = "text/plain"

// readForm reads a form: one blob per part.
func readForm(from io.Reader, boundary string, limit int64) ([]payload.Part, error) {
	if boundary == "" {
		return nil, fault.New(fault.InvalidRequest, "multipart/form-data names no boundary")
	}
	form := transport.NewForm(from, boundary)
	var out []payload.Part
	for {
		part, err := form.NextPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if len(out) == payload.MaxParts {
			return nil, fault.Newf(fault.InvalidRequest, "more than %d parts", payload.MaxParts)
		}
		blob, err := blobOf(part, len(out), limit)
		if err != nil {
			return nil, err
		}
		out = append(out, blob)
	}
	if len(out) == 0 {
		return nil, emptyBody()
	}
	return out, nil
}

func blobOf(part *multipart.Part, index int, limit int64) (payload.Part, error) {
	name := part.FormName()
	if name == "" {
		return payload.Part{}, invalid(fmt.Sprintf("inputs[%d]", index), errors.New("the part has no name; a part's name is its input's"))
	}
	contentType := part.Header.Get("Content-Type")
	if contentType == "" && part.FileName() == "" {
		contentType = textPlain
	}
	data, err := transport.ReadBody(transport.FormReader{Reader: part}, -1, limit)
	if err == nil && payload.IsJSON(contentType) {
		if err = oipjson.Check(data); err != nil {
			f := fault.From(err)
			err = fault.InField(f.Reason, payload.Path("inputs", index, name), "%s", f.Message)
		}
	}
	return payload.OfBlob(name, contentType, data), err
}
