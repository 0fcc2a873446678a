package openapi

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// part is one input or output as callers see it.
type part struct {
	*stagev1.PartSpec
	// name is the name that callers use, and key names its component.
	name, key string
	// rows is true if axis 0 of tensors is rows. A caller may omit the axis for a
	// single row.
	rows bool
}

func (p part) isTensor() bool { return p.GetTensor() != nil }
func (p part) isBlob() bool   { return p.GetTensor() == nil }

// representable reports whether JSON can represent the tensor.
func (p part) representable() bool { return hasText(tensor.Datatype(p.GetTensor().GetDatatype())) }

// hasText reports whether JSON can represent elements of a datatype.
func hasText(d tensor.Datatype) bool { return d != tensor.FP16 && d != tensor.BF16 }

// about describes the part in one line of Markdown.
func (p part) about() string {
	var b strings.Builder
	if t := p.GetTensor(); t != nil {
		fmt.Fprintf(&b, "a tensor of %s, shape %s", t.GetDatatype(), shapeText(t.GetShape()))
	} else if types := p.GetBlob().GetContentTypes(); len(types) > 0 {
		fmt.Fprintf(&b, "%s", strings.Join(types, ", "))
	} else {
		b.WriteString("bytes of any type")
	}
	if p.GetOptional() {
		b.WriteString(", may be left out")
	}
	if text := p.GetDescription(); text != "" {
		b.WriteString("; " + text)
	}
	return b.String()
}

// shapeText formats a shape for people: `[n, 64]`.
func shapeText(shape []int64) string {
	axes := make([]string, len(shape))
	for i, n := range shape {
		if axes[i] = fmt.Sprint(n); n < 0 {
			axes[i] = "any"
		}
	}
	return "[" + strings.Join(axes, ", ") + "]"
}

// tensorSchema describes a part in the form of the Open Inference Protocol; elements
// describes the elements of a datatype.
func (a operations) tensorSchema(p part, elements func(tensor.Datatype) object) object {
	t := p.GetTensor()
	return p.entitle(a.variant("Tensor", object{
		"name": object{"const": p.name}, "datatype": object{"const": t.GetDatatype()},
		"shape": p.shapeSchema(), "data": elements(tensor.Datatype(t.GetDatatype())),
	}))
}

// outputSchema describes an output in a document.
func (a operations) outputSchema(p part, f form) object {
	if p.isTensor() {
		return a.tensorSchema(p, f.given)
	}
	contentType, types := object{"type": "string"}, p.types()
	if !slices.ContainsFunc(types, isUnspecific) {
		contentType["examples"] = []any{types[0]}
	}
	out := a.variant(f.prefix+"Blob", object{
		"name": object{"const": p.name}, "content_type": contentType, "json": a.jsonSchema(p),
	})
	// A blob of one kind has only the members of that kind. Bytes that do not match their type
	// are bytes whatever the type is.
	properties, either := out["properties"].(object), []any{}
	for _, member := range []struct {
		name   string
		ofType func(string) bool
	}{{"text", isText}, {"json", payload.IsJSON}, {f.rest, func(string) bool { return true }}} {
		if !slices.ContainsFunc(types, func(t string) bool { return member.ofType(t) || isUnspecific(t) }) {
			delete(properties, member.name)
			continue
		}
		either = append(either, object{"required": []any{member.name}})
	}
	out["oneOf"] = either
	return p.entitle(out)
}

// entitle gives a schema the part's name and description.
func (p part) entitle(schema object) object {
	schema["title"] = p.name
	if text := p.GetDescription(); text != "" {
		schema["description"] = text
	}
	return schema
}

// shapeSchema accepts the part's shape and, if it has rows, the shape of a single row.
func (p part) shapeSchema() object {
	shape := p.GetTensor().GetShape()
	if !p.rows || len(shape) == 0 {
		return shapeOf(shape)
	}
	return object{"anyOf": []any{shapeOf(shape), shapeOf(shape[1:])}, "description": "With rows, or of one row alone."}
}

func shapeOf(shape []int64) object {
	axes := make([]any, len(shape))
	for i, n := range shape {
		if axes[i] = (object{"const": n}); n < 0 {
			axes[i] = object{"type": "integer", "minimum": 0}
		}
	}
	out := object{"type": "array", "minItems": len(shape), "maxItems": len(shape)}
	if len(axes) > 0 {
		out["prefixItems"] = axes
	}
	return out
}

