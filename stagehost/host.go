// Package stagehost is one running host of a stage: it pulls items from the
// stage's queue, batches them, hands batches to a runner, and sends each item's
// outcome to the next stage or back to the gateway. internal/item has its items, and
// internal/models its models; this package starts and stops, keeps the queues, serves and registers.
//
//	h, err := stagehost.New(settings)
//	err = h.Run(ctx)
//
// When Run's context ends the host drains, as does one whose runner is lost. A batch that
// does not stop within a few seconds is left behind: Run returns an error, so that the
// program can exit and does not exit with success. Go code cannot be ended from outside.
package stagehost

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/internal/item"
	"github.com/stagemesh/stagemesh/stagehost/internal/models"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Host is one running host of a stage. Its fields are grouped by the part of the
// host that owns them.
type Host struct {
	settings Settings
	metrics  *item.Metrics
	// models is set for a stage that loads models, else nil.
	models *models.Models
	// spec, its parameters and contract are set once the runner has started.
	spec       runner.Spec
	parameters *stagev1.ParameterSpecs
	contract   *schema.Contract
	// startTook is how long the runner took to start: its workers take as long.
	startTook time.Duration
	// connectedAt is when this process connected to the broker as a host.
	connectedAt time.Time
	status      status
	// items are the host's, from connect on.
	items *item.Items
	// runCtx is the context of runs; cancelRuns ends it.
	runCtx     context.Context
	cancelRuns context.CancelFunc
	// leftBehind is true when a batch runs on after the host has given it up.
	leftBehind bool

	broker
	reconciler
	service
}

// records are the stores that the items need.
type records struct {
	*store.Results
	*store.DeadLetters
	*store.Runs
}

// broker is the host's connection and what uses it; from connect to disconnect.
type broker struct {
	bus     *bus.Bus
	records records
	// pulled are the queues that the host pulls from: its stage's, and after those its own
	// where it loads models.
	pulled []*pulledQueues
	// stopCancels ends the subscription to cancel messages.
	stopCancels func() error
}

// pulledQueues are queues of one name, one for each durability, with a puller.
type pulledQueues struct {
	name     pipeline.StageName
	settings QueueSettings
	puller   *bus.Puller
	// alive ends the answers that the host serves them; nil while there are none. It is
	// reconcile's, and the drain's after that has ended.
	alive func() error
	// served is what the last answers named, and failing since when others cannot be ensured.
	served  []pipeline.Durability
	failing map[pipeline.Durability]time.Time
}

// reconciler is the state of reconcile, and of the drain after that has ended.
type reconciler struct {
	// missing holds a value when the queue has been found missing; storeMissing is
	// true when a reply has found no stream to be stored in.
	missing      chan struct{}
	storeMissing atomic.Bool
	// inFlight ends the answers that the host may hold items, failing those why it does not
	// serve, and forwarded the intake of items that other hosts forward; nil while there is none.
	inFlight, failing, forwarded func() error
	// servedAt is when another host served the stage last, as far as this one knows; while
	// it does not serve itself.
	servedAt time.Time
	// ackWait is how long the queues wait for an ack or an extension of an item.
	ackWait time.Duration

	known        known
	runnerHealth runnerHealth
}

// service is the host's StageService.
type service struct {
	// listener is nil where there is no service, tls where it has no TLS.
	listener net.Listener
	tls      *tls.Config
	callers  callers
	address  atomic.Value
	// directs has the direct calls in flight.
	directs *budget.Pool
}

// New returns a host. It dials nothing and starts nothing.
func New(s Settings) (*Host, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	s.Config = s.Config.withDefaults()
	s.HostGrace = cmp.Or(s.HostGrace, bus.DefaultHostGrace)
	s.RunRecords.Replicas = cmp.Or(s.RunRecords.Replicas, s.Queue.Replicas)
	s.Logger = s.Logger.With("stage", s.Stage, "host", s.Host)
	s.Bus.Mesh, s.Bus.Name, s.Bus.Logger, s.Bus.Meter = s.Mesh, "stagehost "+string(s.Host), s.Logger, s.Meter
	m, err := item.NewMetrics(s.Meter, s.Stage, s.Host)
	if err != nil {
		return nil, err
	}
	h := &Host{
		settings:   s,
		metrics:    m,
		reconciler: reconciler{missing: make(chan struct{}, 1)},
		service:    service{directs: budget.NewPool(budget.Settings{Limit: maxDirectCalls, Name: "direct calls", Key: "docs/security.md", Shared: s.TokenFile != ""})},
	}
	h.runnerHealth.runner, _ = s.Runner.(runner.HealthReporter)
	if s.Registry != nil {
		h.status.unregistered = ErrNotRegistered
	}
	return h, nil
}

