package stagehost

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Sender sends what becomes of items: internal/bus is one. Its errors are that package's; what it
// makes a message of fails with ErrTooLarge.
type Sender interface {
	// HandOver hands an item to a host of its stage in this process. Where it is false, the item
	// is published.
	HandOver(item *envelope.Envelope) bool
	// HandOverReply hands a reply or a chunk to the gateway of a local item.
	HandOverReply(item *envelope.Envelope, reply *envelope.Reply) (bus.Receipt, error)
	Item(item *envelope.Envelope) (bus.Message, error)
	// Forward makes a message for another host of the item's stage, which takes the delivery.
	Forward(item *envelope.Envelope, delivery bus.Delivery) (bus.Message, error)
	Reply(gateway pipeline.GatewayID, reply *envelope.Reply) (bus.Message, error)
	// Publish calls done once, from any goroutine and maybe before it returns.
	Publish(message bus.Message, done func(bus.Receipt, error))
	PublishUnacked(message bus.Message) error
	Connected() bool
}

// Records keeps what outlives the host. Result and DeadLetter make the message that stores one.
type Records interface {
	Result(result *envelope.Result) (bus.Message, error)
	DeadLetter(dead *envelope.DeadLetter, delivery bus.Delivery) (bus.Message, error)
	// AddRun records a run of an item, RunsOf returns the records of all, and EndRun deletes them.
	AddRun(ctx context.Context, item *envelope.Envelope, run envelope.RunRecord) ([]envelope.RunRecord, error)
	RunsOf(ctx context.Context, item *envelope.Envelope) ([]envelope.RunRecord, error)
	EndRun(ctx context.Context, item *envelope.Envelope) error
}

// records are a host's, on the broker.
type records struct {
	*store.Results
	*store.DeadLetters
	*store.Runs
}

// Models says which items may run. The loop calls all methods but contract.
type Models interface {
	// contract returns what the inputs of an item have to fit; false while its model is not loaded.
	// Any goroutine calls it.
	contract(item *envelope.Envelope) (*schema.Contract, bool)
	// bind is called once, before the others.
	bind(l *loop)
	// admit reports whether an item may run. Otherwise it waits for its model, or has got its
	// fault. leave ends that wait, and the use of the model.
	admit(now time.Time, it *item) bool
	leave(it *item)
	// act does what is due, and next returns when something is, if that is earlier.
	act(now time.Time)
	next(than time.Time) time.Time
	// ran takes the duration of a run. runAgain has the items of one that found no model run
	// again; false means that no other run would find it.
	ran(r *run, took time.Duration)
	runAgain(now time.Time, items []*item) bool
	// publish has others know how the models stand.
	publish(now time.Time)
}

// oneModel is the one model of a runner, which is always there.
type oneModel struct{ itsContract *schema.Contract }

var (
	_ Sender  = (*bus.Bus)(nil)
	_ Records = records{}
	_ Models  = oneModel{}
	_ Models  = (*modelSet)(nil)
)

func (m oneModel) contract(*envelope.Envelope) (*schema.Contract, bool) { return m.itsContract, true }
func (oneModel) bind(*loop)                                             {}
func (oneModel) admit(time.Time, *item) bool                            { return true }
func (oneModel) leave(*item)                                            {}
func (oneModel) act(time.Time)                                          {}
func (oneModel) next(than time.Time) time.Time                          { return than }
func (oneModel) ran(*run, time.Duration)                                {}
func (oneModel) runAgain(time.Time, []*item) bool                       { return false }
func (oneModel) publish(time.Time)                                      {}

// loopSettings configure a loop and its pumps.
type loopSettings struct {
	Mesh  pipeline.MeshName
	Stage pipeline.StageName
	Host  pipeline.HostID
	// These are as in Config, with every 0 replaced.
	Batch        Batch
	Stream       StreamSettings
	MaxInFlight  int
	CrashLimit   int
	ExposeErrors ExposeErrors
	Queue        QueueSettings
	Runner       runner.Runner
	// Bound is how many items the ledger holds.
	Bound int
	// StartTook is how long the runner took to start: its workers take as long.
	StartTook time.Duration
	// ConnectedAt is when this process connected to the broker as a host.
	ConnectedAt time.Time
}

// streams reports whether the runner answers in chunks.
func (s loopSettings) streams() bool { return s.Batch.Mode == batch.Stream }

// pumps are what brings events to the loop and runs its batches. Any goroutine may use them; only
// the loop, which has them too, changes items.
type pumps struct {
	settings loopSettings
	metrics  *metrics
	tracer   trace.Tracer
	log      *slog.Logger
	sender   Sender
	records  Records
	models   Models
	// streamMissing is called when a message to store has found no stream.
	streamMissing func()

	// events go to the loop; loopDone is closed when it takes no more. cancels are the cancel
	// messages that it has not taken yet.
	events   chan event
	loopDone chan struct{}
	cancels  pendingCancels
	// refusal is what items get that are pulled all the same while the host serves nobody.
	refusal atomic.Pointer[fault.Fault]
	// busy is true while items wait for a slot; load counts them.
	busy     atomic.Bool
	load     load
	slotTime slotTime

	// runs are all goroutines but the loop, runCtx is the context of batches. Goroutines that have
	// run a batch wait in idle, and take another from tasks.
	runs   sync.WaitGroup
	runCtx context.Context
	tasks  chan *run
	idle   chan struct{}
}
