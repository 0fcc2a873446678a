package item

import (
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Drain begins the end: no more items are pulled.
func (l *Loop) Drain() {
	l.draining = true
	l.batcher.Drain()
	l.nakQueued()
}

// loseRunner ends the slots: none falls idle any more. Running batches may
// still end; queued ones get no slot, nor do any of the runner's idle ones.
func (l *Loop) loseRunner(err error) {
	l.Logger.Error("the runner is lost; queued items go to other hosts", "error", err)
	l.lost = true
	l.releaseSlots()
	l.nakQueued()
}

// Abandon naks everything that does not run.
func (l *Loop) Abandon() {
	l.abandoned = true
	l.nakEach(func(it *Item) bool { return it.state != running })
}

// LeaveBehind gives up what still runs. Deliveries return by themselves; the callers of local
// items get a fault, and nothing of the runs after it. An item whose outcome the runner has given
// is not the loop's until that has come.
func (l *Loop) LeaveBehind() {
	for _, it := range l.ledger.items {
		if it.env.Local == nil || it.state != running {
			continue
		}
		it.run.close()
		if slices.Contains(it.run.takeUnended(), it) && l.beginSend(it) {
			l.sendFaultInstead(it, stoppingFault())
		}
	}
}

// checkEmpty closes empty when a draining loop holds nothing any more.
func (l *Loop) checkEmpty() {
	if l.emptied || !l.draining || len(l.ledger.items) > 0 || l.running > 0 {
		return
	}
	l.emptied = true
	close(l.empty)
}

// nakQueued naks the items that wait for a slot when none will come. Before
// the drain they would be redelivered to this host again and again.
func (l *Loop) nakQueued() {
	if l.lost && l.draining {
		l.nakEach(func(it *Item) bool { return it.state == queued })
	}
}

// NakWaiting naks the items that wait for a slot, those whose run crashed only if it is said so.
func (l *Loop) NakWaiting(alsoCrashed bool) {
	l.nakEach(func(it *Item) bool { return it.state == queued && (alsoCrashed || it.crashes == 0) })
}

func (l *Loop) nakEach(of func(*Item) bool) {
	for _, it := range l.ledger.items {
		if of(it) {
			l.dequeue(it)
			l.nak(it)
		}
	}
}

// dequeue removes an item from the batches to come.
func (l *Loop) dequeue(it *Item) {
	l.batcher.Remove(it.id)
	for i, rerun := range l.reruns {
		l.reruns[i] = slices.DeleteFunc(rerun, func(other *Item) bool { return other == it })
	}
}

// nak ends an item that this host will not finish. It naks the delivery, or publishes a local
// item, except where that would repeat a reply. An item whose run crashed returns by itself after
// the ack wait, and as a suspect.
func (l *Loop) nak(it *Item) {
	if it.replyStored {
		// Its result is stored; only the stored reply is on its way.
		l.settle(it)
		return
	}
	if !it.mayRunAgain() && !it.env.StoresResult() {
		// The gateway detects that no more chunks arrive.
		l.Metrics.countUndelivered("dropped")
		l.settle(it)
		return
	}
	if it.direct != nil {
		it.direct.finish(it, runner.Failed(l.leavingFault()))
	}
	if it.env.Local != nil {
		l.publishLocal(it)
		return
	}
	it.span().AddEvent("returned")
	l.settleWith(it, func(d bus.Delivery) error { return it.nakWithoutCrash(d, 0) }, queued, running, sending)
}

// nakWithoutCrash naks a delivery of the item, unless its run crashed.
func (it *Item) nakWithoutCrash(d bus.Delivery, delay time.Duration) error {
	if it.crashes > 0 {
		return nil
	}
	return d.Nak(delay)
}

// publishLocal gives a local item to its queue, under the message ID that it would have had
// there. The caller gets a fault where that fails, or where a message of the item was on its
// way already.
func (l *Loop) publishLocal(it *Item) {
	if it.state == sending {
		l.sendFaultInstead(it, stoppingFault())
		return
	}
	if !l.beginSend(it) {
		return
	}
	it.span().AddEvent("returned")
	env := *it.env
	env.LocalAttempts, env.LocalCrash = 1, it.crashes > 0
	message, err := l.Sender.Item(&env)
	if err != nil {
		l.sendFaultInstead(it, bus.FaultOf(err, l.Stage))
		return
	}
	l.replaceOutbox(it, []outgoing{{message, toOwn}})
	l.send(it)
}

// leavingFault is what callers get for an item that no other host can take.
func (l *Loop) leavingFault() *fault.Fault {
	if l.draining || l.abandoned || l.lost {
		return stoppingFault()
	}
	return fault.New(fault.NoCapacity, "the host's runner cannot run anything at the moment")
}

func stoppingFault() *fault.Fault { return fault.New(fault.ShuttingDown, "the host is stopping") }
