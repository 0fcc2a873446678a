// Package rest serves inference on plain HTTP, for curl and for whoever has no
// RPC client:
//
//	POST   /v1/pipelines/{pipeline}:infer
//	POST   /v1/pipelines/{pipeline}:stream
//	GET    /v1/requests/{request_id}/result?wait=5s
//	DELETE /v1/requests/{request_id}
//
// The second answers in events: see Streams. The third answers with what is
// stored of a durable request, in the form that the first would have had, with all
// of its outputs and without an Open Inference Protocol id; wait is a Go duration
// or milliseconds, and 0 where it is left out. The fourth calls a request off, and answers 204.
//
// The pipeline is what stands before the last colon, so "stage:echo:infer" asks
// for the stage echo alone. docs/http.md is the same for application
// developers, with examples.
//
// # Requests
//
// The Content-Type says what the body is:
//   - application/json that is a request of the Open Inference Protocol (an
//     object whose inputs is an array whose first element has a datatype) is
//     tensors, by gateway/front/oipjson. Other JSON is one blob.
//     "application/json; form=tensors" and "; form=blob" decide it.
//   - application/msgpack, under any of its names, is the same in MessagePack, in
//     which the data of a tensor may be binary: its raw bytes.
//   - multipart/form-data is one blob per part, named as the part is; a part
//     without a type is text/plain.
//   - application/x-www-form-urlencoded is refused: it is what curl says when
//     nobody told it.
//   - anything else is one blob of that type, without a name.
//
// Headers: Stagemesh-Timeout, Stagemesh-Priority, Stagemesh-Durability,
// Idempotency-Key, traceparent, tracestate. Query: parameters.<name> for all
// steps, steps.<step>.<name> for one, outputs=a,b. Where an OIP body has
// parameters or outputs too, the query wins. Unknown keys are refused.
//
// # Answers
//
// An answer of exactly one blob is that blob, under its own type. Everything
// else, everything asked in the form of the Open Inference Protocol, and
// everything where Accept lists application/json, is JSON:
//
//	{"request_id", "id"?, "model_name", "outputs": [...], "metadata"?, "timeline"}
//
// with tensors as oipjson writes them and blobs as {"name", "content_type"} and
// one of text, json or data_base64. Where Accept prefers application/msgpack, or
// tensors came in it and Accept does not want JSON, the same is MessagePack, in which
// data is binary. Every answer carries Server-Timing, and Stagemesh-Request-Id where
// an id was minted.
//
// # Streams
//
// A stream takes what inference takes and answers with server-sent events, by
// gateway/front/eventstream, in JSON whatever is accepted. Each chunk is an event
// "chunk", {"request_id", "seq", "outputs"}, whose id is its seq; the answer is the
// last, "done", in the JSON form of inference. What fails before the first event is an
// ordinary failure; after it, and after a comment, it is the last event, "error", with the
// same JSON. A request with Last-Event-ID is refused with INVALID_REQUEST: a stream is
// not taken up where it broke, and making it anew unasked would run it twice.
//
// # Failures
//
// Faults are written by gateway/front/failure. Found here are malformed
// requests (INVALID_REQUEST, INVALID_INPUT), types that are not taken
// (UNSUPPORTED_MEDIA_TYPE), bodies over MaxBodyBytes (PAYLOAD_TOO_LARGE, of
// which at most one byte more than the limit is read) and answers that JSON
// cannot say. A wrong method is 405, with reason INVALID_REQUEST.
//
// # Concurrency
//
// The handler is safe for concurrent use and starts no goroutine, but for one
// beside each stream, which ends with it. A request's body is in memory as a whole
// before the Caller is asked; so is the answer of inference before its first byte is
// sent, and a failure is never half of it. A caller
// that takes nothing of its answer for the Patience is cut off.
package rest
