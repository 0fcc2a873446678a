// Package item has the items of a stage's host, from their delivery until they are settled.
//
//	items := item.New(ctx, settings)
//	loop := item.NewLoop(items)
//	loop.Run(loopCtx)
//
// One goroutine, the loop, owns the ledger of items and the batcher, both pure,
// and is the only one to move an item. It knows no host: Sender, Models and Records
// are what it needs of one. Items has the pumps that post events to it: the puller's
// subscriptions post items as they arrive, decoded and checked; the slot pump
// posts idle slots; each batch's sink posts outcomes, with their message already
// encoded; the bus posts acknowledgements. The channel of events is the only way
// in, so no lock orders settling against expiry, acknowledgement, failure and
// drain.
//
// While a batch runs it has what it changes of its items, and the loop takes that back
// with their outcomes.
//
// The life of an item reads in three files: intake.go (pull, decode, queue),
// dispatch.go (batch, run, outcome) and send.go (forward or reply, settle). Its
// exceptions have one each: retry.go (failed batches, quarantine), stream.go
// (replies in chunks), cancel.go, deadletter.go and drain.go. docs/design/settling.md
// has the rules.
package item

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Sender sends what becomes of items: internal/bus is one. Its errors are that package's; what it
// makes a message of fails with ErrTooLarge.
type Sender interface {
	// HandOver hands an item to a host of its stage in this process. Where it is false, the item
	// is published.
	HandOver(item *envelope.Envelope) bool
	// HandOverReply hands a reply or a chunk to the gateway of a local item.
	HandOverReply(item *envelope.Envelope, reply *envelope.Reply) (bus.Receipt, error)
	Item(item *envelope.Envelope) (bus.Message, error)
	// Forward makes a message for another host of the item's stage, which takes the delivery.
	Forward(item *envelope.Envelope, delivery bus.Delivery) (bus.Message, error)
	Reply(gateway pipeline.GatewayID, reply *envelope.Reply) (bus.Message, error)
	// Publish calls done once, from any goroutine and maybe before it returns.
	Publish(message bus.Message, done func(bus.Receipt, error))
	PublishUnacked(message bus.Message) error
	Connected() bool
}

// Records keeps what outlives the host. Result and DeadLetter make the message that stores one.
type Records interface {
	Result(result *envelope.Result) (bus.Message, error)
	DeadLetter(dead *envelope.DeadLetter, delivery bus.Delivery) (bus.Message, error)
	// AddRun records a run of an item, RunsOf returns the records of all, and EndRun deletes all but those
	// of crashes.
	AddRun(ctx context.Context, item *envelope.Envelope, run envelope.RunRecord) ([]envelope.RunRecord, error)
	RunsOf(ctx context.Context, item *envelope.Envelope) ([]envelope.RunRecord, error)
	EndRun(ctx context.Context, item *envelope.Envelope, crashes []envelope.RunRecord) error
}

// Models says which items may run. The loop calls all methods but Contract.
type Models interface {
	// Contract returns what the inputs of an item have to fit; false while its model is not loaded.
	// Any goroutine calls it.
	Contract(item *envelope.Envelope) (*schema.Contract, bool)
	// Bind is called once, before the others.
	Bind(l *Loop)
	// Admit reports whether an item may run. Otherwise it waits for its model, or has got its
	// fault. Leave ends that wait, and the use of the model.
	Admit(now time.Time, it *Item) bool
	Leave(it *Item)
	// Act does what is due, and Next returns when something is, if that is earlier.
	Act(now time.Time)
	Next(than time.Time) time.Time
	// Ran counts a batch that has run. RunAgain has the items of one that found no model run
	// again; false means that no other run would find it.
	Ran(r Ran)
	RunAgain(now time.Time, items []*Item) bool
	// Publish has others know how the models stand.
	Publish(now time.Time)
}

// oneModel is the one model of a runner, which is always there.
type oneModel struct{ inputs *schema.Contract }

// OneModel returns the Models of a runner that has one, whose inputs fit the contract.
func OneModel(inputs *schema.Contract) Models { return oneModel{inputs} }

var (
	_ Sender = (*bus.Bus)(nil)
	_ Models = oneModel{}
)

func (m oneModel) Contract(*envelope.Envelope) (*schema.Contract, bool) { return m.inputs, true }
func (oneModel) Bind(*Loop)                                             {}
func (oneModel) Admit(time.Time, *Item) bool                            { return true }
func (oneModel) Leave(*Item)                                            {}
func (oneModel) Act(time.Time)                                          {}
func (oneModel) Next(than time.Time) time.Time                          { return than }
func (oneModel) Ran(Ran)                                                {}
func (oneModel) RunAgain(time.Time, []*Item) bool                       { return false }
func (oneModel) Publish(time.Time)                                      {}

