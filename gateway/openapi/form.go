package openapi

import (
	"maps"
	"slices"

	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// form is what documents are written in: JSON, or MessagePack, which has bytes.
type form struct {
	// suffix ends the keys of the components that are not JSON's, and prefix begins
	// those of which no stage has a say.
	suffix, prefix string
	// sent and given are the elements of a tensor in a request and in an answer.
	sent, given func(tensor.Datatype) object
	// rest is the member of a blob that is neither text nor JSON, and blob describes
	// it.
	rest string
	blob object
}

func asJSON() form {
	list := func(d tensor.Datatype) object { return schemaRef(dataSchema(d)) }
	return form{
		sent: list, given: list, rest: "data_base64",
		blob: object{"type": "string", "contentEncoding": "base64", "description": "The blob, where it is anything else."},
	}
}

func asPacked() form {
	return form{
		suffix: ".packed", prefix: "Packed", rest: "data", blob: schemaRef("Bytes"),
		sent: func(d tensor.Datatype) object {
			if !sayable(d) {
				return schemaRef("Bytes")
			}
			return object{"anyOf": []any{schemaRef("Bytes"), schemaRef(dataSchema(d))}}
		},
		given: func(tensor.Datatype) object { return schemaRef("Bytes") },
	}
}

// packed is a document in MessagePack. Its binary strings are strings to the schema.
func packed(schema object) object {
	out := object{"type": "string", "contentMediaType": msgpack.Type}
	if len(schema) > 0 {
		out["contentSchema"] = schema
	}
	return out
}

// packedSchemas are those of MessagePack that no stage has a say in.
func packedSchemas(text, count object) object {
	out := object{
		"Bytes": object{
			"type": "string", "contentMediaType": payload.OctetStream,
			"description": "A binary string of MessagePack. A tensor's bytes are little-endian and row-major, each element of BYTES after its length in 4 bytes.",
		},
	}
	maps.Copy(out, answerSchemas(asPacked(), text, count))
	return out
}

// answerSchemas are an answer of anything in a form, and its outputs.
func answerSchemas(f form, text, count object) object {
	data := object{"type": "array"}
	if f.prefix != "" {
		data = f.blob
	}
	return object{
		f.prefix + "Tensor": object{
			"type": "object", "required": []any{"name", "datatype", "shape", "data"},
			"properties": object{
				"name": text, "datatype": object{"enum": datatypes()}, "shape": object{"type": "array", "items": count},
				"data": data, "parameters": schemaRef("Parameters"),
			},
		},
		f.prefix + "Blob": object{
			"type": "object", "required": []any{"name", "content_type"},
			"properties": object{
				"name": text, "content_type": text, "text": text, "json": object{},
				f.rest: f.blob, "parameters": schemaRef("Parameters"),
			},
		},
		f.prefix + "Answer": answerOf(object{"type": "array", "items": object{"anyOf": []any{schemaRef(f.prefix + "Tensor"), schemaRef(f.prefix + "Blob")}}}),
	}
}

// takes are the media types that a blob may be sent in: where one is JSON, MessagePack
// does as well.
func (p part) takes() []string {
	out := p.types()
	if slices.Contains(out, jsonType) && !slices.ContainsFunc(out, msgpack.Is) {
		out = append(out, msgpack.Type)
	}
	return out
}
