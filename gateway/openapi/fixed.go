package openapi

import (
	"net/http"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/mesh/payload"
)

// Tags of what is no pipeline's; no pipeline has a name like that.
const (
	tagAny      = "Any pipeline"
	tagRequests = "Requests"
	tagProtocol = "Open Inference Protocol"
	tagProbes   = "Probes"
)

func fixedTags() []any {
	return []any{
		object{"name": tagAny, "description": "Pipelines by name, and stages alone as `stage:<name>`."},
		object{"name": tagRequests, "description": "Stored answers, and calling off."},
		object{"name": tagProtocol, "description": "The REST form of version 2, for clients of other servers: a pipeline is a model."},
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
	return object{
		inferPath("{pipeline}"):            object{"post": anyPipeline()},
		"/v1/requests/{request_id}/result": object{"get": result()},
		"/v1/requests/{request_id}":        object{"delete": cancel()},
		"/v2":                              object{"get": protocol("server", "What serves", nil, schemaRef("Server"))},
		"/v2/health/live":                  object{"get": open(protocol("live", "Whether the gateway answers", nil, object{"type": "object"}))},
		"/v2/health/ready":                 object{"get": open(unready(protocol("ready", "Whether the gateway can take requests", nil, schemaRef("Readiness"))))},
		"/v2/models/{model}":               object{"get": protocol("model", "What a pipeline takes and gives", []any{model()}, schemaRef("Model"))},
		"/v2/models/{model}/ready":         object{"get": unready(protocol("modelReady", "Whether every stage of a pipeline has a host", []any{model()}, schemaRef("Readiness")))},
		"/v2/models/{model}/infer":         object{"post": protocolInfer()},
		"/livez":                           object{"get": open(probe("livez", "Whether the process answers"))},
		"/readyz":                          object{"get": open(readyz())},
	}
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
		"description": "A pipeline by its name, or a stage alone as `stage:<name>`.",
		"parameters":  append([]any{named("pipeline", "A pipeline, or `stage:<name>`.")}, optionRefs()...),
		"requestBody": anything(),
		"responses":   withFaults(object{"200": a.answer()}, inferStatuses()),
	}
}

func named(name, about string) object {
	return object{"name": name, "in": "path", "required": true, "description": about, "schema": object{"type": "string"}}
}

func model() object { return named("model", "A pipeline, or `stage:<name>`.") }

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

// protocol is an operation of the Open Inference Protocol without a body.
func protocol(id, summary string, parameters []any, schema object) object {
	out := object{
		"operationId": "v2_" + id, "tags": []any{tagProtocol}, "summary": summary,
		"responses": object{
			"200":     object{"description": "It is so.", "content": object{jsonType: object{"schema": schema}}},
			"default": protocolFailure(),
		},
	}
	if parameters != nil {
		out["parameters"] = parameters
	}
	return out
}

func protocolFailure() object {
	return object{"description": "What went wrong, with the statuses that all of plain HTTP has.", "content": object{jsonType: object{"schema": schemaRef("ProtocolError")}}}
}

// unready adds that something is not ready.
func unready(operation object) object {
	operation["responses"].(object)["503"] = object{"description": "It is not.", "content": object{jsonType: object{"schema": schemaRef("Readiness")}}}
	return operation
}

func protocolInfer() object {
	out := protocol("infer", "Ask a pipeline as a model", []any{model()}, schemaRef("ModelAnswer"))
	out["description"] = "A blob is a BYTES tensor of one element, whose parameter `content_type` may name its type. Bytes may follow the JSON, by the protocol's binary extension."
	out["requestBody"] = object{"required": true, "content": object{jsonType: object{"schema": schemaRef("ModelRequest")}}}
	success := out["responses"].(object)["200"].(object)
	success["description"], success["headers"] = "The answer.", answerHeaders()
	success["content"].(object)[payload.OctetStream] = object{"schema": object{"type": "string", "contentMediaType": payload.OctetStream}}
	return out
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

// protocolSchemas are those of the Open Inference Protocol.
func protocolSchemas(text, count object) object {
	truth := object{"type": "boolean"}
	described := object{"type": "array", "items": object{
		"type": "object", "required": []any{"name", "datatype", "shape"},
		"properties": object{"name": text, "datatype": object{"enum": datatypes()}, "shape": object{"type": "array", "items": object{"type": "integer", "minimum": -1}}},
	}}
	// Without data where bytes follow the JSON.
	loose := object{
		"type": "object", "required": []any{"name", "datatype", "shape"},
		"properties": object{
			"name": text, "datatype": object{"enum": datatypes()}, "shape": object{"type": "array", "items": count},
			"data": object{"type": "array"}, "parameters": schemaRef("Parameters"),
		},
	}
	return object{
		"Server":        object{"type": "object", "properties": object{"name": text, "version": text, "extensions": object{"type": "array", "items": text}}},
		"Readiness":     object{"type": "object", "required": []any{"ready"}, "properties": object{"ready": truth, "name": text}},
		"ProtocolError": object{"type": "object", "required": []any{"error"}, "properties": object{"error": object{"type": "string", "examples": []any{"UNKNOWN_PIPELINE: there is no such pipeline"}}}},
		"Model": object{"type": "object", "required": []any{"name", "inputs", "outputs"}, "properties": object{
			"name": text, "versions": object{"type": "array", "items": text}, "platform": text,
			"inputs": described, "outputs": described,
		}},
		"ModelRequest": object{
			"type": "object", "required": []any{"inputs"},
			"properties": object{
				"id": text, "parameters": schemaRef("Parameters"),
				"inputs":  object{"type": "array", "items": loose},
				"outputs": object{"type": "array", "items": schemaRef("WantedOutput")},
			},
		},
		"ModelAnswer": object{
			"type": "object", "required": []any{"model_name", "outputs"},
			"properties": object{
				"id": text, "model_name": text, "model_version": text,
				"outputs": object{"type": "array", "items": loose},
			},
		},
	}
}
