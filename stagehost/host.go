package stagehost

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/mesh/attempt"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/deadletter"
	"github.com/stagemesh/stagemesh/mesh/process"
	"github.com/stagemesh/stagemesh/mesh/result"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/schema"
)

// Host is one running host of a stage.
type Host struct {
	settings Settings
	metrics  *metrics
	spec     runner.Spec
	contract *schema.Contract
	bus      *bus.Bus
	results  *result.Store
	dead     *deadletter.Store
	starts   *attempt.Book
	puller   *bus.Puller
	// born is when this process became a host.
	born time.Time
	// ackWait is how long the queues wait for a word about an item.
	ackWait atomic.Int64
	// stopNotices ends the cancel notices.
	stopNotices func() error

	// events go to the loop, and are there once the runner has started; looped is closed when it no longer takes any.
	events chan event
	// notices are of requests that were called off.
	notices notices
	looped  chan struct{}
	// storeMissing says that an answer has found no stream to be stored in.
	storeMissing atomic.Bool
	// missing holds a value when the queue has been found missing.
	missing chan struct{}
	// runs are the goroutines of running batches; those that have run one and are
	// resting take another from tasks; hard ends with the host's patience.
	runs    sync.WaitGroup
	tasks   chan task
	resting chan struct{}
	hard    context.Context
	giveUp  context.CancelFunc
	directs chan struct{}

	// listener is the StageService's; nil where there is none.
	listener net.Listener
	// certificate is what it shows; nil where it is plain.
	certificate *tls.Certificate
	// alive ends the answers that the host is there; nil while there are none.
	// It is reconcile's, and the drain's after that has ended.
	alive func() error
	known known
	// vitals are reconcile's.
	vitals vitals
	// leftBehind says that a batch runs on after the host has given it up.
	leftBehind bool

	// busy says that items wait for a slot, load what is in hand.
	busy atomic.Bool
	load load
	// registration is whether the registry has heard of the host.
	registration registration

	clock   clock
	address atomic.Value
	status  status
}

// directBound bounds the calls past the queue that are in hand.
const directBound = 16

// New returns a host. It dials nothing and starts nothing.
func New(s Settings) (*Host, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	s = s.withDefaults()
	s.Logger = s.Logger.With("stage", s.Stage, "host", s.Host)
	s.Bus.Mesh, s.Bus.Name, s.Bus.Logger = s.Mesh, "stagehost "+string(s.Host), s.Logger
	m, err := newMetrics(s.Meter, s.Stage, s.Host)
	if err != nil {
		return nil, err
	}
	return &Host{
		settings:     s,
		metrics:      m,
		looped:       make(chan struct{}),
		missing:      make(chan struct{}, 1),
		directs:      make(chan struct{}, directBound),
		vitals:       vitalsOf(s.Runner),
		registration: registrationIn(s.Registry),
	}, nil
}

// Run starts the runner, serves the stage until the context ends, and drains.
// It returns nil after a drain, else the reason why the host cannot go on, or
// why it could not stop its runner. It is called once.
func (h *Host) Run(ctx context.Context) error {
	defer h.status.set(stateStopped)
	// What is in hand is finished after ctx has ended: hard outlives it.
	h.hard, h.giveUp = context.WithCancel(context.WithoutCancel(ctx))
	defer h.giveUp()
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
	h.place()
	if r, ok := h.settings.Runner.(runner.Killer); ok {
		// Start waits for those that leave, which a second signal ends.
		patience, cancel := process.Draining(ctx, h.settings.StartTimeout+h.settings.DrainTimeout)
		defer cancel()
		defer context.AfterFunc(patience, r.Kill)()
	}
	if err := h.settings.Runner.Start(ctx); err != nil {
		return fmt.Errorf("stage %s: start of the runner: %w", h.settings.Stage, err)
	}
	if err := h.agree(); err != nil {
		return fmt.Errorf("stage %s: %w", h.settings.Stage, err)
	}
	h.settings.Logger.Info("runner ready", "took", time.Since(begin).Round(time.Millisecond))
	return nil
}

// agree settles what the stage takes and gives, and how. A runner that could be started and
// cannot serve is stopped.
func (h *Host) agree() error {
	spec, err := h.settings.complete(h.settings.Runner.Spec())
	if err == nil {
		h.contract, err = schema.Compile(spec)
	}
	if err == nil {
		h.spec = spec
		err = h.adapt()
	}
	if err != nil {
		h.stopRunner()
	}
	return err
}

// place tells the runner where it serves, if it wants to know.
func (h *Host) place() {
	s := h.settings
	if r, ok := s.Runner.(runner.HostAware); ok {
		r.SetHost(runner.HostInfo{
			Stage: string(s.Stage), Host: string(s.Host), MaxSize: s.Batch.MaxSize, StartTimeout: s.StartTimeout,
			Complete: s.complete, Logger: s.Logger, Meter: s.Meter,
		})
	}
}

