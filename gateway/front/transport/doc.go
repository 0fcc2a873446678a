// Package transport is what every front shares between the connection and the service:
// bounded request bodies, headers, faults, server-sent events, and the adapter that serves
// plain Go methods over Connect, gRPC and gRPC-Web.
//
// # Methods
//
//	service := transport.NewService(descriptor, transport.Settings{})
//	transport.Unary(service, "Get", get)
//	transport.ServerStream(service, "Watch", watch)
//	transport.BidiStream(service, "Talk", 64, talk)
//	mux.Handle(service.Path(), service)
//
// A method is a plain function of a context, a Call and a generated message. It knows
// neither Connect nor net/http: a Call carries the trace context in, and headers and
// trailers out. Messages are the method's to keep.
//
// A *fault.Fault in the chain of a method's error becomes the RPC's status with its
// google.rpc details: see docs/faults.md. The adapter itself reports two faults. A message
// over MaxMessageBytes, as sent or after decompression, is PAYLOAD_TOO_LARGE; its length
// prefix or Content-Length is checked before it is read. Bytes that do not decode, JSON with
// unknown fields or enum names, and a message with more than 262,144 nested messages or
// 1,048,576 strings in lists are INVALID_REQUEST; elements are counted before any is
// allocated. The connect library answers violations of the RPC protocol itself (two messages
// where one is due, an unknown compression) with a code and without details.
//
// A BidiStream applies the message limit and the stall timeout to each message. Between two
// messages a caller may be silent. Bytes of a message are released to the Budget when the
// next one is read, so the method reserves what it keeps. When the gateway stops, the stream
// reads no more, answers the messages in flight and ends with SHUTTING_DOWN. A message that
// cannot be read ends the stream and cancels the messages in flight; the cause of their
// contexts is a CANCELLED fault with the reason.
//
// Responses are not compressed: tensors and images hardly shrink. Requests may use gzip.
//
// # Budget
//
// ReadBody reads at most a limit. StallReader and StallWriter fail when a caller sends or
// takes less than 256 KiB within the stall timeout; a caller is served as slowly as that.
// WithBudget reserves budget for bodies, and ReservingCaller for responses. A Reservation reserves it for inputs that are
// decoded into new memory, before the memory is allocated.
//
// # Faults on plain HTTP
//
// WriteFault answers with the status of the fault's reason and a JSON body,
//
//	{"error": {"code": "NOT_FOUND", "reason": "UNKNOWN_PIPELINE", "message": "...",
//	  "request_id"?, "stage"?, "step"?, "host"?, "violations"?: [{"field", "description"}],
//	  "retry_after_ms"?, "metadata"?: {}}}
//
// with the headers Stagemesh-Request-Id where an ID was assigned, and Retry-After, in
// seconds, where a delay is known.
//
// # Server-sent events
//
//	out := transport.NewEventStream(transport.StallWriter(w, transport.DefaultStallTimeout), 0)
//	err := out.Run(r.Context(), func(ctx context.Context) error {
//		... out.Send(transport.Event{ID: 1, Name: "chunk", Data: document}) ...
//	})
//	switch {
//	case err == nil:
//	case out.Begun(): // the status has been sent: report err in an event
//	default: // an ordinary response with its own status
//	}
//
// Status and headers are sent with the first event, so a failure before it is an ordinary
// response. Every event is flushed. While Run works and nothing was sent for the ping
// interval, a comment ": ping" is sent, because proxies close idle responses; it also begins
// the response. When the caller has disconnected, Send fails, and the context of Run ends when a
// comment cannot be sent.
//
// # Concurrency
//
// A Service is assembled by one goroutine and then safe for concurrent use. Only BidiStream
// and EventStream.Run start goroutines; all of them have ended when the stream or Run has.
// Readers, writers, reservations and event streams belong to one request. Errors are
// *fault.Fault unless stated otherwise.
package transport
