package worker

import (
	"context"
	"sync/atomic"
	"time"
)

// relief lets the goroutine that reads run a batch itself, because a switch of
// goroutines takes as long as a round trip to the host. When a batch takes longer than
// the interval, another goroutine reads on, so that no message waits behind the batch.
//
// The turn is odd while a batch runs. The goroutine that moves it to even reads on: the
// one that ran the batch, or its relief.
type relief struct {
	turn atomic.Uint64
	// asleep is true while nothing watches; then wake wakes the watch.
	asleep atomic.Bool
	wake   chan struct{}
}

const (
	// reliefInterval is the interval of the watch. A batch that it sees twice is long.
	reliefInterval = 5 * time.Millisecond
	// reliefQuiet is after how many intervals without a batch the watch sleeps.
	reliefQuiet = 20

	// reliefOver is set in the turn when the watch has ended. Then no batch may begin.
	reliefOver = 1 << 63
)

func newRelief() *relief { return &relief{wake: make(chan struct{}, 1)} }

// begin begins a batch on the goroutine that reads, and returns the turn for end. It
// returns false where no batch may begin.
func (r *relief) begin() (uint64, bool) {
	turn := r.turn.Add(1)
	if r.asleep.Load() && r.asleep.CompareAndSwap(true, false) {
		r.wake <- struct{}{}
	}
	return turn, turn < reliefOver
}

// end reports whether the goroutine that ran the batch reads on.
func (r *relief) end(turn uint64) bool { return r.turn.CompareAndSwap(turn, turn+1) }

// watch calls read on a goroutine of its own for each long batch, until the context ends,
// and then once more if a batch runs. It needs no timer while there are no batches.
func (r *relief) watch(ctx context.Context, read func()) {
	for r.sleep(ctx) {
		r.look(ctx, read)
	}
	if r.turn.Or(reliefOver)%2 == 1 {
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

// look watches batches until there have been none for a while.
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
