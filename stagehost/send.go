package stagehost

import (
	"context"
	"errors"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// outcome is what the runner made of an item; its message is prepared.
type outcome struct {
	item *item
	what became
}

func (e *outcome) apply(l *loop) {
	it := e.item
	if it.unwanted() && (l.host.streams() || !it.env.StoresAnswer()) {
		// What is left of a stream that was told to end may be a part of it.
		l.dropCalledOff(it)
		return
	}
	if e.what.fault != nil {
		l.failed(it, e.what.fault)
		return
	}
	if !l.sending(it) {
		return
	}
	l.host.metrics.answered(context.Background())
	switch {
	case it.direct != nil:
		it.direct.finish(it, e.what)
		l.done(it)
	case it.expired(time.Now()) && !it.env.StoresAnswer():
		l.host.metrics.expired(context.Background())
		l.done(it)
	default:
		l.send(it)
	}
}

// prepare encodes what an item becomes: the item of the next step, or the
// caller's answer.
func (h *Host) prepare(it *item, what became) *fault.Fault {
	var err error
	if it.env.Last() {
		reply := it.answer()
		reply.Parts, reply.Metadata = what.parts, what.metadata
		err = h.prepareAnswer(it, reply)
	} else {
		var next bus.Message
		next, err = h.bus.Item(it.env.Next(it.env.Parts, what.parts, it.timing))
		it.outbox = []outgoing{{next, toNext}}
	}
	if err != nil {
		return unsent(it.env.Hop(), err)
	}
	return nil
}

// prepareEnd is prepare. A caller that has all of an answer in chunks gets its end
// without the whole, where that is too large to be sent.
func (h *Host) prepareEnd(it *item, what *became) *fault.Fault {
	f := h.prepare(it, *what)
	if f != nil && f.Reason == fault.OutputTooLarge && it.chunks > 0 && !it.env.StoresAnswer() {
		what.parts = nil
		f = h.prepare(it, *what)
	}
	return f
}

// prepareAnswer makes the reply what is sent for the item. That of a durable
// request, or one with an idempotency key, is stored first: then nobody needs to
// hear the reply for the answer to be known.
func (h *Host) prepareAnswer(it *item, reply *envelope.Reply) error {
	message, err := h.bus.Reply(it.env.Gateway, reply)
	if err != nil {
		return err
	}
	it.outbox, it.answered = []outgoing{{message, toGateway}}, true
	if !it.env.StoresAnswer() {
		return nil
	}
	stored, err := h.bus.Result(it.env.Result(reply, time.Now()))
	it.outbox = []outgoing{{stored, toResults}, {message, toGateway}}
	return err
}

// unsent returns what it tells the caller that an output could not be made a
// message of.
func unsent(hop pipeline.Hop, err error) *fault.Fault {
	if errors.Is(err, bus.ErrTooLarge) {
		return fault.Newf(fault.OutputTooLarge, "the output of step %s is too large to pass on: %w", hop.Step, err)
	}
	return fault.Newf(fault.RunnerOutputInvalid, "the output of step %s cannot be passed on: %w", hop.Step, err)
}

// failed handles a runner's fault. When it was called off, past the deadline and
// in an abandoned drain, the run was told to stop, which may be all that is wrong
// with the item.
func (l *loop) failed(it *item, f *fault.Fault) {
	switch {
	case it.unwanted():
		l.dropCalledOff(it)
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

// fail answers the item with a fault; later stages are skipped.
func (l *loop) fail(it *item, f *fault.Fault) {
	if !l.sending(it) {
		return
	}
	l.host.metrics.failed(context.Background(), f)
	f = l.host.here(it, f)
	if it.direct != nil {
		it.direct.finish(it, became{fault: f})
		l.done(it)
		return
	}
	l.sendFault(it, f)
}

// here says in a fault where it happened.
func (h *Host) here(it *item, f *fault.Fault) *fault.Fault {
	hop := it.env.Hop()
	return f.At(string(hop.Stage), string(hop.Step), string(h.settings.Host))
}

// sendFault sends a fault as what the item became, after the other messages.
func (l *loop) sendFault(it *item, f *fault.Fault, before ...outgoing) {
	reply := it.answer()
	reply.Fault = f
	if err := l.host.prepareAnswer(it, reply); err != nil {
		// A fault is small; only a defect makes it too large to send.
		l.host.defect("fault cannot be sent", err)
		l.done(it)
		return
	}
	l.recovered(it)
	it.outbox, it.tries, it.missingSince = append(before, it.outbox...), 0, time.Time{}
	l.send(it)
}

// sending moves the item on; false says that it has its outcome already.
func (l *loop) sending(it *item) bool {
	if err := l.ledger.Send(it.id); err != nil {
		l.host.defect("outcome out of turn", err)
		return false
	}
	return true
}

func (l *loop) send(it *item) {
	if it.tries == 0 {
		it.firstTry = time.Now()
	}
	it.tries++
	l.host.bus.Send(it.outbox[0].Message, func(receipt bus.Receipt, err error) {
		l.host.tell(&sent{item: it, receipt: receipt, err: err})
	})
}

// done settles an item that is in good hands, or that nobody wants.
func (l *loop) done(it *item) {
	verb, err := l.ledger.Sent(it.id)
	l.forget(it, verb, err)
}

// sent is what became of a message.
type sent struct {
	item    *item
	receipt bus.Receipt
	err     error
}

func (e *sent) apply(l *loop) {
	it := e.item
	if l.items[it.id] != it {
		return // given back while its message was on its way
	}
	switch {
	case e.err == nil && it.storing():
		l.stored(it, e.receipt)
	case e.err == nil:
		l.host.metrics.taken(context.Background(), e.receipt.Disposition)
		l.done(it)
	case l.mayRetry(it, e.err):
		it.retryAt = time.Now().Add(backoff(it.tries))
		l.unsent[it.id] = it
		l.host.metrics.resent(context.Background())
	default:
		l.unsendable(it, e.err)
	}
}

// stored goes on to what is to be stored or told next. Where another execution's
// answer was stored before, that is the answer.
func (l *loop) stored(it *item, r bus.Receipt) {
	was := it.outbox[0].to
	l.next(it)
	it.stored = was == toResults
	if was == toResults && r.Duplicate {
		l.host.metrics.outrun(context.Background())
		reply := it.answer()
		reply.Stored = true
		notice, err := l.host.bus.Reply(it.env.Gateway, reply)
		if err != nil {
			l.host.defect("notice cannot be sent", err)
			l.done(it)
			return
		}
		it.outbox = []outgoing{{notice, toGateway}}
	}
	l.send(it)
}

// next takes the first message out of the outbox.
func (l *loop) next(it *item) {
	l.recovered(it)
	it.outbox, it.tries, it.missingSince = it.outbox[1:], 0, time.Time{}
}

// Bounds on sending again.
const (
	retryBase = 5 * time.Millisecond
	retryMost = 500 * time.Millisecond
	// retryGrace is how long a gateway or a queue may be missing: as long as
	// either takes to come back after the broker does.
	retryGrace = 3 * time.Second
	// failingShare is the share of the host's items that may wait for one
	// destination that does not take them: one in four.
	failingShare = 4
)

func backoff(tries int) time.Duration {
	return min(retryMost, retryBase<<min(tries, 10))
}

// mayRetry says whether to send the message again. What is to be stored is tried
// for as long as it takes, or until the deadline of a request in memory. A full
// queue has room sooner or later, and a lost
// acknowledgement is no answer, so both are tried until the deadline; who is
// missing is given the time of a reconnect, and so is the gateway that is told of
// a stored answer. No destination may hold up all the others.
func (l *loop) mayRetry(it *item, err error) bool {
	if errors.Is(err, bus.ErrTooLarge) || errors.Is(err, bus.ErrClosed) {
		return false
	}
	if errors.Is(err, bus.ErrNoResults) || errors.Is(err, bus.ErrNoDeadLetters) {
		l.host.storeMissing.Store(true)
		l.host.queueMissing()
	}
	now := time.Now()
	if it.storing() {
		return it.durable() || !it.expired(now)
	}
	switch {
	case it.expired(now), it.stored && errors.Is(err, bus.ErrNoGateway):
		return false
	case it.stored && now.Sub(it.firstTry) >= retryGrace:
		return false
	}
	return l.mayWait(it) && it.missing(err, now) < retryGrace
}

// missing returns how long the item's destination has been missing.
func (it *item) missing(err error, now time.Time) time.Duration {
	switch {
	case !errors.Is(err, bus.ErrNoGateway) && !errors.Is(err, bus.ErrNoQueue):
		it.missingSince = time.Time{}
		return 0
	case it.missingSince.IsZero():
		it.missingSince = now
	}
	return now.Sub(it.missingSince)
}

// mayWait books the item as one that its destination does not take, and is false
// when too many are already.
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

// recovered books that the item does not wait for its destination any more.
func (l *loop) recovered(it *item) {
	if it.failing == "" {
		return
	}
	if l.failing[it.failing]--; l.failing[it.failing] == 0 {
		delete(l.failing, it.failing)
	}
	it.failing = ""
}

// destination names who is to take what the item became.
func (it *item) destination() string {
	if it.answered {
		return "gateway " + string(it.env.Gateway)
	}
	return "stage " + string(it.env.Route[it.env.Position+1].Stage)
}

func (l *loop) resend(now time.Time) {
	for id, it := range l.unsent {
		if now.Before(it.retryAt) {
			continue
		}
		delete(l.unsent, id)
		l.send(it)
	}
}

// unsendable gives up on a message. What cannot go on to the next stage is
// answered with a fault; an answer that cannot be given is dropped, for nobody
// waits for it, and so is the output of a request in memory whose deadline has
// passed. What is durable is stored, or goes back.
func (l *loop) unsendable(it *item, err error) {
	switch {
	case it.storing():
		l.unstorable(it, err)
	case it.durable() && !it.answered && errors.Is(err, bus.ErrClosed):
		l.giveBack(it)
	case it.env.StoresAnswer() && !it.answered && it.expired(time.Now()):
		l.noAnswer(it, it.deadlineFault())
	case it.answered, errors.Is(err, bus.ErrClosed), it.expired(time.Now()):
		l.host.metrics.dropped(context.Background())
		l.done(it)
	default:
		l.host.settings.Logger.Debug("item cannot go on", "next", it.destination(), "error", err)
		l.noAnswer(it, bus.FaultOf(err, it.env.Route[it.env.Position+1].Stage))
	}
}

// unstorable is for what is too large for the broker, which an answer becomes
// when the limit is lowered, for the end of the connection, and for the answer of
// a request in memory whose deadline has passed before there was a place for it.
func (l *loop) unstorable(it *item, err error) {
	switch {
	case !it.durable() && it.expired(time.Now()):
		l.host.metrics.dropped(context.Background())
		l.done(it)
	case !errors.Is(err, bus.ErrTooLarge):
		l.giveBack(it)
	case it.outbox[0].to == toDead:
		l.host.settings.Logger.Error("dead letter is too large", "request", it.env.RequestID, "error", err)
		l.next(it)
		l.send(it)
	default:
		l.noAnswer(it, unsent(it.env.Hop(), err))
	}
}

// noAnswer answers with a fault in place of an output that cannot go on.
func (l *loop) noAnswer(it *item, f *fault.Fault) {
	f = l.host.here(it, f)
	l.host.metrics.faulted(context.Background(), f)
	l.sendFault(it, f)
}
