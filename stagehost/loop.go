package stagehost

import (
	"context"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/ledger"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// loop owns every item on the host.
type loop struct {
	host    *Host
	ledger  *ledger.Ledger
	batcher *batch.Batcher
	items   map[ledger.ID]*item
	nextID  ledger.ID

	// slots are idle.
	slots   []runner.Slot
	running int
	// halves are batches to run again as they are.
	halves [][]*item
	// lonely says that a batch in quarantine runs.
	lonely bool
	// unsent are items whose message is to be sent again.
	unsent map[ledger.ID]*item
	// failing counts the items that wait for a destination that does not take
	// them.
	failing map[string]int
	tombs   tombstones

	touchAt time.Time
	// draining says that no more items are asked for.
	draining bool
	// lost says that the runner has no more slots.
	lost bool
	// abandoned says that the drain took too long.
	abandoned bool
	// empty is closed, and emptied true, when a draining loop holds nothing.
	empty   chan struct{}
	emptied bool
}

func newLoop(h *Host) *loop {
	return &loop{
		host:    h,
		ledger:  ledger.New(h.settings.MaxInFlight + directBound),
		batcher: batch.New(h.settings.Batch),
		items:   map[ledger.ID]*item{},
		unsent:  map[ledger.ID]*item{},
		failing: map[string]int{},
		tombs:   tombstones{},
		empty:   make(chan struct{}),
	}
}

// eventsPerTurn bounds the events applied before batches are formed, so that
// what arrived together can run together and nothing waits for long.
const eventsPerTurn = 256

// run applies events until the context ends. The host ends it when nothing is
// held and nothing more can come.
func (l *loop) run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Reset(l.turn(time.Now()))
		select {
		case e := <-l.host.events:
			e.apply(l)
			l.applyWaiting()
		case <-timer.C:
		case <-ctx.Done():
			l.releaseSlots()
			l.host.metrics.held(l.ledger)
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
		case e := <-l.host.events:
			e.apply(l)
		default:
			return
		}
	}
}

// turn does everything that is due and returns how long until the next thing
// is.
func (l *loop) turn(now time.Time) time.Duration {
	l.resend(now)
	l.dispatch(now)
	l.expire(now)
	l.touch(now)
	l.host.busy.Store(len(l.slots) == 0 && (l.ledger.Count(ledger.Queued) > 0 || l.ledger.Len() >= l.host.settings.MaxInFlight))
	l.checkEmpty()
	return l.untilNext(now)
}

