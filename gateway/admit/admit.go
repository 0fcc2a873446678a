// Package admit bounds what a gateway has in flight: a Gate the requests, and it
// ends admission when the gateway stops; Shares those of single pipelines; a
// Budget the bytes of their bodies. All are safe for concurrent use.
package admit

import (
	"context"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// retryAfter is what a caller is asked to wait of whom nothing else is known.
const retryAfter = time.Second

// Gate lets requests in.
type Gate struct {
	bound int

	mu      sync.Mutex
	inside  int
	left    pace
	closed  bool
	emptied chan struct{}

	// open ends when the gate is closed, by shut.
	open context.Context
	shut context.CancelFunc
}

// New returns a gate for at most bound requests at a time.
func New(bound int) *Gate {
	open, shut := context.WithCancel(context.Background())
	return &Gate{bound: bound, emptied: make(chan struct{}), open: open, shut: shut}
}

// Enter lets a request in, which must Leave, or returns the fault that refuses
// it.
func (g *Gate) Enter() *fault.Fault {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.closed:
		return Stopping()
	case g.inside >= g.bound:
		return fault.Newf(fault.Overloaded, "the gateway has %d requests in flight, as many as gateway.max_in_flight allows", g.bound).
			WithRetryAfter(g.left.forNext(1+g.bound/roomToTell, time.Now()))
	}
	g.inside++
	return nil
}

// Stopping is the fault of a gate that is closed.
func Stopping() *fault.Fault {
	return fault.New(fault.ShuttingDown, "the gateway is stopping").WithRetryAfter(retryAfter)
}

// Leave lets a request out.
func (g *Gate) Leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inside--
	g.left.one(time.Now())
	g.checkEmptied()
}

// Inside returns the number of requests in flight.
func (g *Gate) Inside() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.inside
}

// Close lets nobody in any more.
func (g *Gate) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	g.shut()
	g.checkEmptied()
}

// Open returns a context that ends when the gate is closed, for requests that
// need not be finished then.
func (g *Gate) Open() context.Context { return g.open }

// Empty returns when the closed gate has let everybody out.
func (g *Gate) Empty(ctx context.Context) error {
	select {
	case <-g.emptied:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (g *Gate) checkEmptied() {
	if !g.closed || g.inside > 0 {
		return
	}
	select {
	case <-g.emptied:
	default:
		close(g.emptied)
	}
}
