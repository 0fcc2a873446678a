package stagehost

import (
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// event is something that happened; the loop applies one after the other.
type event interface{ apply(l *loop) }

// post gives an event to the loop. After the loop has ended it drops it.
func (h *Host) post(e event) {
	select {
	case <-h.looped:
		h.drop(e)
		return
	default:
	}
	select {
	case h.events <- e:
	case <-h.looped:
		h.drop(e)
	}
}

// tell posts an event that the bus calls back with. The bus must not wait, and
// the loop must not wait for itself, which calls the bus and may be called back
// before that returns: when there is no room a goroutine waits, until the loop
// has ended at the latest. There is one event at most for each item.
func (h *Host) tell(e event) {
	select {
	case h.events <- e:
	default:
		go h.post(e)
	}
}

// dropEvents drops what the loop has left when it ended.
func (h *Host) dropEvents() {
	for {
		select {
		case e := <-h.events:
			h.drop(e)
		default:
			return
		}
	}
}

// drop gives back what an event holds that the loop does not apply.
func (h *Host) drop(e event) {
	switch e := e.(type) {
	case *slotIdle:
		e.slot.Release()
	case *arrived:
		h.handBack(e.item, stopping())
	}
}

// handBack ends an item that the ledger does not hold: another host gets it,
// and who called directly gets the fault.
func (h *Host) handBack(it *item, f *fault.Fault) {
	if it.direct != nil {
		it.direct.finish(it, became{fault: f})
		return
	}
	h.say(it.delivery.Nak(0))
	h.puller.Settled(it.delivery)
}

func stopping() *fault.Fault { return fault.New(fault.ShuttingDown, "the host is stopping") }

// leaving is why the host gives back what a caller has sent to it.
func (l *loop) leaving() *fault.Fault {
	if l.draining || l.abandoned || l.lost {
		return stopping()
	}
	return fault.New(fault.NoCapacity, "the host's runner cannot run anything at the moment")
}
