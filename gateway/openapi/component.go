package openapi

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// option is a header or a query key that every inference takes.
type option struct {
	key, name, in, about string
	schema               object
}

func options() []option {
	return []option{
		{"Timeout", transport.HeaderTimeout, "header", "A duration such as `250ms` or `1.5s`, or whole milliseconds. Shortens the pipeline's timeout, never extends it.", object{"type": "string"}},
		{"Priority", transport.HeaderPriority, "header", "Above 0 is served first, below 0 yields.", object{"type": "integer", "format": "int32"}},
		{"Durability", transport.HeaderDurability, "header", "Where the request waits between stages: `file` makes it durable. The pipeline's own where it is left out.", object{"type": "string", "enum": []any{"memory", "file"}}},
		{"WaitForCapacity", transport.HeaderWaitForCapacity, "header", "Whether the request waits where a stage has no room for it, until its deadline, instead of being refused. The pipeline's own where it is left out.", object{"type": "boolean"}},
		{"IdempotencyKey", transport.HeaderIdempotencyKey, "header", "The request with this key is made once; whoever sends it again gets its answer.", object{"type": "string", "maxLength": call.MaxIdempotencyKey}},
		{"TraceParent", "traceparent", "header", "W3C trace context.", object{"type": "string"}},
		{"TraceState", "tracestate", "header", "W3C trace context.", object{"type": "string"}},
		{"Outputs", "outputs", "query", "Only these outputs come back.", object{"type": "array", "items": object{"type": "string"}, "maxItems": payload.MaxParts, "uniqueItems": true}},
	}
}

// sharedParameters are the options, and one for the keys of the query that a caller
// makes up.
func sharedParameters() object {
	out := object{
		"More": object{
			"name": "parameters", "in": "query", "style": "form", "explode": true,
			"description": "Parameters for every step as `parameters.<name>`, and for one as `steps.<step>.<name>`, which wins: `{\"parameters.temperature\": 0.5}`.",
			"schema":      object{"type": "object", "additionalProperties": object{"type": []any{"string", "number", "boolean", "array"}}, "examples": []any{object{}}},
			"example":     object{},
		},
	}
	for _, o := range options() {
		one := object{"name": o.name, "in": o.in, "description": o.about, "schema": o.schema}
		if o.in == "query" {
			one["style"], one["explode"] = "form", false
		}
		out[o.key] = one
	}
	return out
}

func optionRefs() []any {
	var out []any
	for _, o := range options() {
		out = append(out, component("parameters", o.key))
	}
	return append(out, component("parameters", "More"))
}

func sharedHeaders() object {
	return object{
		"RequestID":    object{"description": "What the mesh knows the request by.", "schema": object{"type": "string"}, "example": exampleID},
		"ServerTiming": object{"description": "Where the time went, as browsers draw it.", "schema": object{"type": "string"}, "example": "label-queue;dur=0.127, label-batch;dur=0.092, label-run;dur=0.046;desc=\"batch 1, idle\", total;dur=0.626"},
		"RetryAfter":   object{"description": "Seconds to wait before the next try, where that is known.", "schema": object{"type": "integer", "minimum": 0}},
	}
}

func answerHeaders() object {
	return object{transport.HeaderRequestID: component("headers", "RequestID"), transport.HeaderServerTiming: component("headers", "ServerTiming")}
}

// operators are reasons that callers of the public port never get.
var operators = []fault.Reason{fault.NotReplayable, fault.RevisionMismatch, fault.PipelineDoesNotFit}

// byStatus are the reasons that a caller may get, by their status on plain HTTP.
func byStatus() map[int][]fault.Reason {
	out := map[int][]fault.Reason{}
	for _, reason := range fault.Reasons() {
		if !slices.Contains(operators, reason) {
			status := fault.Classify(reason).HTTP
			out[status] = append(out[status], reason)
		}
	}
	return out
}

// inferStatuses are the failures that an inference may have.
func inferStatuses() []int {
	var out []int
	for status := range byStatus() {
		out = append(out, status)
	}
	slices.Sort(out)
	return out
}

// withFaults adds what may go wrong to what goes well.
func withFaults(responses object, statuses []int) object {
	for _, status := range statuses {
		responses[strconv.Itoa(status)] = component("responses", faultKey(status))
	}
	return responses
}