// stopRunner stops a runner whose batches have ended, as it may expect.
func (h *Host) stopRunner() {
	if h.leftBehind {
		return
	}
	ctx, cancel := process.Draining(h.hard, h.settings.DrainTimeout)
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
		// The runner may be deaf in this too.
		if !await(stopped, runAbandon) {
			h.settings.Logger.Error("the runner does not stop and is left behind")
		}
	}
}

func (h *Host) connect() error {
	conn, err := bus.Connect(h.settings.Bus)
	if err != nil {
		return err
	}
	h.bus, h.born = conn, time.Now()
	h.ackWait.Store(int64(h.settings.Queue.AckWait))
	h.results = result.New(conn, h.settings.Results)
	h.dead = deadletter.New(conn, h.settings.DeadLetters)
	h.starts = attempt.New(conn, h.settings.Starts)
	h.puller, err = conn.Pull(bus.PullSettings{
		Stage:        h.settings.Stage,
		Durabilities: h.settings.Queue.Durabilities,
		Bound:        h.settings.MaxInFlight,
		Sparing:      h.streams(),
		AckWait:      h.settings.Queue.AckWait,
		Malformed:    h.noDelivery,
		QueueMissing: h.queueMissing,
	}, h.receive)
	if err != nil {
		conn.Close()
		return err
	}
	h.stopNotices, err = conn.ServeCancels(h.heard)
	if err == nil {
		// Their end is the connection's.
		_, held := conn.ServeHeld(h.settings.Stage)
		_, swept := conn.ServeGivenUp(h.settings.Stage, h.sweep)
		err = errors.Join(held, swept)
	}
	if err != nil {
		h.puller.Close()
		conn.Close()
	}
	return err
}

func (h *Host) disconnect() {
	if err := h.stopNotices(); err != nil {
		h.settings.Logger.Debug("end of cancel notices", "error", err)
	}
	h.puller.Close()
	// What came before the end of the subscription is given back.
	h.dropEvents()
	h.bus.Close()
}

// serve runs the pumps and the loop. The pumps that bring work end with ctx,
// or with the first of them that fails; then the host drains, and the loop
// ends last.
func (h *Host) serve(ctx context.Context) error {
	loop := newLoop(h)
	loopCtx, endLoop := context.WithCancel(context.WithoutCancel(ctx))
	var looping sync.WaitGroup
	looping.Go(func() {
		defer close(h.looped)
		loop.run(loopCtx)
	})
	pumps, pumping := errgroup.WithContext(ctx)
	pumps.Go(func() error { return h.acquireSlots(pumping) })
	pumps.Go(func() error { return h.reconcile(pumping) })
	pumps.Go(func() error { return h.serveAPI(pumping) })
	pumps.Go(func() error { return h.register(pumping) })
	// The pumps have ended before the drain waits for what they started.
	err := pumps.Wait()
	h.leftBehind = !h.drain(loop)
	endLoop()
	looping.Wait()
	h.dropEvents()
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = nil
	}
	if h.leftBehind {
		err = errors.Join(err, h.leaving(loop.running))
	}
	return err
}

// leaving says what is left behind of a runner that does not end.
func (h *Host) leaving(batches int) error {
	what := "it still waits for an idle slot"
	if batches > 0 {
		what = fmt.Sprintf("%d of its batches still run", batches)
	}
	return fmt.Errorf("stage %s: the runner does not stop: %s %s after it was told to end", h.settings.Stage, what, runAbandon+runLeave)
}

// acquireSlots posts every slot that falls idle, also while the host drains.
func (h *Host) acquireSlots(ctx context.Context) error {
	lost := make(chan error, 1)
	h.runs.Go(func() { lost <- h.postSlots() })
	select {
	case err := <-lost:
		return fmt.Errorf("stage %s: the runner is lost: %w", h.settings.Stage, err)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// postSlots returns why there are no more slots: the runner is lost, or the
// host has given up.
func (h *Host) postSlots() error {
	for {
		slot, err := h.settings.Runner.Acquire(h.hard)
		if err == nil {
			h.post(&slotIdle{slot: slot})
			continue
		}
		if h.hard.Err() == nil {
			h.post(runnerLost{err: err})
		}
		return err
	}
}

// noDelivery counts a message that came to the puller and cannot be settled:
// no queue sent it.
func (h *Host) noDelivery(err error) {
	h.metrics.malformed(context.Background())
	h.settings.Logger.Warn("message that is no delivery", "error", err)
}

func (h *Host) queueMissing() {
	select {
	case h.missing <- struct{}{}:
	default:
	}
}

// say logs a word to the queue that could not be said: the item will come
// again.
func (h *Host) say(err error) {
	if err != nil {
		h.metrics.unsaid(context.Background())
		h.settings.Logger.Debug("item not settled", "error", err)
	}
}

// defect logs what cannot happen.
func (h *Host) defect(what string, err error) {
	h.metrics.defect(context.Background())
	h.settings.Logger.Error(what, "error", err)
}
