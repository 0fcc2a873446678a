package batch

import (
	"time"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// ClassLead is what a class is worth in waiting time: an item goes before one
// of the class below unless that one arrived more than this earlier. So high
// goes before normal and normal before low, and low still gets its turn.
const ClassLead = time.Second

// ID is the host's own number for an item.
type ID uint64

// Key is a batch key. Only items of equal keys share a batch.
type Key string

// Item is what the policy knows of a request.
type Item struct {
	ID  ID
	Key Key
	// Rows is the item's extent on the batch axis, at least 1.
	Rows int
	// Bytes is the size of the item's payload.
	Bytes int
	// Arrival is when the host got the item; max_wait counts from here.
	Arrival time.Time
	// Deadline is when nobody wants the answer any more; the zero time is
	// never.
	Deadline time.Time
	// Class is normal where it is empty.
	Class pipeline.Class
	// Alone says that the item must be the only one of its batch.
	Alone bool
}

// Batch is a list of items to run together.
type Batch struct {
	Key Key
	// Items are in the order in which they were served.
	Items []Item
	// Rows and Bytes are the sums over the items.
	Rows   int
	Bytes  int
	Reason Reason
}

// Reason says why a batch was dispatched when it was.
type Reason string

// The reasons. A Batcher gives the first six; the host gives the others to the
// batches that it makes itself.
const (
	// Full: the limits let no further item in, or the next in order.
	Full Reason = "full"
	// Idle: a worker was idle and waiting would have gained nothing.
	Idle Reason = "idle"
	// Gather: the batch was held for the stragglers of an earlier one, and is
	// complete or was held as long as it may be.
	Gather Reason = "gather"
	// Timer: the oldest item had waited max_wait.
	Timer Reason = "timer"
	// Deadline: the batch was held, and later it might be too late for one of
	// its items.
	Deadline Reason = "deadline"
	// Drain: nothing is held back any more.
	Drain Reason = "drain"
	// Retry: the batch is part of one that failed.
	Retry Reason = "retry"
	// Direct: the item went past the batcher.
	Direct Reason = "direct"
)

// Reasons returns all of them.
func Reasons() []Reason { return []Reason{Full, Idle, Gather, Timer, Deadline, Drain, Retry, Direct} }

// Run is a batch that a worker has finished.
type Run struct {
	Key   Key
	Items int
	Rows  int
	// Took is the time that the worker needed; 0 where it says nothing about
	// later batches, as when the run failed.
	Took time.Duration
}
