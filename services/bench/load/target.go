package load

import (
	"context"
	"time"
)

// Target answers requests: a mesh, or what a mesh is compared with.
type Target interface {
	// Do makes one request and waits for its answer, which it fills in: it is
	// empty, but may have slices to use again. An error that is no *Failure is
	// one without a name.
	Do(ctx context.Context, into *Answer) error
}

// TargetFunc is a target that is a function.
type TargetFunc func(ctx context.Context, into *Answer) error

var _ Target = TargetFunc(nil)

// Do implements Target.
func (f TargetFunc) Do(ctx context.Context, into *Answer) error { return f(ctx, into) }

// Answer is what is measured of one answer, beside its time. It belongs to the caller
// of Do, who uses it again.
type Answer struct {
	// Total is from the gateway's admission of the request to the reply's arrival
	// there; 0 where the target does not say.
	Total time.Duration
	// Steps say where the time went, in order; none where the target does not say.
	Steps []Step
	// Chunks are the times at which the parts of a streamed answer came, since Do was
	// called.
	Chunks []time.Duration
}

// Step is what one step of a request cost.
type Step struct {
	Name              string
	Queue, Batch, Run time.Duration
	BatchSize         uint32
	Dispatch          string
	// Attempt is 1 where the item was delivered once, and 0 where that is not known.
	Attempt uint32
}

// reset makes the answer empty.
func (a *Answer) reset() {
	a.Total, a.Steps, a.Chunks = 0, a.Steps[:0], a.Chunks[:0]
}

// Failure is a request without an answer.
type Failure struct {
	// Reason is a name of few, such as QUEUE_FULL.
	Reason string
	// Refused says that the target did not take the request on at all: there was no
	// room, or nobody to serve it.
	Refused bool
	// Retryable says that the same request may have an answer later.
	Retryable bool
	Err       error
}

// Error implements error.
func (f *Failure) Error() string { return f.Err.Error() }

// Unwrap returns what the target said.
func (f *Failure) Unwrap() error { return f.Err }

// Sample is one request that is over.
type Sample struct {
	// Latency is from the moment for which the request was planned until its answer
	// was there.
	Latency time.Duration
	// Late is the part of it before the request was sent.
	Late time.Duration
	// Answer is only for the time of the call.
	Answer *Answer
	Err    error
}

// Recorder takes samples, from many goroutines at once. Callers with different numbers,
// from 0 on, may be apart.
type Recorder interface {
	Record(caller int, s Sample)
}
