package item

import (
	"container/heap"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// ReceiveCancel is the handler of cancel messages.
func (p *Items) ReceiveCancel(data []byte) {
	cancel, err := envelope.DecodeCancel(data)
	if err != nil || cancel.Mesh != p.Mesh {
		p.Metrics.malformed.inc()
		return
	}
	if p.cancels.add(cancel) {
		p.postAsync(EventFunc((*Loop).takeCancels))
	}
}

// pendingCancels are those that the loop has not taken yet: a thousand may arrive at
// once, or while the process was stopped. A cancel is best effort, so those beyond
// the bound are dropped.
type pendingCancels struct {
	mu      sync.Mutex
	waiting []*envelope.Cancel
}

// add reports whether to post an event: the loop takes all of them at once.
func (n *pendingCancels) add(cancel *envelope.Cancel) (first bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.waiting) >= maxCancelled {
		return false
	}
	n.waiting = append(n.waiting, cancel)
	return len(n.waiting) == 1
}

func (n *pendingCancels) take() []*envelope.Cancel {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := n.waiting
	n.waiting = nil
	return out
}

// takeCancels cancels the items of new cancel messages.
func (l *Loop) takeCancels() {
	now := time.Now()
	// No item outlives the longest deadline, whatever the message has.
	latest := now.Add(l.MaxAge)
	cancelled := map[cancelKey]bool{}
	for _, cancel := range l.cancels.take() {
		key := cancelKey{cancel.Tenant, cancel.RequestID}
		cancelled[key] = true
		switch {
		case cancel.Deadline.IsZero():
			l.cancelledIDs.add(key, latest, false)
		case now.Before(cancel.Deadline):
			l.cancelledIDs.add(key, Earlier(cancel.Deadline, latest), true)
		}
	}
	for _, it := range l.ledger.items {
		if cancelled[it.cancelKey()] && it.direct == nil {
			l.cancel(it)
		}
	}
}

// cancel drops the item where it waits, and stops it where it runs.
func (l *Loop) cancel(it *Item) {
	switch it.state {
	case queued:
		l.dequeue(it)
		l.dropCancelled(it)
	case running:
		it.run.cancelItem(it)
	case sending:
		l.cancelUnsent(it)
	}
}

// cancelUnsent drops an item whose output waits for space in the next queue.
// Messages on their way, and replies, are sent.
func (l *Loop) cancelUnsent(it *Item) {
	if _, held := l.retries[it.id]; !held || it.isReply {
		return
	}
	delete(l.retries, it.id)
	l.Metrics.cancelled.inc()
	it.span().AddEvent("cancelled")
	if it.env.StoresResult() {
		l.sendFault(it, l.locate(it, cancelledFault()))
		return
	}
	l.settle(it)
}

func cancelledFault() *fault.Fault { return fault.New(fault.Cancelled, "the request was cancelled") }

// dropCancelled ends a cancelled item. Its result is stored where a later caller
// may ask for it.
func (l *Loop) dropCancelled(it *Item) {
	l.Metrics.cancelled.inc()
	it.span().AddEvent("cancelled")
	if it.env.StoresResult() || it.direct != nil {
		l.Fail(it, cancelledFault())
		return
	}
	if l.beginSend(it) {
		l.settle(it)
	}
}

// isCancelled reports whether the request was cancelled while the item ran; false
// where it never ran.
func (a *arrival) isCancelled() bool {
	select {
	case <-a.cancelled:
		return true
	default:
		return false
	}
}

// dropEnded drops the items whose deadline has passed, or that were cancelled.
func (l *Loop) dropEnded(items []*Item, now time.Time) []*Item {
	var out []*Item
	for _, it := range items {
		switch {
		case it.isCancelled():
			l.dropCancelled(it)
		case it.expired(now):
			l.expireOne(it)
		default:
			out = append(out, it)
		}
	}
	return out
}

// cancelItem signals the runner that the item is cancelled, and cancels the batch
// when all of its items are. The loop calls it.
func (r *run) cancelItem(it *Item) {
	if it.isCancelled() {
		return
	}
	close(it.cancelled)
	if r.inLoop.wanted--; r.inLoop.wanted == 0 {
		r.cancel()
	}
}

// cancelKey is what a cancel message names: a request of a tenant.
type cancelKey struct {
	tenant  string
	request pipeline.RequestID
}

func (it *Item) cancelKey() cancelKey { return cancelKey{it.env.Tenant, it.env.RequestID} }

// cancelledRequests are requests that were cancelled, each until its items can arrive
// no more. Clients can cancel any ID, so those that a gateway knows to be a request, and
// whose deadline it sends, have space of their own.
type cancelledRequests struct{ known, unknown expiringIDs }

func (t *cancelledRequests) add(id cancelKey, until time.Time, known bool) {
	if known {
		t.known.add(id, until)
	} else {
		t.unknown.add(id, until)
	}
}

func (t *cancelledRequests) has(id cancelKey) bool {
	return t.known.ids[id] || t.unknown.ids[id]
}

func (t *cancelledRequests) expire(now time.Time) {
	t.known.expire(now)
	t.unknown.expire(now)
}

// expiringIDs are at most maxCancelled request IDs. One more takes the place of the one
// that expires first.
type expiringIDs struct {
	ids   map[cancelKey]bool
	order expiryOrder
}

func (e *expiringIDs) add(id cancelKey, until time.Time) {
	if e.ids[id] {
		return
	}
	if e.ids == nil {
		e.ids = map[cancelKey]bool{}
	}
	e.ids[id] = true
	heap.Push(&e.order, expiry{id, until})
	if len(e.order) > maxCancelled {
		e.removeFirst()
	}
}

func (e *expiringIDs) removeFirst() {
	delete(e.ids, e.order[0].id)
	heap.Pop(&e.order)
}

func (e *expiringIDs) expire(now time.Time) {
	for len(e.order) > 0 && !now.Before(e.order[0].until) {
		e.removeFirst()
	}
}

type expiry struct {
	id    cancelKey
	until time.Time
}

// expiryOrder is a heap with the one that expires first on top.
type expiryOrder []expiry

var _ heap.Interface = (*expiryOrder)(nil)

// Len implements heap.Interface.
func (o expiryOrder) Len() int { return len(o) }

// Less implements heap.Interface.
func (o expiryOrder) Less(i, j int) bool { return o[i].until.Before(o[j].until) }

// Swap implements heap.Interface.
func (o expiryOrder) Swap(i, j int) { o[i], o[j] = o[j], o[i] }

// Push implements heap.Interface.
func (o *expiryOrder) Push(one any) { *o = append(*o, one.(expiry)) }

// Pop implements heap.Interface.
func (o *expiryOrder) Pop() any {
	last := len(*o) - 1
	one := (*o)[last]
	*o = (*o)[:last]
	return one
}
