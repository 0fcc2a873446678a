package rest

import (
	"encoding/json"
	"fmt"
	"mime"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/oipjson"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

const jsonType = payload.JSONType

// refuse says no before anything of the body is read.
func (h *handler) refuse(r *http.Request) error {
	if err := transport.CheckEncoding(r); err != nil {
		return err
	}
	return transport.CheckLength(r, int64(h.settings.MaxMessageBytes))
}

// inputs reads the body into the request, and says how the answer is wished.
func (h *handler) inputs(out *call.Request, w http.ResponseWriter, r *http.Request, memory *transport.Reservation) (wish, error) {
	wished := wishOf(r.Header)
	kind, err := contentType(r.Header.Get("Content-Type"))
	if err != nil {
		return wished, err
	}
	from := http.MaxBytesReader(w, transport.StallReader(w, r, h.settings.StallTimeout), int64(h.settings.MaxMessageBytes))
	if kind.media == "multipart/form-data" {
		out.Inputs, err = parts(from, kind.params["boundary"], int64(h.settings.MaxMessageBytes))
	} else {
		var data []byte
		if data, err = transport.ReadBody(from, r.ContentLength, int64(h.settings.MaxMessageBytes)); err == nil {
			err = h.single(out, &wished, kind, data, memory)
		}
	}
	if err != nil {
		return wished, err
	}
	return wished, payload.Validate("inputs", out.Inputs)
}

// single takes a body that is one thing.
func (h *handler) single(out *call.Request, wished *wish, kind kind, data []byte, memory *transport.Reservation) (err error) {
	if len(data) == 0 {
		return empty()
	}
	switch {
	case kind.media == jsonType:
		return takeJSON(out, wished, kind, data, memory)
	case msgpack.Is(kind.media):
		return takePacked(out, wished, kind, data, &unpacked{limit: h.settings.MaxMessageBytes, memory: memory})
	case strings.HasSuffix(kind.media, "+json"):
		err = checkJSON(data)
	}
	out.Inputs = []payload.Part{payload.OfBlob("", kind.full, data)}
	return err
}

// takeJSON reads a body of JSON: tensors in the form of the Open Inference Protocol,
// or one blob.
func takeJSON(out *call.Request, wished *wish, kind kind, data []byte, memory *transport.Reservation) error {
	tensors, err := kind.tensors(func() bool { return oipjson.Detect(data) })
	if err != nil {
		return err
	}
	if !tensors {
		out.Inputs = []payload.Part{payload.OfBlob("", jsonType, data)}
		return checkJSON(data)
	}
	request, err := oipjson.Decode(data, memory)
	if err != nil {
		return err
	}
	wished.json = !wished.packed
	return takeRequest(out, wished, request)
}

// takeRequest takes a request of the Open Inference Protocol. What the query said
// stays.
func takeRequest(out *call.Request, wished *wish, request *oipjson.Request) (err error) {
	if out.Inputs, err = request.Parts(); err != nil {
		return err
	}
	out.Parameters = payload.Merge(request.Parameters, out.Parameters)
	if out.Outputs == nil {
		out.Outputs = request.OutputNames()
	}
	wished.id = request.ID
	return nil
}

func empty() error {
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
		return out, fault.Newf(fault.UnsupportedMedia, "Content-Type %.*q is no media type", shown, out.full)
	}
	if out.media == "application/x-www-form-urlencoded" {
		return out, fault.New(fault.UnsupportedMedia, "application/x-www-form-urlencoded is not taken (curl says it when it is told nothing); name the body's own type, such as Content-Type: image/jpeg")
	}
	return out, nil
}

// tensors decides whether a body is tensors or one blob, by the parameter form or
// else by what it looks like.
func (k kind) tensors(looks func() bool) (bool, error) {
	switch form := k.params["form"]; form {
	case "tensors":
		return true, nil
	case "":
		return looks(), nil
	case "blob":
		return false, nil
	default:
		return false, fault.Newf(fault.UnsupportedMedia, "Content-Type has form=%.*q; there are tensors and blob", shown, form)
	}
}

func checkJSON(data []byte) error {
	if json.Valid(data) && utf8.Valid(data) {
		return nil
	}
	var text json.RawMessage
	err := json.Unmarshal(data, &text)
	if err == nil {
		err = fmt.Errorf("not UTF-8")
	}
	return fault.Newf(fault.InvalidRequest, "the body is not the JSON that its type says: %s", err)
}
