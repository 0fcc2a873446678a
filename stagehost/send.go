package stagehost

import (
	"errors"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// itemDone is an item with its outcome; its message is encoded.
type itemDone struct {
	item    *item
	outcome runner.Outcome
}

func (e *itemDone) apply(l *loop) {
	it := e.item
	if it.isCancelled() && (l.host.streams() || !it.env.StoresResult()) {
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
	l.host.metrics.countOutput()
	switch {
	case it.direct != nil:
		it.direct.finish(it, e.outcome)
		l.settle(it)
	case it.expired(time.Now()) && !it.env.StoresResult():
		l.host.metrics.expired.inc()
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
)

// mustStore reports whether the first message is one to store, before the reply.
func (it *item) mustStore() bool { return len(it.outbox) > 1 }

// answer returns the final reply of the item's request.
func (it *item) answer() *envelope.Reply {
	reply := it.env.NewReply()
	reply.Timings = append(reply.Timings[:len(reply.Timings):len(reply.Timings)], it.timing)
	reply.Attempt = it.timing.Attempt
	reply.Seq = it.chunks + 1
	return reply
}

// prepare encodes the message of an output: the next step's item, or the reply.
func (h *Host) prepare(it *item, out runner.Outcome) *fault.Fault {
	var err error
	if it.env.Last() {
		reply := it.answer()
		reply.Parts, reply.Metadata = out.Parts, out.Metadata
		err = h.prepareAnswer(it, reply)
	} else {
		var next bus.Message
		next, err = h.bus.Item(it.env.Next(it.env.Parts, out.Parts, it.timing))
		it.outbox = []outgoing{{next, toNext}}
	}
	if err != nil {
		return encodeFault(it.env.Hop(), err)
	}
	return nil
}

// prepareEnd is prepare, but a caller that has received all chunks gets the end of
// the reply without the whole output, where that is too large to send.
func (h *Host) prepareEnd(it *item, out *runner.Outcome) *fault.Fault {
	f := h.prepare(it, *out)
	if f != nil && f.Reason == fault.OutputTooLarge && it.chunks > 0 && !it.env.StoresResult() {
		out.Parts = nil
		f = h.prepare(it, *out)
	}
	return f
}

// prepareAnswer puts the reply into the outbox. The result of a durable request,
// or of one with an idempotency key, is stored first, so that it is not lost with
// the reply.
func (h *Host) prepareAnswer(it *item, reply *envelope.Reply) error {
	message, err := h.bus.Reply(it.env.Gateway, reply)
	if err != nil {
		return err
	}
	it.outbox, it.isReply = []outgoing{{message, toGateway}}, true
	if !it.env.StoresResult() {
		return nil
	}
	stored, err := h.bus.Result(it.env.Result(reply, time.Now()))
	it.outbox = []outgoing{{stored, toResults}, {message, toGateway}}
	return err
}

// encodeFault returns the fault of an output that could not be made a message.
func encodeFault(hop pipeline.Hop, err error) *fault.Fault {
	if errors.Is(err, bus.ErrTooLarge) {
		return fault.Newf(fault.OutputTooLarge, "the output of step %s is too large to pass on: %w", hop.Step, err)
	}
	return fault.Newf(fault.RunnerOutputInvalid, "the output of step %s cannot be passed on: %w", hop.Step, err)
}

// handleFault handles a runner's fault. The host stops runs of items that are
// cancelled or expired, and all runs in an abandoned drain; that may be all that
// is wrong with the item.
func (l *loop) handleFault(it *item, f *fault.Fault) {
	switch {
	case it.isCancelled():
		l.dropCancelled(it)
	case it.expired(time.Now()):
		l.expireOne(it)
	case l.abandoned && it.chunks == 0:
		l.giveBack(it)
	case l.abandoned:
		l.fail(it, fault.Newf(fault.StreamInterrupted, "the answer broke after %d chunks: the host is stopping", it.chunks))
	default:
		l.fail(it, f)
	}
}

// fail replies to the item with a fault; later stages are skipped.
func (l *loop) fail(it *item, f *fault.Fault) {
	if !l.beginSend(it) {
		return
	}
	l.host.metrics.countFailure(f)
	f = l.host.locate(it, f)
	if it.direct != nil {
		it.direct.finish(it, runner.Failed(f))
		l.settle(it)
		return
	}
	l.sendFault(it, f)
}

// locate adds the stage, step and host to a fault.
func (h *Host) locate(it *item, f *fault.Fault) *fault.Fault {
	hop := it.env.Hop()
	return f.At(string(hop.Stage), string(hop.Step), string(h.settings.Host))
}

// sendFault sends a fault as the item's reply, after the other messages.
func (l *loop) sendFault(it *item, f *fault.Fault, before ...outgoing) {
	reply := it.answer()
	reply.Fault = f
	if err := l.host.prepareAnswer(it, reply); err != nil {
		// A fault is small; only an internal error makes it too large to send.
		l.host.internalError("fault cannot be sent", err)
		l.settle(it)
		return
	}
	l.replaceOutbox(it, append(before, it.outbox...))
	l.send(it)
}

// replaceOutbox replaces the messages of an item, of which the first is not sent yet.
func (l *loop) replaceOutbox(it *item, outbox []outgoing) {
	l.clearFailing(it)
	it.outbox, it.tries, it.missingSince = outbox, 0, time.Time{}
}

// beginSend moves the item to sending; false means that it has its outcome
// already.
func (l *loop) beginSend(it *item) bool {
	if err := l.ledger.move(it, sending, queued, running); err != nil {
		l.host.internalError("outcome out of turn", err)
		return false
	}
	return true
}

func (l *loop) send(it *item) {
	if it.tries == 0 {
		it.firstTry = time.Now()
	}
	it.tries++
	l.host.bus.Publish(it.outbox[0].Message, func(receipt bus.Receipt, err error) {
		l.host.postAsync(&sent{item: it, receipt: receipt, err: err})
	})
}

// sent is the receipt of a message, or the error.
type sent struct {
	item    *item
	receipt bus.Receipt
	err     error
}

func (e *sent) apply(l *loop) {
	it := e.item
	if l.ledger.items[it.id] != it {
		return // naked while its message was on its way
	}
	switch {
	case e.err == nil && it.mustStore():
		l.sendNext(it, e.receipt)
	case e.err == nil:
		l.host.metrics.countDisposition(e.receipt.Disposition)
		l.settle(it)
	case l.mayRetry(it, e.err):
		it.retryAt = time.Now().Add(backoff(it.tries))
		l.retries[it.id] = it
		l.host.metrics.sendRetries.inc()
	default:
		l.giveUpSending(it, e.err)
	}
}

// sendNext goes on to the next message of the outbox. Where another execution's
// result was stored before, the reply refers to that.
func (l *loop) sendNext(it *item, r bus.Receipt) {
	was := it.outbox[0].to
	l.replaceOutbox(it, it.outbox[1:])
	it.replyStored = was == toResults
	if was == toResults && r.Duplicate {
		l.host.metrics.duplicateReplies.inc()
		reply := it.answer()
		reply.Stored = true
		notice, err := l.host.bus.Reply(it.env.Gateway, reply)
		if err != nil {
			l.host.internalError("notice cannot be sent", err)
			l.settle(it)
			return
		}
		it.outbox = []outgoing{{notice, toGateway}}
	}
	l.send(it)
}

func backoff(tries int) time.Duration {
	return min(retryMax, retryMin<<min(tries, 10))
}

// mayRetry reports whether to send the message again. A message to store is
// retried for as long as it takes, or until the deadline of a request in memory. A
// full queue drains sooner or later, and a lost acknowledgement has no meaning, so
// both are retried until the deadline. A missing receiver has the time of a
// reconnect, and so has the gateway of a stored result. No
// destination may hold up all others.
func (l *loop) mayRetry(it *item, err error) bool {
	if errors.Is(err, bus.ErrTooLarge) || errors.Is(err, bus.ErrClosed) {
		return false
	}
	if errors.Is(err, bus.ErrNoResults) || errors.Is(err, bus.ErrNoDeadLetters) {
		l.host.storeMissing.Store(true)
		l.host.queueMissing()
	}
	now := time.Now()
	if it.mustStore() {
		return it.durable() || !it.expired(now)
	}
	switch {
	case it.expired(now), it.replyStored && errors.Is(err, bus.ErrNoGateway):
		return false
	case it.replyStored && now.Sub(it.firstTry) >= missingGrace:
		return false
	}
	return l.mayWait(it) && it.missingFor(err, now) < missingGrace
}

// missingFor returns how long the item's destination has been missing.
func (it *item) missingFor(err error, now time.Time) time.Duration {
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
func (l *loop) mayWait(it *item) bool {
	if it.failing != "" {
		return true
	}
	to := it.destination()
	if l.failing[to] >= max(1, l.host.settings.MaxInFlight/failingShare) {
		return false
	}
	it.failing = to
	l.failing[to]++
	return true
}

// clearFailing records that the item does not wait for its destination any more.
func (l *loop) clearFailing(it *item) {
	if it.failing == "" {
		return
	}
	if l.failing[it.failing]--; l.failing[it.failing] == 0 {
		delete(l.failing, it.failing)
	}
	it.failing = ""
}

// destination names the receiver of the item's message.
func (it *item) destination() string {
	if it.isReply {
		return "gateway " + string(it.env.Gateway)
	}
	return "stage " + string(it.env.Route[it.env.Position+1].Stage)
}

func (l *loop) resend(now time.Time) {
	for id, it := range l.retries {
		if now.Before(it.retryAt) {
			continue
		}
		delete(l.retries, id)
		l.send(it)
	}
}

// giveUpSending gives up on a message. An output that cannot go on to the next
// stage becomes a fault. A reply that cannot be delivered is dropped, and so is
// the output of a request in memory whose deadline has passed. Durable items are
// stored or naked.
func (l *loop) giveUpSending(it *item, err error) {
	switch {
	case it.mustStore():
		l.giveUpStoring(it, err)
	case it.durable() && !it.isReply && errors.Is(err, bus.ErrClosed):
		l.giveBack(it)
	case it.env.StoresResult() && !it.isReply && it.expired(time.Now()):
		l.sendFaultInstead(it, it.deadlineFault())
	case it.isReply, errors.Is(err, bus.ErrClosed), it.expired(time.Now()):
		l.host.metrics.countUndelivered("dropped")
		l.settle(it)
	default:
		l.host.settings.Logger.Debug("item cannot go on", "next", it.destination(), "error", err)
		l.sendFaultInstead(it, bus.FaultOf(err, it.env.Route[it.env.Position+1].Stage))
	}
}

// giveUpStoring gives up on a message to store: it is too large, because the
// broker's limit was lowered; or the connection is closed; or the deadline of a
// request in memory has passed before it was stored.
func (l *loop) giveUpStoring(it *item, err error) {
	switch {
	case !it.durable() && it.expired(time.Now()):
		l.host.metrics.countUndelivered("dropped")
		l.settle(it)
	case !errors.Is(err, bus.ErrTooLarge):
		l.giveBack(it)
	case it.outbox[0].to == toDead:
		l.host.settings.Logger.Error("dead letter is too large", "request", it.env.RequestID, "error", err)
		l.replaceOutbox(it, it.outbox[1:])
		l.send(it)
	default:
		l.sendFaultInstead(it, encodeFault(it.env.Hop(), err))
	}
}

// sendFaultInstead replies with a fault in place of an output that cannot go on.
func (l *loop) sendFaultInstead(it *item, f *fault.Fault) {
	l.host.metrics.countFault(f.Reason.Label())
	l.sendFault(it, l.host.locate(it, f))
}
