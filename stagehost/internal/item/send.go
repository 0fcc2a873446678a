package item

import (
	"errors"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// itemDone is an item with its outcome; its output is handed over, or its message encoded.
type itemDone struct {
	run     *run
	at      int
	outcome runner.Outcome
}

func (e *itemDone) Apply(l *Loop) {
	it := e.run.items[e.at]
	it.answer = e.run.attempts[e.at].answer
	it.crashes = 0 // it has an outcome
	if it.isHandedOver {
		if l.beginSend(it) {
			l.Metrics.countOutput()
			l.settleHandedOver(it)
		}
		return
	}
	if it.isCancelled() && (l.streams() || !it.env.StoresResult()) {
		// The rest of a stopped stream may be incomplete.
		l.dropCancelled(it)
		return
	}
	if e.outcome.Fault != nil {
		l.handleFault(it, e.outcome.Fault)
		return
	}
	if !l.beginSend(it) {
		return
	}
	l.Metrics.countOutput()
	switch {
	case it.direct != nil:
		it.direct.finish(it, e.outcome)
		l.settle(it)
	case it.expired(time.Now()) && !it.env.StoresResult():
		l.Metrics.expired.inc()
		l.settle(it)
	default:
		l.send(it)
	}
}

// outgoing is a message of the outbox.
type outgoing struct {
	bus.Message
	to destination
}

// destination is the receiver of a message.
type destination uint8

const (
	toNext destination = iota
	toGateway
	toResults
	toDead
	// toOwn is the queue of the item's own step, for a local item that is published; toHost
	// another host of the stage.
	toOwn
	toHost
)

// mustStore reports whether the first message is one to store, before the reply.
func (a *answer) mustStore() bool { return len(a.outbox) > 1 }

// finalReply returns the final reply of the item's request, without its content.
func (w work) finalReply() *envelope.Reply {
	reply := w.env.NewReply()
	reply.Timings = append(reply.Timings[:len(reply.Timings):len(reply.Timings)], w.stepTiming())
	reply.Attempt = w.timing.Attempt
	reply.Seq = w.chunks + 1
	return reply
}

// stepTiming returns the timeline's entry for this step.
func (w work) stepTiming() envelope.StepTiming {
	out := w.timing
	out.BatchWait, out.Run = w.batchWait, w.took
	return out
}

// prepareOutput hands over an output, or encodes its message: the next step's item, or
// the reply. A caller that has received all chunks gets the end of the reply without
// the whole output, where that is too large to send.
func (p *Items) prepareOutput(w work, out *runner.Outcome) *fault.Fault {
	hop := w.env.Hop()
	if w.env.Local != nil && (w.isCancelled() || w.expired(time.Now())) {
		return nil // the loop drops w
	}
	if !w.env.Last() {
		env := w.env.Next(w.env.Parts, out.Parts, w.stepTiming())
		p.tracePublish(w, env)
		if w.isHandedOver = p.Sender.HandOver(env); w.isHandedOver {
			return nil
		}
		next, err := p.Sender.Item(env)
		w.outbox = []outgoing{{next, toNext}}
		if err != nil {
			return encodeFault(hop, err)
		}
		return nil
	}
	reply := w.finalReply()
	reply.Parts, reply.Metadata = out.Parts, out.Metadata
	err := p.prepareReply(w, reply)
	if errors.Is(err, bus.ErrTooLarge) && w.chunks > 0 && !w.env.StoresResult() {
		out.Parts, reply.Parts = nil, nil
		err = p.prepareReply(w, reply)
	}
	if err != nil {
		return encodeFault(hop, err)
	}
	return nil
}

// prepareReply hands the reply of a local item to its gateway, and puts any other into the
// outbox. The result of a durable request, or of one with an idempotency key, is stored
// first, so that it is not lost with the reply.
func (p *Items) prepareReply(w work, reply *envelope.Reply) (err error) {
	p.traceReply(w)
	if w.env.Local != nil {
		w.receipt, err = p.Sender.HandOverReply(w.env, reply)
		w.isHandedOver = err == nil
		return err
	}
	message, err := p.Sender.Reply(w.env.Gateway, reply)
	if err != nil {
		return err
	}
	w.outbox, w.isReply = []outgoing{{message, toGateway}}, true
	if !w.env.StoresResult() {
		return nil
	}
	stored, err := p.Records.Result(w.env.Result(reply, time.Now()))
	w.outbox = []outgoing{{stored, toResults}, {message, toGateway}}
	return err
}

// encodeFault returns the fault of an output that could not be made a message.
func encodeFault(hop *pipeline.Hop, err error) *fault.Fault {
	if errors.Is(err, bus.ErrTooLarge) {
		return fault.Newf(fault.OutputTooLarge, "the output of step %s is too large to pass on: %w", hop.Step, err)
	}
	return fault.Newf(fault.RunnerOutputInvalid, "the output of step %s cannot be passed on: %w", hop.Step, err)
}

// handleFault handles a runner's fault. The host stops runs of items that are
// cancelled or expired, and all runs in an abandoned drain; that may be all that
// is wrong with the item.
func (l *Loop) handleFault(it *Item, f *fault.Fault) {
	switch {
	case it.isCancelled():
		l.dropCancelled(it)
	case it.expired(time.Now()):
		l.expireOne(it)
	case l.abandoned:
		for _, it := range l.failStreamed([]*Item{it}, stoppingFault()) {
			l.nak(it)
		}
	case f.Reason == fault.RunnerOutOfMemory:
		l.retryOutOfMemory(it, f)
	default:
		l.Fail(it, f)
	}
}

// Fail replies to the item with a fault; later stages are skipped.
func (l *Loop) Fail(it *Item, f *fault.Fault) {
	if !l.beginSend(it) {
		return
	}
	l.Metrics.countFailure(f)
	f = l.locate(it, f)
	tracing.Fail(it.span(), f)
	if it.direct != nil {
		it.direct.finish(it, runner.Failed(f))
		l.settle(it)
		return
	}
	l.sendFault(it, f)
}

// locate adds the stage, step and host to a fault.
func (p *Items) locate(it *Item, f *fault.Fault) *fault.Fault {
	hop := it.env.Hop()
	return f.At(string(hop.Stage), string(hop.Step), string(p.Host))
}

// sendFault sends a fault as the item's reply, after the other messages.
func (l *Loop) sendFault(it *Item, f *fault.Fault, before ...outgoing) {
	reply := it.work().finalReply()
	reply.Fault = f
	if err := l.prepareReply(it.work(), reply); err != nil {
		// A fault is small; only an internal error makes it too large to send.
		l.internalError("fault cannot be sent", err)
		l.settle(it)
		return
	}
	if it.isHandedOver {
		l.settleHandedOver(it)
		return
	}
	l.replaceOutbox(it, append(before, it.outbox...))
	l.send(it)
}

// settleHandedOver settles an item whose outcome the next host or the gateway has.
func (l *Loop) settleHandedOver(it *Item) {
	l.Metrics.countDisposition(it.receipt.Disposition)
	l.settle(it)
}

// replaceOutbox replaces the messages of an item, of which the first is not sent yet.
func (l *Loop) replaceOutbox(it *Item, outbox []outgoing) {
	l.clearFailing(it)
	it.outbox, it.tries, it.missingSince = outbox, 0, time.Time{}
}

// beginSend moves the item to sending; false means that it has its outcome
// already.
func (l *Loop) beginSend(it *Item) bool {
	if err := l.ledger.move(it, sending, queued, running); err != nil {
		l.internalError("outcome out of turn", err)
		return false
	}
	l.Models.Leave(it)
	return true
}

func (l *Loop) send(it *Item) {
	if it.tries == 0 {
		it.firstTry = time.Now()
	}
	it.tries++
	l.Sender.Publish(it.outbox[0].Message, func(receipt bus.Receipt, err error) {
		l.postAsync(&messageSent{item: it, receipt: receipt, err: err})
	})
}

// messageSent is the receipt of a message, or the error.
type messageSent struct {
	item    *Item
	receipt bus.Receipt
	err     error
}

func (e *messageSent) Apply(l *Loop) {
	it := e.item
	if l.ledger.items[it.id] != it {
		return // naked while its message was on its way
	}
	switch {
	case e.err == nil && it.mustStore():
		l.sendNext(it, e.receipt)
	case e.err == nil:
		if it.env.Local != nil {
			it.env.Local.Queued(it.env.ExecutionID, it.receiver(), e.receipt.Seq)
		}
		l.Metrics.countDisposition(e.receipt.Disposition)
		if it.givesDelivery() {
			l.settleWith(it, func(bus.Delivery) error { return nil }, sending) // the other host does
		} else {
			l.settle(it)
		}
	case l.mayRetry(it, e.err):
		it.retryAt = time.Now().Add(backoff(it.tries, retryMin, retryMax))
		l.retries[it.id] = it
		l.Metrics.sendRetries.inc()
		it.span().AddEvent("resent")
	default:
		l.giveUpSending(it, e.err)
	}
}

// sendNext goes on to the next message of the outbox. Where another execution's
// result was stored before, the reply refers to that.
func (l *Loop) sendNext(it *Item, r bus.Receipt) {
	was := it.outbox[0].to
	if was == toDead {
		l.Metrics.deadLettered.inc()
		it.span().AddEvent("dead letter", trace.WithAttributes(attribute.Int64("stagemesh.dead_letter", int64(r.Seq))))
	}
	l.replaceOutbox(it, it.outbox[1:])
	it.replyStored = was == toResults
	if was == toResults && r.Duplicate {
		l.Metrics.duplicateReplies.inc()
		it.span().AddEvent("duplicate result")
		reply := it.work().finalReply()
		reply.Stored = true
		stored, err := l.Sender.Reply(it.env.Gateway, reply)
		if err != nil {
			l.internalError("stored reply cannot be sent", err)
			l.settle(it)
			return
		}
		it.outbox = []outgoing{{stored, toGateway}}
	}
	l.send(it)
}

// backoff returns a pause that doubles with each of n tries.
func backoff(n int, least, most time.Duration) time.Duration {
	return min(most, least<<min(n, 10))
}

// mayRetry reports whether to send the message again. Messages to store are
// retried until they are stored, for memory requests until the deadline; a full
// stream is a destination as any other. Other
// messages are retried until the deadline: the broker comes back, a full queue
// drains sooner or later, and a lost acknowledgement says nothing about the
// message. A missing gateway or queue gets missingGrace, the time of a reconnect,
// and so does the gateway of a stored result. No destination may hold up all
// others, unless the broker is what holds up all.
func (l *Loop) mayRetry(it *Item, err error) bool {
	if errors.Is(err, bus.ErrTooLarge) || errors.Is(err, bus.ErrClosed) || errors.Is(err, bus.ErrNoBroker) {
		return false
	}
	if errors.Is(err, bus.ErrNoResults) || errors.Is(err, bus.ErrNoDeadLetters) {
		l.StreamMissing()
	}
	now := time.Now()
	if it.isRefusedResult(err) {
		return false
	}
	if it.mustStore() {
		isWithinShare := !bus.IsFull(err) || l.mayWait(it)
		return isWithinShare && (it.durable() || !it.expired(now))
	}
	switch {
	case it.outbox[0].to == toOwn && !errors.Is(err, bus.ErrUnknown):
		return false // this host is leaving
	case it.givesDelivery() && !bus.IsFull(err):
		return false // the other host may be gone
	case it.expired(now), it.replyStored && errors.Is(err, bus.ErrNoGateway):
		return false
	case it.replyStored && now.Sub(it.firstTry) >= missingGrace:
		return false
	case l.isBrokerDown(it, err):
		l.clearFailing(it)
		it.missingSince = time.Time{}
		return true
	}
	return l.mayWait(it) && it.missingFor(err, now) < missingGrace
}

// isBrokerDown reports whether it is the broker, and not the receiver, that has not taken
// the item's message. A gateway may be why a reply has no acknowledgement.
func (l *Loop) isBrokerDown(it *Item, err error) bool {
	return errors.Is(err, bus.ErrDisconnected) || errors.Is(err, bus.ErrUnknown) && (!it.isReply || !l.Sender.Connected())
}

// missingFor returns how long the item's destination has been missing.
func (it *Item) missingFor(err error, now time.Time) time.Duration {
	switch {
	case !errors.Is(err, bus.ErrNoGateway) && !errors.Is(err, bus.ErrNoQueue):
		it.missingSince = time.Time{}
		return 0
	case it.missingSince.IsZero():
		it.missingSince = now
	}
	return now.Sub(it.missingSince)
}

// mayWait records that the item's destination does not take it, and is false when
// too many items wait for that one already.
func (l *Loop) mayWait(it *Item) bool {
	if it.failing != "" {
		return true
	}
	to := it.destination()
	if l.failing[to] >= max(1, l.MaxInFlight/failingShare) {
		return false
	}
	it.failing = to
	l.failing[to]++
	return true
}

// clearFailing records that the item does not wait for its destination any more.
func (l *Loop) clearFailing(it *Item) {
	if it.failing == "" {
		return
	}
	if l.failing[it.failing]--; l.failing[it.failing] == 0 {
		delete(l.failing, it.failing)
	}
	it.failing = ""
}

// destination names the receiver of the item's message.
func (it *Item) destination() string {
	switch {
	case it.mustStore():
		return "store"
	case it.isReply:
		return "gateway " + string(it.env.Gateway)
	}
	return "stage " + string(it.env.Route[it.receiver()].Stage)
}

// givesDelivery reports whether the item's message has another host settle its delivery.
func (it *Item) givesDelivery() bool { return it.durable() && it.outbox[0].to == toHost }

// receiver is the position of the step that the item's message is for, where that is not a reply.
func (it *Item) receiver() int {
	if to := it.outbox[0].to; to == toOwn || to == toHost {
		return it.env.Position
	}
	return it.env.Position + 1
}

func (l *Loop) resend(now time.Time) {
	for id, it := range l.retries {
		if now.Before(it.retryAt) {
			continue
		}
		delete(l.retries, id)
		l.send(it)
	}
}

// giveUpSending gives up on a message. An output that cannot go on to the next
// stage becomes a fault, unless the item is durable and too many others wait for that
// stage here: then it is given back, and runs again later. A reply that its gateway
// does not take is stored, and dropped after that; so is the output of a request in
// memory whose deadline has passed. Durable items are stored or naked.
func (l *Loop) giveUpSending(it *Item, err error) {
	switch {
	case it.mustStore():
		l.giveUpStoring(it, err)
	case it.outbox[0].to == toOwn && errors.Is(err, bus.ErrNoBroker):
		l.sendFaultInstead(it, l.leavingFault())
	case it.durable() && !it.isReply && errors.Is(err, bus.ErrClosed):
		l.nak(it)
	case it.env.StoresResult() && !it.isReply && it.expired(time.Now()):
		l.sendFaultInstead(it, it.deadlineFault(sending))
	case it.isReply && !it.replyStored && !errors.Is(err, bus.ErrClosed) && !it.expired(time.Now()):
		l.storeReply(it)
	case it.isReply, errors.Is(err, bus.ErrClosed), it.expired(time.Now()):
		l.Metrics.countUndelivered("dropped")
		l.settle(it)
	case it.givesDelivery(), it.durable() && it.mayReturn(err):
		l.giveBack(it)
	default:
		l.Logger.Debug("item cannot go on", "next", it.destination(), "error", err)
		l.sendFaultInstead(it, bus.FaultOf(err, it.env.Route[it.receiver()].Stage))
	}
}

// mayReturn reports whether the item, whose output is not sent or stored, can be given
// back to its queue: it does not wait for its destination here, because too many do. The
// caller of a stream that has begun gets STREAM_INTERRUPTED when the next run begins, and
// the result of that run is stored.
func (it *Item) mayReturn(err error) bool {
	isFullOrMissing := bus.IsFull(err) || errors.Is(err, bus.ErrNoQueue)
	return isFullOrMissing && !it.noQueue && it.failing == "" && (it.mayRunAgain() || it.env.StoresResult())
}

// returnDelay returns how long an item that is given back waits for its next delivery. After half of the
// allowed deliveries the others are spread over the time to the deadline: a host that starts later does
// not know which deliveries were given back.
func returnDelay(deliveries int, remaining time.Duration) time.Duration {
	delay := backoff(deliveries-1, returnMin, returnMax)
	if deliveries > maxDeliveries/2 {
		delay = max(delay, remaining/time.Duration(max(1, maxDeliveries-deliveries)))
	}
	return delay
}

// giveBack has the item redelivered later. That makes it no suspect, unless its run crashed: see nak.
func (l *Loop) giveBack(it *Item) {
	delay := returnDelay(it.delivery.Deliveries, time.Until(it.env.Deadline))
	it.span().AddEvent("returned")
	l.settleWith(it, func(d bus.Delivery) error { return it.nakWithoutCrash(d, delay) }, queued, sending)
}

// Overflow ends an item that has no place here. A durable one returns to its queue.
func (l *Loop) Overflow(it *Item, f *fault.Fault) {
	if it.durable() && !it.noQueue {
		l.giveBack(it)
		return
	}
	l.Fail(it, f)
}

// MayPassOn reports whether another host may get the item. A durable one without a queue is
// nowhere else.
func (it *Item) MayPassOn() bool {
	return it.direct == nil && (!it.durable() || !it.noQueue) && len(it.env.Hop().Visited) < pipeline.MaxVisited
}

// Forward gives an item to another host.
func (l *Loop) Forward(it *Item, to pipeline.HostID) {
	env := *it.env
	env.Route = slices.Clone(env.Route)
	hop := env.Hop()
	env.Generation++
	own := string(l.Host)
	if it.Refusal == nil {
		own = "" // it may come back, should the other host not load its model
	}
	hop.Host, hop.Visited = to, append(slices.Clip(hop.Visited), own)
	message, err := l.Sender.Forward(&env, it.delivery)
	if err != nil {
		l.Fail(it, bus.FaultOf(err, hop.Stage))
		return
	}
	if !l.beginSend(it) {
		return
	}
	l.Metrics.modelForwards.inc()
	it.span().AddEvent("passed on", trace.WithAttributes(attribute.String("stagemesh.host", string(to))))
	l.replaceOutbox(it, []outgoing{{message, toHost}})
	l.send(it)
}

// storeReply stores a reply before it is sent once more: its gateway is cut off, and
// looks for it when it is connected again.
func (l *Loop) storeReply(it *Item) {
	message := it.outbox[0]
	reply, err := envelope.DecodeReply(message.Data)
	if err != nil {
		l.internalError("reply cannot be stored", err)
		l.settle(it)
		return
	}
	stored, err := l.Records.Result(it.env.Result(reply, time.Now()))
	if err != nil {
		l.sendFaultInstead(it, encodeFault(it.env.Hop(), err))
		return
	}
	l.replaceOutbox(it, []outgoing{{stored, toResults}, message})
	l.send(it)
}

// giveUpStoring gives up on a message to store: it is too large, because the
// broker's limit was lowered; or the connection is closed; or the deadline of a
// request in memory has passed before it was stored; or the stream is full, and too many
// others wait for it here; or the broker stores nothing more.
func (l *Loop) giveUpStoring(it *Item, err error) {
	switch {
	case it.isRefusedResult(err):
		l.sendUnstored(it, bus.Rejection(err, it.env.Hop()))
	case !it.durable() && it.expired(time.Now()):
		l.Metrics.countUndelivered("dropped")
		l.settle(it)
	case it.mayReturn(err):
		l.giveBack(it)
	case !errors.Is(err, bus.ErrTooLarge):
		l.nak(it)
	case it.outbox[0].to == toDead:
		l.Logger.Error("dead letter is too large", append(it.logIDs(), "error", err)...)
		l.replaceOutbox(it, it.outbox[1:])
		l.send(it)
	default:
		l.sendFaultInstead(it, encodeFault(it.env.Hop(), err))
	}
}

// isRefusedResult reports whether the result of a request in memory is not stored because the broker
// stores nothing more. Its caller is told, and may send the request again; a durable item waits.
func (it *Item) isRefusedResult(err error) bool {
	return it.mustStore() && it.outbox[0].to == toResults && !it.durable() && errors.Is(err, bus.ErrStoreFull)
}

// sendUnstored replies with a fault that is not stored.
func (l *Loop) sendUnstored(it *Item, f *fault.Fault) {
	l.Metrics.countFault(f.Reason.Label())
	tracing.Fail(it.span(), f)
	reply := it.work().finalReply()
	reply.Fault = l.locate(it, f)
	message, err := l.Sender.Reply(it.env.Gateway, reply)
	if err != nil {
		l.internalError("fault cannot be sent", err)
		l.settle(it)
		return
	}
	l.replaceOutbox(it, []outgoing{{message, toGateway}})
	l.send(it)
}

// sendFaultInstead replies with a fault in place of an output that cannot go on.
func (l *Loop) sendFaultInstead(it *Item, f *fault.Fault) {
	l.Metrics.countFault(f.Reason.Label())
	tracing.Fail(it.span(), f)
	l.sendFault(it, l.locate(it, f))
}

// settle settles an item whose outcome is acknowledged, or has no receiver.
func (l *Loop) settle(it *Item) { l.settleWith(it, bus.Delivery.Ack, sending) }

// settleWith settles an item that is in one of the states, and frees its capacity.
func (l *Loop) settleWith(it *Item, settle func(bus.Delivery) error, from ...itemState) {
	if err := l.ledger.forget(it, from...); err != nil {
		l.internalError("item settled out of turn", err)
		return
	}
	l.Models.Leave(it)
	it.work().endTrace()
	delete(l.retries, it.id)
	l.clearFailing(it)
	if it.direct != nil {
		return
	}
	if !it.noQueue {
		l.CheckAck(settle(it.delivery))
	}
	if !it.isReleased {
		it.delivery.Release()
	}
}

// CheckAck counts a failed ack, nak or extension: the item is redelivered.
func (p *Items) CheckAck(err error) {
	if err != nil {
		p.Metrics.ackFailures.inc()
		p.Logger.Debug("item not settled", "error", err)
	}
}
