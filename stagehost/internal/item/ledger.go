package item

import (
	"errors"
	"fmt"
	"slices"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// ledger holds the items on a host, and checks the events that the state of each
// allows:
//
//	queued -> running -> sending -> settled
//
// An item is admitted queued; its batch makes it running; its outcome, or its
// expiry, makes it sending, while its message is on its way to the next queue or
// the gateway; when that is acknowledged it is settled. A batch that failed as a
// whole goes back to queued. Each item is settled exactly once and then forgotten.
//
// The ledger is pure: no goroutine, lock, clock or channel. The loop owns it. An
// event that an item's state does not allow is an error and changes nothing: that
// catches second outcomes, late acknowledgements and events of forgotten items.
type ledger struct {
	bound  int
	items  map[batch.ID]*Item
	counts [3]int
	// released counts the items that do not count for max_in_flight.
	released int
}

// itemState is the state of an item that the ledger holds.
type itemState uint8

const (
	queued itemState = iota
	running
	sending
)

// String returns the state's name.
func (s itemState) String() string { return [...]string{"queued", "running", "sending"}[s] }

func newLedger(bound int) ledger {
	return ledger{bound: bound, items: map[batch.ID]*Item{}}
}

var errLedgerFull = errors.New("the host holds as many items as it may")

// admit takes an item, queued. An item of a direct call, or a local one, has no queue.
func (l *ledger) admit(it *Item) error {
	if l.items[it.id] != nil {
		return fmt.Errorf("item %d is in the ledger already", it.id)
	}
	if len(l.items) >= l.bound {
		return fmt.Errorf("item %d: %w: %d", it.id, errLedgerFull, l.bound)
	}
	l.items[it.id] = it
	it.state, it.noQueue = queued, it.delivery.Epoch == ""
	l.counts[queued]++
	return nil
}

// move moves an item that is in one of the states to another.
func (l *ledger) move(it *Item, to itemState, from ...itemState) error {
	if err := l.check(it, from); err != nil {
		return err
	}
	l.counts[it.state]--
	l.counts[to]++
	it.state = to
	return nil
}

// forget ends an item that is in one of the states.
func (l *ledger) forget(it *Item, from ...itemState) error {
	if err := l.check(it, from); err != nil {
		return err
	}
	l.counts[it.state]--
	if it.isReleased {
		l.released--
	}
	delete(l.items, it.id)
	return nil
}

func (l *ledger) check(it *Item, from []itemState) error {
	switch {
	case l.items[it.id] != it:
		return fmt.Errorf("item %d is unknown", it.id)
	case !slices.Contains(from, it.state):
		return fmt.Errorf("item %d is %s", it.id, it.state)
	}
	return nil
}

// ReplaceQueue marks the items of a queue with another epoch as without a queue, and
// returns how many those are.
func (l *ledger) ReplaceQueue(queue QueueKey, epoch bus.Epoch) (marked int) {
	for _, it := range l.items {
		if of := (QueueKey{it.delivery.Stage, it.delivery.Durability}); of == queue && it.delivery.Epoch != epoch && !it.noQueue {
			it.noQueue = true
			marked++
		}
	}
	return marked
}

// QueueKey names a queue on the broker.
type QueueKey struct {
	Name       pipeline.StageName
	Durability pipeline.Durability
}
