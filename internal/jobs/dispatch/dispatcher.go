package dispatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/metric"
	"golang.org/x/sync/errgroup"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Target makes attempts. Its methods return by the deadline of one, or soon after their context ends.
type Target interface {
	// Do makes an attempt.
	Do(ctx context.Context, a Attempt) Answer
	// Timeout is how long an attempt of a job may take; 0 means until the job's deadline.
	Timeout(j store.StoredJob) time.Duration
	// Resume returns the answer of an attempt that another dispatcher began. It returns false if that is over
	// without an answer, or the job may be sent again.
	Resume(ctx context.Context, a Attempt) (Answer, bool)
	// Forget drops what is kept of an attempt for Resume, without a wait. The record has its answer.
	Forget(request pipeline.RequestID)
}

// Attempt is one forward of one job.
type Attempt struct {
	store.StoredJob

	Request  pipeline.RequestID // the ID of the request in a mesh
	Priority int32              // the request's
	Deadline time.Time
}

// Answer is how an attempt ended: with a result, a fault, or both.
type Answer struct {
	Infer  *inferencev1.InferResponse
	HTTP   *inferencev1.HttpAnswer
	Fault  *fault.Fault
	Steps  []*inferencev1.StepTiming // those that ran in the mesh, also if the attempt has failed
	Chunks uint64                    // how many chunks the answer of a pipeline had

	sent    uint64  // the payload in bytes
	outcome outcome // set where neither the fault nor the status tells it
}

// Settings are a dispatcher's.
type Settings struct {
	Config

	Mesh        pipeline.MeshName
	Bus         bus.Settings
	Target      func(PoolConfig) Target // of a pool whose jobs go to pipelines
	DeadLetters store.Settings
	// Stages returns the load of stages, ReadyHosts how many hosts of a stage take items, ReadyInstances how
	// many instances of a service pass in Consul. Gates that need one require it.
	Stages         func(ctx context.Context, pipelines []string) ([]StageLoad, error)
	ReadyHosts     func(stage string) (int, error)
	ReadyInstances func(ctx context.Context, service string) (int, error)
	// Gates are gates of the program, by the name that pools use in own.
	Gates    map[string]GateFunc
	keyValue func(ctx context.Context, bucket, key string) (*bus.StoredMessage, error)
	// DrainTimeout bounds how long a stop waits for attempts; 0 means DefaultDrainTimeout.
	DrainTimeout time.Duration
	Logger       *slog.Logger
	Meter        metric.Meter
}

// DefaultDrainTimeout is the default of Settings.DrainTimeout.
const DefaultDrainTimeout = 30 * time.Second

// Dispatcher owns pools, or stands by until it can.
type Dispatcher struct {
	settings        Settings
	log             *slog.Logger
	id              string
	jobs            *store.Jobs
	dead            *store.DeadLetters
	ready           chan struct{}
	setup           atomic.Pointer[setup] // the configuration; changed has a value after it was replaced
	changed         chan struct{}
	running, owners sync.Map // the pools that this process owns or waits for; owners of the former
	metrics         *metrics
	latches         sync.Map              // of pools that this process has owned
	problem         atomic.Pointer[error] // why the streams of the jobs are not there yet
}

// New returns a dispatcher. It starts nothing.
func New(s Settings) (*Dispatcher, error) {
	id := uuid.NewString()
	s.Bus.Mesh, s.Bus.Name, s.Bus.Logger, s.Bus.Meter = s.Mesh, "dispatcher "+id, s.Logger, s.Meter
	d := &Dispatcher{settings: s, log: s.Logger, id: id, ready: make(chan struct{}), changed: make(chan struct{}, 1)}
	first, err := d.newSetup(s.Config)
	if err != nil {
		return nil, err
	}
	d.setup.Store(first)
	d.settings.Config = first.Config
	d.metrics, err = newMetrics(s.Meter, &d.owners)
	return d, err
}

