package batch

import (
	"errors"
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Mode is when a batch may be held although a slot is idle.
type Mode string

// The modes.
const (
	// Adaptive holds a batch while that is likely to save more time than it costs. It
	// is what an empty mode means.
	Adaptive Mode = "adaptive"
	// Eager gives an idle slot what is queued at once, but for gathering.
	Eager Mode = "eager"
	// Window holds a batch up to max_wait for more items.
	Window Mode = "window"
	// Stream gives every item to an idle slot by itself, at once. It is for runners
	// that answer in chunks.
	Stream Mode = "stream"
)

// Settings are the limits of one stage's batches.
type Settings struct {
	Mode Mode `yaml:"mode"`
	// MaxSize is the most rows of a batch, at least 1.
	MaxSize int `yaml:"max_size"`
	// MaxBytes is the most payload bytes of a batch, and the most bytes of its padded
	// tensors; 0 is no limit.
	MaxBytes int `yaml:"max_bytes,size"`
	// MaxWait is the longest that an item is held while a slot is idle,
	// counted from its arrival in window mode. In adaptive and eager mode 0 turns
	// holding off.
	MaxWait time.Duration `yaml:"max_wait"`
	// By names the parameters that items of one batch must agree on. The host makes the
	// items' batch keys of them.
	By []string `yaml:"by"`
	// OneByOne is true where the runner runs the items of a batch one after the other.
	OneByOne bool `yaml:"-"`
}

// Validate reports every setting that cannot be used, by its key.
func (s Settings) Validate() error {
	errs := []error{s.Mode.validate()}
	if s.MaxSize < 1 {
		errs = append(errs, fmt.Errorf("batch.max_size: %d rows is less than 1", s.MaxSize))
	}
	if s.MaxBytes < 0 {
		errs = append(errs, fmt.Errorf("batch.max_bytes: %d is negative; 0 is no limit", s.MaxBytes))
	}
	if s.MaxWait < 0 {
		errs = append(errs, fmt.Errorf("batch.max_wait: %s is negative", s.MaxWait))
	}
	if s.Mode == Window && s.MaxWait == 0 {
		errs = append(errs, errors.New("batch.max_wait: window mode needs a time to wait; use eager mode to wait for nothing"))
	}
	return errors.Join(errs...)
}

func (m Mode) validate() error {
	switch m {
	case "", Adaptive, Eager, Window, Stream:
		return nil
	default:
		return fmt.Errorf("batch.mode: expected adaptive, eager, window or stream, got %q", string(m))
	}
}

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
	// Padded are the tensors that the runner pads. Items of one key have the same ones.
	Padded []Padded
	// Arrival is when the host received the item; max_wait counts from here.
	Arrival time.Time
	// Deadline is when the item expires; the zero time is never.
	Deadline time.Time
	// Class is normal where it is empty.
	Class pipeline.Class
	// Alone is true where the item must be the only one of its batch.
	Alone bool
	// Limit bounds the batches with the item; nil is no bound. Items of one key share it.
	Limit *Limit
}

// Padded is a tensor that the runner pads to the longest extents of its batch.
type Padded struct {
	Name string
	// Shape is of one row, and ElementSize in bytes.
	Shape       []int64
	ElementSize int64
}

// Limit bounds how many batches run at a time of the items that share it. The batches are
// counted by whoever runs them, also those that no Batcher made.
type Limit struct {
	// Most is at least 1.
	Most    int
	running int
	// alone is the group of its items that must be alone.
	alone *group
}

// Add counts batches that begin, or end where n is negative.
func (l *Limit) Add(n int) {
	if l != nil {
		l.running += n
	}
}

// Left returns how many batches may begin of so many.
func (l *Limit) Left(n int) int {
	if l == nil {
		return n
	}
	return min(n, l.Most-l.running)
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

// Reason is why a batch was dispatched when it was.
type Reason string

// The reasons. A Batcher gives the first six; the host gives the others to the
// batches that it makes itself.
const (
	// Full: the limits let no further item in, or the next in order.
	Full Reason = "full"
	// Idle: a slot was idle, or about to be, and waiting would have gained nothing.
	Idle Reason = "idle"
	// Gather: the batch was held for the returning callers of an earlier one, and is
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

// Run is a batch that a slot has finished.
type Run struct {
	Key   Key
	Items int
	Rows  int
	// Took is how long the run took; 0 where it predicts nothing, as when
	// the run failed.
	Took time.Duration
}
