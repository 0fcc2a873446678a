package openapi

import (
	"encoding/json"
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Bounds on examples: the number of examples of one body, the number of elements in a
// generated tensor, and the bytes of one that is not text.
const (
	maxExamples = 4
	maxElements = 1024
	maxBinary   = 16 << 10
)

// exampleID is a request's id.
const exampleID = "01a1fc61-c602-7919-8f3a-1abcfc776362"

// example is an example of a body, as JSON. The value of one that is not text is binary.
type example struct {
	name  string
	value any
}

// binary is what JSON has in base64.
type binary []byte

// binaryKey is an extension, since OpenAPI has no key for a value in base64; the predict page reads it.
const binaryKey = "x-stagemesh-base64"

func byName(examples []example) object {
	out := object{}
	for _, e := range examples {
		key := "value"
		if _, is := e.value.(binary); is {
			key = binaryKey
		}
		out[e.name] = object{key: e.value}
	}
	return out
}

// examples returns the stage's examples that decode, as far as JSON can represent
// them. Their parts have the names that callers use. Published examples may lack oversized
// values.
func (a operations) examples(value func([]payload.Part) (any, bool)) []example {
	var out []example
	names := map[string]bool{}
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
		if name == "" || names[name] {
			name = fmt.Sprintf("example %d", i+1)
		}
		names[name] = true
		if one, ok := value(parts); ok {
			out = append(out, example{name, one})
		}
		if len(names) == maxExamples {
			break
		}
	}
	return out
}

// blobExamples are the stage's examples that are one blob of the media type.
func (a operations) blobExamples(p part, media string) []example {
	return a.examples(func(parts []payload.Part) (any, bool) {
		part, ok := payload.Find(parts, p.name)
		if !ok || part.Tensor != nil || payload.BareType(part.Blob.ContentType) != media {
			return nil, false
		}
		switch data := part.Blob.Data; {
		case payload.IsJSON(media) && json.Valid(data):
			return json.RawMessage(data), true
		case isText(media) && utf8.Valid(data):
			return string(data), true
		case !payload.IsJSON(media) && !isText(media) && len(data) <= maxBinary:
			return binary(data), true
		}
		return nil, false
	})
}

// tensorExamples are the stage's examples that are tensors, or else one example of
// zeros.
func (a operations) tensorExamples(inputs []part) []example {
	if out := a.examples(request); len(out) > 0 {
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
		return []example{{"zeros", text}}
	}
	return nil
}

// request returns tensors as a request of the Open Inference Protocol.
func request(parts []payload.Part) (any, bool) {
	var inputs []json.RawMessage
	for _, p := range parts {
		if p.Tensor == nil {
			return nil, false
		}
		text, err := oipjson.AppendTensor(nil, p)
		if err != nil {
			return nil, false
		}
		inputs = append(inputs, text)
	}
	return object{"inputs": inputs}, len(inputs) > 0
}

// answerExample is a response of the smallest outputs, if they can be generated.
func answerExample(model string, outputs []part) (object, bool) {
	made := make([]any, len(outputs))
	for i, p := range outputs {
		text, ok := p.sample()
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

// sample generates an output for the JSON document. It generates none for an output with
// a schema.
func (p part) sample() (any, bool) {
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

// zeros is the part's smallest tensor with an element, unless that is large. Elements
// of BYTES are empty.
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
	if datatype == tensor.Bytes {
		t, err := tensor.FromBytes(shape, make([][]byte, n))
		return t, err == nil
	}
	size := datatype.Size()
	return tensor.Tensor{Datatype: datatype, Shape: shape, Raw: make([]byte, int(n)*max(size, 0))}, size > 0
}
