// Package request has a request as a front decoded it, and its answer: the words between fronts,
// the gateway's request path and jobs. Values are plain; nothing here waits or locks.
package request

import (
	"time"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Prefixes of names that mean a model or an alias, not a pipeline.
const (
	ModelPrefix = "model:"
	AliasPrefix = "alias:"
)

// Key is an idempotency key. A key belongs to a tenant and a pipeline; calls replace its tenant by
// their own.
type Key struct {
	Tenant   string
	Pipeline pipeline.Name
	Key      string
}

// Request is one request as a front decoded it. Zero fields mean the pipeline's
// own settings. Its memory does not change any more, also after the call: a host in the
// process may share it.
type Request struct {
	// Pipeline is a pipeline's name, "stage:<name>", "alias:<name>" or "model:<id>"; if ByModel
	// is true also an alias or a model without a prefix.
	Pipeline string
	ByModel  bool
	Inputs   []payload.Part
	// Parameters go to every step, Steps to single ones, by step name.
	Parameters payload.Parameters
	Steps      map[pipeline.StepName]pipeline.StepOptions
	// IdempotencyKey makes one request of all requests of the tenant and pipeline
	// that have it; empty means none.
	IdempotencyKey string
	// Timeout may only shorten the pipeline's. Negative is rejected; 0 means
	// the pipeline's.
	Timeout    time.Duration
	Durability pipeline.Durability
	Priority   int32
	// WaitForCapacity makes the call wait, until its deadline, where a stage of the
	// route has no capacity for it; nil means the pipeline's option.
	WaitForCapacity *bool
	Metadata        map[string]string
	// ID is the request's, which is new; empty means that the gateway mints one. StoreResult has
	// the result stored, also without a key, so that Result returns it; a failure comes with a
	// response that has the timeline alone.
	ID          pipeline.RequestID
	StoreResult bool
	// LossyChunks is for a caller of Stream to whom the end matters more than chunks: some may be
	// missing, and another run of the request may send its own.
	LossyChunks bool
	// Outputs are the names to return; empty means all.
	Outputs []string
	// IsComplete makes an answer that would be partial a failure.
	IsComplete bool
	// Passthrough is true for a gRPC call that is passed on to a model server. Only its input may
	// have the parameters of package passthrough.
	Passthrough bool
	// Trace is the caller's W3C trace context, and Origin how the request came.
	Trace  envelope.Trace
	Origin tracing.Origin
}

// Partial is the key of a Response's metadata that names the branches, by their paths, that were late
// or failed and whose parts are absent or replaced.
const Partial = "partial"

// Activated is the key of a Response's metadata that names the stages for whose first host the
// request has waited.
const Activated = "activating"

// Response is the final answer to a request. Its memory and the memory of a Chunk are read-only: a
// stage in the process may share it.
type Response struct {
	RequestID string
	// Pipeline is the name that the request asked for, of a model or an alias with its prefix.
	Pipeline string
	Outputs  []payload.Part
	Metadata map[string]string
	Timeline Timeline
	// Chunks is how many chunks the answer had, for a caller of Stream.
	Chunks uint64
}

// Chunk is a part of an answer that is sent while the runner still works.
type Chunk struct {
	RequestID string
	// Seq counts the messages of the answer from 1.
	Seq     uint64
	Attempt uint32
	Outputs []payload.Part
	// Activating is set in place of all else but RequestID, before the first chunk, while the request
	// waits for the first host of a stage.
	Activating *Activating
}

// Activating is how long a request has waited for the first host of a stage.
type Activating struct {
	Stage  string
	Waited time.Duration
}

// Timeline says where a request's time went.
type Timeline struct {
	// Total is from admission to the reply's arrival. For a stored result it is until
	// a host had the answer.
	Total time.Duration
	Steps []StepTiming
	// Branches are the blocks of the pipeline and their branches; none without blocks.
	Branches []envelope.Branch
}

// StepTiming is what one step of a request cost.
type StepTiming = envelope.StepTiming

// MaxIdempotencyKey bounds an idempotency key, in bytes.
const MaxIdempotencyKey = 256