// Run dispatches until the context ends, and then waits for running attempts.
func (d *Dispatcher) Run(ctx context.Context) error {
	conn, err := bus.Connect(d.settings.Bus)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.WaitConnected(ctx); err != nil {
		return nil
	}
	d.settings.keyValue = conn.KeyValue
	d.jobs, d.dead = store.NewJobs(conn, d.settings.Config.Settings), store.NewDeadLetters(conn, d.settings.DeadLetters)
	pools, ctx := errgroup.WithContext(ctx)
	pools.Go(func() error { return d.supervise(ctx, conn, pools) })
	return pools.Wait()
}

// WaitReady returns when the streams of the jobs are there.
func (d *Dispatcher) WaitReady(ctx context.Context) error {
	select {
	case <-d.ready:
		return nil
	case <-ctx.Done():
		if problem := d.problem.Load(); problem != nil {
			return fmt.Errorf("dispatcher: %w: %w", *problem, ctx.Err())
		}
		return fmt.Errorf("dispatcher: %w", ctx.Err())
	}
}

func (d *Dispatcher) ensure(ctx context.Context) error {
	err := errors.Join(d.jobs.Ensure(ctx), d.dead.Ensure(ctx))
	queues := d.setup.Load().Queues
	for _, name := range slices.Sorted(maps.Keys(queues)) {
		if err == nil {
			err = d.jobs.EnsureQueue(ctx, pipeline.QueueName(name), queues[name].JobQueueSettings)
		}
	}
	return err
}

const retryEvery = time.Second

// retry calls try until it succeeds or the context ends. It logs the first failure.
func retry(ctx context.Context, log *slog.Logger, problem string, try func(context.Context) error) error {
	for isLogged := false; ctx.Err() == nil; {
		err := try(ctx)
		if err == nil || ctx.Err() != nil {
			return ctx.Err()
		}
		if !isLogged {
			log.Warn(problem+"; retrying", "error", err)
			isLogged = true
		}
		_ = process.Sleep(ctx, retryEvery)
	}
	return ctx.Err()
}

// ownPool owns a pool until the context, the lease or the plan ends, and then awaits its attempts.
func (d *Dispatcher) ownPool(ctx context.Context, conn *bus.Bus, pool string, p plan, l *store.Lease) error {
	o := newOwner(d, pool, p, l)
	if t, ok := p.target.(interface{ close() }); ok {
		defer t.close()
	}
	d.owners.Store(pool, o)
	defer d.owners.Delete(pool)
	stop, err := conn.ServeJobCancels(o.checkCancelled)
	if err != nil {
		return err
	}
	defer stop() //nolint:errcheck // its only error is a closed connection
	stopReports, err := conn.ServePool(pool, o.report)
	if err != nil {
		return err
	}
	defer stopReports() //nolint:errcheck // its only error is a closed connection
	// The lease is renewed, and attempts run, until the drain ends.
	running, end := context.WithCancelCause(context.WithoutCancel(ctx))
	defer end(nil)
	var renewal errgroup.Group
	renewal.Go(func() error {
		if err := l.Keep(running, o.low); err != nil {
			end(err)
		}
		return nil
	})
	own, cancel := context.WithCancel(ctx)
	defer cancel()
	if p.isGone {
		defer time.AfterFunc(ownGoneFor, cancel).Stop()
	}
	defer context.AfterFunc(running, cancel)()
	err = o.run(own, running)
	if p.isGone || errors.Is(err, errRetired) {
		// Cut attempts of a pool that is gone, and ends that cannot be stored: the next owner goes on with them.
		defer time.AfterFunc(retryEvery, func() { end(nil) }).Stop()
	}
	drain, stopDrain := process.DrainContext(ctx, cmp.Or(d.settings.DrainTimeout, DefaultDrainTimeout))
	defer stopDrain()
	defer context.AfterFunc(drain, func() { end(context.Cause(drain)) })()
	o.flights.Wait()
	d.latches.Store(pool, targetLatch{p.config.Target, o.credit.latch})
	lost := context.Cause(running)
	end(nil)
	_ = renewal.Wait()
	if !errors.Is(lost, store.ErrLeaseLost) {
		l.Release()
	}
	return errors.Join(err, lost)
}
