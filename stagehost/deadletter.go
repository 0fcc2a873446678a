package stagehost

import (
	"context"
	"time"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// deadLetter gives up on an item: a durable one is stored as a dead letter before
// its fault is.
func (l *loop) deadLetter(it *item, f *fault.Fault) {
	if !it.durable() || it.direct != nil {
		l.fail(it, f)
		return
	}
	if !l.beginSend(it) {
		return
	}
	l.metrics.countFailure(f)
	f = l.locate(it, f)
	tracing.Fail(it.span(), f)
	message, err := l.newDeadLetter(it.delivery, f, it.env.Priority, it.runs)
	if err != nil {
		l.internalError("dead letter cannot be sent", err)
		l.sendFault(it, f)
		return
	}
	l.metrics.deadLettered.inc()
	l.sendFault(it, f, outgoing{message, toDead})
}

// newDeadLetter encodes the dead letter about a delivery.
func (p *pumps) newDeadLetter(d bus.Delivery, f *fault.Fault, priority int32, runs []envelope.RunRecord) (bus.Message, error) {
	return p.records.DeadLetter(&envelope.DeadLetter{
		Mesh: p.settings.Mesh, Stage: p.settings.Stage, Host: p.settings.Host,
		Durability: d.Durability, Priority: priority, Fault: f, Item: d.Data, Runs: runs,
		Deliveries: d.Deliveries, QueuedAt: d.QueuedAt, DeadLetteredAt: time.Now(),
	}, d)
}

// deadLetterBytes removes bytes from their queue that are no item and name no
// caller, after a dead letter about them is stored.
func (p *pumps) deadLetterBytes(d bus.Delivery, cause error) {
	p.log.Warn("malformed item removed from the queue", "seq", d.Seq, "error", cause)
	message, err := p.newDeadLetter(d, fault.Newf(fault.InvalidRequest, "no item: %w", cause), 0, nil)
	if err != nil || !p.settings.Queue.durable() {
		p.termBytes(d)
		return
	}
	p.sender.Publish(message, func(_ bus.Receipt, err error) {
		if err != nil && d.Deliveries < maxDeliveries {
			p.checkAck(d.Nak(malformedRetry))
			d.Release()
			return
		}
		if err == nil {
			p.metrics.deadLettered.inc()
		}
		p.termBytes(d)
	})
}

func (p *pumps) termBytes(d bus.Delivery) {
	p.checkAck(d.Term("malformed"))
	d.Release()
}

// exhaustedFault is the fault of an item that was delivered as often as may be.
func exhaustedFault(deliveries int, stage pipeline.StageName) *fault.Fault {
	return fault.Newf(fault.AttemptsExhausted, "stage %s got the item %d times and no host finished it", stage, deliveries)
}

// endExhausted ends an item that the broker delivers no more. A host decides
// before that, so this is for items that crashed each host before it could. It
// retries nothing: the caller learns of the failure by the deadline at the latest.
func (h *Host) endExhausted(g bus.Exhausted) {
	ctx, cancel := context.WithTimeout(context.Background(), exhaustedTimeout)
	defer cancel()
	env, err := h.items.decode(g.Data)
	if err != nil {
		h.metrics.malformed.inc()
	} else {
		h.metrics.countFailure(h.replyExhausted(ctx, env, g.Deliveries))
	}
	if err := h.bus.Remove(ctx, g); err != nil {
		h.settings.Logger.Warn("an item that the broker gave up on stays in its queue", "error", err)
	}
}

// replyExhausted replies to an item that no host holds.
func (h *Host) replyExhausted(ctx context.Context, env *envelope.Envelope, deliveries int) *fault.Fault {
	hop := env.Hop()
	f := exhaustedFault(deliveries, h.settings.Stage).At(string(hop.Stage), string(hop.Step), string(h.settings.Host))
	reply := env.NewReply()
	reply.Fault = f
	h.settings.Logger.Warn("the broker gave up on an item", "request_id", env.RequestID, "deliveries", deliveries)
	if env.StoresResult() {
		if m, err := h.bus.Result(env.Result(reply, time.Now())); err == nil {
			_, err = h.bus.PublishAndWait(ctx, m)
			h.items.checkAck(err)
		}
	}
	m, err := h.bus.Reply(env.Gateway, reply)
	if err == nil {
		err = h.bus.PublishUnacked(m)
	}
	h.items.checkAck(err)
	return f
}