// Run starts the runner, serves the stage until the context ends, and drains. It
// returns nil after a drain, else the reason why the host cannot go on, or why it
// could not stop its runner. It is called once.
func (h *Host) Run(ctx context.Context) error {
	defer h.status.set(stateStopped)
	// Items in flight are finished after ctx has ended: runCtx outlives it.
	h.runCtx, h.cancelRuns = context.WithCancel(context.WithoutCancel(ctx))
	defer h.cancelRuns()
	if err := h.listen(ctx); err != nil {
		return err
	}
	defer h.unlisten()
	if err := h.startRunner(ctx); err != nil {
		return err
	}
	defer h.stopRunner()
	if err := h.connect(); err != nil {
		return err
	}
	defer h.disconnect()
	h.status.set(stateJoining)
	return h.serve(ctx)
}

func (h *Host) startRunner(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, h.settings.StartTimeout)
	defer cancel()
	begin := time.Now()
	s := h.settings
	if r, ok := s.Runner.(runner.HostAware); ok {
		r.SetHost(runner.HostInfo{
			Stage: string(s.Stage), Host: string(s.Host), MaxSize: s.Batch.MaxSize, StartTimeout: s.StartTimeout,
			Complete: s.complete, Logger: s.Logger, Meter: s.Meter, Models: s.Models.memory(), ModelRoot: s.Models.root(),
		})
	}
	if r, ok := h.settings.Runner.(runner.Killer); ok {
		// Start waits for processes that end; a second signal ends the wait.
		patience, cancel := process.DrainContext(ctx, h.settings.StartTimeout+h.settings.DrainTimeout)
		defer cancel()
		defer context.AfterFunc(patience, r.Kill)()
	}
	if err := h.settings.Runner.Start(ctx); err != nil {
		return fmt.Errorf("stage %s: start of the runner: %w", h.settings.Stage, err)
	}
	if err := h.compileSpec(); err != nil {
		return fmt.Errorf("stage %s: %w", h.settings.Stage, err)
	}
	h.startTook = time.Since(begin)
	h.settings.Logger.Info("runner ready", "took", h.startTook.Round(time.Millisecond))
	return nil
}

// compileSpec fixes the stage's contract and how the host serves it. It stops a runner
// that started and cannot serve.
func (h *Host) compileSpec() error {
	spec, err := h.settings.complete(h.settings.Runner.Spec())
	if err == nil {
		h.contract, err = schema.Compile(spec)
	}
	if err == nil {
		h.spec, h.parameters = spec, parametersToProto(spec.Parameters)
		err = errors.Join(h.settings.checkBatchBy(spec), h.configureBatching(), h.configureModels())
	}
	if err != nil {
		h.stopRunner()
	}
	return err
}

// configureBatching chooses how the host serves its runner, once that has started.
func (h *Host) configureBatching() error {
	s := &h.settings
	switch streams := h.spec.Stream; {
	case streams && s.Batch.Mode == "":
		s.Batch.Mode = batch.Stream
	case streams && s.Batch.Mode != batch.Stream:
		return fmt.Errorf("batch.mode: %s is for runners of batches, and this one answers in chunks; use stream, or leave the key out", s.Batch.Mode)
	case !streams && s.Batch.Mode == batch.Stream:
		return errors.New("batch.mode: stream is for runners that answer in chunks, and this one does not; leave the key out")
	}
	s.Batch.OneByOne = h.spec.OneByOne
	s.MaxInFlight = cmp.Or(s.MaxInFlight, s.defaultInFlight())
	return nil
}

