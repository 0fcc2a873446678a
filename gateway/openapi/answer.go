package openapi

import (
	"slices"

	"github.com/stagemesh/stagemesh/mesh/payload"
)

// answer describes a success: the document, or the one blob that it would hold.
func (a asked) answer() object {
	outputs := a.out.outputs()
	either := []any{a.document()}
	var content content
	if outputs == nil {
		either = append(either, object{"title": "one output alone, which is JSON"})
		content.add(anyType, object{"schema": object{"type": "string", "contentMediaType": payload.OctetStream}})
	}
	for _, p := range outputs {
		if p.isTensor() {
			continue
		}
		for _, media := range p.types() {
			schema := a.blobSchema(p, media)
			if media == jsonType {
				either = append(either, schema)
				continue
			}
			content.add(media, object{"schema": schema})
		}
	}
	document := object{"anyOf": either}
	if len(either) == 1 {
		document = a.document()
	}
	content = slices.Insert(content, 0, media{jsonType, object{"schema": document}})
	about := "The answer as a JSON document."
	if outputs == nil || slices.ContainsFunc(outputs, func(p part) bool { return !p.isTensor() }) {
		about = "An answer of exactly one blob is that blob, under its own type, unless `Accept` lists `application/json`. Everything else is a JSON document."
	}
	return object{"description": about, "headers": answerHeaders(), "content": content}
}

// document refers to the schema of the answer as a JSON document.
func (a asked) document() object {
	outputs := a.out.outputs()
	if outputs == nil {
		return schemaRef("Answer")
	}
	key := a.out.key + ".answer"
	if a.schemas[key] == nil {
		schema := answerOf(object{"type": "array", "items": anyOf(outputs, a.outputSchema)})
		if example, ok := answerExample(string(a.pipeline.Name), outputs); ok {
			schema["examples"] = []any{example}
		}
		a.schemas[key] = schema
	}
	return schemaRef(key)
}

// outputSchema is an output in the JSON document.
func (a asked) outputSchema(p part) object {
	if p.isTensor() {
		return p.tensorSchema()
	}
	out := object{
		"type": "object", "title": p.name,
		"required": []any{"name", "content_type"},
		"properties": object{
			"name":         object{"const": p.name},
			"content_type": contentTypes(p),
			"text":         object{"type": "string", "description": "The blob, where it is text."},
			"json":         a.jsonSchema(p),
			"data_base64":  object{"type": "string", "contentEncoding": "base64", "description": "The blob, where it is anything else."},
			"parameters":   schemaRef("Parameters"),
		},
		"oneOf": []any{
			object{"required": []any{"text"}}, object{"required": []any{"json"}}, object{"required": []any{"data_base64"}},
		},
	}
	a.trim(out["properties"].(object), p)
	if text := p.GetDescription(); text != "" {
		out["description"] = text
	}
	return out
}

// trim leaves out the forms that a blob of exactly one kind does not have; bytes that
// are not what their type says are in base64 whatever that is.
func (a asked) trim(properties object, p part) {
	types := p.types()
	if !slices.ContainsFunc(types, func(t string) bool { return payload.IsJSON(t) || ranges(t) }) {
		delete(properties, "json")
	}
	if !slices.ContainsFunc(types, func(t string) bool { return isText(t) || ranges(t) }) {
		delete(properties, "text")
	}
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

// events describes a success that comes in pieces.
func (a asked) events() object {
	return object{
		"description": "Server-sent events, numbered by `id` from 1: `chunk` with a piece of the answer (`Chunk`), at last `done` with the whole answer as `:infer` gives it, or `error` with the failure (`Fault`). Lines that begin with a colon keep the connection open.",
		"headers":     object{"Cache-Control": object{"schema": object{"const": "no-store"}}},
		"content": object{"text/event-stream": object{
			"schema":  object{"type": "string"},
			"example": eventsExample,
		}},
	}
}

const eventsExample = "id: 1\nevent: chunk\ndata: {\"request_id\":\"" + exampleID + "\",\"seq\":1,\"outputs\":[{\"name\":\"text\",\"content_type\":\"text/plain\",\"text\":\"Hel\"}]}\n\n" +
	"id: 2\nevent: done\ndata: {\"request_id\":\"" + exampleID + "\",\"model_name\":\"...\",\"outputs\":[],\"timeline\":{\"total_ms\":12.5,\"steps\":[]}}\n\n"

// exampleID is a request's id.
const exampleID = "01a1fc61-c602-7919-8f3a-1abcfc776362"
