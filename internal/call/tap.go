package call

import (
	"cmp"
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	// maxTaps is how many taps a gateway has at a time.
	maxTaps = 4
	// maxTapped and maxTappedBytes bound what a tap holds; it drops more.
	maxTapped      = 64
	maxTappedBytes = 16 << 20
)

// Tapped is a request that has ended. It is read-only.
type Tapped struct {
	Env *envelope.Envelope
	// Model is the one that ran it.
	Model    string
	IsShadow bool
	// Response is nil for a request that failed, Fault for another. Chunks that the caller got
	// are not there.
	Response *request.Response
	Fault    *fault.Fault
	Took     time.Duration
	// Dropped is how many requests this tap has dropped so far.
	Dropped uint64

	size int64
}

// tap is who looks at the requests of a model or an alias.
type tap struct {
	of      payload.ModelRef
	percent int
	queue   chan Tapped
	held    *budget.Pool
	dropped atomic.Uint64
}

// Tap hands a percentage of the requests of a model or an alias to emit, as they end here, until
// the context ends or emit fails. Requests that nobody sent on are not among them. A slow emit
// delays no request: the tap drops what it cannot hold.
func (s *Service) Tap(ctx context.Context, of payload.ModelRef, percent int, emit func(Tapped) error) error {
	t := &tap{of: of, percent: percent, queue: make(chan Tapped, maxTapped), held: budget.NewPool(budget.Settings{Limit: maxTappedBytes})}
	free := 0
	for ; free < maxTaps && !s.taps[free].CompareAndSwap(nil, t); free++ {
	}
	if free == maxTaps {
		return fault.Newf(fault.Overloaded, "the gateway has %d taps, as many as it may", maxTaps).WithRetryAfter(budget.RetryAfter)
	}
	defer s.taps[free].Store(nil)
	for {
		select {
		case one := <-t.queue:
			one.Dropped = t.dropped.Load()
			err := emit(one)
			t.held.Release("", one.size)
			if err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// tap hands a request that has ended to the taps of its models. One that was rejected, or that got
// the answer of another one with its key, ran on no model.
func (s *Service) tap(x *call, p *pipeline.Pipeline, response *request.Response, f *fault.Fault, took time.Duration) {
	if x.pending == nil {
		return
	}
	for i := range s.taps {
		if t := s.taps[i].Load(); t != nil {
			t.offer(x, p, response, f, took)
		}
	}
}

func (t *tap) offer(x *call, p *pipeline.Pipeline, response *request.Response, f *fault.Fault, took time.Duration) {
	steps := p.StageSteps()
	for i, hop := range x.env.Route {
		asked := cmp.Or(x.request.Steps[hop.Step].Model, steps[i].Model)
		if t.of != (payload.ModelRef{Model: hop.Model.Model}) && t.of != (payload.ModelRef{Alias: asked.Alias}) {
			continue
		}
		if rand.IntN(100) >= t.percent { //nolint:gosec // it is not a secret
			return
		}
		one := Tapped{Env: x.env, Model: hop.Model.Model, IsShadow: x.request.isShadow(), Response: response, Fault: f, Took: took}
		if one.size = int64(payload.Size(x.env.Parts)); response != nil {
			one.size += int64(payload.Size(response.Outputs))
		}
		if t.held.Reserve("", one.size) == nil {
			select {
			case t.queue <- one:
				return
			default:
				t.held.Release("", one.size)
			}
		}
		t.dropped.Add(1)
		return
	}
}
