// Package ledger has the state of every item on a host, and the events that each
// state allows:
//
//	queued -> running -> sending -> settled
//
// An item is admitted queued; its batch makes it running; its outcome, or its
// expiry, makes it sending, while its message is on its way to the next queue or
// the gateway; when that is acknowledged it is settled, by the verb that the
// ledger returns. A batch that failed as a whole goes back to queued. Each item is
// settled exactly once and then forgotten.
//
// The ledger is pure: no goroutine, lock, clock or channel. The host's loop owns
// it and applies events to it. An event that an item's state does not allow is an
// error and changes nothing: that catches second outcomes, late acknowledgements
// and events of forgotten items.
package ledger

import (
	"errors"
	"fmt"
)

// ID is an item on this host.
type ID uint64

// State is the state of an item.
type State uint8

// The states of an item that the ledger holds.
const (
	Queued State = iota
	Running
	Sending
)

// String returns the state's name.
func (s State) String() string {
	switch s {
	case Queued:
		return "queued"
	case Running:
		return "running"
	case Sending:
		return "sending"
	}
	return "unknown"
}

// Verb is how an item is settled with its queue.
type Verb uint8

const (
	// Ack deletes the item: the receiver has its outcome.
	Ack Verb = iota
	// Nak returns the item to its queue.
	Nak
	// Discard sends nothing: the item's queue is lost, or it never had one, and an ack
	// could only settle another item.
	Discard
)

// Errors of events.
var (
	// ErrFull means that the bound is reached.
	ErrFull = errors.New("the host holds as many items as it may")
	// ErrUnknown means that the ledger does not hold the item (any more).
	ErrUnknown = errors.New("unknown item")
	// ErrState means that the item's state does not allow the event.
	ErrState = errors.New("the item's state does not allow that")
	// ErrTwice means that the item is there already.
	ErrTwice = errors.New("the item is there already")
)

// Ledger holds the items of one host.
type Ledger struct {
	bound  int
	items  map[ID]*entry
	counts [3]int
}

type entry struct {
	state State
	// queue is the item's queue, epoch the creation of that.
	queue, epoch string
	orphan       bool
}

// New returns a ledger of at most bound items.
func New(bound int) *Ledger {
	return &Ledger{bound: bound, items: make(map[ID]*entry, bound)}
}

// Admit takes an item, queued. The epoch tells the queue of that name from its
// predecessors and successors; it is empty for an item without a queue.
func (l *Ledger) Admit(id ID, queue, epoch string) error {
	if _, there := l.items[id]; there {
		return fmt.Errorf("item %d: %w", id, ErrTwice)
	}
	if len(l.items) >= l.bound {
		return fmt.Errorf("item %d: %w: %d", id, ErrFull, l.bound)
	}
	l.items[id] = &entry{queue: queue, epoch: epoch, orphan: epoch == ""}
	l.counts[Queued]++
	return nil
}

// Dispatch records that a batch with the item goes to the runner.
func (l *Ledger) Dispatch(id ID) error { return l.move(id, Running, Queued) }

// Requeue records that the item's batch ended without an outcome for it.
func (l *Ledger) Requeue(id ID) error { return l.move(id, Queued, Running) }

// Send records that the item's outcome is known and on its way.
func (l *Ledger) Send(id ID) error { return l.move(id, Sending, Queued, Running) }

// Sent records that the outcome is acknowledged, or has no receiver. The item is
// forgotten; the verb settles it.
func (l *Ledger) Sent(id ID) (Verb, error) { return l.settle(id, Ack, Sending) }

// GiveBack records that this host will not finish the item. The item is forgotten;
// the verb settles it.
func (l *Ledger) GiveBack(id ID) (Verb, error) { return l.settle(id, Nak, Queued, Running, Sending) }

// QueueReplaced sets the queue's epoch: items of any other are settled by Discard.
func (l *Ledger) QueueReplaced(queue, epoch string) (orphans int) {
	for _, e := range l.items {
		if e.queue == queue && e.epoch != epoch && !e.orphan {
			e.orphan = true
			orphans++
		}
	}
	return orphans
}

// State returns where the item is, and false when the ledger does not hold it.
func (l *Ledger) State(id ID) (State, bool) {
	e, ok := l.items[id]
	if !ok {
		return 0, false
	}
	return e.state, true
}

// Alive calls f for every item whose delivery must be extended.
func (l *Ledger) Alive(f func(ID)) {
	for id, e := range l.items {
		if !e.orphan {
			f(id)
		}
	}
}

// Len returns the number of items held.
func (l *Ledger) Len() int { return len(l.items) }

// Count returns the number of items in the state.
func (l *Ledger) Count(s State) int { return l.counts[s] }

func (l *Ledger) move(id ID, to State, from ...State) error {
	e, err := l.find(id, from)
	if err != nil {
		return err
	}
	l.counts[e.state]--
	l.counts[to]++
	e.state = to
	return nil
}

func (l *Ledger) settle(id ID, verb Verb, from ...State) (Verb, error) {
	e, err := l.find(id, from)
	if err != nil {
		return Discard, err
	}
	l.counts[e.state]--
	delete(l.items, id)
	if e.orphan {
		return Discard, nil
	}
	return verb, nil
}

func (l *Ledger) find(id ID, from []State) (*entry, error) {
	e, ok := l.items[id]
	if !ok {
		return nil, fmt.Errorf("item %d: %w", id, ErrUnknown)
	}
	for _, s := range from {
		if e.state == s {
			return e, nil
		}
	}
	return nil, fmt.Errorf("item %d is %s: %w", id, e.state, ErrState)
}
