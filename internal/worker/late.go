package worker

import (
	"sync/atomic"
	"time"
)

// pace is how long the batches of a runner's workers are silent, which decides when one is late.
type pace struct {
	// longest is the longest silence of a batch lately. Before the first has finished it is
	// 0, or less where one was given up: the time that it had run, negative.
	longest atomic.Int64
}

// record records the longest silence of a batch that has finished.
func (p *pace) record(silence time.Duration) {
	was := max(0, p.longest.Load())
	p.longest.Store(max(int64(silence), was-was/usualBatches))
}

// giveUp records how long a batch ran that was given up, if no other has finished or was.
func (p *pace) giveUp(ran time.Duration) { p.longest.CompareAndSwap(0, -int64(ran)) }

// usual returns how long batches are silent at most. Limit is the heartbeat's.
func (p *pace) usual(limit time.Duration) time.Duration {
	if longest := p.longest.Load(); longest != 0 {
		return time.Duration(longest).Abs()
	}
	return firstBatch * limit
}

// lateAfter returns how long a batch is silent until it is late.
func (p *pace) lateAfter(limit time.Duration) time.Duration {
	return max(limit, lateFactor*p.usual(limit))
}

// work returns the worker's work for the machine, where batches are late after that time.
func (n *incarnation) work(now time.Time, late time.Duration) workload {
	n.mu.Lock()
	defer n.mu.Unlock()
	w := workload{Ended: n.finishedAt}
	for _, b := range n.running {
		if b == n.next {
			continue
		}
		if w.Oldest.IsZero() || b.activeAt.Before(w.Oldest) {
			w.Oldest, w.IsLate = b.activeAt, now.Sub(b.activeAt) >= late
		}
		if b.ctx.Err() == nil {
			continue
		}
		if b.unwantedSince.IsZero() {
			b.unwantedSince = now
		}
		// A worker that still answers other batches does not hang.
		at := later(b.unwantedSince, later(b.activeAt, n.movedAt).Add(late)).Add(unwantedGrace)
		if w.GiveUp.IsZero() || at.Before(w.GiveUp) {
			w.GiveUp = at
		}
	}
	return w
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// requestsSince returns some of the requests of the batches that have been silent since
// then.
func (n *incarnation) requestsSince(at time.Time) []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []string
	for _, b := range n.running {
		for _, item := range b.items {
			if b.activeAt.Equal(at) && len(out) < namedRequests {
				out = append(out, item.RequestID)
			}
		}
	}
	return out
}
