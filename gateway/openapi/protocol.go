package openapi

import (
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// protocolPaths are those of the Open Inference Protocol's REST form.
func protocolPaths() object {
	out := object{
		"/v2":              object{"get": protocol("server", "What serves", schemaRef("Server"))},
		"/v2/health/live":  object{"get": open(protocol("live", "Whether the gateway answers", object{"type": "object"}))},
		"/v2/health/ready": object{"get": open(unready(protocol("ready", "Whether the gateway can take requests", schemaRef("Readiness"))))},
	}
	latest := address{root: "/v2/models/{model}", tag: tagProtocol, parameters: []any{model()}}
	latest.add(out)
	versioned := address{root: latest.root + "/versions/{version}", suffix: "_version", tag: tagVersions, parameters: []any{model(), onlyVersion()}}
	versioned.add(out)
	return out
}

func model() object { return named("model", "A pipeline, or `stage:<name>`.") }

func onlyVersion() object {
	out := named("version", "The version of a pipeline.")
	out["schema"] = object{"const": "1"}
	return out
}

// address is a way to name a model.
type address struct {
	// root is the model's path, with the parameters, and suffix ends its operations' names.
	root, suffix, tag string
	parameters        []any
}

// add adds what can be asked of a model.
func (a address) add(paths object) {
	for _, one := range []struct {
		path, method string
		operation    object
	}{
		{"", "get", protocol("model", "What a pipeline takes and gives", schemaRef("Model"))},
		{"/ready", "get", unready(protocol("modelReady", "Whether every stage of a pipeline has a host", schemaRef("Readiness")))},
		{"/infer", "post", protocolInfer()},
		{"/generate", "post", generate()},
		{"/generate_stream", "post", generateStream()},
	} {
		one.operation["operationId"] = one.operation["operationId"].(string) + a.suffix
		one.operation["tags"], one.operation["parameters"] = []any{a.tag}, a.parameters
		paths[a.root+one.path] = object{one.method: one.operation}
	}
}

// protocol is an operation without a body.
func protocol(id, summary string, schema object) object {
	return object{
		"operationId": "v2_" + id, "tags": []any{tagProtocol}, "summary": summary,
		"responses": object{
			"200":     object{"description": "It is so.", "content": object{jsonType: object{"schema": schema}}},
			"default": protocolFailure(),
		},
	}
}

func protocolFailure() object {
	return object{"description": "What went wrong, with the statuses that all of plain HTTP has.", "content": object{jsonType: object{"schema": schemaRef("ProtocolError")}}}
}

// unready adds that something is not ready.
func unready(operation object) object {
	operation["responses"].(object)["503"] = object{"description": "It is not.", "content": object{jsonType: object{"schema": schemaRef("Readiness")}}}
	return operation
}

// asking is an operation with a body, and an answer of its own.
func asking(id, summary string, body, answer object) object {
	out := protocol(id, summary, answer)
	out["requestBody"] = object{"required": true, "content": object{jsonType: object{"schema": body}}}
	success := out["responses"].(object)["200"].(object)
	success["description"], success["headers"] = "The answer.", answerHeaders()
	return out
}

func protocolInfer() object {
	out := asking("infer", "Ask a pipeline as a model", schemaRef("ModelRequest"), schemaRef("ModelAnswer"))
	out["description"] = "A blob is a BYTES tensor of one element, whose parameter `content_type` may name its type. Bytes may follow the JSON, by the protocol's binary extension."
	success := out["responses"].(object)["200"].(object)
	success["content"].(object)[payload.OctetStream] = object{"schema": object{"type": "string", "contentMediaType": payload.OctetStream}}
	return out
}

func generate() object {
	out := asking("generate", "Ask a pipeline with one object", schemaRef("GenerateRequest"), schemaRef("GenerateAnswer"))
	out["description"] = aboutGenerate
	return out
}

func generateStream() object {
	out := asking("generateStream", "Ask a pipeline with one object and get the answer in pieces", schemaRef("GenerateRequest"), nil)
	out["description"] = aboutGenerate + aboutViewers
	success := out["responses"].(object)["200"].(object)
	success["description"] = "Server-sent events without names or numbers: the outputs of each piece (`GenerateAnswer`), or of the whole answer where it has no pieces, and what fails after the first (`ProtocolError`), which is the last."
	success["headers"] = eventHeaders()
	success["content"] = object{transport.EventStreamType: object{
		"schema":  eventsOf(event(object{"anyOf": []any{schemaRef("GenerateAnswer"), schemaRef("ProtocolError")}})),
		"example": "data: {\"model_name\":\"...\",\"model_version\":\"1\",\"text_output\":\"Hel\"}\n\ndata: {\"model_name\":\"...\",\"model_version\":\"1\",\"text_output\":\"lo\"}\n\n",
	}}
	return out
}

const aboutGenerate = "Inputs and parameters are members of one object, and outputs of another. An answer that is neither text, JSON nor numbers is asked for by `infer`."

// protocolSchemas are those of the Open Inference Protocol.
func protocolSchemas(text, count object) object {
	out := generateSchemas(text)
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
	out["Server"] = object{"type": "object", "properties": object{"name": text, "version": text, "extensions": object{"type": "array", "items": text}}}
	out["Readiness"] = object{"type": "object", "required": []any{"ready"}, "properties": object{"ready": truth, "name": text}}
	out["ProtocolError"] = object{"type": "object", "required": []any{"error"}, "properties": object{"error": object{"type": "string", "examples": []any{"UNKNOWN_PIPELINE: there is no such pipeline"}}}}
	out["Model"] = object{"type": "object", "required": []any{"name", "inputs", "outputs"}, "properties": object{
		"name": text, "versions": object{"type": "array", "items": text}, "platform": text,
		"inputs": described, "outputs": described,
	}}
	out["ModelRequest"] = object{
		"type": "object", "required": []any{"inputs"},
		"properties": object{
			"id": text, "parameters": schemaRef("Parameters"),
			"inputs":  object{"type": "array", "items": loose},
			"outputs": object{"type": "array", "items": schemaRef("WantedOutput")},
		},
	}
	out["ModelAnswer"] = object{
		"type": "object", "required": []any{"model_name", "outputs"},
		"properties": object{
			"id": text, "model_name": text, "model_version": text,
			"outputs": object{"type": "array", "items": loose},
		},
	}
	return out
}

// generateSchemas are those of the protocol's generate extension.
func generateSchemas(text object) object {
	return object{
		"GenerateRequest": object{
			"type": "object", "minProperties": 1,
			"description": "Inputs by their names: a string is a text, or a BYTES tensor of one element; a number is one element, and a list the last axis of a tensor whose other axes are 1; where the stage takes JSON, any JSON is it. Any other string, number or boolean is a parameter; `timeout` is in microseconds.",
			"properties": object{
				"text_input": object{"description": "The only input of text, whatever its name."},
				"parameters": schemaRef("Parameters"),
				"id":         object{"type": "string", "maxLength": payload.MaxName, "description": "The caller's own name for the request, which is echoed."},
			},
			"examples": []any{object{"text_input": "hello"}},
		},
		"GenerateAnswer": object{
			"type": "object", "required": []any{"model_name", "model_version"},
			"description": "Beside these, the outputs by their names, one without a name as `text_output`: one element as such, several as a list, text as a string, JSON as it is.",
			"properties":  object{"model_name": text, "model_version": text, "id": object{"type": "string", "description": "The request's own `id`, where it had one."}},
			"examples":    []any{object{"model_name": "chat", "model_version": "1", "text_output": "Hello."}},
		},
	}
}
