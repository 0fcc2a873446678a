package openapi

import (
	"github.com/stagemesh/stagemesh/gateway/front/transport"
)

// events describes a success that comes in pieces.
func (a asked) events() object {
	return object{
		"description": "Server-sent events: `chunk` with a piece of the answer, at last `done` with the whole answer as `:infer` gives it in JSON, or `error` with the failure (`Fault`). All but `error` are numbered by `id`, from 1. What ends without `done` or `error` was cut off. Lines that begin with a colon keep the connection open.",
		"headers":     eventHeaders(),
		"content": object{transport.EventStreamType: object{
			"schema":  eventsOf(numberedEvent("chunk", a.chunk()), numberedEvent("done", a.document(asJSON())), namedEvent("error", schemaRef("Fault"))),
			"example": eventsExample,
		}},
	}
}

// chunk refers to the schema of a piece of the answer. What has the name of an output
// is as the stage says of that; a piece may have more.
func (a asked) chunk() object {
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

// chunkOf is a piece of an answer with such outputs.
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

// eventHeaders are those that leave with the first event.
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

// event is one as its reader has it, with its fields as text; its data is a line of
// JSON.
func event(data object) object {
	return object{
		"type": "object", "required": []any{"data"},
		"properties": object{"data": object{"type": "string", "contentMediaType": jsonType, "contentSchema": data}},
	}
}

// namedEvent is one that has a name.
func namedEvent(name string, data object) object {
	out := event(data)
	out["title"], out["required"] = name, []any{"event", "data"}
	out["properties"].(object)["event"] = object{"const": name}
	return out
}

// numberedEvent is one that has a name and a number.
func numberedEvent(name string, data object) object {
	out := namedEvent(name, data)
	out["required"] = []any{"id", "event", "data"}
	out["properties"].(object)["id"] = object{"type": "string", "pattern": "^[1-9][0-9]*$"}
	return out
}

const eventsExample = "id: 1\nevent: chunk\ndata: {\"request_id\":\"" + exampleID + "\",\"seq\":1,\"outputs\":[{\"name\":\"text\",\"content_type\":\"text/plain\",\"text\":\"Hel\"}]}\n\n" +
	"id: 2\nevent: done\ndata: {\"request_id\":\"" + exampleID + "\",\"model_name\":\"...\",\"outputs\":[],\"timeline\":{\"total_ms\":12.5,\"steps\":[]}}\n\n"

// What descriptions of operations say of answers in events.
const (
	aboutStreams = " Whoever closes the connection calls the request off, unless that is durable or has an idempotency key. A stream that broke is not taken up again: a request with `Last-Event-ID` is refused with INVALID_REQUEST." + aboutViewers
	aboutViewers = " A page such as `/docs` shows the events when the last one has come; `curl -N` shows each as it comes."
)
