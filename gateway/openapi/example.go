package openapi

import (
	"encoding/json"
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/gateway/front/oipjson"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// Bounds on examples: how many there are of one body, and how many elements the
// tensors have of one that no stage gave.
const (
	maxExamples = 4
	maxElements = 1024
)

// example is one of the first stage's, with the names that callers use.
type example struct {
	name  string
	parts []payload.Part
}

// examples are those of the stage that can be read. Those that were published may
// lack what was too large.
func (a asked) examples() []example {
	var out []example
	for i, e := range a.in.spec.GetExamples() {
		parts, err := payload.FromProto("inputs", e.GetInputs())
		if err != nil || len(parts) == 0 {
			continue
		}
		for j := range parts {
			if name, ok := a.in.rename[parts[j].Name]; ok {
				parts[j].Name = name
			}
		}
		name := e.GetName()
		if name == "" || slices.ContainsFunc(out, func(o example) bool { return o.name == name }) {
			name = fmt.Sprintf("example %d", i+1)
		}
		if out = append(out, example{name, parts}); len(out) == maxExamples {
			break
		}
	}
	return out
}

// blobExamples are those of the stage's that are one blob of the media type, as far
// as JSON can say it.
func (a asked) blobExamples(p part, media string) object {
	out := object{}
	for _, e := range a.examples() {
		part, ok := payload.Find(e.parts, p.name)
		if !ok || part.Tensor != nil || payload.BareType(part.Blob.ContentType) != media {
			continue
		}
		if value, ok := said(media, part.Blob.Data); ok {
			out[e.name] = object{"value": value}
		}
	}
	return out
}

// said returns bytes of a media type as JSON, where that can say them.
func said(media string, data []byte) (any, bool) {
	switch {
	case payload.IsJSON(media) && json.Valid(data):
		return json.RawMessage(data), true
	case isText(media) && utf8.Valid(data):
		return string(data), true
	}
	return nil, false
}

// blobExample is the first of blobExamples.
func (a asked) blobExample(p part, media string) (any, bool) {
	for _, e := range a.examples() {
		part, ok := payload.Find(e.parts, p.name)
		if ok && part.Tensor == nil && payload.BareType(part.Blob.ContentType) == media {
			return said(media, part.Blob.Data)
		}
	}
	return nil, false
}

// tensorExamples are those of the stage's that are tensors, or else one of zeros.
func (a asked) tensorExamples(inputs []part) object {
	out := object{}
	for _, e := range a.examples() {
		if text, ok := request(e.parts); ok {
			out[e.name] = object{"value": text}
		}
	}
	if len(out) > 0 {
		return out
	}
	var zeros []payload.Part
	for _, p := range inputs {
		if p.GetOptional() {
			continue
		}
		t, ok := p.zeros()
		if !ok {
			return nil
		}
		zeros = append(zeros, payload.OfTensor(p.name, t))
	}
	if text, ok := request(zeros); ok {
		out["zeros"] = object{"value": text}
	}
	return out
}

// request returns tensors as a request of the Open Inference Protocol.
func request(parts []payload.Part) (json.RawMessage, bool) {
	text := []byte(`{"inputs":[`)
	for i, p := range parts {
		if p.Tensor == nil {
			return nil, false
		}
		if i > 0 {
			text = append(text, ',')
		}
		var err error
		if text, err = oipjson.AppendTensor(text, p); err != nil {
			return nil, false
		}
	}
	return append(text, `]}`...), len(parts) > 0
}

// answerExample is an answer of the smallest outputs, where they can be made up.
func answerExample(model string, outputs []part) (object, bool) {
	made := make([]any, len(outputs))
	for i, p := range outputs {
		text, ok := p.made()
		if !ok {
			return nil, false
		}
		made[i] = text
	}
	return object{
		"request_id": exampleID, "model_name": model, "outputs": made,
		"timeline": object{"total_ms": 0.626, "steps": []any{}},
	}, true
}

// made returns an output in the JSON document; what a stage has a schema for is not
// made up.
func (p part) made() (any, bool) {
	if p.isTensor() {
		t, ok := p.zeros()
		if !ok {
			return nil, false
		}
		text, err := oipjson.AppendTensor(nil, payload.OfTensor(p.name, t))
		return json.RawMessage(text), err == nil
	}
	media := p.types()[0]
	out := object{"name": p.name, "content_type": media}
	switch {
	case payload.IsJSON(media) && p.GetSchema() != "":
		return nil, false
	case payload.IsJSON(media):
		out["json"] = object{}
	case isText(media):
		out["text"] = "text"
	default:
		out["data_base64"] = ""
	}
	return out, true
}

// zeros is the smallest tensor of the part's that has an element, unless that is
// large. Elements of BYTES are empty.
func (p part) zeros() (tensor.Tensor, bool) {
	spec := p.GetTensor()
	shape := slices.Clone(spec.GetShape())
	for i := range shape {
		if shape[i] < 0 {
			shape[i] = 1
		}
	}
	n, ok := tensor.Elements(shape)
	if !ok || n > maxElements {
		return tensor.Tensor{}, false
	}
	datatype := tensor.Datatype(spec.GetDatatype())
	size := datatype.Size()
	if datatype == tensor.Bytes {
		t, err := tensor.FromBytes(shape, make([][]byte, n))
		return t, err == nil
	}
	if size <= 0 {
		return tensor.Tensor{}, false
	}
	return tensor.Tensor{Datatype: datatype, Shape: shape, Raw: make([]byte, int(n)*size)}, true
}
