package call

import (
	"time"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Durability says where a request waits between stages; see pipeline.Durability.
type Durability = pipeline.Durability

// Request is one request as a front understood it. Zero fields mean the
// pipeline's own settings.
type Request struct {
	// Pipeline is a pipeline's name, or "stage:<name>".
	Pipeline string
	Inputs   []payload.Part
	// Booked is how many bytes of the inputs the caller has taken from the budget of
	// bodies already, and gives back itself after the call.
	Booked int
	// Parameters go to every step, Steps to single ones, by step name.
	Parameters payload.Parameters
	Steps      map[string]StepOptions
	// IdempotencyKey makes all requests of the tenant for the pipeline that have
	// it one; empty means none.
	IdempotencyKey string
	// Timeout may only shorten the pipeline's. Negative is refused; 0 means
	// the pipeline's.
	Timeout    time.Duration
	Durability Durability
	Priority   int32
	// WaitForCapacity makes the call wait, until its deadline, where a stage of the
	// route has no room for it; nil means what the pipeline says.
	WaitForCapacity *bool
	Metadata        map[string]string
	// Outputs are the names wanted; empty means all.
	Outputs []string
	// Trace is the W3C trace context: traceparent, tracestate.
	Trace map[string]string
	// Tenant is who asks, from authentication.
	Tenant string
}

// StepOptions are a request's options for one step.
type StepOptions struct {
	Model      payload.ModelRef
	Parameters payload.Parameters
}

// Response is the one answer to a request.
type Response struct {
	RequestID string
	// Pipeline is the name that the request asked for.
	Pipeline string
	Outputs  []payload.Part
	Metadata map[string]string
	Timeline Timeline
}

// Chunk is a part of an answer that is sent while the runner still works.
type Chunk struct {
	RequestID string
	// Seq counts the messages of the answer from 1.
	Seq     uint64
	Attempt uint32
	Outputs []payload.Part
}

// Timeline says where a request's time went.
type Timeline struct {
	// Total is from admission to the reply's arrival, or to when a host had the
	// answer where that was fetched later.
	Total time.Duration
	Steps []StepTiming
}

// StepTiming is what one step of a request cost.
type StepTiming = envelope.StepTiming