func (l *loop) untilNext(now time.Time) time.Duration {
	next := l.touchAt
	if at, ok := l.batcher.Wake(len(l.slots)); ok {
		next = earlier(next, at)
	}
	for _, it := range l.unsent {
		next = earlier(next, it.retryAt)
	}
	for _, half := range l.halves {
		for _, it := range half {
			next = earlier(next, it.env.Deadline)
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

// arrived is an item that the host has got, or a fault that it has already.
type arrived struct {
	item  *item
	fault *fault.Fault
}

func (e *arrived) apply(l *loop) {
	it := e.item
	if l.over() {
		l.host.drop(e)
		return
	}
	if it.suspect() && l.again(it) {
		return
	}
	l.nextID++
	it.id = l.nextID
	if err := l.ledger.Admit(it.id, string(it.delivery.Durability), string(it.delivery.Epoch)); err != nil {
		l.overflow(it, err)
		return
	}
	l.items[it.id] = it
	if l.tombs.has(it.env.RequestID) {
		l.dropCalledOff(it)
		return
	}
	if e.fault != nil {
		l.fail(it, e.fault)
		return
	}
	if it.delivery.Deliveries >= maxDeliveries {
		l.bury(it, nil, exhausted(it.delivery.Deliveries, l.host.settings.Stage))
		return
	}
	if it.expired(time.Now()) {
		l.expireOne(it)
		return
	}
	if err := l.batcher.Add(time.Now(), it.entry()); err != nil {
		l.fail(it, fault.From(err))
	}
}

// again reports whether the item is another delivery of one that the host holds:
// its word that it is in hand did not get through in time. It stays as it is, and
// is settled by the later delivery.
func (l *loop) again(it *item) bool {
	for _, held := range l.items {
		if held.direct == nil && held.delivery.Same(it.delivery) {
			l.host.metrics.again(context.Background())
			// It has not become suspect by that.
			it.delivery.Deliveries = held.delivery.Deliveries
			held.delivery = it.delivery
			l.host.puller.Settled(it.delivery)
			return true
		}
	}
	return false
}

// overflow gives back an item that came although the host is full: the broker
// sent more than was asked for, or the ask was thought to be over.
func (l *loop) overflow(it *item, err error) {
	l.host.settings.Logger.Warn("item given back", "error", err)
	l.host.handBack(it, fault.Newf(fault.Overloaded, "%w", err))
}

// expire answers the items whose deadline has passed while they waited.
func (l *loop) expire(now time.Time) {
	for _, entry := range l.batcher.Expire(now) {
		l.expireOne(l.items[ledger.ID(entry.ID)])
	}
	for i, half := range l.halves {
		l.halves[i] = l.live(half, now)
	}
}

func (l *loop) expireOne(it *item) {
	l.host.metrics.expired(context.Background())
	l.fail(it, it.deadlineFault())
}

func (it *item) deadlineFault() *fault.Fault {
	timeout := it.env.Timeout().Round(time.Millisecond)
	return fault.Newf(fault.DeadlineExceeded, "no answer within %s; the deadline passed at stage %s", timeout, it.env.Hop().Stage)
}

// touch tells the queue that the items in hand are still in hand. After an
// abandoned drain it is silent: what a runner does not let go of comes to
// another host by the end of its ack wait. While the broker is away there is
// nobody to tell.
func (l *loop) touch(now time.Time) {
	if now.Before(l.touchAt) {
		return
	}
	every := time.Duration(l.host.ackWait.Load()) / touchesPerAckWait
	l.touchAt = now.Add(every)
	l.host.metrics.held(l.ledger)
	l.host.load.held(l.ledger)
	l.tombs.sweep(now)
	if l.abandoned || !l.host.bus.Connected() {
		return
	}
	l.ledger.Alive(func(id ledger.ID) {
		if it := l.items[id]; now.Sub(it.arrived) > every/2 {
			l.host.say(it.delivery.InProgress())
		}
	})
}

// speak says that the queue wants to hear of its items sooner than it was thought
// to.
type speak struct{}

func (speak) apply(l *loop) { l.touchAt = time.Time{} }

// touchesPerAckWait leaves room for two words to be lost.
const touchesPerAckWait = 3

// forget settles an item by the ledger's verb and frees its place.
func (l *loop) forget(it *item, verb ledger.Verb, err error) {
	if err != nil {
		l.host.defect("item settled out of turn", err)
		return
	}
	delete(l.items, it.id)
	delete(l.unsent, it.id)
	l.recovered(it)
	if it.direct != nil {
		return
	}
	switch verb {
	case ledger.Ack:
		l.host.say(it.delivery.Ack())
	case ledger.Nak:
		l.host.say(it.delivery.Nak(0))
	case ledger.Discard:
	}
	l.host.puller.Settled(it.delivery)
}

// queueReplaced says which queue of that durability there is now.
type queueReplaced struct {
	queue pipeline.Durability
	epoch bus.Epoch
}

func (e *queueReplaced) apply(l *loop) {
	if n := l.ledger.QueueReplaced(string(e.queue), string(e.epoch)); n > 0 {
		l.host.settings.Logger.Warn("a queue was replaced; items of the old one are finished but not settled", "queue", e.queue, "items", n)
	}
}

// drain says that no more items will be asked for.
type drain struct{}

func (drain) apply(l *loop) {
	l.draining = true
	l.batcher.Drain()
	l.giveBackWaiting()
}

// runnerLost says that no slot falls idle any more. Batches that run may still
// end; those that never ran get no slot, nor do any of the runner's idle ones.
type runnerLost struct{ err error }

func (e runnerLost) apply(l *loop) {
	l.host.settings.Logger.Error("the runner is lost; what waits for it is given back", "error", e.err)
	l.lost = true
	l.releaseSlots()
	l.giveBackWaiting()
}

// giveBackWaiting gives back what waits for a slot when none will come. Before
// the drain the items would only come back to this host, again and again.
func (l *loop) giveBackWaiting() {
	if l.lost && l.draining {
		l.giveBackIn(ledger.Queued)
	}
}

// over says that an item that arrives now will not be finished.
func (l *loop) over() bool { return l.abandoned || l.emptied || l.lost && l.draining }

// checkEmpty tells the host when a draining loop holds nothing any more.
func (l *loop) checkEmpty() {
	if l.emptied || !l.draining || l.ledger.Len() > 0 || l.running > 0 {
		return
	}
	l.emptied = true
	close(l.empty)
}

// abandon gives back everything that does not run.
type abandon struct{}

func (abandon) apply(l *loop) {
	l.abandoned = true
	l.giveBackIn(ledger.Queued, ledger.Sending)
}

// giveBackIn gives back the items in the states, of which Queued is one.
func (l *loop) giveBackIn(states ...ledger.State) {
	l.halves = nil
	for id, it := range l.items {
		if state, _ := l.ledger.State(id); !slices.Contains(states, state) {
			continue
		}
		l.batcher.Remove(batch.ID(id))
		l.giveBack(it)
	}
}

func (l *loop) giveBack(it *item) {
	if it.stored {
		// Its answer is stored; only the word about it is on its way.
		l.done(it)
		return
	}
	if it.chunks > 0 && !it.env.StoresAnswer() {
		// Chunks must not repeat, and the gateway notices that no more come.
		l.host.metrics.dropped(context.Background())
		l.done(it)
		return
	}
	verb, err := l.ledger.GiveBack(it.id)
	if it.direct != nil {
		it.direct.finish(it, became{fault: l.leaving()})
	}
	l.forget(it, verb, err)
}
