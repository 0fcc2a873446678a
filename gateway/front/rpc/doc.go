// Package rpc serves stagemesh.inference.v1.InferenceService over Connect,
// gRPC and gRPC-Web, in protobuf and JSON, all on one path. It translates:
// a message becomes a call.Request, the Caller does the work, its answer
// becomes a message, a fault becomes the RPC's status. Infer and InferStream run
// a request, GetResult returns the stored answer to a durable one, with the
// headers and trailers that Infer has, and Cancel calls one off.
//
//	path, handler := rpc.New(caller, rpc.Settings{})
//	mux.Handle(path, handler)
//
// # Headers
//
// The W3C headers traceparent and tracestate go into Request.Trace. The
// client's own deadline, and the message's timeout, whichever is earlier, is
// Request.Timeout. Every answer carries the header Stagemesh-Request-Id, and
// the trailer Server-Timing with the timeline; Connect's unary protocol has
// trailers only by name, so there Server-Timing is a header too. A stream
// learns its id with its first message and says it there; its trailers say it
// again.
//
// # Failures
//
// A failure has the fault's code, its message and google.rpc details: see
// docs/faults.md. Two are found here. A message over MaxMessageBytes, as sent
// or after decompression, is PAYLOAD_TOO_LARGE, refused by its length prefix or
// Content-Length before it is read. Bytes that are no such message, JSON with
// unknown fields or enum names among them, are INVALID_REQUEST. What violates
// the RPC protocol itself (two messages where one is due, an unknown
// compression) is answered by the connect library, with a code and without
// details. A caller that takes nothing of its answer for the Patience is cut
// off: its stream would keep its place in the gateway.
//
// # Concurrency
//
// Handlers are safe for concurrent use. They start no goroutine. Parts given to
// the Caller share the request message's bytes and are the Caller's to keep.
//
// Answers are not compressed, whatever the client accepts: tensors and images
// hardly shrink, and the time would be the request's. Requests may be, by gzip.
//
// To test with it, serve New's handlers from an httptest server and let the
// Caller be a fake: see gateway/front/fronttest.
package rpc
