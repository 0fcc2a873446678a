package stagehost

import (
	"context"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// loop owns every item on the host: its methods run on one goroutine, where only events call them.
type loop struct {
	*pumps

	ledger  ledger
	batcher *batch.Batcher
	nextID  batch.ID

	// slots are idle.
	slots []runner.Slot
	// running counts the batches at the runner, begun are those that it has begun, by
	// their prefetchAt.
	running int
	begun   []*run
	// reruns are batches to run again as they are.
	reruns [][]*item
	// quarantineBusy is true while a quarantined batch runs.
	quarantineBusy bool
	// retries are items whose message is to be sent again.
	retries map[batch.ID]*item
	// failing counts the items that wait, by the destination that does not take
	// them.
	failing      map[string]int
	cancelledIDs cancelledRequests

	// ackWait is how long the queues wait for an ack or an extension of an item.
	ackWait  time.Duration
	extendAt time.Time
	// draining is true once the host pulls no more.
	draining bool
	// lost is true once the runner has no more slots.
	lost bool
	// abandoned is true once the drain took too long.
	abandoned bool
	// empty is closed, and emptied true, when a draining loop holds nothing.
	empty   chan struct{}
	emptied bool
}

func newLoop(p *pumps) *loop {
	l := &loop{
		pumps:   p,
		ledger:  newLedger(p.settings.Bound),
		batcher: batch.New(p.settings.Batch),
		retries: map[batch.ID]*item{},
		failing: map[string]int{},
		ackWait: p.settings.Queue.AckWait,
		empty:   make(chan struct{}),
	}
	p.models.bind(l)
	return l
}

// run applies events until the context ends. The host ends it when nothing is
// held and nothing more can come.
func (l *loop) run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Reset(l.runDue(time.Now()))
		select {
		case e := <-l.events:
			e.apply(l)
			l.applyWaiting()
		case <-timer.C:
		case <-ctx.Done():
			l.releaseSlots()
			l.metrics.recordItems(&l.ledger)
			return
		}
	}
}

func (l *loop) releaseSlots() {
	for _, slot := range l.slots {
		slot.Release()
	}
	l.slots = nil
}

func (l *loop) applyWaiting() {
	for range eventsPerTurn {
		select {
		case e := <-l.events:
			e.apply(l)
		default:
			return
		}
	}
}

// runDue does everything that is due and returns the pause until the next turn.
func (l *loop) runDue(now time.Time) time.Duration {
	l.resend(now)
	l.models.act(now)
	l.dispatch(now)
	l.expire(now)
	l.extend(now)
	l.busy.Store(len(l.slots) == 0 && (l.ledger.counts[queued] > 0 || len(l.ledger.items) >= l.settings.MaxInFlight))
	l.checkEmpty()
	return l.untilNext(now)
}