// dataSchema is the component for the elements of a datatype.
func dataSchema(d tensor.Datatype) string {
	switch d {
	case tensor.Bool:
		return "Booleans"
	case tensor.Bytes:
		return "Strings"
	case tensor.FP16, tensor.BF16, tensor.FP32, tensor.FP64:
		return "Numbers"
	}
	return "Integers"
}

// usual returns concrete types for a media range, because a page or a program has to
// name one.
func usual(contentType string) []string {
	switch contentType {
	case "image/*":
		return []string{"image/png", "image/jpeg", contentType}
	case "text/*":
		return []string{"text/plain", contentType}
	case "audio/*":
		return []string{"audio/wav", contentType}
	case "video/*":
		return []string{"video/mp4", contentType}
	case "application/*":
		return []string{jsonType, payload.OctetStream, contentType}
	case anyType:
		return []string{payload.OctetStream, "text/plain", jsonType, contentType}
	}
	return []string{contentType}
}

const (
	jsonType = payload.JSONType
	anyType  = "*/*"
)

// types are the media types that a blob may have, each once, without parameters.
func (p part) types() []string {
	types := p.GetBlob().GetContentTypes()
	if len(types) == 0 {
		types = []string{anyType}
	}
	var out []string
	for _, one := range types {
		for _, contentType := range usual(payload.BareType(one)) {
			if !slices.Contains(out, contentType) {
				out = append(out, contentType)
			}
		}
	}
	return out
}

func isText(media string) bool { return strings.HasPrefix(media, "text/") }

// isUnspecific reports whether a media range has types of which nothing is known.
func isUnspecific(media string) bool { return media == anyType || media == "application/*" }

// blobSchema describes a blob of a media type as a body of its own, or as a part of a
// form.
func (a operations) blobSchema(p part, media string) object {
	switch {
	case payload.IsJSON(media):
		return a.jsonSchema(p)
	case msgpack.Is(media):
		return packed(a.jsonSchema(p))
	case isText(media):
		return object{"type": "string"}
	}
	if strings.Contains(media, "*") {
		media = payload.OctetStream
	}
	return object{"type": "string", "contentMediaType": media}
}

// jsonSchema refers to the part's JSON Schema, if it has one.
func (a operations) jsonSchema(p part) object {
	if p.GetSchema() == "" {
		return object{}
	}
	schema, ok := embed(p.GetSchema(), p.key)
	if !ok {
		return object{}
	}
	return a.define(p.key, schema)
}

// form is the encoding of documents: JSON, or MessagePack, which has bytes.
type form struct {
	// suffix ends the keys of components that are not JSON's. prefix begins the keys
	// of components that do not depend on a stage.
	suffix, prefix string
	// sent and given describe the elements of a tensor in a request and in a response.
	sent, given func(tensor.Datatype) object
	// rest is the member of a blob that is neither text nor JSON.
	rest string
}

func asJSON() form {
	list := func(d tensor.Datatype) object { return schemaRef(dataSchema(d)) }
	return form{sent: list, given: list, rest: "data_base64"}
}

func asPacked() form {
	return form{
		suffix: ".packed", prefix: "Packed", rest: "data",
		sent: func(d tensor.Datatype) object {
			if !hasText(d) {
				return schemaRef("Bytes")
			}
			return object{"anyOf": []any{schemaRef("Bytes"), schemaRef(dataSchema(d))}}
		},
		given: func(tensor.Datatype) object { return schemaRef("Bytes") },
	}
}

// packed describes a document in MessagePack. Its binary strings are strings to the
// schema.
func packed(schema object) object {
	out := object{"type": "string", "contentMediaType": msgpack.Type}
	if len(schema) > 0 {
		out["contentSchema"] = schema
	}
	return out
}

// takes returns the media types in which a blob may be sent. A blob of JSON may also
// be sent as MessagePack.
func (p part) takes() []string {
	out := p.types()
	if slices.Contains(out, jsonType) && !slices.ContainsFunc(out, msgpack.Is) {
		out = append(out, msgpack.Type)
	}
	return out
}