// configureModels prepares to load models where the stage does.
func (h *Host) configureModels() error {
	s, r := h.settings, h.settings.Registry
	if s.Models == nil {
		return nil
	}
	if r == nil || r.Models == nil {
		return errors.New("models: the mesh has no registry; the section registry of its file names one")
	}
	live, err := s.Models.Settings("models.")
	if err != nil {
		return err
	}
	loader := s.Runner.(runner.ModelLoader) // Validate has checked it
	h.models, err = models.New(h.runCtx, models.Settings{
		Mesh: s.Mesh, Stage: s.Stage, Host: s.Host, Loader: loader, MaxBatch: s.Batch.MaxSize, Cache: s.Models.cache(loader.ModelLimits()),
		Table: r.Models, Live: live, Watcher: r.Watcher, Hosts: r.Table,
		StageContract: h.contract, SpecToProto: specToProto, IsLeaving: h.status.isLeaving,
		Pull:    func(name pipeline.StageName) (*bus.Puller, error) { return h.newPuller(name, s.ownQueue()) },
		Metrics: h.metrics, Logger: s.Logger,
	})
	return err
}

// stopRunner stops the runner once its batches have ended.
func (h *Host) stopRunner() {
	if h.leftBehind {
		return
	}
	ctx, cancel := process.DrainContext(h.runCtx, h.settings.DrainTimeout)
	defer cancel()
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		if err := h.settings.Runner.Stop(ctx); err != nil {
			h.settings.Logger.Error("stop of the runner", "error", err)
		}
	}()
	select {
	case <-stopped:
	case <-ctx.Done():
		// The runner may ignore the context here too.
		if !await(stopped, runStopWait) {
			h.settings.Logger.Error("the runner does not stop and is left behind")
		}
	}
}

func (h *Host) connect() error {
	conn, err := bus.Connect(h.settings.Bus)
	if err != nil {
		return err
	}
	h.bus, h.connectedAt, h.ackWait = conn, time.Now(), h.settings.Queue.AckWait
	h.records = records{
		store.NewResults(conn, h.settings.Results), store.NewDeadLetters(conn, h.settings.DeadLetters), store.NewRuns(conn, h.settings.RunRecords),
	}
	h.items = h.newItems()
	err = h.pull(h.settings.Stage, h.settings.Queue)
	if err == nil && h.models != nil && slices.Contains(h.settings.Queue.Durabilities, pipeline.Memory) {
		err = h.pull(pipeline.HostQueue(h.settings.Stage, h.settings.Host), h.settings.ownQueue())
	}
	if err == nil {
		h.stopCancels, err = conn.ServeCancels(h.items.ReceiveCancel)
	}
	if err == nil {
		// These subscriptions end with the connection.
		_, err = conn.ServeExhausted(h.settings.Stage, h.endExhausted)
	}
	if err == nil {
		err = conn.ServeExplain(h.items.ReceiveQuestion)
	}
	if err == nil {
		err = conn.ServeRequests(h.items.ReceiveItemsQuestion)
	}
	if err == nil {
		err = conn.ServeDemand(h.demand)
	}
	if err != nil {
		h.closePullers()
		conn.Close()
	}
	return err
}

// newItems returns what has the items of the host.
func (h *Host) newItems() *item.Items {
	s := h.settings
	own := item.Settings{
		Mesh: s.Mesh, Stage: s.Stage, Host: s.Host, Batch: s.Batch, Stream: s.Stream, Runner: s.Runner,
		IsDurable: s.Queue.durable(), MaxAge: s.Queue.MaxAge, AckWait: s.Queue.AckWait,
		MaxInFlight: s.MaxInFlight, CrashLimit: s.CrashLimit, ExposeErrors: s.ExposeErrors,
		Bound: s.itemBound(), Events: s.eventRoom(), StartTook: h.startTook, ConnectedAt: h.connectedAt,
		Sender: h.bus, Records: h.records, Models: item.OneModel(h.contract),
		Metrics: h.metrics, Tracer: s.Tracer, Logger: s.Logger,
		StreamMissing: func() {
			h.storeMissing.Store(true)
			h.queueMissing()
		},
	}
	if h.models != nil {
		own.Models = h.models.Connect(h.bus)
	}
	return item.New(h.runCtx, own)
}