func (l *loop) untilNext(now time.Time) time.Duration {
	next := l.extendAt
	for _, r := range l.begun {
		if r.prefetchAt.After(now) {
			next = earlier(next, r.prefetchAt)
		}
	}
	if at, ok := l.batcher.Wake(len(l.slots)); ok {
		next = earlier(next, at)
	}
	next = l.models.next(next)
	for _, it := range l.retries {
		next = earlier(next, it.retryAt)
	}
	for _, rerun := range l.reruns {
		for _, it := range rerun {
			next = earlier(next, it.env.Deadline)
			if it.rerunAt.After(now) {
				next = earlier(next, it.rerunAt)
			}
		}
	}
	return max(0, next.Sub(now))
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// event is something that happened; the loop applies one after the other.
type event interface{ apply(l *loop) }

// eventFunc is an event that is a function.
type eventFunc func(l *loop)

func (f eventFunc) apply(l *loop) { f(l) }

// ask returns what the loop answers, or the error of the context.
func ask[T any](ctx context.Context, p *pumps, f func(*loop) T) (answer T, err error) {
	answers := make(chan T, 1)
	p.post(eventFunc(func(l *loop) { answers <- f(l) }))
	select {
	case answer = <-answers:
	case <-ctx.Done():
		err = ctx.Err()
	}
	return answer, err
}

// post gives an event to the loop, and drops it after the loop has ended.
func (p *pumps) post(e event) {
	select {
	case <-p.loopDone:
		p.drop(e)
		return
	default:
	}
	select {
	case p.events <- e:
	case <-p.loopDone:
		p.drop(e)
	}
}

// postAsync posts an event from a callback of the bus. The bus must not wait; nor
// must the loop wait for itself, which calls the bus and may be called back before
// that returns. Where the channel is full a goroutine waits, until the loop has
// ended at the latest; there is one event at most for each item.
func (p *pumps) postAsync(e event) {
	select {
	case p.events <- e:
	default:
		go p.post(e)
	}
}

// dropEvents drops the events that are left when the loop has ended.
func (p *pumps) dropEvents() {
	for {
		select {
		case e := <-p.events:
			p.drop(e)
		default:
			return
		}
	}
}

// drop releases the slot or item of an event that the loop does not apply.
func (p *pumps) drop(e event) {
	switch e := e.(type) {
	case *slotIdle:
		e.slot.Release()
	case *itemArrived:
		p.rejectUnadmitted(e.item, stoppingFault())
	}
}

// rejectUnadmitted ends an item that the ledger does not hold: a nak gives it to
// another host, and the caller of a direct or local one gets the fault.
func (p *pumps) rejectUnadmitted(it *item, f *fault.Fault) {
	if it.direct != nil {
		it.direct.finish(it, runner.Failed(f))
		return
	}
	if it.env.Local != nil {
		reply := it.work().finalReply()
		reply.Fault = p.locate(it, f)
		_, _ = p.sender.HandOverReply(it.env, reply) // a fault is small
	} else {
		p.checkAck(it.delivery.Nak(0))
	}
	it.work().endTrace()
	it.delivery.Release()
}

// expire fails the items whose deadline has passed while they waited.
func (l *loop) expire(now time.Time) {
	for _, entry := range l.batcher.Expire(now) {
		l.expireOne(l.ledger.items[entry.ID])
	}
	for i, rerun := range l.reruns {
		l.reruns[i] = l.dropEnded(rerun, now)
	}
}

func (l *loop) expireOne(it *item) {
	l.metrics.expired.inc()
	it.span().AddEvent("expired")
	l.fail(it, it.deadlineFault(envelope.WaitsInQueue))
}

func (a *arrival) deadlineFault(state string) *fault.Fault {
	return a.env.DeadlineFault(string(a.env.Hop().Step), string(a.env.Hop().Stage), state)
}

// extend extends the deliveries in flight. After an abandoned drain it does not,
// so that items that a runner does not let go of are redelivered to another host
// after their ack wait.
func (l *loop) extend(now time.Time) {
	if now.Before(l.extendAt) {
		return
	}
	every := l.ackWait / extendsPerAckWait
	l.extendAt = now.Add(every)
	l.metrics.recordItems(&l.ledger)
	l.load.recordInFlight(&l.ledger)
	l.load.recordLearned(l.batcher)
	l.models.publish(now)
	l.cancelledIDs.expire(now)
	if l.abandoned || !l.sender.Connected() {
		return
	}
	for _, it := range l.ledger.items {
		if !it.noQueue && now.Sub(it.arrived) > every/2 {
			l.checkAck(it.delivery.InProgress())
		}
	}
}

// replaceQueue has the items of a queue with another epoch finished without it.
func (l *loop) replaceQueue(queue queueKey, epoch bus.Epoch) {
	if n := l.ledger.replaceQueue(queue, epoch); n > 0 {
		l.log.Warn("a queue was replaced; items of the old one are finished but not settled", "queue", queue.name, "durability", queue.durability, "items", n)
	}
}
