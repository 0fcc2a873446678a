package header

// Names of the headers that callers and gateway send, in canonical form.
const (
	// RequestID is on every answer for which an id was minted.
	RequestID = "Stagemesh-Request-Id"
	// ServerTiming is the W3C header that browsers show in their network panel.
	ServerTiming = "Server-Timing"
	// Timeout shortens the pipeline's timeout: a Go duration or milliseconds.
	Timeout = "Stagemesh-Timeout"
	// Priority is a whole number; above 0 is served first.
	Priority = "Stagemesh-Priority"
	// Durability is memory or file.
	Durability = "Stagemesh-Durability"
	// WaitForCapacity is true or false: whether the request waits where a stage has
	// no room for it.
	WaitForCapacity = "Stagemesh-Wait-For-Capacity"
	// IdempotencyKey is the request's key, as the IETF draft names it.
	IdempotencyKey = "Idempotency-Key"

	// JSONLength is the Open Inference Protocol's: how many bytes of a body are JSON,
	// before those of its tensors.
	JSONLength = "Inference-Header-Content-Length"

	// TraceParent and TraceState are the W3C trace context.
	TraceParent = "Traceparent"
	TraceState  = "Tracestate"
)

// RequestIDKey is the request's id among the metadata of a fault, where one
// was minted before it failed.
const RequestIDKey = "request_id"
