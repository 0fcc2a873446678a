// Package rpc serves stagemesh.inference.v1.InferenceService over Connect, gRPC and gRPC-Web.
// Its methods are plain functions that translate: a message becomes a call.Request, the Caller
// runs it, its response becomes a message. gateway/front/transport adapts them to the wire,
// with its bounds, decoding and errors.
//
//	path, handler := rpc.New(caller, transport.Settings{})
//	mux.Handle(path, handler)
//
// # Headers
//
// The W3C headers traceparent and tracestate become Request.Trace. Request.Timeout is the
// earlier of the client's own deadline and the message's timeout. Every response has the
// header Stagemesh-Request-Id; on Connect's unary protocol also Server-Timing with the
// timeline, which is in every message too. A stream learns its ID with its first message and
// sends it in that message's headers, and again in its trailers.
//
// # Concurrency
//
// Everything is safe for concurrent use and starts no goroutine. Inputs given to the Caller
// share the request message's bytes and are the Caller's to keep.
//
// To test with it, serve New's handler from an httptest server with a Caller of
// gateway/front/fronttest.
package rpc
