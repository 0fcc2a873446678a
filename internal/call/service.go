// Package call is a gateway's one request path: admit, resolve, check, register,
// publish, await, settle. Every front calls it, and nothing else of a gateway
// publishes requests.
//
//	s, err := call.New(settings)
//	err = s.Start(bus)              // receive replies and cancel messages
//	response, err := s.Infer(ctx, request)
//	response, err = s.Result(ctx, requestID, wait)
//	err = s.Cancel(ctx, requestID)
//	report, err := s.Explain(ctx, requestID)
//	err = s.Stop(ctx)               // reject new requests, wait for those in flight
//
// Every error is a *fault.Fault whose metadata carry the request ID, as soon as
// there is one. Package admission lists the reasons to reject a request. A call ends
// at its deadline at the latest, whatever happens to the mesh; only a stream's emit
// can hold it longer. A call that leaves too many chunks unread ends with SLOW_READER.
// docs/design/settling.md has durable requests, idempotency keys and cancels.
//
// A call belongs to the tenant of its context, see budget.WithTenant. Keys, results and requests of
// one tenant do not exist for another: Result returns NOT_FOUND, and Cancel does nothing.
// Service is safe for concurrent use.
package call

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/admission"
	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/explain"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/route"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Limits bound requests: keys of a mesh file's section gateway. 0 means the default.
type Limits struct {
	// Timeout is a request's where neither it nor its pipeline sets one. MaxTimeout
	// bounds all timeouts.
	Timeout    time.Duration `yaml:"timeout"`
	MaxTimeout time.Duration `yaml:"max_timeout"`
	// MaxInFlight bounds the requests in flight.
	MaxInFlight int `yaml:"max_in_flight"`
	// HostGrace is how long a request in memory waits for its first step while
	// the step's stage has no host.
	HostGrace time.Duration `yaml:"host_grace"`
	// MaxPayload bounds the inputs of a request, in bytes; 0 means what the
	// broker takes.
	MaxPayload int `yaml:"max_payload,size"`
	// Metadata are the keys that a request may hand to runners.
	Metadata []string `yaml:"metadata"`
}

// Validate checks the limits. Messages begin with the key.
func (l Limits) Validate() error {
	errs := []error{
		config.NotNegative("max_in_flight", l.MaxInFlight),
		config.NotNegative("timeout", l.Timeout),
		config.NotNegative("max_timeout", l.MaxTimeout),
		config.NotNegative("host_grace", l.HostGrace),
	}
	if longest := cmp.Or(l.MaxTimeout, DefaultMaxTimeout); l.Timeout > longest {
		errs = append(errs, fmt.Errorf("timeout: %s is more than the max_timeout of %s", l.Timeout, longest))
	}
	return errors.Join(errs...)
}

// Settings are the request path's.
type Settings struct {
	Limits

	Mesh    pipeline.MeshName
	Gateway pipeline.GatewayID
	// Router knows what callers may name.
	Router *route.Router
	// Specs returns the known specs of stages, by stage name; nil means that none is known.
	Specs func() map[string]*stagev1.Spec
	// Adapt returns a request whose only input is JSON or MessagePack without a name as the pipeline
	// takes it, in reserved memory; nil leaves all as they are.
	Adapt func(r *request.Request, p pipeline.Pipeline, memory *budget.Account) (*request.Request, error)
	// Budget bounds the bytes of all requests in flight. Ports reserve the bytes of the
	// request's body in the account of the context; nil means no bound.
	Budget *budget.Pool
	// Activation has requests wait for the first host of some stages; nil has none wait.
	Activation *Activation
	// Shared is true where there are several tenants, each of which leaves space to the others.
	Shared bool
	// Results are where results are stored: the same as the hosts'.
	Results store.Settings
	// Idempotency is where idempotency keys are stored. Its retention is how long a
	// key means its request; 0 means as long as results are stored. See ValidateWindow.
	Idempotency store.Settings
	Logger      *slog.Logger
	Meter       metric.Meter
	// Tracer makes the spans of the requests that Sampling chooses; nil means that nothing is
	// traced.
	Tracer   trace.Tracer
	Sampling tracing.Sampling
}