// Settings configure a loop and its Items.
type Settings struct {
	Mesh  pipeline.MeshName
	Stage pipeline.StageName
	Host  pipeline.HostID
	// These are as in the stage's section, with every 0 replaced.
	Batch        batch.Settings
	Stream       StreamSettings
	MaxInFlight  int
	CrashLimit   int
	ExposeErrors ExposeErrors
	// IsDurable is true where the stage takes durable requests, MaxAge is the longest deadline,
	// and AckWait how long the queues wait for an ack or an extension.
	IsDurable       bool
	MaxAge, AckWait time.Duration
	Runner          runner.Runner
	// Bound is how many items the ledger holds, Events how many events may wait for the loop.
	Bound, Events int
	// StartTook is how long the runner took to start: its workers take as long.
	StartTook time.Duration
	// ConnectedAt is when this process connected to the broker as a host.
	ConnectedAt time.Time

	Sender  Sender
	Records Records
	Models  Models
	// StreamMissing is called when a message to store has found no stream.
	StreamMissing func()
	Metrics       *Metrics
	Logger        *slog.Logger
	// Tracer makes the spans of items that are traced; nil means that nothing is.
	Tracer trace.Tracer
}

// streams reports whether the runner answers in chunks.
func (s *Settings) streams() bool { return s.Batch.Mode == batch.Stream }

// Items holds the items of one host: what brings events to the loop, and runs its batches. Any goroutine may
// use them; only the loop, which has them too, changes an item.
type Items struct {
	Settings

	// events go to the loop; loopDone is closed when it takes no more. cancels are the cancel
	// messages that it has not taken yet.
	events   chan Event
	loopDone chan struct{}
	cancels  pendingCancels
	// Refusal is what items get that are pulled all the same while the host serves nobody.
	Refusal atomic.Pointer[fault.Fault]
	// IsBusy is true while items wait for a slot; load counts them.
	IsBusy   atomic.Bool
	load     load
	slotTime slotTime
	// ran counts the items of batches that have ended.
	ran atomic.Uint64

	// Runs are all goroutines but the loop, runCtx is the context of batches. Goroutines that have
	// run a batch wait in idle, and take another from tasks.
	Runs   sync.WaitGroup
	runCtx context.Context
	tasks  chan *run
	idle   chan struct{}
}

// New returns the items of a host, none yet. Batches run in the context.
func New(ctx context.Context, s Settings) *Items {
	return &Items{
		Settings: s, runCtx: ctx, events: make(chan Event, s.Events), loopDone: make(chan struct{}),
		tasks: make(chan *run), idle: make(chan struct{}, s.Runner.Concurrency()),
	}
}

// Loop owns every item on the host: its methods run on one goroutine, where only events call them.
type Loop struct {
	*Items

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
	reruns [][]*Item
	// quarantineBusy is true while a quarantined batch runs.
	quarantineBusy bool
	// retries are items whose message is to be sent again.
	retries map[batch.ID]*Item
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

// Empty is closed when a draining loop holds nothing.
func (l *Loop) Empty() <-chan struct{} { return l.empty }

// Running counts the batches at the runner, once the loop has ended.
func (l *Loop) Running() int { return l.running }

// SetAckWait has the loop extend deliveries for an ack wait, which may be shorter than the one before.
func (l *Loop) SetAckWait(wait time.Duration) { l.ackWait, l.extendAt = wait, time.Time{} }

// NewLoop returns the loop of the items, which has none yet.
func NewLoop(p *Items) *Loop {
	l := &Loop{
		Items:   p,
		ledger:  newLedger(p.Bound),
		batcher: batch.New(p.Batch),
		retries: map[batch.ID]*Item{},
		failing: map[string]int{},
		ackWait: p.AckWait,
		empty:   make(chan struct{}),
	}
	p.Models.Bind(l)
	return l
}

// Run applies events until the context ends. The host ends it when nothing is
// held and nothing more can come.
func (l *Loop) Run(ctx context.Context) {
	defer close(l.loopDone)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Reset(l.runDue(time.Now()))
		select {
		case e := <-l.events:
			e.Apply(l)
			l.applyWaiting()
		case <-timer.C:
		case <-ctx.Done():
			l.releaseSlots()
			l.Metrics.recordItems(&l.ledger)
			return
		}
	}
}

func (l *Loop) releaseSlots() {
	for _, slot := range l.slots {
		slot.Release()
	}
	l.slots = nil
}

func (l *Loop) applyWaiting() {
	for range eventsPerTurn {
		select {
		case e := <-l.events:
			e.Apply(l)
		default:
			return
		}
	}
}

// runDue does everything that is due and returns the pause until the next turn.
func (l *Loop) runDue(now time.Time) time.Duration {
	l.resend(now)
	l.Models.Act(now)
	l.dispatch(now)
	l.expire(now)
	l.extend(now)
	l.IsBusy.Store(len(l.slots) == 0 && (l.ledger.counts[queued] > 0 || len(l.ledger.items) >= l.MaxInFlight))
	l.checkEmpty()
	return l.untilNext(now)
}

