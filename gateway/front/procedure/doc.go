// Package procedure makes functions the procedures of a service over Connect,
// gRPC and gRPC-Web, in protobuf and JSON, all on one path: what is the same for
// every service that a gateway serves.
//
//	service := procedure.NewService(descriptor, procedure.Settings{})
//	procedure.Unary(service, "Get", get)
//	procedure.Stream(service, "Watch", watch)
//	procedure.Each(service, "Talk", 64, talk)
//	mux.Handle(service.Path(), service)
//
// # Failures
//
// What a function fails with, a *fault.Fault in its chain, becomes the RPC's
// status with its google.rpc details: see docs/faults.md. Two are found here. A
// message over MaxMessageBytes, as sent or after decompression, is
// PAYLOAD_TOO_LARGE, refused by its length prefix or Content-Length before it is
// read. Bytes that are no such message, JSON with unknown fields or enum names
// among them, are INVALID_REQUEST, and so is a message with more than 262,144
// messages, or 1,048,576 texts in lists, within it: in memory they are many times
// larger. What violates the RPC protocol itself (two messages where one is due, an
// unknown compression) is answered by the connect library, with a code and without
// details. A caller that takes nothing of its answer for the Patience is cut off.
//
// # Streams of many messages
//
// Each bounds them one by one: the message limit holds for each, and so does the
// Patience, within a message; between two a caller may be silent. What its messages
// took of a body.Budget is given back as the next one is read: who answers books what
// it keeps. Where the gateway stops nothing more is read, what is in hand is answered,
// and the stream ends with SHUTTING_DOWN. A message that cannot be read ends its stream,
// and calls off what the stream has in hand: the cause of those contexts, a CANCELLED
// fault, says why.
//
// Answers are not compressed, whatever the client accepts: tensors and images
// hardly shrink, and the time would be the request's. Requests may be, by gzip.
//
// # Concurrency
//
// A Service is made by one goroutine and then safe for concurrent use. It starts
// no goroutine, but for Each: one for every message in hand and one that watches, all of
// which have ended when the stream has. Messages are the function's to keep.
//
// Its promises are held by the tests of gateway/front/rpc, and of Each by its own and
// those of gateway/front/oip.
package procedure