// ValidateWindow checks that an idempotency key means its request for longer than any
// request takes, and for no longer than its answer is stored. Errors begin with the key
// of a mesh file.
func (s Settings) ValidateWindow() error {
	stored := cmp.Or(s.Results.Retention, store.DefaultResultRetention)
	window := cmp.Or(s.Idempotency.Retention, stored)
	if window > stored {
		return fmt.Errorf("idempotency.retention: %s is longer than the %s of results.retention: a key would outlive its answer", window, stored)
	}
	longest := cmp.Or(s.MaxTimeout, DefaultMaxTimeout)
	if window > longest {
		return nil
	}
	const forgotten = "an idempotency key would be forgotten while its request runs"
	switch {
	case s.Idempotency.Retention != 0:
		return fmt.Errorf("idempotency.retention: %s is no longer than the %s of gateway.max_timeout: %s", window, longest, forgotten)
	case s.Results.Retention != 0:
		return fmt.Errorf("results.retention: %s is no longer than the %s of gateway.max_timeout: %s", window, longest, forgotten)
	}
	return fmt.Errorf("gateway.max_timeout: %s is no shorter than the %s of results.retention: %s; raise results.retention", longest, window, forgotten)
}

// Defaults of Settings.
const (
	DefaultTimeout     = 30 * time.Second
	DefaultMaxTimeout  = 10 * time.Minute
	DefaultMaxInFlight = 4096

	// waitsShare is the part of the requests in flight that may wait for a stored result:
	// one in so many.
	waitsShare = 4
)

// Caller is what fronts need of a Service.
//
// Its errors have a *fault.Fault in their chain; the fault's metadata RequestIDKey is the
// request's ID where one was assigned. Stream calls emit in order, and not after it returned;
// an error of emit ends the call.
type Caller interface {
	Infer(ctx context.Context, r *request.Request) (*request.Response, error)
	Stream(ctx context.Context, r *request.Request, emit func(request.Chunk) error) (*request.Response, error)
	Result(ctx context.Context, requestID string, wait time.Duration) (*request.Response, error)
	Cancel(ctx context.Context, requestID string) error
	// RequestOf returns the ID of the request that has an idempotency key.
	RequestOf(ctx context.Context, k request.Key) (requestID string, err error)
}

var _ Caller = (*Service)(nil)

// Service is the request path of one gateway.
type Service struct {
	settings Settings
	metrics  *metrics
	tracer   *tracer
	bus      *bus.Bus
	// These reject requests.
	limiter      *admission.Limiter
	availability *admission.Availability
	// activations are nil where no request waits for a first host.
	activations *activations
	// waits bounds the requests that wait for a stored result or a load: they must leave room
	// for others.
	waits *budget.Pool
	// shadows run answered requests again; shadowBytes bounds what they hold.
	shadows     *tasks
	shadowBytes *budget.Pool
	// taps look at requests that have ended; nil ones are free.
	taps [maxTaps]atomic.Pointer[tap]

	// pieces bounds the steps of pipelines with blocks that run at a time.
	pieces   *semaphore.Weighted
	graphs   graphs
	averages averages

	table  *table
	unsent unsent
	// finished has the last requests that ended.
	finished      *explain.Ring
	results       *store.Results
	resultsStream *store.LazyStream
	// shares are those that requests have asked, by the name of the stream.
	shares  sync.Map
	keys    *keys
	cancels *cancels

	stopReplies func() error
	stopCancels func() error
	stopWatch   context.CancelFunc
	store       storeWatch
	watches     sync.WaitGroup
}

