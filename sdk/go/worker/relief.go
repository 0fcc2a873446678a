package worker

import (
	"sync/atomic"
	"time"
)

// reliefInterval is the interval in which a relief looks. A batch that it sees twice is
// long.
const reliefInterval = 5 * time.Millisecond

// relief lets the goroutine that reads run a batch itself, because a switch of
// goroutines takes as long as a round trip to the host. When a batch takes longer than
// the interval, another goroutine reads on, so that no message waits behind the batch.
//
// The turn is odd while a batch runs. The goroutine that moves it to even reads on: the
// one that ran the batch, or its relief.
type relief struct {
	turn atomic.Uint64
	read func()
	// timer calls look while batches come, which is when watches is true. To set it for
	// each batch would take as long as a tenth of a round trip.
	timer   *time.Timer
	watches atomic.Bool
	// seen is the turn of the last look.
	seen uint64
}

func newRelief(read func()) *relief {
	r := &relief{read: read}
	r.watches.Store(true)
	r.timer = time.AfterFunc(reliefInterval, r.look)
	return r
}

// begin begins a batch on the goroutine that reads, and returns the turn for end.
func (r *relief) begin() uint64 {
	turn := r.turn.Add(1)
	r.watch()
	return turn
}

func (r *relief) watch() {
	if !r.watches.Load() && r.watches.CompareAndSwap(false, true) {
		r.timer.Reset(reliefInterval)
	}
}

// end reports whether the goroutine that ran the batch reads on.
func (r *relief) end(turn uint64) bool { return r.turn.CompareAndSwap(turn, turn+1) }

// look reads on where a batch is long.
func (r *relief) look() {
	turn := r.turn.Load()
	if turn != r.seen {
		r.seen = turn
		r.timer.Reset(reliefInterval)
		return
	}
	isLong := turn%2 == 1 && r.turn.CompareAndSwap(turn, turn+1)
	r.watches.Store(false)
	if now := r.turn.Load(); now != turn && now%2 == 1 {
		r.watch() // a batch began before watches was false
	}
	if isLong {
		r.read()
	}
}
