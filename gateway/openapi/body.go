package openapi

import (
	"maps"
	"slices"

	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// body describes what callers may send: one blob as it is, blobs as a form, and
// tensors as JSON or MessagePack.
func (a asked) body() object {
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

func unsayable(p part) bool { return !sayable(tensor.Datatype(p.GetTensor().GetDatatype())) }

// anything is a body of a stage of which nothing is known.
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

// single adds the one input that needs no name.
func (a asked) single(content *content, p part) {
	for _, media := range p.takes() {
		one := object{"schema": a.blobSchema(p, media)}
		if examples := a.blobExamples(p, media); len(examples) > 0 {
			one["examples"] = examples
		}
		content.add(media, one)
	}
}

// form has a part for each blob, named as it is.
func (a asked) form(blobs []part) object {
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

// tensors adds requests of the Open Inference Protocol, in JSON where that can say
// them.
func (a asked) tensors(content *content, inputs []part) {
	if said := slices.DeleteFunc(slices.Clone(inputs), unsayable); !slices.ContainsFunc(inputs, func(p part) bool { return unsayable(p) && !p.GetOptional() }) && len(said) > 0 {
		one := object{"schema": a.request(said, asJSON())}
		if examples := a.tensorExamples(said); len(examples) > 0 {
			one["examples"] = examples
		}
		content.add(jsonType, one)
	}
	content.add(msgpack.Type, object{"schema": packed(a.request(inputs, asPacked()))})
}

// request refers to the schema of a request of the Open Inference Protocol.
func (a asked) request(inputs []part, f form) object {
	key := a.in.key + ".request" + f.suffix
	if a.schemas[key] == nil {
		list := object{"type": "array", "minItems": 1, "maxItems": len(inputs), "items": anyOf(inputs, func(p part) object { return p.tensorSchema(f.sent) })}
		if all := contained(inputs); len(inputs) > 1 && len(all) > 0 {
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

// anyOf is one schema of those of the parts.
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

// contained says that every input is there that may not be left out.
func contained(inputs []part) []any {
	var out []any
	for _, p := range inputs {
		if !p.GetOptional() {
			out = append(out, object{"contains": object{"required": []any{"name"}, "properties": object{"name": object{"const": p.name}}}})
		}
	}
	return out
}
