package openapi

import (
	"slices"

	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// answer describes a success: the document in either form, or its only blob alone.
func (a operations) answer() object {
	outputs := a.fixedOutputs()
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
				compact = append(compact, singleMessagePack())
			}
		}
	}
	if outputs == nil {
		plain = append(plain, object{"title": "one output alone, which is JSON"})
		compact = append(compact, singleMessagePack())
		others.add(anyType, object{"schema": object{"type": "string", "contentMediaType": payload.OctetStream}})
	}
	all := content{{jsonType, object{"schema": oneOf(plain)}}}
	all.add(msgpack.Type, object{"schema": packed(oneOf(compact))})
	for _, one := range others {
		all.add(one.contentType, one.object)
	}
	return object{"description": aboutAnswer(outputs), "headers": answerHeaders(), "content": all}
}

func singleMessagePack() object { return object{"title": "one output alone, which is MessagePack"} }

// oneOf is one schema for one or several alternatives.
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

// fixedOutputs are the outputs of a whole response. They are nil, for any, if the response
// is chunked: a host validates its chunks by the stage's spec, and not its final
// outputs.
func (a operations) fixedOutputs() []part {
	if a.out.spec.GetStream() {
		return nil
	}
	return a.out.outputs()
}

// document refers to the schema of the response document.
func (a operations) document(f form) object {
	outputs := a.fixedOutputs()
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

// outputSchema describes an output in a document.
func (a operations) outputSchema(p part, f form) object {
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

// trim removes the members that a blob of exactly one kind does not have, and returns
// the remaining ones. Bytes that do not match their type are bytes whatever the type
// is.
func (a operations) trim(properties object, p part, f form) (either []any) {
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

// contentTypes describes the type of a blob in the document.
func contentTypes(p part) object {
	out := object{"type": "string"}
	if types := p.types(); !slices.ContainsFunc(types, ranges) {
		out["examples"] = []any{types[0]}
	}
	return out
}

// exampleID is a request's id.
const exampleID = "01a1fc61-c602-7919-8f3a-1abcfc776362"

// events describes a success that is streamed.
func (a operations) events() object {
	return object{
		"description": "Server-sent events: `chunk` with a piece of the answer, at last `done` with the whole answer as `:infer` gives it in JSON, or `error` with the failure (`Fault`). All but `error` are numbered by `id`, from 1. What ends without `done` or `error` was cut off. Lines that begin with a colon keep the connection open.",
		"headers":     eventHeaders(),
		"content": object{transport.EventStreamType: object{
			"schema":  eventsOf(numberedEvent("chunk", a.chunk()), numberedEvent("done", a.document(asJSON())), namedEvent("error", schemaRef("Fault"))),
			"example": eventsExample,
		}},
	}
}

// chunk refers to the schema of a chunk. Parts named like an output follow the stage's
// spec; a chunk may have more parts.
func (a operations) chunk() object {
	outputs := a.out.outputs()
	if outputs == nil {
		return schemaRef("Chunk")
	}
	key := a.out.key + ".chunk"
	if a.schemas[key] == nil {
		either, names := []any{}, []any{}
		for _, p := range outputs {
			either, names = append(either, a.outputSchema(p, asJSON())), append(names, p.name)
		}
		more := object{
			"title": "more", "anyOf": []any{schemaRef("Tensor"), schemaRef("Blob")},
			"properties": object{"name": object{"not": object{"enum": names}}},
		}
		a.schemas[key] = chunkOf(object{"type": "array", "items": object{"anyOf": append(either, more)}})
	}
	return schemaRef(key)
}

// chunkOf is the schema of a chunk with such outputs.
func chunkOf(outputs object) object {
	return object{
		"type": "object", "required": []any{"request_id", "seq", "outputs"},
		"properties": object{
			"request_id": object{"type": "string", "description": "What the mesh knows the request by."},
			"seq":        object{"type": "integer", "minimum": 1, "description": "Counts from 1 without a gap."},
			"outputs":    outputs,
		},
	}
}

// eventHeaders are sent with the first event.
func eventHeaders() object {
	return object{
		"Cache-Control":           object{"schema": object{"const": "no-store"}},
		transport.HeaderRequestID: component("headers", "RequestID"),
	}
}

// eventsOf is a body of events, each of one of the kinds.
func eventsOf(kinds ...any) object {
	return object{
		"type": "string", "contentMediaType": transport.EventStreamType,
		"contentSchema": object{"type": "array", "items": object{"oneOf": kinds}},
	}
}

// event describes an event as its reader receives it: its fields are text, and its
// data is a line of JSON.
func event(data object) object {
	return object{
		"type": "object", "required": []any{"data"},
		"properties": object{"data": object{"type": "string", "contentMediaType": jsonType, "contentSchema": data}},
	}
}

// namedEvent is an event that has a name.
func namedEvent(name string, data object) object {
	out := event(data)
	out["title"], out["required"] = name, []any{"event", "data"}
	out["properties"].(object)["event"] = object{"const": name}
	return out
}

// numberedEvent is an event that has a name and a number.
func numberedEvent(name string, data object) object {
	out := namedEvent(name, data)
	out["required"] = []any{"id", "event", "data"}
	out["properties"].(object)["id"] = object{"type": "string", "pattern": "^[1-9][0-9]*$"}
	return out
}

const eventsExample = "id: 1\nevent: chunk\ndata: {\"request_id\":\"" + exampleID + "\",\"seq\":1,\"outputs\":[{\"name\":\"text\",\"content_type\":\"text/plain\",\"text\":\"Hel\"}]}\n\n" +
	"id: 2\nevent: done\ndata: {\"request_id\":\"" + exampleID + "\",\"model_name\":\"...\",\"outputs\":[],\"timeline\":{\"total_ms\":12.5,\"steps\":[]}}\n\n"

// Descriptions of streamed responses.
const (
	aboutStreams = " Whoever closes the connection cancels the request, unless that is durable or has an idempotency key. A stream that broke is not taken up again: a request with `Last-Event-ID` is refused with INVALID_REQUEST." + aboutViewers
	aboutViewers = " A page such as `/docs` shows the events when the last one has come; `curl -N` shows each as it comes."
)

// answerOf is the schema of a response document with such outputs.
func answerOf(outputs object) object {
	return object{
		"type": "object", "required": []any{"request_id", "model_name", "outputs", "timeline"},
		"properties": object{
			"request_id": object{"type": "string", "description": "What the mesh knows the request by.", "examples": []any{exampleID}},
			"id":         object{"type": "string", "description": "The body's own `id`, where it had one."},
			"model_name": object{"type": "string", "description": "The pipeline."},
			"outputs":    outputs,
			"metadata":   object{"type": "object", "additionalProperties": object{"type": "string"}, "description": "What runners said beside the outputs."},
			"timeline":   schemaRef("Timeline"),
		},
	}
}

func answerHeaders() object {
	return object{transport.HeaderRequestID: component("headers", "RequestID"), transport.HeaderServerTiming: component("headers", "ServerTiming")}
}
