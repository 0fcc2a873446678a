// Package fronttest supports the tests of the fronts: a fake Caller with configured
// answers, a fault with every field set, and a server on a real port with the
// protocols of the product. No program links it.
package fronttest

import (
	"context"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// RequestID is the id in this package's answers and faults.
const RequestID = "0199aaaa-bbbb-7ccc-8ddd-eeeeffff0000"

// Caller is a fake of the request path. It returns configured answers and records its
// arguments. It is safe for concurrent use.
type Caller struct {
	// Answer implements Infer, Stream and Result; nil means Echo.
	Answer func(ctx context.Context, r *request.Request) (*request.Response, error)
	// Chunks are emitted by Stream before it answers.
	Chunks []request.Chunk

	// Keys are the IDs of the requests that have an idempotency key.
	Keys map[request.Key]string
	// Err is the error of Result and Cancel, or nil. Without it Result answers as
	// Infer does for the pipeline "stored", and Cancel succeeds.
	Err error

	mu        sync.Mutex
	last      *request.Request
	lastID    string
	lastWait  time.Duration
	cancelled string
}

// Infer implements the fronts' Caller.
func (c *Caller) Infer(ctx context.Context, r *request.Request) (*request.Response, error) {
	c.mu.Lock()
	c.last = r
	c.mu.Unlock()
	return c.answer(ctx, r)
}

// answer answers for the pipeline that the request names.
func (c *Caller) answer(ctx context.Context, r *request.Request) (*request.Response, error) {
	answer := c.Answer
	if answer == nil {
		answer = Echo
	}
	out, err := answer(ctx, r)
	if err == nil { // as the service does
		err = budget.FromContext(ctx).ReserveResponse(int64(payload.Size(out.Outputs)))
	}
	if out != nil && out.Pipeline == "" {
		out.Pipeline = r.Pipeline
	}
	return out, err
}

// Result implements the fronts' Caller.
func (c *Caller) Result(ctx context.Context, requestID string, wait time.Duration) (*request.Response, error) {
	c.mu.Lock()
	c.lastID, c.lastWait = requestID, wait
	c.mu.Unlock()
	if c.Err != nil {
		return nil, c.Err
	}
	return c.answer(ctx, &request.Request{Pipeline: "stored"})
}

// Cancel implements the fronts' Caller.
func (c *Caller) Cancel(_ context.Context, requestID string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cancelled = requestID
	return c.Err
}

// RequestOf implements the fronts' Caller.
func (c *Caller) RequestOf(_ context.Context, k request.Key) (string, error) {
	if id := c.Keys[k]; id != "" {
		return id, nil
	}
	return "", fault.New(fault.NotFound, "no request has the key")
}

// LastResult returns the arguments of the last call of Result.
func (c *Caller) LastResult() (requestID string, wait time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lastID, c.lastWait
}

// LastCancelled returns the argument of the last call of Cancel.
func (c *Caller) LastCancelled() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cancelled
}

// Stream implements the fronts' Caller.
func (c *Caller) Stream(ctx context.Context, r *request.Request, emit func(request.Chunk) error) (*request.Response, error) {
	for _, chunk := range c.Chunks {
		if err := emit(chunk); err != nil {
			return nil, err
		}
	}
	return c.Infer(ctx, r)
}

// Last returns the last request, or nil.
func (c *Caller) Last() *request.Request {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

// Echo answers with the request's inputs.
func Echo(_ context.Context, r *request.Request) (*request.Response, error) {
	return Respond(r.Inputs...), nil
}

// Respond returns an answer of the parts, with a timeline of one step.
func Respond(parts ...payload.Part) *request.Response {
	return &request.Response{
		RequestID: RequestID,
		Outputs:   parts,
		Metadata:  map[string]string{"note": "from the runner"},
		Timeline: request.Timeline{Total: 4 * time.Millisecond, Steps: []request.StepTiming{{
			Step: "classify", Stage: "resnet", Host: "host-1", Attempt: 2,
			Arrival: time.Millisecond, QueueWait: 120 * time.Microsecond, BatchWait: time.Millisecond, Run: 2500 * time.Microsecond,
			BatchSize: 8, BatchRows: 16, Rows: 2, Dispatch: "idle",
		}}},
	}
}

// AnswerWith returns a Caller that answers with the parts.
func AnswerWith(parts ...payload.Part) *Caller {
	return &Caller{Answer: func(context.Context, *request.Request) (*request.Response, error) { return Respond(parts...), nil }}
}

// FailWith returns a Caller that fails with err.
func FailWith(err error) *Caller {
	return &Caller{Answer: func(context.Context, *request.Request) (*request.Response, error) { return nil, err }}
}

// Fault returns a fault of the reason with every optional field set.
func Fault(r fault.Reason) *fault.Fault {
	return fault.Newf(r, "what went wrong: %s", r).
		At("resnet", "classify", "host-1").
		WithRetryAfter(1500*time.Millisecond).
		WithViolation("inputs.pixels.shape", "rank 3, not 4").
		WithMetadata("request_id", RequestID)
}

// Words returns the chunks of a text, with a word in each, in the output "text".
func Words(words ...string) []request.Chunk {
	out := make([]request.Chunk, len(words))
	for i, word := range words {
		out[i] = request.Chunk{
			RequestID: RequestID, Seq: uint64(i + 1), Attempt: 1,
			Outputs: []payload.Part{payload.OfBlob("text", "text/plain", []byte(word))},
		}
	}
	return out
}

// SteppedCaller is a Caller whose Stream follows a test step by step. It is safe for
// concurrent use.
type SteppedCaller struct {
	Caller

	// Emit receives the chunks to emit. Stream answers when Emit closes.
	Emit chan request.Chunk
	// Ended receives the cause if a stream ends before its answer.
	Ended chan error
}

// NewSteppedCaller returns a SteppedCaller that waits for its first chunk.
func NewSteppedCaller() *SteppedCaller {
	return &SteppedCaller{Emit: make(chan request.Chunk), Ended: make(chan error, 1)}
}

// Stream implements the fronts' Caller.
func (c *SteppedCaller) Stream(ctx context.Context, r *request.Request, emit func(request.Chunk) error) (*request.Response, error) {
	for {
		select {
		case chunk, more := <-c.Emit:
			if !more {
				return c.Infer(ctx, r)
			}
			if err := emit(chunk); err != nil {
				c.Ended <- err
				return nil, err
			}
		case <-ctx.Done():
			c.Ended <- ctx.Err()
			return nil, ctx.Err()
		}
	}
}
