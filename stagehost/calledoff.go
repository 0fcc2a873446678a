package stagehost

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/ledger"
)

// heard is the handler of cancel notices.
func (h *Host) heard(data []byte) {
	notice, err := envelope.DecodeCancel(data)
	if err != nil || notice.Mesh != h.settings.Mesh {
		h.metrics.malformed(context.Background())
		return
	}
	if h.notices.add(notice) {
		h.tell(noticed{})
	}
}

// notices are those that the loop has not taken yet: a thousand may come at once,
// or while the process was stopped. A notice is best effort, so those beyond the
// bound are forgotten.
type notices struct {
	mu      sync.Mutex
	waiting []*envelope.Cancel
}

// add reports whether the loop is to be told: it takes all that wait.
func (n *notices) add(notice *envelope.Cancel) (first bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.waiting) >= maxTombstones {
		return false
	}
	n.waiting = append(n.waiting, notice)
	return len(n.waiting) == 1
}

func (n *notices) take() []*envelope.Cancel {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := n.waiting
	n.waiting = nil
	return out
}

// noticed says that there are requests that nobody wants any more.
type noticed struct{}

func (noticed) apply(l *loop) {
	now := time.Now()
	// Nothing of a request outlives the longest deadline, whatever it says.
	latest := now.Add(l.host.settings.Queue.MaxAge)
	unwanted := map[pipeline.RequestID]bool{}
	for _, notice := range l.host.notices.take() {
		unwanted[notice.RequestID] = true
		l.tombs.add(notice.RequestID, earlier(notice.Deadline, latest), now)
	}
	for _, it := range l.items {
		if unwanted[it.env.RequestID] && it.direct == nil {
			l.callOff(it)
		}
	}
}

// callOff drops the item where it waits, and tells the runner where it runs.
func (l *loop) callOff(it *item) {
	switch state, _ := l.ledger.State(it.id); state {
	case ledger.Queued:
		l.batcher.Remove(batch.ID(it.id))
		for i, half := range l.halves {
			l.halves[i] = slices.DeleteFunc(half, func(other *item) bool { return other == it })
		}
		l.dropCalledOff(it)
	case ledger.Running:
		it.run.callOff(it)
	case ledger.Sending:
		l.callOffHeld(it)
	}
}

// callOffHeld drops an item whose output waits for room in the next queue. What is
// on its way, and an answer, has its course.
func (l *loop) callOffHeld(it *item) {
	if _, held := l.unsent[it.id]; !held || it.answered {
		return
	}
	delete(l.unsent, it.id)
	l.host.metrics.saved(context.Background())
	if it.env.StoresAnswer() {
		l.sendFault(it, l.host.here(it, calledOffFault()))
		return
	}
	l.done(it)
}

func calledOffFault() *fault.Fault { return fault.New(fault.Cancelled, "the request was called off") }

// dropCalledOff ends an item that nobody wants. Who waited for it knows, but
// whoever asks for its stored answer later does not.
func (l *loop) dropCalledOff(it *item) {
	l.host.metrics.saved(context.Background())
	if it.env.StoresAnswer() {
		l.fail(it, calledOffFault())
		return
	}
	if l.sending(it) {
		l.done(it)
	}
}

// callOff tells the runner that nobody wants the item, and to end the batch when
// nobody wants any of it. The loop calls it.
func (r *run) callOff(it *item) {
	if it.unwanted() {
		return
	}
	close(it.cancelled)
	if r.wanted--; r.wanted == 0 {
		r.cancel()
	}
}

// unwanted reports whether the item was called off while it ran.
func (it *item) unwanted() bool {
	select {
	case <-it.cancelled:
		return true
	default:
		return false // also where it never ran
	}
}

// tombstones are requests that were called off and may still arrive.
type tombstones map[pipeline.RequestID]time.Time

// maxTombstones bounds them; more notices than that are forgotten.
const maxTombstones = 1 << 16

func (t tombstones) add(id pipeline.RequestID, until, now time.Time) {
	if len(t) < maxTombstones && now.Before(until) {
		t[id] = until
	}
}

func (t tombstones) has(id pipeline.RequestID) bool {
	_, ok := t[id]
	return ok
}

// sweep forgets the requests of which nothing can arrive any more.
func (t tombstones) sweep(now time.Time) {
	for id, until := range t {
		if !now.Before(until) {
			delete(t, id)
		}
	}
}