// New returns a service that is not started.
func New(s Settings) (*Service, error) {
	if err := pipeline.ValidName("gateway", string(s.Gateway)); err != nil {
		return nil, err
	}
	if err := s.ValidateWindow(); err != nil {
		return nil, err
	}
	s.Timeout = cmp.Or(s.Timeout, DefaultTimeout)
	s.MaxTimeout = cmp.Or(s.MaxTimeout, DefaultMaxTimeout)
	s.HostGrace = cmp.Or(s.HostGrace, bus.DefaultHostGrace)
	s.MaxInFlight = cmp.Or(s.MaxInFlight, DefaultMaxInFlight)
	s.Idempotency.Retention = cmp.Or(s.Idempotency.Retention, s.Results.Retention)
	out := &Service{
		settings: s, limiter: admission.NewLimiter(s.MaxInFlight, s.Shared), waits: budget.NewPool(budget.Settings{
			Limit: int64(max(1, s.MaxInFlight/waitsShare)), Shared: s.Shared,
			Name: "waits for results or loads", Key: "gateway.max_in_flight, of which they are a quarter; ask without a wait",
		}),
		pieces:      semaphore.NewWeighted(int64(piecesPerCall * s.MaxInFlight)),
		table:       newTable(tableLimits{calls: (2+piecesPerCall)*s.MaxInFlight + maxShadows, replies: streamReplies, bytes: streamBytes, shared: streamsBytes}),
		activations: newActivations(s.Activation),
		finished:    explain.NewRing(), shadows: newTasks(maxShadows), shadowBytes: budget.NewPool(budget.Settings{Limit: maxShadowBytes}),
		graphs: graphs{resumed: newTasks(s.MaxInFlight), ends: newTasks(s.MaxInFlight)},
	}
	var err error
	if out.metrics, err = newMetrics(out); err == nil {
		out.tracer, err = newTracer(s)
	}
	return out, err
}

