package openapi

import (
	"maps"
	"net/http"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Tags of what is no pipeline's; no pipeline has a name like that.
const (
	tagAny      = "Any pipeline"
	tagRequests = "Requests"
	tagProtocol = "Open Inference Protocol"
	tagVersions = "Open Inference Protocol, by version"
	tagProbes   = "Probes"
)

func fixedTags() []any {
	return []any{
		object{"name": tagAny, "description": "Pipelines by name, and stages alone as `stage:<name>`."},
		object{"name": tagRequests, "description": "Stored answers, and calling off."},
		object{"name": tagProtocol, "description": "The REST form of version 2, for clients of other servers: a pipeline is a model."},
		object{"name": tagVersions, "description": "The same, for clients that name a version: the only one is `1`."},
		object{"name": tagProbes, "description": "For whoever watches the gateway; they need no token."},
	}
}

func datatypes() []any {
	var out []any
	for _, d := range []tensor.Datatype{
		tensor.Bool, tensor.Uint8, tensor.Uint16, tensor.Uint32, tensor.Uint64, tensor.Int8, tensor.Int16, tensor.Int32, tensor.Int64,
		tensor.FP16, tensor.BF16, tensor.FP32, tensor.FP64, tensor.Bytes,
	} {
		out = append(out, d)
	}
	return out
}

// fixedPaths is what there is whatever the pipelines are.
func fixedPaths() object {
	out := object{
		inferPath("{pipeline}"):            object{"post": anyPipeline()},
		streamPath("{pipeline}"):           object{"post": anyStream()},
		"/v1/requests/{request_id}/result": object{"get": result()},
		"/v1/requests/{request_id}":        object{"delete": cancel()},
		"/livez":                           object{"get": open(probe("livez", "Whether the process answers"))},
		"/readyz":                          object{"get": open(readyz())},
	}
	maps.Copy(out, protocolPaths())
	return out
}

// open says that an operation needs no token.
func open(operation object) object {
	operation["security"] = []any{}
	return operation
}

func anyPipeline() object {
	a := asked{schemas: object{}}
	return object{
		"operationId": "infer", "tags": []any{tagAny}, "summary": "Ask any pipeline and wait for the answer",
		"description": aboutAny,
		"parameters":  append([]any{named("pipeline", "A pipeline, or `stage:<name>`.")}, optionRefs()...),
		"requestBody": anything(),
		"responses":   withFaults(object{"200": a.answer()}, inferStatuses()),
	}
}

func anyStream() object {
	a := asked{schemas: object{}}
	return object{
		"operationId": "stream", "tags": []any{tagAny}, "summary": "Ask any pipeline and get the answer in pieces",
		"description": aboutAny + " One that does not answer in pieces answers with the whole alone." + aboutStreams,
		"parameters":  append([]any{named("pipeline", "A pipeline, or `stage:<name>`.")}, optionRefs()...),
		"requestBody": anything(),
		"responses":   withFaults(object{"200": a.events()}, inferStatuses()),
	}
}

const aboutAny = "A pipeline by its name, or a stage alone as `stage:<name>`."

func named(name, about string) object {
	return object{"name": name, "in": "path", "required": true, "description": about, "schema": object{"type": "string"}}
}

func result() object {
	a := asked{}
	return object{
		"operationId": "result", "tags": []any{tagRequests}, "summary": "Fetch the stored answer to a durable request",
		"description": "In the form that it would have had at first, with all outputs; a failure as that failure.",
		"parameters": []any{
			named("request_id", "The request's id."),
			object{"name": "wait", "in": "query", "description": "How long to wait for an answer that is not there yet: a duration such as `5s`, or whole milliseconds.", "schema": object{"type": "string"}},
		},
		"responses": withFaults(object{"200": a.answer()}, inferStatuses()),
	}
}

func cancel() object {
	return object{
		"operationId": "cancel", "tags": []any{tagRequests}, "summary": "Call a request off",
		"description": "Best effort: a request that is done stays done, and that there is none of that id is no failure.",
		"parameters":  []any{named("request_id", "The request's id.")},
		"responses": withFaults(object{"204": object{"description": "The word is sent."}},
			[]int{http.StatusBadRequest, http.StatusUnauthorized, http.StatusForbidden, http.StatusServiceUnavailable}),
	}
}

func probe(id, summary string) object {
	return object{
		"operationId": id, "tags": []any{tagProbes}, "summary": summary,
		"responses": object{"200": object{"description": "It is so.", "content": object{jsonType: object{"schema": object{"type": "object", "properties": object{"status": object{"const": "ok"}}}}}}},
	}
}

func readyz() object {
	out := probe("readyz", "Whether the gateway, or a pipeline, can take requests")
	out["parameters"] = []any{object{"name": "pipeline", "in": "query", "description": "Asks for one pipeline instead.", "schema": object{"type": "string"}}}
	withFaults(out["responses"].(object), []int{http.StatusNotFound, http.StatusServiceUnavailable})
	return out
}
