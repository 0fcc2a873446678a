// Package transport is what every port shares between the connection and the service:
// bounded request bodies, headers, faults, server-sent events, and the adapters that serve
// plain Go methods: a Service over Connect, gRPC and gRPC-Web on net/http, and NewGRPC over
// gRPC on grpc-go.
//
//	service := transport.NewService(descriptor, transport.Settings{})
//	transport.Unary(service, "Get", get)
//	transport.ServerStream(service, "Watch", watch)
//	transport.BidiStream(service, "Talk", 64, talk)
//	mux.Handle(service.Path(), service)
//	server := transport.NewGRPC(settings, service)
//
// A method is a plain function of a context, a Call and a generated message. It knows
// neither Connect nor net/http: a Call carries the trace context in, and headers and
// trailers out. Messages are the method's to keep. Responses are not compressed: tensors and
// images hardly shrink. Requests may use gzip.
//
// A *fault.Fault in the chain of a method's error becomes the RPC's status with its
// google.rpc details, or the JSON body of WriteFault: see docs/faults.md. The adapter itself
// reports PAYLOAD_TOO_LARGE, before it reads a message that declares its length, and
// INVALID_REQUEST for bytes that do not decode, unknown fields of JSON, and elements that would
// take too much memory. Violations of the RPC protocol itself have no details.
//
// WithMemory and NewGRPC ask the Guard who calls, and open the account of the request
// (internal/budget) before its body is read. What is read, inflated and decoded is reserved
// there before it is allocated. StallReader and StallWriter fail when a caller sends or takes
// less than 256 KiB within the stall timeout. Connections bounds who connects.
//
// A Service is assembled by one goroutine and then safe for concurrent use. Only BidiStream,
// EventStream.Run and the server of NewGRPC start goroutines; all of them have ended when the
// stream, Run or the server has.
// Readers, writers, accounts and event streams belong to one request. Errors are
// *fault.Fault unless stated otherwise.
package transport
