package call

import (
	"context"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// crew is a bounded number of goroutines that end before their owner does.
type crew struct {
	places chan struct{}
	ctx    context.Context
	cancel context.CancelFunc

	mu      sync.Mutex
	closed  bool
	working sync.WaitGroup
}

func newCrew(bound int) *crew {
	ctx, cancel := context.WithCancel(context.Background())
	return &crew{places: make(chan struct{}, bound), ctx: ctx, cancel: cancel}
}

// start does the work on a goroutine of its own, or returns the fault that says
// why not: all places are taken, or the crew was stopped. The work's context ends
// when the stop has lost its patience.
func (c *crew) start(work func(context.Context)) *fault.Fault {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return admission.Stopping()
	}
	select {
	case c.places <- struct{}{}:
	default:
		return fault.Newf(fault.Overloaded, "the gateway waits for %d requests already", cap(c.places)).WithRetryAfter(admission.RetryAfter)
	}
	c.working.Go(func() {
		defer func() { <-c.places }()
		work(c.ctx)
	})
	return nil
}

// stop waits for those that work, and after so long tells them to end.
func (c *crew) stop(patience time.Duration) {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	defer time.AfterFunc(patience, c.cancel).Stop()
	c.working.Wait()
	c.cancel()
}
