package openapi

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"unicode/utf8"

	"github.com/stagemesh/stagemesh/gateway/front/oipjson"
	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// body describes the request bodies that callers may send: one blob as it is, several
// blobs as a form, and tensors as JSON or MessagePack.
func (a operations) body() object {
	inputs := a.in.inputs()
	if len(inputs) == 0 {
		return anything()
	}
	var content content
	required := slices.DeleteFunc(slices.Clone(inputs), func(p part) bool { return p.GetOptional() })
	blobs := slices.DeleteFunc(slices.Clone(inputs), part.isTensor)
	tensors := slices.DeleteFunc(slices.Clone(inputs), func(p part) bool { return !p.isTensor() })
	// A body is one part without a name, blobs with names, or tensors.
	if len(required) <= 1 && len(inputs) == 1 && len(blobs) == 1 {
		a.single(&content, blobs[0])
	}
	if len(blobs) > 0 && !slices.ContainsFunc(required, part.isTensor) {
		content.add(formType, a.form(blobs))
	}
	if len(tensors) > 0 && !slices.ContainsFunc(required, func(p part) bool { return !p.isTensor() }) {
		a.tensors(&content, tensors)
	}
	if len(content) == 0 {
		out := anything()
		out["description"] = "The inputs are blobs and tensors: ask by `/v2`, or by gRPC."
		return out
	}
	return object{"required": true, "content": content}
}

func unrepresentable(p part) bool {
	return !representable(tensor.Datatype(p.GetTensor().GetDatatype()))
}

// anything describes the body for a stage whose inputs are not known.
func anything() object {
	var content content
	for _, contentType := range append(usual(anyType), msgpack.Type) {
		var schema object
		switch {
		case payload.IsJSON(contentType):
			schema = object{"description": "Tensors in the form of the Open Inference Protocol, or JSON that is one input. Which it is may be said: `application/json; form=tensors`, or `form=blob`."}
		case msgpack.Is(contentType):
			schema = packed(object{"description": "As with JSON: tensors, or one input."})
		case isText(contentType):
			schema = object{"type": "string"}
		default:
			schema = object{"type": "string", "contentMediaType": contentType}
		}
		content.add(contentType, object{"schema": schema})
	}
	content.add(formType, object{"schema": object{"type": "object"}})
	return object{"required": true, "content": content, "description": "What the first stage takes is not known: anything may do."}
}

// single adds the only input, which needs no name.
func (a operations) single(content *content, p part) {
	for _, media := range p.takes() {
		one := object{"schema": a.blobSchema(p, media)}
		if examples := a.blobExamples(p, media); len(examples) > 0 {
			one["examples"] = examples
		}
		content.add(media, one)
	}
}

// form has a part for each blob, with the blob's name.
func (a operations) form(blobs []part) object {
	properties, encoding, required := object{}, object{}, []any{}
	for _, p := range blobs {
		types := p.types()
		schema := maps.Clone(a.blobSchema(p, types[0]))
		if example, ok := a.blobExample(p, types[0]); ok {
			schema["examples"] = []any{example}
		}
		if text := p.GetDescription(); text != "" && len(schema) > 0 {
			schema["description"] = text
		}
		properties[p.name] = schema
		encoding[p.name] = object{"contentType": join(p.takes())}
		if !p.GetOptional() {
			required = append(required, p.name)
		}
	}
	schema := object{"type": "object", "properties": properties}
	if len(required) > 0 {
		schema["required"] = required
	}
	return object{"schema": schema, "encoding": encoding}
}

func join(types []string) string {
	var out string
	for i, one := range types {
		if i > 0 {
			out += ", "
		}
		out += one
	}
	return out
}

// tensors adds requests of the Open Inference Protocol. It adds the JSON form only if
// JSON can represent them.
func (a operations) tensors(content *content, inputs []part) {
	if inJSON := slices.DeleteFunc(slices.Clone(inputs), unrepresentable); !slices.ContainsFunc(inputs, func(p part) bool { return unrepresentable(p) && !p.GetOptional() }) && len(inJSON) > 0 {
		one := object{"schema": a.request(inJSON, asJSON())}
		if examples := a.tensorExamples(inJSON); len(examples) > 0 {
			one["examples"] = examples
		}
		content.add(jsonType, one)
	}
	content.add(msgpack.Type, object{"schema": packed(a.request(inputs, asPacked()))})
}

// request refers to the schema of a request of the Open Inference Protocol.
func (a operations) request(inputs []part, f form) object {
	key := a.in.key + ".request" + f.suffix
	if a.schemas[key] == nil {
		list := object{"type": "array", "minItems": 1, "maxItems": len(inputs), "items": anyOf(inputs, func(p part) object { return p.tensorSchema(f.sent) })}
		if all := requiredInputs(inputs); len(inputs) > 1 && len(all) > 0 {
			list["allOf"] = all
		}
		a.schemas[key] = object{
			"type": "object", "title": "tensors", "required": []any{"inputs"},
			"properties": object{
				"id":         object{"type": "string", "description": "The caller's own name for the request, which is echoed."},
				"inputs":     list,
				"outputs":    object{"type": "array", "items": schemaRef("WantedOutput"), "description": "Only these outputs come back."},
				"parameters": schemaRef("Parameters"),
			},
		}
	}
	return schemaRef(key)
}

// anyOf returns one schema for the alternatives of the parts.
func anyOf(parts []part, schema func(part) object) object {
	if len(parts) == 1 {
		return schema(parts[0])
	}
	out := make([]any, len(parts))
	for i, p := range parts {
		out[i] = schema(p)
	}
	return object{"anyOf": out}
}

// requiredInputs requires every input that is not optional.
func requiredInputs(inputs []part) []any {
	var out []any
	for _, p := range inputs {
		if !p.GetOptional() {
			out = append(out, object{"contains": object{"required": []any{"name"}, "properties": object{"name": object{"const": p.name}}}})
		}
	}
	return out
}

// Bounds on examples: the number of examples of one body, and the number of elements
// in a generated tensor.
const (
	maxExamples = 4
	maxElements = 1024
)

// example is an example of the first stage, with the names that callers use.
type example struct {
	name  string
	parts []payload.Part
}

// examples are the stage's examples that decode. Published examples may lack oversized
// values.
func (a operations) examples() []example {
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

// blobExamples are the stage's examples that are one blob of the media type, as far as
// JSON can represent them.
func (a operations) blobExamples(p part, media string) object {
	out := object{}
	for _, e := range a.examples() {
		part, ok := payload.Find(e.parts, p.name)
		if !ok || part.Tensor != nil || payload.BareType(part.Blob.ContentType) != media {
			continue
		}
		if value, ok := jsonValue(media, part.Blob.Data); ok {
			out[e.name] = object{"value": value}
		}
	}
	return out
}

// jsonValue returns bytes of a media type as JSON, if JSON can represent them.
func jsonValue(media string, data []byte) (any, bool) {
	switch {
	case payload.IsJSON(media) && json.Valid(data):
		return json.RawMessage(data), true
	case isText(media) && utf8.Valid(data):
		return string(data), true
	}
	return nil, false
}

// blobExample is the first of blobExamples.
func (a operations) blobExample(p part, media string) (any, bool) {
	for _, e := range a.examples() {
		part, ok := payload.Find(e.parts, p.name)
		if ok && part.Tensor == nil && payload.BareType(part.Blob.ContentType) == media {
			return jsonValue(media, part.Blob.Data)
		}
	}
	return nil, false
}

// tensorExamples are the stage's examples that are tensors, or else one example of
// zeros.
func (a operations) tensorExamples(inputs []part) object {
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