// pull prepares to pull from the queues of that name.
func (h *Host) pull(name pipeline.StageName, s QueueSettings) error {
	puller, err := h.newPuller(name, s)
	if err == nil {
		h.pulled = append(h.pulled, &pulledQueues{name: name, settings: s, puller: puller, failing: map[pipeline.Durability]time.Time{}})
	}
	return err
}

func (h *Host) newPuller(name pipeline.StageName, s QueueSettings) (*bus.Puller, error) {
	return h.bus.Pull(bus.PullSettings{
		Stage:        name,
		Durabilities: s.Durabilities,
		Bound:        h.settings.MaxInFlight,
		OneIdlePull:  h.spec.Stream,
		Local:        h.settings.localPlaces(),
		AckWait:      s.AckWait,
		Malformed:    h.items.ReceiveMalformed,
		QueueMissing: h.queueMissing,
	}, h.items.Receive)
}

func (h *Host) closePullers() {
	for _, q := range h.pulled {
		q.puller.Close()
	}
}

func (h *Host) disconnect() {
	if err := h.stopCancels(); err != nil {
		h.settings.Logger.Debug("end of cancel messages", "error", err)
	}
	h.closePullers()
	if h.models != nil {
		h.models.DeleteOwnQueue()
	}
	// Items that arrived before the end of the subscription are returned.
	h.items.DropEvents()
	h.bus.Close()
}

// serve runs the pumps and the loop. The pumps that bring work end with ctx, or
// with the first of them that fails; then the host drains, and the loop ends last.
func (h *Host) serve(ctx context.Context) error {
	unobserve, err := h.items.ObserveSlots(h.settings.Meter)
	if err != nil {
		return err
	}
	defer unobserve() //nolint:errcheck // it cannot fail
	loop := item.NewLoop(h.items)
	// The registry of models is needed until the drain has ended.
	followCtx, unfollow := context.WithCancel(context.WithoutCancel(ctx))
	var following sync.WaitGroup
	if h.models != nil {
		following.Go(func() { h.models.Follow(followCtx) })
	}
	defer following.Wait()
	defer unfollow()
	loopCtx, endLoop := context.WithCancel(context.WithoutCancel(ctx))
	var looping sync.WaitGroup
	looping.Go(func() { loop.Run(loopCtx) })
	serving, leave := context.WithCancel(context.WithoutCancel(ctx))
	defer leave()
	pumps, pumping := errgroup.WithContext(serving)
	pumps.Go(func() error {
		defer leave()
		return h.awaitLeave(ctx, pumping)
	})
	pumps.Go(func() error { return h.items.AcquireSlots(pumping) })
	pumps.Go(func() error { return h.reconcile(pumping) })
	pumps.Go(func() error { return h.serveAPI(pumping) })
	pumps.Go(func() error { return h.register(pumping) })
	if h.models != nil {
		pumps.Go(func() error { return h.models.Run(pumping) })
	}
	// The pumps have ended before the drain waits for goroutines that they started.
	err = pumps.Wait()
	h.leftBehind = !h.drain(loop)
	endLoop()
	looping.Wait()
	h.items.DropEvents()
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, ctx.Err())) {
		err = nil
	}
	if h.leftBehind {
		err = errors.Join(err, h.leftBehindError(loop.Running()))
	}
	return err
}

// awaitLeave waits until the host is to leave, and then until its models are where they will be
// used next. It returns early if a pump has failed.
func (h *Host) awaitLeave(ctx, pumping context.Context) error {
	select {
	case <-ctx.Done():
	case <-pumping.Done():
		return pumping.Err()
	}
	if h.models != nil {
		moving, cancel := process.DrainContext(pumping, h.settings.DrainTimeout/2)
		defer cancel()
		defer context.AfterFunc(pumping, cancel)()
		h.models.Move(moving, h.status.leave)
	}
	return ctx.Err()
}
