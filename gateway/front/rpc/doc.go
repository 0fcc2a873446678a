// Package rpc serves stagemesh.inference.v1.InferenceService over Connect,
// gRPC and gRPC-Web, in protobuf and JSON, all on one path. It translates:
// a message becomes a call.Request, the Caller does the work, its answer
// becomes a message, a fault becomes the RPC's status. Infer and InferStream run
// a request, GetResult returns the stored answer to a durable one, with the
// headers that Infer has, and Cancel calls one off.
//
//	path, handler := rpc.New(caller, procedure.Settings{})
//	mux.Handle(path, handler)
//
// # Headers
//
// The W3C headers traceparent and tracestate go into Request.Trace. The
// client's own deadline, and the message's timeout, whichever is earlier, is
// Request.Timeout. Every answer carries the header Stagemesh-Request-Id, and those
// of Connect's unary protocol the header Server-Timing with the timeline, which is in
// every message too. A stream learns its id with its first message and says it there;
// its trailers say it again.
//
// # Failures
//
// Bounds, decoding and failures are those of gateway/front/procedure. A caller
// that takes nothing of a streamed answer is cut off, for its stream would keep
// its place in the gateway.
//
// # Concurrency
//
// Handlers are safe for concurrent use. They start no goroutine. Parts given to
// the Caller share the request message's bytes and are the Caller's to keep.
//
// To test with it, serve New's handlers from an httptest server and let the
// Caller be a fake: see gateway/front/fronttest.
package rpc
