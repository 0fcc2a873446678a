package stagehost

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// maxDeliveries is how often an item may be delivered: a little below the
// broker's own limit, beyond which it would lie in the queue unseen.
const maxDeliveries = bus.MaxDeliver - 2

// recordWait bounds the talk with the broker about a run's start.
const recordWait = 2 * time.Second

// begin puts on record that a suspect's run starts, and returns the starts that
// were on record. A start that cannot be recorded blames nobody, and the item
// runs all the same.
func (h *Host) begin(r *run) []envelope.RunRecord {
	ctx, cancel := context.WithTimeout(r.ctx, recordWait)
	defer cancel()
	it := r.items[0]
	before, err := h.starts.Begin(ctx, it.env, envelope.RunRecord{Host: h.settings.Host, At: time.Now()})
	if err != nil {
		h.settings.Logger.Warn("the start of a suspect's run is not on record", "request", it.env.RequestID, "error", err)
		return nil
	}
	// This process lives, whatever it began.
	return slices.DeleteFunc(before, func(s envelope.RunRecord) bool {
		return s.Host == h.settings.Host && !s.At.Before(h.born)
	})
}

// end takes a suspect's run off the record: the process lives.
func (h *Host) end(r *run) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.ctx), recordWait)
	defer cancel()
	if err := h.starts.End(ctx, r.items[0].env); err != nil {
		h.settings.Logger.Warn("the end of a suspect's run is not on record", "request", r.items[0].env.RequestID, "error", err)
	}
}

// recorded reports whether the run's start is to be on record: of an item that
// was delivered before, which may have ended the process that ran it.
func (h *Host) recorded(r *run) bool { return r.batch.Suspect && r.items[0].direct == nil }

// blamed is a suspect whose runs were begun as often as they may be, and did not
// end.
type blamed struct {
	run    *run
	starts []envelope.RunRecord
}

func (e *blamed) apply(l *loop) {
	l.ended(&ran{run: e.run})
	l.bury(e.run.items[0], e.starts, crashed(len(e.starts), e.starts[len(e.starts)-1]))
}

// bury gives up on an item: where it is durable a letter about it is stored
// before its fault is.
func (l *loop) bury(it *item, starts []envelope.RunRecord, f *fault.Fault) {
	if !it.durable() || it.direct != nil {
		l.fail(it, f)
		return
	}
	if !l.sending(it) {
		return
	}
	l.host.metrics.failed(context.Background(), f)
	f = l.host.here(it, f)
	letter := l.host.letter(it.delivery, f)
	letter.Priority, letter.Starts = it.env.Priority, starts
	message, err := l.host.seal(letter, it.delivery)
	if err != nil {
		l.host.defect("dead letter cannot be sent", err)
		l.sendFault(it, f)
		return
	}
	l.host.metrics.buried(context.Background())
	l.sendFault(it, f, outgoing{message, toDead})
}

func (h *Host) letter(d bus.Delivery, f *fault.Fault) *envelope.DeadLetter {
	return &envelope.DeadLetter{
		Mesh: h.settings.Mesh, Stage: h.settings.Stage, Host: h.settings.Host,
		Durability: d.Durability, Fault: f, Item: d.Data,
		Deliveries: d.Deliveries, QueuedAt: d.Stored, DeadLetteredAt: time.Now(),
	}
}

// seal makes a letter a message; one that would be too large goes without its
// item.
func (h *Host) seal(letter *envelope.DeadLetter, d bus.Delivery) (bus.Message, error) {
	m, err := h.bus.DeadLetter(letter, d)
	if errors.Is(err, bus.ErrTooLarge) {
		letter.Fault = letter.Fault.WithMetadata("item", fmt.Sprintf("left out: %d bytes", len(letter.Item)))
		letter.Item = nil
		m, err = h.bus.DeadLetter(letter, d)
	}
	return m, err
}

// unreadablePause is how long bytes rest whose letter could not be stored.
const unreadablePause = time.Second

// buryBytes removes bytes that are no item, and do not say who waits, from their
// queue, after a letter about them is stored.
func (h *Host) buryBytes(d bus.Delivery, cause error) {
	h.settings.Logger.Warn("malformed item removed from the queue", "seq", d.Seq, "error", cause)
	message, err := h.seal(h.letter(d, fault.Newf(fault.InvalidRequest, "no item: %w", cause)), d)
	if err != nil || !h.settings.Queue.durable() {
		h.endBytes(d)
		return
	}
	h.bus.Send(message, func(_ bus.Receipt, err error) {
		if err != nil && d.Deliveries < maxDeliveries {
			h.say(d.Nak(unreadablePause))
			h.puller.Settled(d)
			return
		}
		if err == nil {
			h.metrics.buried(context.Background())
		}
		h.endBytes(d)
	})
}

func (h *Host) endBytes(d bus.Delivery) {
	h.say(d.Term("malformed"))
	h.puller.Settled(d)
}

// exhausted says of an item that it was delivered as often as may be.
func exhausted(deliveries int, stage pipeline.StageName) *fault.Fault {
	return fault.Newf(fault.AttemptsExhausted, "stage %s got the item %d times and no host finished it", stage, deliveries)
}
