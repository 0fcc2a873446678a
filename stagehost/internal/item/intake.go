package item

import (
	"context"
	"fmt"
	"math"
	"runtime/debug"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/internal/modelcache"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// arrival is what an item brings to its runs. It does not change while one has it.
type arrival struct {
	env *envelope.Envelope
	Inputs
	// arrived is when the host received it; queueWait how long it waited before.
	arrived   time.Time
	queueWait time.Duration
	// timing is of the last run, or the next, but for its times, which are the answer's.
	timing envelope.StepTiming
	// traced is a context with the span process, from the item's arrival until it is settled; nil
	// where the item is not traced.
	traced context.Context
	// direct answers a direct call; nil for other items.
	direct *directCall
	// cancelled is closed when the request is cancelled while the item runs.
	cancelled chan struct{}
}

// answer is what has become of an item. A run has one of its own, which the loop takes at the
// end.
type answer struct {
	// batchWait and took are times of the last run.
	batchWait, took time.Duration
	// chunks counts the messages of a streamed reply so far.
	chunks uint64
	spans  itemSpans
	// outbox has the messages that are sent for the item, one after the other: the
	// next step's item, or a reply, after what is stored before.
	outbox []outgoing
	// isHandedOver is true where the output needs no message, as the next host or the gateway
	// got it in memory; receipt is the gateway's. isReply is true where the outbox ends with a
	// reply.
	receipt               bus.Receipt
	isHandedOver, isReply bool
}

// work is an item for whoever has it: the loop, or a run.
type work struct {
	*arrival
	*answer
}

// Item is one request on this host. Once it is posted it is the loop's.
type Item struct {
	arrival
	answer

	id batch.ID
	// delivery settles an item that was pulled.
	delivery bus.Delivery
	// state is the ledger's. noQueue is true where the item's queue was
	// replaced, or it never had one: it is not acked, which could only settle another item.
	state   itemState
	noQueue bool
	// forgiven is true where the broker's silence may be why the item was redelivered, and
	// no run record is against it.
	forgiven bool

	ModelState
	itemRuns
	itemSend
}

func (it *Item) work() work { return work{&it.arrival, &it.answer} }

// ModelState is an item's place among the models, which Models keep.
type ModelState struct {
	// Replica is that which the item pins, IsWaiting is true while it waits for a model, WaitsSince
	// since when.
	Replica    *modelcache.Replica
	WaitsSince time.Time
	IsWaiting  bool
	// isReleased is true once the item counts no more for the host's bound.
	isReleased bool
	// Limit is its model's limit when it was given to the batcher; it may be nil.
	Limit *batch.Limit
	// Refusal is why this host does not load its model, where another one may.
	Refusal *fault.Fault
}

// Envelope returns the item's envelope, which nobody changes.
func (it *Item) Envelope() *envelope.Envelope { return it.env }

// Contract is what the item's inputs fit; nil where they were not checked.
func (it *Item) Contract() *schema.Contract { return it.contract }

// Bytes is the size of the item's inputs.
func (it *Item) Bytes() int { return it.bytes }

// HasRun reports whether the item was in a batch.
func (it *Item) HasRun() bool { return it.run != nil }

// SetInputs takes the inputs of an item as its model takes them.
func (it *Item) SetInputs(in Inputs) { it.Inputs = in }

// Release has the item count no more for max_in_flight, but in WaitedItems.
func (l *Loop) Release(it *Item) {
	if !it.isReleased && it.direct == nil {
		it.isReleased = true
		l.ledger.released++
		it.delivery.Release()
	}
}

// WaitedItems returns how many items here, but for one, count no more for max_in_flight.
func (l *Loop) WaitedItems(except *Item) int {
	if except.isReleased {
		return l.ledger.released - 1
	}
	return l.ledger.released
}

// Inputs are an item's inputs as its model takes them.
type Inputs struct {
	// inputs fit the contract. Both are missing where the item's model is not loaded, so that
	// nobody knows yet what that takes.
	inputs   schema.Fitted
	contract *schema.Contract
	key      batch.Key
	bytes    int
	padded   []batch.Padded
}

// itemRuns are what an item's runs have left.
type itemRuns struct {
	// run is the last batch with the item.
	run *run
	// failedStarts counts batches with the item that never started.
	failedStarts int
	// outOfMemory counts the runs alone on an otherwise idle worker that ran out of memory.
	outOfMemory int
	// crashes counts the processes that died as they ran the item here; quarantined is
	// true once it is run alone because of one.
	crashes     int
	quarantined bool
	// runs are the runs of the item alone that ended with their process, on any host.
	runs []envelope.RunRecord
	// crashedAt is when the last of them ended here, rerunAt until when the item leaves
	// slots to others after it; 0 as long as no slot was idle since.
	crashedAt, rerunAt time.Time
}

// itemSend is an item's state once its outcome is known.
type itemSend struct {
	// replyStored is true once the reply's result is stored.
	replyStored bool
	// tries counts for the first message of the outbox.
	tries    int
	firstTry time.Time
	retryAt  time.Time
	// missingSince is since when the gateway or queue is known to be missing.
	missingSince time.Time
	// failing names the destination where a try has failed; empty for none.
	failing string
}

// suspect reports whether a host had the item and neither settled it nor gave it back, so
// that it may have crashed, or lost a process that ran it.
func (it *Item) suspect() bool {
	return it.delivery.Unreturned() > 1 && !it.forgiven || it.env.LocalCrash
}

// durable reports whether the request waits on file, and may become a dead letter.
// The results of others may be stored too, see StoresResult.
func (a *arrival) durable() bool { return a.env.Durability == pipeline.File }

// expired reports whether the deadline has passed. It is checked in seven places: on
// arrival (itemArrived.apply); while queued (loop.expire, with the batcher); before a
// batch runs again (dropEnded); at a chunk (run.Chunk); at an outcome (itemDone.apply,
// handleFault); before a message is sent again (mayRetry); and when sending is given
// up (giveUpSending, giveUpStoring).
func (a *arrival) expired(now time.Time) bool { return !now.Before(a.env.Deadline) }

// Receive is the puller's handler: it decodes and checks an item on the subscription's
// goroutine, or the one that hands it over, and posts it to the loop.
func (p *Items) Receive(d bus.Delivery) {
	if d.Item != nil {
		p.take(p.newItem(d, d.Item))
		return
	}
	if d.Unreturned() >= maxDeliveries {
		// The check of the item may be what crashed its hosts.
		p.refuse(d, exhaustedFault(d.Deliveries, p.Stage))
		return
	}
	env, err := p.decode(d.Data)
	if err == nil && env.Durability != d.Durability {
		err = fmt.Errorf("item of durability %q in the queue of %q", env.Durability, d.Durability)
	}
	if err != nil {
		p.Metrics.malformed.inc()
		p.refuse(d, err)
		return
	}
	it := p.newItem(d, env)
	p.load.recordWait(it.queueWait)
	p.take(it)
}

// take checks an item of this stage and posts it.
func (p *Items) take(it *Item) {
	p.Metrics.countArrival(it)
	f := p.Refusal.Load()
	if f == nil {
		it.Inputs, f = p.Fit(it.env)
	}
	p.Post(&itemArrived{item: it, fault: f})
}

// ReceiveMalformed counts a message on the puller's subject that no queue sent, so
// it cannot be settled.
func (p *Items) ReceiveMalformed(err error) {
	p.Metrics.malformed.inc()
	p.Logger.Warn("message that is not a delivery", "error", err)
}

func (p *Items) newItem(d bus.Delivery, env *envelope.Envelope) *Item {
	it := &Item{arrival: arrival{env: env, arrived: d.Arrived, queueWait: d.QueueWait}, delivery: d}
	it.timing = it.timingOf(p.Host)
	p.startTrace(it)
	return it
}

// decode reads an item and checks that it is for this stage.
func (p *Items) decode(data []byte) (env *envelope.Envelope, err error) {
	defer p.recoverCheck(&err)
	env, err = envelope.Decode(data)
	if err != nil {
		return nil, err
	}
	if env.Mesh != p.Mesh {
		return nil, fmt.Errorf("item of mesh %q", env.Mesh)
	}
	if stage := env.Hop().Stage; stage != p.Stage {
		return nil, fmt.Errorf("item for stage %q", stage)
	}
	return env, nil
}

// recoverCheck turns a panic about one item into its fault: it would end one host
// after the other.
func (p *Items) recoverCheck(err *error) {
	if cause := recover(); cause != nil {
		p.internalError("check of an item panicked", fmt.Errorf("%v\n%s", cause, debug.Stack()))
		*err = fault.New(fault.Internal, "the check of the item failed; look for the request id in the logs")
	}
}

// timingOf starts the timeline's entry for this step.
func (it *Item) timingOf(host pipeline.HostID) envelope.StepTiming {
	hop := it.env.Hop()
	return envelope.StepTiming{
		Step:      hop.Step,
		Stage:     hop.Stage,
		Host:      host,
		Attempt:   uint32(max(1, it.delivery.Deliveries)) + it.env.LocalAttempts,
		QueueWait: it.queueWait,
		Local:     it.delivery.Item != nil,
		Arrival:   it.arrived.Sub(it.env.AdmittedAt),
	}
}

// Fit makes the item's parts fit the spec of the runner or of its model, or returns the fault.
func (p *Items) Fit(env *envelope.Envelope) (Inputs, *fault.Fault) {
	out, err := p.check(env)
	if err != nil {
		return Inputs{}, fault.From(err)
	}
	return out, nil
}

func (p *Items) check(env *envelope.Envelope) (out Inputs, err error) {
	defer p.recoverCheck(&err)
	hop := env.Hop()
	contract, isLoaded := p.Models.Contract(env)
	if !isLoaded {
		return Inputs{bytes: payload.Size(env.Parts)}, nil
	}
	spec := contract.Spec()
	fitted, err := contract.Fit(env.Parts, env.Kept, hop.Inputs)
	if err == nil && env.Position == 0 && env.Path == "" {
		// An input that no step takes is a mistake of the caller. An output that the
		// next step does not take is a choice of the pipeline.
		err = schema.AllTaken(spec, env.Parts, hop.Inputs, hop.Keep)
	}
	if err != nil {
		return Inputs{}, err
	}
	key := batch.Key(schema.Key(spec, hop.Model, fitted, hop.Parameters, p.Batch.By))
	return Inputs{fitted, contract, key, payload.Size(fitted.Inputs), paddedOf(spec, fitted.Inputs)}, nil
}

// paddedOf returns the tensors that the runner pads, with the extents of this item.
func paddedOf(spec runner.Spec, inputs []payload.Part) (out []batch.Padded) {
	for _, want := range spec.Inputs {
		part, ok := payload.Find(inputs, want.Name)
		if want.PadTo == 0 || !ok || part.Tensor == nil {
			continue
		}
		shape, first := slices.Clone(part.Tensor.Shape), 0
		if spec.BatchAxis == runner.BatchRows {
			first = 1
		}
		for axis := first; axis < len(shape); axis++ {
			if want.Shape[axis] < 0 {
				// The batcher bounds extents far below an overflow.
				shape[axis] = min(shape[axis], math.MaxInt64-want.PadTo)
				shape[axis] += (want.PadTo - shape[axis]%want.PadTo) % want.PadTo
			}
		}
		out = append(out, batch.Padded{Name: want.Name, Shape: shape[first:], ElementSize: int64(want.Datatype.Size())})
	}
	return out
}

// refuse ends an item without its content: by a fault where the caller can be read
// from it, so that he does not wait until the deadline.
func (p *Items) refuse(d bus.Delivery, err error) {
	env, ok := p.decodeAddress(d)
	if !ok {
		p.deadLetterBytes(d, err)
		return
	}
	p.Logger.Warn("item refused unread", "seq", d.Seq, "request_id", env.RequestID, "error", err)
	p.Post(&itemArrived{item: p.newItem(d, env), fault: fault.From(err)})
}

// decodeAddress returns as much of a malformed item as a reply needs: request, gateway
// and deadline. It is false where these cannot be trusted either.
func (p *Items) decodeAddress(d bus.Delivery) (*envelope.Envelope, bool) {
	var in meshv1.Envelope
	if err := proto.Unmarshal(d.Data, &in); err != nil {
		return nil, false
	}
	rest, err := proto.Marshal(&meshv1.Envelope{
		Mesh:        in.GetMesh(),
		Tenant:      in.GetTenant(),
		RequestId:   in.GetRequestId(),
		ExecutionId: in.GetExecutionId(),
		Gateway:     in.GetGateway(),
		Route:       []*meshv1.Step{{Name: p.stepName(&in), Stage: string(p.Stage)}},
		Deadline:    in.GetDeadline(),
		AdmittedAt:  in.GetAdmittedAt(),
		Durability:  d.Durability.ToProto(),
		Priority:    in.GetPriority(),
		// With them the result is stored, as of any other item.
		IdempotencyKey: in.GetIdempotencyKey(),
		StoreResult:    in.GetStoreResult(),
	})
	if err != nil {
		return nil, false
	}
	// Decoded again, so that the rest has passed every check.
	env, err := p.decode(rest)
	return env, err == nil
}

// stepName returns the item's step where that is valid, else the stage's name.
func (p *Items) stepName(in *meshv1.Envelope) string {
	if at := int64(in.GetPosition()); at < int64(len(in.GetRoute())) {
		if name := in.GetRoute()[at].GetName(); pipeline.ValidName("step", name) == nil {
			return name
		}
	}
	return string(p.Stage)
}

// itemArrived is an item that the host received, with a fault where it failed already.
type itemArrived struct {
	item  *Item
	fault *fault.Fault
}

func (e *itemArrived) Apply(l *Loop) {
	it := e.item
	if l.refusesItems() {
		l.drop(e)
		return
	}
	if it.delivery.Deliveries > 1 && l.replaceDelivery(it) {
		return
	}
	l.nextID++
	it.id = l.nextID
	if err := l.ledger.admit(it); err != nil {
		l.internalError("item beyond the host's bound", err)
		l.rejectUnadmitted(it, fault.Newf(fault.Overloaded, "%w", err))
		return
	}
	if l.cancelledIDs.has(it.cancelKey()) {
		l.dropCancelled(it)
		return
	}
	if it.delivery.Unreturned() >= maxDeliveries {
		l.deadLetter(it, e.fault)
		return
	}
	if e.fault != nil {
		l.Fail(it, e.fault)
		return
	}
	if it.delivery.AfterSilence && it.delivery.Unreturned() == 2 {
		// Its run record is read before it can run with others.
		l.Runs.Go(func() {
			isNone := l.readRecord(it.env)
			l.Post(EventFunc(func(l *Loop) {
				if l.ledger.items[it.id] == it && it.state == queued {
					it.forgiven = isNone
					l.Enqueue(it)
				}
			}))
		})
		return
	}
	l.Enqueue(it)
}

// Enqueue lets a queued item run.
func (l *Loop) Enqueue(it *Item) {
	if it.expired(time.Now()) {
		l.expireOne(it)
		return
	}
	if l.Models.Admit(time.Now(), it) {
		l.Ready(it)
	}
}

// Ready gives an item to the batcher. One in quarantine, whose process has lost its models, runs alone
// now too.
func (l *Loop) Ready(it *Item) {
	if it.quarantined {
		l.reruns = append(l.reruns, []*Item{it})
		return
	}
	if err := l.batcher.Add(time.Now(), it.entry()); err != nil {
		l.Fail(it, fault.From(err))
	}
}

// entry is the item as the batcher sees it.
func (it *Item) entry() batch.Item {
	return batch.Item{
		ID:       it.id,
		Key:      it.key,
		Rows:     it.inputs.Rows,
		Bytes:    it.bytes,
		Padded:   it.padded,
		Arrival:  it.arrived,
		Deadline: it.env.Deadline,
		Class:    it.env.Class(),
		Alone:    it.suspect() || it.direct != nil,
		Limit:    it.Limit,
	}
}

// replaceDelivery reports whether the item is another delivery of one that the
// host holds, because an extension did not arrive in time. The held item keeps its
// state, and is settled by the later delivery.
func (l *Loop) replaceDelivery(it *Item) bool {
	for _, held := range l.ledger.items {
		if held.direct == nil && held.delivery.Same(it.delivery) {
			l.Metrics.duplicateDeliveries.inc()
			// This redelivery does not make it suspect.
			it.delivery.Deliveries, it.delivery.Returned = held.delivery.Deliveries, held.delivery.Returned
			it.delivery.Release()
			it.delivery.Forwarded = held.delivery.Forwarded
			held.delivery = it.delivery
			return true
		}
	}
	return false
}

// refusesItems reports whether an item that arrives now would not be finished.
func (l *Loop) refusesItems() bool { return l.abandoned || l.emptied || l.lost && l.draining }
