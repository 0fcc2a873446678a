// Package rest serves inference on plain HTTP, for curl and other clients without RPC.
// docs/http.md is the manual of its paths, options, formats and events:
//
//	POST   /v1/pipelines/{pipeline}:infer
//	POST   /v1/pipelines/{pipeline}:stream
//	GET    /v1/requests/{request_id}/result?wait=5s
//	DELETE /v1/requests/{request_id}
//
// The Content-Type decides how a body is read: JSON and MessagePack are tensors in the form
// of the Open Inference Protocol where they look like it, by gateway/front/oipjson. Each part
// of a form, and every other body, is one blob. Options of the query win over those of a
// body, and unknown keys are rejected.
//
// A response of exactly one blob is that blob, unless Accept or the request asks for JSON or
// MessagePack. A stream responds with server-sent events in JSON. A failure before the first
// event is an ordinary response; after it, the last event. A request with Last-Event-ID is
// rejected: a stream cannot be resumed, and running it again unasked would run it twice.
//
// Faults are written by transport.WriteFault. A wrong method is 405 with the reason
// INVALID_REQUEST.
//
// The handler is safe for concurrent use. It starts one goroutine beside each stream, which
// ends with it. The whole body is in memory before the Caller gets the request, and the whole
// response before its first byte is sent.
package rest
