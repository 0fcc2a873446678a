package worker

import (
	"context"
	"sync/atomic"
	"time"
)

// relief lets the goroutine that reads run a batch itself: a change of goroutines
// would take as long as a round trip to the host. When a batch takes longer than
// the interval, another goroutine reads on, so that nothing waits behind it.
//
// Who reads is whoever moves the turn from odd, where a batch runs, to even: the
// goroutine that ran it, or its relief.
type relief struct {
	turn atomic.Uint64
	// asleep says that nothing watches, and wake that there is something to.
	asleep atomic.Bool
	wake   chan struct{}
}

const (
	// reliefInterval is how often a batch that runs is looked at; one that is seen
	// twice is long.
	reliefInterval = 5 * time.Millisecond
	// reliefQuiet is after how many looks without a batch nobody looks any more.
	reliefQuiet = 20
)

func newRelief() *relief { return &relief{wake: make(chan struct{}, 1)} }

// over is set in the turn when the watch has ended: then no batch may begin.
const over = 1 << 63

// begin says that who reads runs a batch, and returns what end is given; false is
// that it must not.
func (r *relief) begin() (uint64, bool) {
	turn := r.turn.Add(1)
	if r.asleep.Load() && r.asleep.CompareAndSwap(true, false) {
		r.wake <- struct{}{}
	}
	return turn, turn < over
}

// end reports whether the goroutine that ran the batch reads on.
func (r *relief) end(turn uint64) bool { return r.turn.CompareAndSwap(turn, turn+1) }

// watch calls read in a goroutine of its own for each batch that is long, until the
// context ends, and then once more where a batch runs. While there are no batches, it
// waits for one without a timer.
func (r *relief) watch(ctx context.Context, read func()) {
	for r.sleep(ctx) {
		r.look(ctx, read)
	}
	if r.turn.Or(over)%2 == 1 {
		read()
	}
}

// sleep waits for a batch, and reports whether there was one before the end.
func (r *relief) sleep(ctx context.Context) bool {
	before := r.turn.Load()
	r.asleep.Store(true)
	if turn := r.turn.Load(); (turn != before || turn%2 == 1) && r.asleep.CompareAndSwap(true, false) {
		return ctx.Err() == nil
	}
	select {
	case <-ctx.Done():
		return false
	case <-r.wake:
		return true
	}
}

// look returns when there have been no batches for a while.
func (r *relief) look(ctx context.Context, read func()) {
	ticker := time.NewTicker(reliefInterval)
	defer ticker.Stop()
	seen := r.turn.Load()
	for quiet := 0; quiet < reliefQuiet; quiet++ {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		switch turn := r.turn.Load(); {
		case turn != seen:
			seen, quiet = turn, 0
		case turn%2 == 1 && r.turn.CompareAndSwap(turn, turn+1):
			go read()
		}
	}
}
