package item

import (
	"time"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// deadLetter gives up on an item: a durable one is stored as a dead letter before
// its fault is.
func (l *Loop) deadLetter(it *Item, f *fault.Fault) {
	if !it.durable() || it.direct != nil {
		l.Fail(it, f)
		return
	}
	if !l.beginSend(it) {
		return
	}
	l.Metrics.countFailure(f)
	f = l.locate(it, f)
	tracing.Fail(it.span(), f)
	message, err := l.newDeadLetter(it.delivery, f, it.env.Priority, it.runs)
	if err != nil {
		l.internalError("dead letter cannot be sent", err)
		l.sendFault(it, f)
		return
	}
	l.sendFault(it, f, outgoing{message, toDead})
}

// newDeadLetter encodes the dead letter about a delivery.
func (p *Items) newDeadLetter(d bus.Delivery, f *fault.Fault, priority int32, runs []envelope.RunRecord) (bus.Message, error) {
	return p.Records.DeadLetter(&envelope.DeadLetter{
		Mesh: p.Mesh, Stage: p.Stage, Host: p.Host,
		Durability: d.Durability, Priority: priority, Fault: f, Item: d.Data, Runs: runs,
		Deliveries: d.Deliveries, QueuedAt: d.QueuedAt, DeadLetteredAt: time.Now(),
	}, d)
}

// deadLetterBytes removes bytes from their queue that are no item and name no
// caller, after a dead letter about them is stored.
func (p *Items) deadLetterBytes(d bus.Delivery, cause error) {
	p.Logger.Warn("malformed item removed from the queue", "seq", d.Seq, "error", cause)
	message, err := p.newDeadLetter(d, fault.Newf(fault.InvalidRequest, "no item: %w", cause), 0, nil)
	if err != nil || !p.IsDurable {
		p.termBytes(d)
		return
	}
	p.Sender.Publish(message, func(_ bus.Receipt, err error) {
		if err != nil && d.Deliveries < maxDeliveries {
			p.CheckAck(d.Nak(malformedRetry))
			d.Release()
			return
		}
		if err == nil {
			p.Metrics.deadLettered.inc()
		}
		p.termBytes(d)
	})
}

func (p *Items) termBytes(d bus.Delivery) {
	p.CheckAck(d.Term("malformed"))
	d.Release()
}

// exhaustedFault is the fault of an item that was delivered as often as may be.
func exhaustedFault(deliveries int, stage pipeline.StageName) *fault.Fault {
	return fault.Newf(fault.AttemptsExhausted, "stage %s got the item %d times and no host finished it", stage, deliveries)
}

// Exhausted reads an item that the broker delivers no more, and returns the reply to its caller.
func (p *Items) Exhausted(data []byte, deliveries int) (*envelope.Envelope, *envelope.Reply, error) {
	env, err := p.decode(data)
	if err != nil {
		p.Metrics.malformed.inc()
		return nil, nil, err
	}
	hop, reply := env.Hop(), env.NewReply()
	reply.Fault = exhaustedFault(deliveries, p.Stage).At(string(hop.Stage), string(hop.Step), string(p.Host))
	p.Metrics.countFailure(reply.Fault)
	return env, reply, nil
}
