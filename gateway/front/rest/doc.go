// Package rest serves inference on plain HTTP, for curl and for whoever has no
// RPC client:
//
//	POST   /v1/pipelines/{pipeline}:infer
//	GET    /v1/requests/{request_id}/result?wait=5s
//	DELETE /v1/requests/{request_id}
//
// The second answers with what is stored of a durable request, in the form that
// the first would have had, with all of its outputs and without an Open
// Inference Protocol id; wait is a Go duration or milliseconds, and 0 where it is
// left out.
// The third calls a request off, and answers 204.
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
// The handler is safe for concurrent use and starts no goroutine. A request's
// body is in memory as a whole before the Caller is asked; so is the answer
// before its first byte is sent, and a failure is never half an answer. A caller
// that takes nothing of its answer for the Patience is cut off.
package rest
