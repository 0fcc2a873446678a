// Package runner is the seam between a stage host and the code that does a
// stage's work: slots and a sink.
//
// A host keeps asking a Runner for a Slot. Acquire blocks until one is idle, so
// work goes to whoever is idle first. The host then hands the slot one Batch by
// Do, exactly once, and the slot settles each item of it through the Sink:
// chunks while it works, where the stage streams, and then exactly one outcome,
// an output or a fault. One bad item is one fault; its neighbours are settled
// by their own outcomes. When Do returns, the slot is spent; the runner offers
// it again by the next Acquire.
//
// Do's error speaks of the batch as a whole and of the items that it leaves
// unsettled: the runner cannot say which of them is at fault, so the host runs
// them again in halves until the one that fails does so alone. An error that
// wraps ErrNotStarted says that none of those ran and blames nobody, and one that
// wraps ErrDied that a process ended with them in hand. An item left unsettled
// without an error is the runner's fault.
//
// A runner that may be unable to serve for a while, though it is started, says so
// as Monitored.
//
// Implementations are tested by the promises in runner/runnertest.
package runner

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// ErrNotStarted says that a batch's unsettled items never ran.
var ErrNotStarted = errors.New("the batch did not start")

// ErrDied says that the process that ran the batch ended, or had to be ended,
// before it had answered for its unsettled items: it crashed, was killed, froze,
// took too long or did not make sense any more. Any of those items may be to
// blame, or none. They may have run; the host runs each of them alone, and not
// together again. The runner replaces the process by itself.
var ErrDied = errors.New("the process that ran the batch ended")

// ErrOutOfMemory says that the batch was too large for the memory at hand.
var ErrOutOfMemory = errors.New("out of memory")

// Place is where a runner serves.
type Place struct {
	Stage, Host string
	// MaxSize is the rows of the largest batch.
	MaxSize int
	// StartTimeout is how long a start may take.
	StartTimeout time.Duration
	// Complete, where set, returns the spec of the stage for one that the runner
	// says: a runner that warms up by its spec does so by that. It is a pure
	// function, and of what it returned it returns the same.
	Complete func(Spec) (Spec, error)
	Logger   *slog.Logger
	Meter    metric.Meter
}

// Placed is a Runner that is told where it serves, before Start.
type Placed interface{ Place(p Place) }

// Runner runs batches for one stage.
type Runner interface {
	// Spec says what the runner takes and gives. It is constant once Start has
	// returned.
	Spec() Spec
	// Concurrency is the number of slots. Like the spec it may be known only once
	// Start has returned, and is constant from then on.
	Concurrency() int
	// Start makes the runner ready: loads, compiles, warms up. It returns when
	// it is ready to run, or with the reason why it cannot be. The context
	// bounds the start alone.
	Start(ctx context.Context) error
	// Acquire returns an idle slot. It blocks until there is one or the
	// context ends; an error other than the context's is final.
	Acquire(ctx context.Context) (Slot, error)
	// Stop ends the runner after the last Do has returned; Acquire fails from
	// then on. It is safe on a runner that never started, and more than once. It
	// is not called while a Do does not return.
	Stop(ctx context.Context) error
}

// Monitored is a Runner that may be unable to serve for a while.
type Monitored interface {
	// Health returns nil as long as some slot falls idle sooner or later, and
	// otherwise why none does now. The channel is closed when that may have
	// changed; then one asks again.
	Health() (changed <-chan struct{}, err error)
}

// Staffed is a Runner of processes, and says how each is.
type Staffed interface {
	Workers() []Worker
}

// Worker is one of a runner's processes, or a gang of them.
type Worker struct {
	// State is STARTUP, READY, ERROR, SHUTDOWN or DEAD.
	State string
	// Incarnation counts its starts.
	Incarnation uint64
	// Cause is what it died of last, where it is not ready.
	Cause string
}

// Forcible is a Runner that can end what runs.
type Forcible interface {
	// Abandon ends every batch that runs, at once: Do returns with an error that
	// wraps ErrDied. The runner is only stopped after that.
	Abandon()
}

// Slot is the right to run one batch.
type Slot interface {
	// Do runs the batch and returns when every item that it will settle is
	// settled. The context ends when nobody wants any of the answers, or the
	// host gives up waiting; a host leaves without a Do that does not return
	// within seconds of that, and reports the runner as broken. Do is called at
	// most once, on a goroutine that other batches are run on later: what belongs
	// to it, such as a thread that is locked, is given back before Do returns.
	Do(ctx context.Context, batch Batch, sink Sink) error
	// Release gives the slot back unused.
	Release()
}

// Sink takes what a batch's items become. Its methods are safe for concurrent
// use and do not block on the network.
type Sink interface {
	// Chunk sends part of item i's answer ahead of its outcome. An error says
	// that it was not sent, as nobody wants more of it or the parts cannot
	// travel; the runner should settle the item.
	Chunk(i int, parts []payload.Part) error
	// Settle gives item i its one outcome. A second one for the same item is
	// refused with ErrSettled and reported as the runner's fault.
	Settle(i int, o Outcome) error
}

// Errors of a Sink.
var (
	ErrSettled   = errors.New("the item has its outcome already")
	ErrNoSuch    = errors.New("the batch has no such item")
	ErrCancelled = errors.New("nobody waits for the item any more")
)

// Outcome is what one item became: Fault, or else Parts.
type Outcome struct {
	Parts []payload.Part
	// Metadata goes to the caller beside the parts.
	Metadata map[string]string
	Fault    *fault.Fault
}

// Output returns the outcome of an item that went well.
func Output(parts ...payload.Part) Outcome { return Outcome{Parts: parts} }

// Failed returns the outcome of an item at fault.
func Failed(f *fault.Fault) Outcome { return Outcome{Fault: f} }

// Batch is a list of items that agree on model, datatypes, trailing shapes or
// content types, and on the parameters that the stage batches by.
type Batch struct {
	Items []Item
	// Rows is the sum of the items' rows.
	Rows int
	// Model is the same for all items.
	Model payload.ModelRef
	// Suspect says that the only item may have ended a process. A runner whose
	// processes run several batches at a time gives it one to itself, or others
	// would be blamed with it.
	Suspect bool
}

// Item is one request at one stage.
type Item struct {
	// RequestID is what the caller knows the request by.
	RequestID string
	// Inputs fit the runner's Spec, in its order, and have the rank that it
	// says. Where the spec names no inputs they are what the caller sent.
	// They are read-only: they share memory with the message that they came in, which is
	// kept where the item runs again or is given up on.
	Inputs []payload.Part
	// Rows is the item's extent on the batch axis, 1 where there is none.
	Rows       int
	Parameters payload.Parameters
	Metadata   map[string]string
	Deadline   time.Time
	// Cancelled is closed when nobody waits for the item any more. It may be
	// nil.
	Cancelled <-chan struct{}
}

// Input returns the input of that name.
func (it Item) Input(name string) (payload.Part, bool) { return payload.Find(it.Inputs, name) }
