// Package rest serves inference on plain HTTP, for curl and other clients without RPC:
//
//	POST   /v1/pipelines/{pipeline}:infer
//	POST   /v1/pipelines/{pipeline}:stream
//	GET    /v1/requests/{request_id}/result?wait=5s
//	DELETE /v1/requests/{request_id}
//
// The first runs a request and returns its response. The second responds with events: see
// Streams. The third returns the stored result of a durable request, in the form of the first,
// with all outputs and without an Open Inference Protocol id; wait is a Go duration or
// milliseconds, 0 by default. The fourth cancels a request and returns 204.
//
// The pipeline is the text before the last colon, so "stage:echo:infer" runs the stage echo
// alone. docs/http.md is the same for application developers, with examples.
//
// # Requests
//
// The Content-Type decides how the body is read:
//   - application/json that is a request of the Open Inference Protocol (an object whose inputs
//     is an array whose first element has a datatype) is tensors, by gateway/front/oipjson. Other
//     JSON is one blob. "application/json; form=tensors" and "; form=blob" override this.
//   - application/msgpack, under any of its names, is the same in MessagePack, where the data of
//     a tensor may be binary: its raw bytes.
//   - multipart/form-data is one blob per part, named as the part; a part without a type is
//     text/plain.
//   - application/x-www-form-urlencoded is rejected: it is curl's default.
//   - anything else is one blob of that type, without a name.
//
// Headers: Stagemesh-Timeout, Stagemesh-Priority, Stagemesh-Durability,
// Stagemesh-Wait-For-Capacity, Idempotency-Key, traceparent, tracestate. Query:
// parameters.<name> for all steps, steps.<step>.<name> for one, outputs=a,b. The query wins over
// parameters and outputs of a body. Unknown keys are rejected.
//
// # Responses
//
// A response of exactly one blob is that blob, under its own type. Every other response, and
// every one to a request of the Open Inference Protocol or with application/json in Accept, is
// JSON:
//
//	{"request_id", "id"?, "model_name", "outputs": [...], "metadata"?, "timeline"}
//
// with tensors as oipjson writes them, and blobs as {"name", "content_type"} and one of text,
// json or data_base64. Where Accept prefers application/msgpack, or tensors came in it and Accept
// does not list JSON, the same is MessagePack with binary data. Every response has Server-Timing,
// and Stagemesh-Request-Id where an ID was assigned.
//
// # Streams
//
// A stream takes the same requests and responds with server-sent events in JSON, whatever Accept
// lists. Each chunk is an event "chunk", {"request_id", "seq", "outputs"}, whose id is its seq.
// The last event is "done", the whole response in JSON. A failure before the first event is an
// ordinary response; after it, or after a comment, it is the last event, "error", with the same
// JSON. A request with Last-Event-ID is INVALID_REQUEST: a stream cannot be resumed, and running
// it again unasked would run it twice.
//
// # Failures
//
// Faults are written by transport.WriteFault. This package reports malformed requests
// (INVALID_REQUEST, INVALID_INPUT), types that it does not take (UNSUPPORTED_MEDIA_TYPE), bodies
// over the limit (PAYLOAD_TOO_LARGE, after at most one byte more) and responses that JSON cannot
// represent. A wrong method is 405 with the reason INVALID_REQUEST.
//
// # Concurrency
//
// The handler is safe for concurrent use. It starts one goroutine beside each stream, which ends
// with it. The whole body is in memory before the Caller gets the request, and the whole response
// before its first byte is sent.
package rest
