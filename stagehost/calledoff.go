package stagehost

import (
	"context"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/ledger"
)

// heard is the handler of cancel notices. A notice is best effort: one that
// comes while the loop is behind is dropped rather than waited for.
func (h *Host) heard(data []byte) {
	notice, err := envelope.DecodeCancel(data)
	if err != nil || notice.Mesh != h.settings.Mesh {
		h.metrics.malformed(context.Background())
		return
	}
	select {
	case h.events <- &calledOff{notice}:
	default:
	}
}

// calledOff is a request that nobody wants any more.
type calledOff struct{ notice *envelope.Cancel }

func (e *calledOff) apply(l *loop) {
	now := time.Now()
	// Nothing of a request outlives the longest deadline, whatever it says.
	latest := now.Add(l.host.settings.Queue.MaxAge)
	l.tombs.add(e.notice.RequestID, earlier(e.notice.Deadline, latest), now)
	for _, it := range l.items {
		if it.env.RequestID == e.notice.RequestID && it.direct == nil {
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
	if it.durable() {
		l.sendFault(it, l.host.here(it, calledOffFault()))
		return
	}
	l.done(it)
}

func calledOffFault() *fault.Fault { return fault.New(fault.Cancelled, "the request was called off") }

// dropCalledOff ends an item that nobody wants. Who waited for it knows, but
// whoever asks for a durable request's answer later does not.
func (l *loop) dropCalledOff(it *item) {
	l.host.metrics.saved(context.Background())
	if it.durable() {
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