// Start receives replies and cancel messages from the bus, and watches the queues
// and stages that calls wait for.
func (s *Service) Start(b *bus.Bus) error {
	s.bus = b
	s.availability = admission.NewAvailability(b, s.settings.Shared, s.limiter.Closing().Done())
	if err := s.availability.Report(s.settings.Meter); err != nil {
		return err
	}
	hasBroker := b.BrokerError() == nil
	if hasBroker {
		if err := s.store.report(s.settings.Meter, b); err != nil {
			return err
		}
	}
	s.results = store.NewResults(b, s.settings.Results)
	s.resultsStream = s.NewLazyStream("the broker stores no results", s.results.Ensure)
	s.keys = newKeys(s)
	s.cancels = newCancels(b, s.results, s.settings.MaxInFlight, s.metrics.countCancel)
	s.cancels.onDeleted = s.availability.Deleted
	var err error
	if s.stopReplies, err = b.ServeReplies(s.settings.Gateway, s.receiveReply); err != nil {
		return err
	}
	if s.stopCancels, err = b.ServeCancels(s.receiveCancel); err != nil {
		return errors.Join(err, s.stopReplies())
	}
	if err = b.ServeExplain(func(id pipeline.RequestID, reply func(*meshv1.ExplainAnswer)) { reply(s.answerOf(id)) }); err != nil {
		return errors.Join(err, s.stopCancels(), s.stopReplies())
	}
	if err = b.ServeRequests(func(q *meshv1.InFlightQuestion, reply func(*meshv1.InFlightAnswer)) { reply(s.inFlight(q)) }); err != nil {
		return errors.Join(err, s.stopCancels(), s.stopReplies())
	}
	if err = s.serveDemand(); err != nil {
		return errors.Join(err, s.stopCancels(), s.stopReplies())
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.stopWatch = cancel
	s.watches.Go(func() { s.watchQueues(ctx, b.Reconnects()) })
	s.watches.Go(func() { s.watchConnection(ctx, b.Reconnects()) })
	s.watches.Go(func() { s.watchClock(ctx, b.Reconnects()) })
	if hasBroker {
		s.watches.Go(func() { s.watchStore(ctx) })
		s.watches.Go(func() { s.watchGraphs(ctx) })
	}
	s.watches.Go(func() { s.watchDeadlines(ctx) })
	return nil
}

// Stop rejects new requests and waits for those in flight until the context ends;
// then it fails those that are left, and returns the context's cause. It waits for
// cancellations, which take a second, or five where there are many, and for
// idempotency keys that are released. Then it stops receiving replies.
func (s *Service) Stop(ctx context.Context) error {
	s.limiter.Close()
	s.shadows.stop(0)
	s.graphs.resumed.stop(0) // another gateway goes on
	err := s.limiter.AwaitIdle(ctx)
	if err != nil {
		err = errors.Join(context.Cause(ctx), s.failPending())
	}
	s.cancels.running.stop(cancelTimeout)
	s.graphs.ends.stop(storeTimeout)
	s.keys.stop()
	s.stopWatch()
	s.watches.Wait()
	s.availability.Stop()
	return errors.Join(err, s.stopCancels(), s.stopReplies())
}

// failTimeout is how long failed calls have to return.
const failTimeout = time.Second

// failPending fails the calls that still wait.
func (s *Service) failPending() error {
	f := fault.New(fault.ShuttingDown, "the gateway stopped before there was an answer; the result of a durable request is stored, and can be fetched by its ID")
	s.table.close(f)
	s.keys.watches.stop(0) // what they follow goes on, and they do not
	ctx, cancel := context.WithTimeout(context.Background(), failTimeout)
	defer cancel()
	return s.limiter.AwaitIdle(ctx)
}

// Limiter admits the requests of the gateway.
func (s *Service) Limiter() *admission.Limiter { return s.limiter }

// InFlight returns how many requests are admitted and not answered, including those
// that wait for capacity or for a stored result.
func (s *Service) InFlight() int { return s.limiter.InFlight() }

// receiveReply is the handler of the shared reply subscription.
func (s *Service) receiveReply(id pipeline.ExecutionID, data []byte) meshv1.ReplyDisposition {
	isFinal, err := envelope.PeekTerminal(data)
	if err != nil {
		s.metrics.droppedReply("malformed")
		return malformed
	}
	return s.deliver(id, isFinal, message{data: data, size: len(data)})
}

func (s *Service) deliver(id pipeline.ExecutionID, isFinal bool, m message) meshv1.ReplyDisposition {
	out := s.table.deliver(id, isFinal, m)
	if out == unknown && isFinal {
		s.completeRecord(id, m)
	}
	if out != delivered {
		s.metrics.droppedReply(map[meshv1.ReplyDisposition]string{unknown: "late", duplicate: "duplicate", overflow: "overflow"}[out])
	}
	return out
}

// completeRecord adds the timeline of a final reply that came too late to the record of its
// request.
func (s *Service) completeRecord(id pipeline.ExecutionID, m message) {
	s.finished.Complete(id, func() []request.StepTiming {
		if r, err := m.decode(); err == nil {
			return r.Timings
		}
		return nil
	})
}

// localGateway is the service as hosts in this process see it.
type localGateway Service

var _ envelope.LocalGateway = (*localGateway)(nil)

// Deliver implements envelope.LocalGateway.
func (g *localGateway) Deliver(r *envelope.Reply) meshv1.ReplyDisposition {
	return (*Service)(g).deliver(r.ExecutionID, r.Terminal(), message{reply: r, size: payload.WireSize(r.Parts)})
}

// Queued implements envelope.LocalGateway.
func (g *localGateway) Queued(id pipeline.ExecutionID, position int, seq uint64) {
	g.table.recordQueued(id, position, seq)
}

// Ready returns nil when requests can be served, else a fault that says why not.
func (s *Service) Ready() error {
	if err := s.bus.ConnectionError(); err != nil {
		return store.Unavailable(err)
	}
	if f := s.checkClock(); f != nil {
		return f
	}
	return nil
}

// checkClock returns a fault where the gateway's deadlines would be wrong for hosts and
// other gateways.
func (s *Service) checkClock() *fault.Fault {
	if err := s.bus.ClockError(); err != nil {
		return fault.Newf(fault.NoCapacity, "this gateway accepts no requests: %w", err).WithRetryAfter(budget.RetryAfter)
	}
	return nil
}

// PipelineReady returns nil when every stage of the pipeline has a host, else a
// fault that says which has none, or that there is no such pipeline. The name may name
// an alias or a model. If alsoFile is true, stages with queues for durable requests need a host for
// these too.
func (s *Service) PipelineReady(ctx context.Context, name string, alsoFile bool) error {
	p, f := s.Resolve(name, true)
	if f != nil {
		return f
	}
	route, err := p.Route(pipeline.Options{})
	if err != nil {
		return err
	}
	durability, f := durabilityOf(&request.Request{}, &p)
	if f == nil {
		f = s.availability.CheckHosts(ctx, route, durability)
	}
	if f == nil && alsoFile {
		if f = s.availability.CheckHosts(ctx, route, pipeline.File); f != nil && f.Reason == fault.NotSupported {
			f = nil
		}
	}
	if f == nil && durability == pipeline.File {
		f = s.StoreFault()
	}
	if f != nil {
		return f
	}
	return nil
}

// StageState is the state of a stage as the broker reports it.
type StageState struct {
	// Served is true while a host takes items.
	Served bool
	// Queues are the stage's queues that exist.
	Queues []QueueState
	// Wait is how long an item of the lowest class will wait; 0 where that is not known.
	Wait time.Duration
}

// QueueState is what is in a queue, waiting or in flight.
type QueueState struct {
	Durability pipeline.Durability
	Backlog
}

// Backlog is what the broker reports of a queue.
type Backlog = bus.Backlog

// Stage returns the state of a stage, BROKER_UNAVAILABLE while there is no broker.
// The state of its queues is current, its hosts' state at most 200 ms old.
func (s *Service) Stage(ctx context.Context, name pipeline.StageName) (StageState, error) {
	if err := s.bus.ConnectionError(); err != nil {
		return StageState{}, store.Unavailable(err)
	}
	durabilities := []pipeline.Durability{pipeline.Memory, pipeline.File}
	backlogs := make([]bus.Backlog, len(durabilities))
	out := StageState{Wait: s.availability.Wait(name)}
	queries, ctx := errgroup.WithContext(ctx)
	queries.Go(func() error {
		f := s.availability.CheckHosts(ctx, []pipeline.Hop{{Stage: name, Step: pipeline.StepName(name)}}, pipeline.Memory)
		if out.Served = f == nil || f.Reason == fault.NotSupported; out.Served || f.Reason == fault.NoCapacity {
			return nil
		}
		return f
	})
	for i, d := range durabilities {
		queries.Go(func() (err error) {
			if backlogs[i], err = s.bus.Backlog(ctx, name, d); errors.Is(err, bus.ErrNoQueue) {
				return nil
			}
			return err
		})
	}
	if err := queries.Wait(); err != nil {
		return StageState{}, store.Unavailable(err)
	}
	for i, b := range backlogs {
		if b.Epoch != "" {
			out.Queues = append(out.Queues, QueueState{Durability: durabilities[i], Backlog: b})
		}
	}
	return out, nil
}

// tasks are a bounded number of background goroutines that end before their owner
// does.
type tasks struct {
	limit   int
	ctx     context.Context
	cancel  context.CancelFunc
	running errgroup.Group

	mu        sync.Mutex
	isStopped bool
}

func newTasks(limit int) *tasks {
	t := &tasks{limit: limit}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.running.SetLimit(limit)
	return t
}

// start runs the task on a goroutine of its own, or returns the fault that says why
// not: too many are running, or the tasks are stopped. The task's context ends when
// stop has waited long enough.
func (t *tasks) start(task func(context.Context)) *fault.Fault {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.isStopped {
		return admission.Stopping()
	}
	if !t.running.TryGo(func() error {
		task(t.ctx)
		return nil
	}) {
		return fault.Newf(fault.Overloaded, "the gateway waits for %d requests already", t.limit).WithRetryAfter(budget.RetryAfter)
	}
	return nil
}

// stop waits for the running tasks, and ends their context after so long.
func (t *tasks) stop(patience time.Duration) {
	t.mu.Lock()
	t.isStopped = true
	t.mu.Unlock()
	defer time.AfterFunc(patience, t.cancel).Stop()
	_ = t.running.Wait()
	t.cancel()
}
