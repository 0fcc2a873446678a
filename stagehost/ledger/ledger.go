// Package ledger says where every item on a host is, and which steps it may
// take next:
//
//	queued -> running -> sending -> settled
//
// An item is admitted queued; a batch takes it running; its outcome, or its
// expiry, makes it sending, while what it became is on its way to the next
// queue or the gateway; when that is acknowledged it is settled, and the ledger
// says by which word. A batch that failed as a whole goes back to queued. Each
// item is settled exactly once and then forgotten.
//
// The ledger is pure: no goroutine, lock, clock or channel. The host's loop
// owns it, posts events to it and does what it says. An event that an item's
// state does not allow is an error and changes nothing, which is how second
// outcomes, late acknowledgements and events of forgotten items are caught.
package ledger

import (
	"errors"
	"fmt"
)

// ID is an item on this host.
type ID uint64

// State is where an item is.
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
	// Ack forgets the item: what it became is in good hands.
	Ack Verb = iota
	// Nak gives the item back to its queue.
	Nak
	// Discard says nothing: the item's queue is gone, or it never had one, and
	// a word about it could only hit another's.
	Discard
)

// Errors of events.
var (
	// ErrFull says that the bound is reached.
	ErrFull = errors.New("the host holds as many items as it may")
	// ErrUnknown says that the ledger does not hold the item (any more).
	ErrUnknown = errors.New("unknown item")
	// ErrState says that the item's state does not allow the event.
	ErrState = errors.New("the item's state does not allow that")
	// ErrTwice says that the item is there already.
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
	// queue is where the item came from, epoch when that was made.
	queue, epoch string
	orphan       bool
}

// New returns a ledger of at most bound items.
func New(bound int) *Ledger {
	return &Ledger{bound: bound, items: make(map[ID]*entry, bound)}
}

// Admit takes an item, queued. The epoch tells the queue of that name that it
// came from from those before and after, and is empty for an item that came from
// none.
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

// Dispatch says that a batch with the item goes to the runner.
func (l *Ledger) Dispatch(id ID) error { return l.move(id, Running, Queued) }

// Requeue says that the item's batch ended without an outcome for it.
func (l *Ledger) Requeue(id ID) error { return l.move(id, Queued, Running) }

// Send says that it is known what the item becomes, and that it is on its way.
func (l *Ledger) Send(id ID) error { return l.move(id, Sending, Queued, Running) }

// Sent says that what the item became is acknowledged, or that nobody is left
// to have it. The item is forgotten; the verb settles it.
func (l *Ledger) Sent(id ID) (Verb, error) { return l.settle(id, Ack, Sending) }

// GiveBack says that this host will not finish the item. The item is
// forgotten; the verb settles it.
func (l *Ledger) GiveBack(id ID) (Verb, error) { return l.settle(id, Nak, Queued, Running, Sending) }

// QueueReplaced says what the queue's epoch is now: its items of any other are
// settled by Discard.
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

// Alive calls f for every item whose queue must hear that it is still in hand.
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
