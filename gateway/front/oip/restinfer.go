package oip

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/body"
	"github.com/stagemesh/stagemesh/gateway/front/header"
	"github.com/stagemesh/stagemesh/gateway/front/oipjson"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// The binary extension: bytes of tensors follow the JSON, whose length the header says.
const (
	binarySize       = "binary_data_size"
	binaryWanted     = "binary_data"
	binaryWantedAll  = "binary_data_output"
	classifyWanted   = "classification"
	binaryMediaType  = "application/octet-stream"
	binaryExtension  = "binary_tensor_data"
	generateExtends  = "generate"
	contentTypeOfAll = "application/json"
)

func extensions() []string { return []string{binaryExtension, generateExtends} }

// infer answers one request.
func (h *rest) infer(w http.ResponseWriter, r *http.Request, name string) error {
	model, err := h.models.Model(name)
	if err != nil {
		return err
	}
	room := body.NewRoom(r.Context(), h.maxPayload)
	defer room.Close()
	asked, wished, err := h.asked(w, r, name, model, room)
	if err != nil {
		return err
	}
	response, err := h.caller.Infer(r.Context(), asked)
	if err != nil {
		return err
	}
	text, binary, err := wished.answer(response)
	if err != nil {
		return fault.From(err).WithMetadata(header.RequestIDKey, response.RequestID)
	}
	write(w, response, text, binary)
	return nil
}

// asked reads the body: the request, whose tensors in JSON are made in the room, and how
// its answer is wished.
func (h *rest) asked(w http.ResponseWriter, r *http.Request, name string, model Model, room *body.Room) (*call.Request, wish, error) {
	data, err := h.read(w, r)
	if err != nil {
		return nil, wish{}, err
	}
	text, binary, err := split(data, r.Header.Get(header.JSONLength))
	if err != nil {
		return nil, wish{}, err
	}
	in, err := oipjson.Decode(text, room)
	if err != nil {
		return nil, wish{}, err
	}
	if err := takeBinary(in, binary); err != nil {
		return nil, wish{}, err
	}
	wished, err := wishOf(in)
	if err != nil {
		return nil, wish{}, err
	}
	out := &call.Request{Pipeline: name, Parameters: in.Parameters, Outputs: in.OutputNames(), Trace: header.Trace(r.Header)}
	if out.Timeout, err = taken(r.Context(), out.Parameters); err != nil {
		return nil, wish{}, err
	}
	if out.Inputs, err = in.Parts(); err != nil {
		return nil, wish{}, err
	}
	out.Booked = room.Made()
	for i, part := range out.Inputs {
		if out.Inputs[i], err = asTaken(part, model.Inputs); err != nil {
			return nil, wish{}, fault.Newf(fault.InvalidInput, "inputs.%s: %w", part.Name, err).WithViolation("inputs."+part.Name, "%s", err)
		}
	}
	return out, wished, payload.Validate("inputs", out.Inputs)
}

// read reads the body.
func (h *rest) read(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	if err := body.RefuseEncoded(r); err != nil {
		return nil, err
	}
	if err := body.Refuse(r, h.limit); err != nil {
		return nil, err
	}
	return body.Read(http.MaxBytesReader(w, body.Patient(w, r, h.patience), h.limit), r.ContentLength, h.limit)
}

// split returns the JSON of a body, and the bytes behind it.
func split(data []byte, length string) (text, binary []byte, err error) {
	if length == "" {
		return data, nil, nil
	}
	n, err := strconv.ParseUint(length, 10, 63)
	if err != nil || n > uint64(len(data)) {
		return nil, nil, invalid(header.JSONLength, "%.*q is no length within a body of %d bytes", shown, length, len(data))
	}
	return data[:n], data[n:], nil
}

// takeBinary gives inputs without data their bytes, which are shared.
func takeBinary(in *oipjson.Request, binary []byte) error {
	for i := range in.Inputs {
		input := &in.Inputs[i]
		size, said := input.Parameters[binarySize]
		if !said {
			continue
		}
		field := fmt.Sprintf("inputs[%d].parameters.%s", i, binarySize)
		n, whole := size.Int()
		switch {
		case input.Tensor.Raw != nil:
			return invalid(field, "it has data in the JSON too")
		case !whole || n < 0 || n > int64(len(binary)):
			return invalid(field, "%s, and %d bytes are left behind the JSON", size, len(binary))
		}
		input.Tensor.Raw, binary = binary[:n:n], binary[n:]
		delete(input.Parameters, binarySize)
	}
	if len(binary) > 0 {
		return invalid("inputs", "%d bytes behind the JSON are no input's", len(binary))
	}
	return nil
}

