package openapi

import (
	"slices"

	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// answer describes a success: the document in either form, or the one blob that it
// would hold.
func (a asked) answer() object {
	outputs := a.settled()
	plain, compact := []any{a.document(asJSON())}, []any{a.document(asPacked())}
	var others content
	for _, p := range a.out.outputs() {
		if p.isTensor() {
			continue
		}
		for _, media := range p.types() {
			switch schema := a.blobSchema(p, media); {
			case outputs == nil && (payload.IsJSON(media) || msgpack.Is(media)):
			case media == jsonType:
				plain = append(plain, schema)
			case media == msgpack.Type:
				compact = append(compact, a.jsonSchema(p))
			default:
				others.add(media, object{"schema": schema})
			}
			if ranges(media) {
				compact = append(compact, aloneInMessagePack())
			}
		}
	}
	if outputs == nil {
		plain = append(plain, object{"title": "one output alone, which is JSON"})
		compact = append(compact, aloneInMessagePack())
		others.add(anyType, object{"schema": object{"type": "string", "contentMediaType": payload.OctetStream}})
	}
	all := content{{jsonType, object{"schema": oneOf(plain)}}}
	all.add(msgpack.Type, object{"schema": packed(oneOf(compact))})
	for _, one := range others {
		all.add(one.contentType, one.object)
	}
	return object{"description": aboutAnswer(outputs), "headers": answerHeaders(), "content": all}
}

func aloneInMessagePack() object { return object{"title": "one output alone, which is MessagePack"} }

// oneOf is one schema of one or several, of which any may be meant.
func oneOf(either []any) object {
	if len(either) == 1 {
		return either[0].(object)
	}
	return object{"anyOf": either}
}

func aboutAnswer(outputs []part) string {
	if outputs != nil && !slices.ContainsFunc(outputs, func(p part) bool { return !p.isTensor() }) {
		return "The answer as a JSON document; in MessagePack where `Accept` lists that before JSON, or the body was tensors in it."
	}
	return "An answer of exactly one blob is that blob, under its own type, unless `Accept` lists `application/json` or `application/msgpack`. Everything else is a JSON document, or the same in MessagePack where `Accept` prefers it or the body was tensors in it."
}

// settled are the outputs of a whole answer, nil where they may be anything: an answer
// in chunks is held against what its stage says chunk by chunk, and not as a whole.
func (a asked) settled() []part {
	if a.out.spec.GetStream() {
		return nil
	}
	return a.out.outputs()
}

// document refers to the schema of the answer as a document.
func (a asked) document(f form) object {
	outputs := a.settled()
	if outputs == nil {
		return schemaRef(f.prefix + "Answer")
	}
	key := a.out.key + ".answer" + f.suffix
	if a.schemas[key] == nil {
		schema := answerOf(object{"type": "array", "items": anyOf(outputs, func(p part) object { return a.outputSchema(p, f) })})
		if example, ok := answerExample(string(a.pipeline.Name), outputs); ok && f.suffix == "" {
			schema["examples"] = []any{example}
		}
		a.schemas[key] = schema
	}
	return schemaRef(key)
}

// outputSchema is an output in a document.
func (a asked) outputSchema(p part, f form) object {
	if p.isTensor() {
		return p.tensorSchema(f.given)
	}
	out := object{
		"type": "object", "title": p.name,
		"required": []any{"name", "content_type"},
		"properties": object{
			"name":         object{"const": p.name},
			"content_type": contentTypes(p),
			"text":         object{"type": "string", "description": "The blob, where it is text."},
			"json":         a.jsonSchema(p),
			f.rest:         f.blob,
			"parameters":   schemaRef("Parameters"),
		},
	}
	out["oneOf"] = a.trim(out["properties"].(object), p, f)
	if text := p.GetDescription(); text != "" {
		out["description"] = text
	}
	return out
}

// trim leaves out the members that a blob of exactly one kind does not have, and
// returns which there are; bytes that are not what their type says are bytes whatever
// that is.
func (a asked) trim(properties object, p part, f form) (either []any) {
	types := p.types()
	if !slices.ContainsFunc(types, func(t string) bool { return payload.IsJSON(t) || ranges(t) }) {
		delete(properties, "json")
	}
	if !slices.ContainsFunc(types, func(t string) bool { return isText(t) || ranges(t) }) {
		delete(properties, "text")
	}
	for _, name := range []string{"text", "json", f.rest} {
		if _, there := properties[name]; there {
			either = append(either, object{"required": []any{name}})
		}
	}
	return either
}

// ranges reports whether a media range has types of which nothing is known.
func ranges(media string) bool { return media == anyType || media == "application/*" }

// contentTypes is the type of a blob in the document.
func contentTypes(p part) object {
	out := object{"type": "string"}
	if said := p.types(); !slices.ContainsFunc(said, ranges) {
		out["examples"] = []any{said[0]}
	}
	return out
}

// exampleID is a request's id.
const exampleID = "01a1fc61-c602-7919-8f3a-1abcfc776362"