func faultKey(status int) string { return "Fault" + strconv.Itoa(status) }

// sharedResponses has a failure for each status; with tokens the mesh refuses those
// who have none.
func sharedResponses(tokens bool) object {
	out := object{}
	for status, reasons := range byStatus() {
		out[faultKey(status)] = faultResponse(status, reasons, tokens)
	}
	return out
}

func faultResponse(status int, reasons []fault.Reason, tokens bool) object {
	var about strings.Builder
	headers := object{transport.HeaderRequestID: component("headers", "RequestID"), transport.HeaderServerTiming: component("headers", "ServerTiming")}
	for i, reason := range reasons {
		class := fault.Classify(reason)
		if i > 0 {
			about.WriteString("\n")
		}
		fmt.Fprintf(&about, "- `%s`: %s", reason, class.Meaning)
		if class.Retryable {
			about.WriteString("; may succeed later")
			headers["Retry-After"] = component("headers", "RetryAfter")
		}
	}
	if status == http.StatusUnauthorized && !tokens {
		about.WriteString(", which this gateway asks nobody for")
	}
	first := fault.Classify(reasons[0])
	return object{
		"description": about.String(), "headers": headers,
		"content": object{jsonType: object{
			"schema": schemaRef("Fault"),
			"example": object{"error": object{
				"code": first.Code.String(), "reason": reasons[0], "message": first.Meaning, "request_id": exampleID,
			}},
		}},
	}
}

// fixedSchemas are those that no stage has a say in.
func fixedSchemas() object {
	text, number, count := object{"type": "string"}, object{"type": "number"}, object{"type": "integer", "minimum": 0}
	elements := func(about string, kinds ...any) object {
		return object{"type": "array", "items": object{"type": append(kinds, "array")}, "description": "Flat and row-major, or nested exactly as the shape is; answers are flat. " + about}
	}
	out := object{
		"Numbers":  elements("Numbers within the datatype.", "number"),
		"Integers": elements("Whole numbers, as digits alone, exact up to 64 bits.", "integer"),
		"Booleans": elements("Truth values.", "boolean"),
		"Strings":  elements("Text in UTF-8.", "string"),
		"Parameters": object{
			"type": "object", "maxProperties": payload.MaxParameters,
			"additionalProperties": object{"type": []any{"string", "number", "boolean"}},
		},
		"WantedOutput": object{"type": "object", "required": []any{"name"}, "properties": object{"name": text, "parameters": schemaRef("Parameters")}},
		"Timeline":     timelineSchema(text, number, count),
		"Fault":        faultSchema(text),
		"Chunk":        chunkOf(object{"type": "array", "items": object{"anyOf": []any{schemaRef("Tensor"), schemaRef("Blob")}}}),
	}
	for _, more := range []object{answerSchemas(asJSON(), text, count), packedSchemas(text, count), protocolSchemas(text, count)} {
		maps.Copy(out, more)
	}
	return out
}

// answerOf is the document of an answer with such outputs.
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

func timelineSchema(text, number, count object) object {
	return object{
		"type": "object", "description": "Where the time went, in milliseconds.", "required": []any{"total_ms", "steps"},
		"properties": object{
			"total_ms": number,
			"steps": object{"type": "array", "items": object{"type": "object", "properties": object{
				"step": text, "stage": text, "host": text, "attempt": count,
				"queue_wait_ms": number, "batch_wait_ms": number, "run_ms": number,
				"batch_size": count, "batch_rows": count, "dispatch_reason": text,
			}}},
		},
	}
}

func faultSchema(text object) object {
	reasons := []any{}
	for _, reason := range fault.Reasons() {
		reasons = append(reasons, reason)
	}
	return object{
		"type": "object", "required": []any{"error"},
		"properties": object{"error": object{
			"type": "object", "required": []any{"code", "reason", "message"},
			"properties": object{
				"code":       object{"type": "string", "description": "The gRPC code."},
				"reason":     object{"enum": reasons, "description": "What a program may branch on."},
				"message":    text,
				"request_id": text, "stage": text, "step": text, "host": text,
				"violations":     object{"type": "array", "items": object{"type": "object", "properties": object{"field": text, "description": text}}},
				"retry_after_ms": object{"type": "integer", "minimum": 0},
				"metadata":       object{"type": "object", "additionalProperties": text},
			},
		}},
	}
}