func (l *Loop) untilNext(now time.Time) time.Duration {
	next := l.extendAt
	for _, r := range l.begun {
		if r.inLoop.prefetchAt.After(now) {
			next = Earlier(next, r.inLoop.prefetchAt)
		}
	}
	if at, ok := l.batcher.Wake(len(l.slots)); ok {
		next = Earlier(next, at)
	}
	next = l.Models.Next(next)
	for _, it := range l.retries {
		next = Earlier(next, it.retryAt)
	}
	for _, rerun := range l.reruns {
		for _, it := range rerun {
			next = Earlier(next, it.env.Deadline)
			if it.rerunAt.After(now) {
				next = Earlier(next, it.rerunAt)
			}
		}
	}
	return max(0, next.Sub(now))
}

// Earlier returns the earlier of two times.
func Earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// Event is something that happened; the loop applies one after the other.
type Event interface{ Apply(l *Loop) }

// EventFunc is an event that is a function.
type EventFunc func(l *Loop)

// Apply implements Event.
func (f EventFunc) Apply(l *Loop) { f(l) }

// Post gives an event to the loop, and drops it after the loop has ended.
func (p *Items) Post(e Event) {
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
func (p *Items) postAsync(e Event) {
	select {
	case p.events <- e:
	default:
		go p.Post(e)
	}
}

// DropEvents drops the events that are left when the loop has ended.
func (p *Items) DropEvents() {
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
func (p *Items) drop(e Event) {
	switch e := e.(type) {
	case *slotIdle:
		e.slot.Release()
	case *itemArrived:
		p.rejectUnadmitted(e.item, stoppingFault())
	}
}

// rejectUnadmitted ends an item that the ledger does not hold: a nak gives it to
// another host, and the caller of a direct or local one gets the fault.
func (p *Items) rejectUnadmitted(it *Item, f *fault.Fault) {
	if it.direct != nil {
		it.direct.finish(it, runner.Failed(f))
		return
	}
	if it.env.Local != nil {
		reply := it.work().finalReply()
		reply.Fault = p.locate(it, f)
		_, _ = p.Sender.HandOverReply(it.env, reply) // a fault is small
	} else {
		p.CheckAck(it.delivery.Nak(0))
	}
	it.work().endTrace()
	it.delivery.Release()
}

// expire fails the items whose deadline has passed while they waited.
func (l *Loop) expire(now time.Time) {
	for _, entry := range l.batcher.Expire(now) {
		l.expireOne(l.ledger.items[entry.ID])
	}
	for i, rerun := range l.reruns {
		l.reruns[i] = l.dropEnded(rerun, now)
	}
}

func (l *Loop) expireOne(it *Item) {
	l.Metrics.expired.inc()
	it.span().AddEvent("expired")
	l.Fail(it, it.deadlineFault(it.state))
}

func (a *arrival) deadlineFault(state itemState) *fault.Fault {
	return a.env.DeadlineFault(string(a.env.Hop().Step), string(a.env.Hop().Stage), envelope.StateText(state.String(), false))
}

// extend extends the deliveries in flight. After an abandoned drain it does not,
// so that items that a runner does not let go of are redelivered to another host
// after their ack wait.
func (l *Loop) extend(now time.Time) {
	if now.Before(l.extendAt) {
		return
	}
	every := l.ackWait / extendsPerAckWait
	l.extendAt = now.Add(every)
	l.Metrics.recordItems(&l.ledger)
	l.load.recordInFlight(&l.ledger)
	l.load.recordLearned(l.batcher)
	l.Models.Publish(now)
	l.cancelledIDs.expire(now)
	if l.abandoned || !l.Sender.Connected() {
		return
	}
	for _, it := range l.ledger.items {
		if !it.noQueue && now.Sub(it.arrived) > every/2 {
			l.CheckAck(it.delivery.InProgress())
		}
	}
}

// ReplaceQueue has the items of a queue with another epoch finished without it.
func (l *Loop) ReplaceQueue(queue QueueKey, epoch bus.Epoch) {
	if n := l.ledger.ReplaceQueue(queue, epoch); n > 0 {
		l.Logger.Warn("a queue was replaced; items of the old one are finished but not settled", "queue", queue.Name, "durability", queue.Durability, "items", n)
	}
}

// AcquireSlots posts every slot that falls idle, also while the host drains.
func (p *Items) AcquireSlots(ctx context.Context) error {
	lost := make(chan error, 1)
	p.Runs.Go(func() { lost <- p.postSlots() })
	select {
	case err := <-lost:
		return fmt.Errorf("stage %s: the runner is lost: %w", p.Stage, err)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// postSlots returns why there are no more slots: the runner is lost, or the host
// has given up.
func (p *Items) postSlots() error {
	for {
		slot, err := p.Runner.Acquire(p.runCtx)
		if err == nil {
			p.Post(&slotIdle{slot: slot})
			continue
		}
		if p.runCtx.Err() == nil {
			p.Post(EventFunc(func(l *Loop) { l.loseRunner(err) }))
		}
		return err
	}
}

// internalError reports what cannot happen.
func (p *Items) internalError(what string, err error) {
	p.Metrics.internalErrors.inc()
	p.Logger.Error(what, "error", err)
}
