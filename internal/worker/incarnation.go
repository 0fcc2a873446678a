package worker

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// incarnation is one start of a worker: its processes, the connections to them, and
// their batches.
type incarnation struct {
	worker *worker
	number uint64
	ranks  []*rank
	// prefetches is true where the worker takes one batch more than its slot. The handshake
	// sets it, before the worker is offered.
	prefetches bool

	// order is held while a batch, a cancel or a request is written, so that all ranks get them
	// in one order.
	order sync.Mutex

	mu sync.Mutex
	// lost is why no more batches are accepted; nil while they are.
	lost    error
	running map[uint64]*running
	// requests are about models. They share the numbers of batches.
	requests map[uint64]*modelRequest
	// next is the one of them that the worker has not begun; nil where there is none.
	next    *running
	batches uint64
	// finishedAt is when it last finished a batch after its warm-up, movedAt when it last
	// finished one or sent a chunk.
	finishedAt, movedAt time.Time
	warm                bool
	// warmUpTook is how long the longest warm-up took. It is set before the incarnation is ready.
	warmUpTook time.Duration
	// withdrawn is true once it gets no more batches.
	withdrawn bool
	// nextCheck is closed at the next cancelCheck; nil where no batch waits for it.
	nextCheck chan struct{}
}

// reportIdle makes the loop report the worker's work to the machine.
func (n *incarnation) reportIdle() {
	n.post(func(*machine, time.Time) []action { return nil })
}

// offer offers the worker's slots after its warm-up, unless its connection was lost
// meanwhile.
func (n *incarnation) offer() {
	n.mu.Lock()
	n.warm = true
	n.mu.Unlock()
	n.worker.pool().offer(n.worker.index, n, n.slots())
	n.worker.pool().resize(n.worker.index, n, n.slots()) // before the offer a resize had no effect
	n.mu.Lock()
	lost := n.lost != nil
	n.mu.Unlock()
	if lost {
		n.worker.pool().withdraw(n.worker.index, n)
	}
}

// withdraw takes the worker's slots back.
func (n *incarnation) withdraw() {
	n.worker.pool().withdraw(n.worker.index, n)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.withdrawn = true
}

// connectionLost is called when the connection to a rank has ended. The batches stay
// until the exit of the process is known.
func (n *incarnation) connectionLost(r *rank, err error) {
	n.mu.Lock()
	first := n.lost == nil
	if first {
		n.lost = err
	}
	n.mu.Unlock()
	n.worker.pool().withdraw(n.worker.index, n)
	switch {
	case !first:
	case errors.Is(err, frame.ErrViolation):
		n.fail(fmt.Errorf("rank %d: %w", r.index, err))
	default:
		n.post(func(m *machine, now time.Time) []action {
			if m.Disconnected(now); m.state != Startup && m.state != Ready {
				n.end(m.endCause()) // a worker that is leaving answers nothing more
			}
			return nil
		})
	}
}

// post posts an event of the incarnation.
func (n *incarnation) post(do func(m *machine, now time.Time) []action) { n.worker.postOf(n, do) }

// fail posts that the worker cannot go on.
func (n *incarnation) fail(cause error) {
	n.post(func(m *machine, now time.Time) []action { return m.Fail(cause, now) })
}

// end ends the incarnation: its batches fail and its connections close. The first cause
// counts.
func (n *incarnation) end(cause error) {
	n.worker.pool().withdraw(n.worker.index, n)
	n.mu.Lock()
	if n.lost == nil {
		n.lost = cause
	}
	for _, b := range n.running {
		if b != n.next && errors.Is(cause, ErrUnwanted) {
			n.worker.runner.pace.giveUp(time.Since(b.activeAt))
		}
	}
	crashed := fmt.Errorf("%w: worker %d: %w", runner.ErrCrashed, n.worker.index, cause)
	n.failRunningLocked(crashed)
	for number, q := range n.requests {
		q.err = crashed
		delete(n.requests, number)
		close(q.done)
	}
	n.mu.Unlock()
	for _, r := range n.ranks {
		r.close()
	}
}

// startedRanks returns the ranks whose processes were started: all, or the first ones.
func (n *incarnation) startedRanks() []*rank {
	if last := len(n.ranks) - 1; last >= 0 && n.ranks[last].process == nil {
		return n.ranks[:last]
	}
	return n.ranks
}

// slots returns how many batches the worker takes at a time: as many as the rank that
// takes fewest.
func (n *incarnation) slots() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	least := n.ranks[0].slots
	for _, r := range n.ranks[1:] {
		least = min(least, r.slots)
	}
	return least
}