// wish is how a caller wants its answer.
type wish struct {
	id string
	// all says that outputs are binary that byName does not have.
	all    bool
	byName map[string]bool
}

func wishOf(in *oipjson.Request) (wish, error) {
	out := wish{id: in.ID, byName: map[string]bool{}}
	if all, said := in.Parameters[binaryWantedAll]; said {
		var is bool
		if out.all, is = all.Any().(bool); !is {
			return out, invalid("parameters."+binaryWantedAll, "%s is neither true nor false", all)
		}
		delete(in.Parameters, binaryWantedAll)
	}
	for i, output := range in.Outputs {
		if _, said := output.Parameters[classifyWanted]; said {
			return out, unclassified(i)
		}
		wanted, said := output.Parameters[binaryWanted]
		if !said {
			continue
		}
		is, ok := wanted.Any().(bool)
		if !ok {
			return out, invalid(fmt.Sprintf("outputs[%d].parameters.%s", i, binaryWanted), "%s is neither true nor false", wanted)
		}
		out.byName[output.Name] = is
	}
	return out, nil
}

// answer encodes a response: the JSON, and the bytes behind it.
func (wished wish) answer(r *call.Response) (text []byte, binary [][]byte, err error) {
	text = oipjson.AppendString([]byte(`{"model_name":`), r.Pipeline)
	text = oipjson.AppendString(append(text, `,"model_version":`...), onlyVersion)
	if wished.id != "" {
		text = oipjson.AppendString(append(text, `,"id":`...), wished.id)
	}
	text = append(text, `,"outputs":[`...)
	for i, part := range r.Outputs {
		if i > 0 {
			text = append(text, ',')
		}
		part = asTensor(part)
		asBinary, said := wished.byName[part.Name]
		if !said {
			asBinary = wished.all
		}
		if !asBinary {
			if text, err = oipjson.AppendTensor(text, part); err != nil {
				return nil, nil, err
			}
			continue
		}
		if text, err = appendHead(text, part); err != nil {
			return nil, nil, err
		}
		binary = append(binary, part.Tensor.Raw)
	}
	return append(text, `]}`...), binary, nil
}

// appendHead appends an output whose bytes follow the JSON.
func appendHead(dst []byte, p payload.Part) ([]byte, error) {
	shape, err := json.Marshal(p.Tensor.Shape)
	if err != nil {
		return nil, err
	}
	dst = oipjson.AppendString(append(dst, `{"name":`...), p.Name)
	dst = oipjson.AppendString(append(dst, `,"datatype":`...), string(p.Tensor.Datatype))
	dst = append(append(dst, `,"shape":`...), shape...)
	said := payload.Merge(p.Parameters, payload.Parameters{binarySize: payload.Int64(int64(len(p.Tensor.Raw)))})
	dst, err = oipjson.AppendParameters(append(dst, `,"parameters":`...), "outputs."+p.Name, said)
	return append(dst, '}'), err
}

// write sends an answer. A caller that no longer listens is not told.
func write(w http.ResponseWriter, r *call.Response, text []byte, binary [][]byte) {
	length := len(text)
	h := w.Header()
	h.Set("Content-Type", contentTypeOfAll)
	if binary != nil {
		h.Set("Content-Type", binaryMediaType)
		h.Set(header.JSONLength, strconv.Itoa(len(text)))
	}
	for _, raw := range binary {
		length += len(raw)
	}
	h.Set("Content-Length", strconv.Itoa(length))
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set(header.RequestID, r.RequestID)
	h.Set(header.ServerTiming, header.Timing(r.Timeline))
	_, _ = w.Write(text)
	for _, raw := range binary {
		_, _ = w.Write(raw)
	}
}

// unclassified says that an output comes as it is.
func unclassified(output int) error {
	return fault.Newf(fault.NotSupported, "outputs[%d].parameters.%s is not served; a stage such as top_k does that", output, classifyWanted)
}
