// Package stagemesh runs a mesh, or a part of one, in your own Go program: broker,
// gateway and stage hosts in one process, as they run apart, but without a network
// between them.
//
//	m, err := stagemesh.New(stagemesh.Settings{Mesh: "demo"})
//	err = m.AddStage(stagemesh.Stage{Name: "double", Runner: runner})
//	err = m.AddPipeline(stagemesh.Pipeline{...})
//	err = m.Start(ctx)
//	answer, err := m.Infer(ctx, &stagemesh.Request{Pipeline: "double", Inputs: ...})
//	answer, err = m.Stream(ctx, request, func(c stagemesh.Chunk) error { ... })
//	answer, err = m.Result(ctx, requestID, wait)     // of a durable request
//	err = m.Cancel(ctx, requestID)
//	err = m.Stop()
//
// FromFile begins with the mesh that a file describes; `stagemesh up` runs that.
//
// Serve is the whole main function of a program that serves stages written in Go; see
// docs/runners.md.
//
// Durable requests, their results and dead letters are files of the broker. The files of
// the broker in the process are in NATS.StoreDir; without one they are in a
// temporary folder and end with Stop.
//
// A Mesh is started once, and Stop is called once Start has returned; a call in another
// order returns an error. Stages start concurrently, so Start takes as long as the
// slowest runner. A start that fails leaves nothing running.
package stagemesh

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/jobs/dispatch"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Pipeline is a named sequence of steps.
type Pipeline = pipeline.Pipeline

// Step is one step of a pipeline.
type Step = pipeline.Step

// Request is what Infer and Stream send.
type Request = request.Request

// Response is what Infer and Stream return.
type Response = request.Response

// Chunk is a part of an answer that comes before its end.
type Chunk = request.Chunk

// Key is an idempotency key. Calls replace its tenant by their own.
type Key = request.Key

// NATS is the broker of a mesh.
type NATS = meshfile.NATS

// RegistryConfig is the registry of a mesh.
type RegistryConfig = meshfile.RegistryConfig

// StoreSettings configure a store on the broker.
type StoreSettings = store.Settings

// Jobs are queues of jobs, and the pools that they feed. Gates are easier to write in a mesh file.
type Jobs = dispatch.Config

// JobPool is a target of jobs, with its bounds.
type JobPool = dispatch.PoolConfig

// JobTarget is where the jobs of a pool go.
type JobTarget = dispatch.TargetConfig

// JobQueue is a queue of jobs.
type JobQueue = dispatch.QueueConfig

// GateFunc is a gate of the program.
type GateFunc = dispatch.GateFunc

// Settings are the settings of a mesh in one process. Zero values mean the defaults.
type Settings struct {
	// Mesh names the mesh; empty means "local".
	Mesh pipeline.MeshName
	// NATS is the broker: one in the process unless it has a URL.
	NATS NATS
	// Gateway is the public port and the bounds of the gateway. Its mesh, id,
	// catalog, results, idempotency and bus are filled in.
	Gateway gateway.Settings
	// NoGateway is true for a process that only serves stages.
	NoGateway bool
	// NoLocalHops has the gateway and the hosts of this process pass all items by the broker.
	NoLocalHops bool
	// Results, DeadLetters and Idempotency are the broker's stores of results, dead
	// letters and idempotency keys. Every process of a mesh has the same.
	Results     StoreSettings
	DeadLetters StoreSettings
	Idempotency StoreSettings
	// Jobs are the queues of jobs, and where they go; see SetJobs. Dispatcher has this process forward
	// them; it needs the gateway.
	Jobs       Jobs
	Dispatcher bool
	// Gates are gates of the program, by the name that pools of jobs use in own.
	Gates map[string]GateFunc
	// Registry is where hosts register; nil means nowhere.
	Registry *RegistryConfig
	// Logger may be nil: nothing is logged.
	Logger *slog.Logger
	// Meter may be nil: nothing is counted.
	Meter metric.Meter
	// TracerProvider has the tracers of the gateway and of each host, whose instrumentation
	// attributes are service.name, service.namespace and service.instance.id; nil means that
	// nothing is traced. Gateway.Call.Sampling decides which requests are.
	TracerProvider trace.TracerProvider
	// Version of the program, for descriptions.
	Version string
	// Operations is the address of the program's operations port, for the registry.
	Operations string
	// Advertise is the host of addresses in the registry where this process listens on all
	// addresses; empty means this machine's first address that is not loopback.
	Advertise string
}

// Stage is one stage with its hosts, each of which needs a runner of its own.
type Stage struct {
	Name pipeline.StageName
	// Runner of the stage's only host; or one for each of several Runners.
	Runner  runner.Runner
	Runners []runner.Runner
	// Host is the id of the only host; empty means a new one.
	Host pipeline.HostID
	// Inputs and Outputs add to the runners' specs.
	Inputs, Outputs []runner.PartSpec
	// Config bounds batches and queues. A zero Batch means stagehost.DefaultBatch, and
	// only the first host listens.
	stagehost.Config
}

// Mesh is a mesh in one process. What adds to it is for one goroutine before
// Start; everything else is safe for concurrent use, Stop once Start has
// returned.
type Mesh struct {
	settings  Settings
	stages    []Stage
	pipelines []pipeline.Pipeline
	// loopback stands for the broker where there is none; nil where there is one.
	loopback *bus.Loopback
	// metrics returns what the Meter of a program has; nil for other meters.
	metrics func() (families []byte, err error)

	begun atomic.Bool
	// started is true once Start has succeeded.
	started atomic.Bool
	meter   meshMeter
	// jobs is held while SetJobs replaces them.
	jobs sync.Mutex
	// parts is nil before the start.
	parts atomic.Pointer[parts]
	stop  sync.Once
	left  error
}

// Errors of a mesh that is used in the wrong order.
var (
	ErrNotStarted = errors.New("the mesh has not been started")
	ErrStarted    = errors.New("the mesh has been started before")
)

// New returns a mesh without stages.
func New(s Settings) (*Mesh, error) {
	if s.Mesh == "" {
		s.Mesh = "local"
	}
	if err := pipeline.ValidName("mesh", string(s.Mesh)); err != nil {
		return nil, err
	}
	if s.Logger == nil {
		s.Logger = slog.New(slog.DiscardHandler)
	}
	if s.Meter == nil {
		s.Meter = noop.Meter{}
	}
	return &Mesh{settings: s, meter: meshMeter{Meter: s.Meter}}, nil
}

// AddStage adds a stage before the start.
func (m *Mesh) AddStage(s Stage) error {
	if m.begun.Load() {
		return fmt.Errorf("stage %s: %w", s.Name, ErrStarted)
	}
	if s.Runner != nil {
		s.Runners, s.Runner = append([]runner.Runner{s.Runner}, s.Runners...), nil
	}
	if b := s.Batch; b.Mode == "" && b.MaxSize == 0 && b.MaxBytes == 0 && b.MaxWait == 0 {
		s.Batch = stagehost.DefaultBatch()
		s.Batch.By = b.By
	}
	if len(s.Runners) == 0 {
		return fmt.Errorf("stage %s: runner: is required", s.Name)
	}
	if s.Host != "" && len(s.Runners) > 1 {
		return fmt.Errorf("stage %s: host: %d hosts would have the ID %q; leave it out, or have one", s.Name, len(s.Runners), s.Host)
	}
	for _, r := range s.Runners {
		settings := s.host(r)
		settings.Mesh, settings.Host = "any", "any"
		if err := settings.Validate(); err != nil {
			return fmt.Errorf("stage %s: %w", s.Name, err)
		}
	}
	for _, other := range m.stages {
		if other.Name == s.Name {
			return fmt.Errorf("stage %s: there is one of that name", s.Name)
		}
	}
	m.stages = append(m.stages, s)
	return nil
}

// host returns the settings of one host that are the stage's own.
func (s Stage) host(r runner.Runner) stagehost.Settings {
	return stagehost.Settings{Config: s.Config, Stage: s.Name, Host: s.Host, Runner: r, Inputs: s.Inputs, Outputs: s.Outputs}
}

// AddPipeline adds a pipeline before the start.
func (m *Mesh) AddPipeline(p pipeline.Pipeline) error {
	if m.begun.Load() {
		return fmt.Errorf("pipeline %s: %w", p.Name, ErrStarted)
	}
	if err := p.Validate(); err != nil {
		return err
	}
	m.pipelines = append(m.pipelines, p)
	return nil
}

// Validate checks the settings and the pipelines, without starting anything.
func (m *Mesh) Validate() error {
	if m.settings.NoGateway {
		return nil
	}
	_, err := m.newGateway(bus.Settings{}, nil, nil, noop.Meter{})
	return err
}

// Start starts the broker, every host and then the gateway, and returns when
// all are ready. What it started is stopped when one fails, or when the context
// ends before. A mesh is started once.
func (m *Mesh) Start(ctx context.Context) error {
	if m.begun.Swap(true) {
		return ErrStarted
	}
	p, err := m.assemble()
	if err == nil {
		m.parts.Store(p)
		err = p.group.Start(ctx)
	}
	if err != nil {
		m.meter.unregister()
	}
	m.started.Store(err == nil)
	return err
}

// WithTenant returns a context whose calls are of a tenant, a name as stages have: it sees the
// results, keys, jobs and files of that tenant alone, and shares bounds with others.
func WithTenant(ctx context.Context, tenant string) context.Context {
	return budget.WithTenant(ctx, tenant)
}

// Infer runs one request through a pipeline. Errors are *fault.Fault. Of a stage
// that answers in chunks the caller gets the outcome alone. The request does not change any
// more, also after the call, and the response is read-only: stages in this process share
// their memory.
func (m *Mesh) Infer(ctx context.Context, r *Request) (*Response, error) {
	return m.Stream(ctx, r, nil)
}

// Stream is Infer that hands each chunk to emit as it comes: in order, one at a
// time, on the caller's goroutine, and all of them before it returns the
// outcome. A pipeline whose last stage does not stream calls emit never. An
// error of emit ends the call with CANCELLED, which wraps it; an emit that falls
// too far behind ends the call with SLOW_READER.
func (m *Mesh) Stream(ctx context.Context, r *Request, emit func(Chunk) error) (*Response, error) {
	service, err := m.service()
	if err != nil {
		return nil, err
	}
	return service.Stream(ctx, r, emit)
}

// Result returns the stored answer to a durable request, or to one with an
// idempotency key, whichever gateway of the mesh took it: the request's own fault
// where it failed, NOT_FOUND where no answer is stored. It waits for an answer for up
// to the given time.
func (m *Mesh) Result(ctx context.Context, requestID string, wait time.Duration) (*Response, error) {
	service, err := m.service()
	if err != nil {
		return nil, err
	}
	return service.Result(ctx, requestID, wait)
}

// Cancel cancels a request by its ID, whichever gateway of the mesh took it. It is best
// effort, and nil also for a finished or an unknown request.
func (m *Mesh) Cancel(ctx context.Context, requestID string) error {
	service, err := m.service()
	if err != nil {
		return err
	}
	return service.Cancel(ctx, requestID)
}

// RequestOf returns the ID of the request of a pipeline that has an idempotency key, for
// Result and Cancel: NOT_FOUND where none has it.
func (m *Mesh) RequestOf(ctx context.Context, key Key) (string, error) {
	service, err := m.service()
	if err != nil {
		return "", err
	}
	return service.RequestOf(ctx, key)
}

// SetJobs replaces the pools and queues of jobs, all or, on an error, none. Errors begin with the
// key, as jobs.queues.nightly. Everything else in it stays as it was at the start.
// No running job is stopped. Jobs of a queue that is left out run on in the pool that they had, and
// nothing more is submitted to it.
func (m *Mesh) SetJobs(c Jobs) error {
	p, err := m.withGateway()
	if err != nil {
		return err
	}
	err = p.gateway.Ready()
	if _, isFault := errors.AsType[*fault.Fault](err); err != nil && !isFault { // with a fault it has started
		return fault.Newf(fault.NoCapacity, "%w", err)
	}
	m.jobs.Lock()
	defer m.jobs.Unlock()
	c.Settings, c.Batches, c.Webhooks = m.settings.Jobs.Settings, m.settings.Jobs.Batches, m.settings.Jobs.Webhooks
	if d := p.dispatcher; d != nil {
		err = d.SetConfig(c)
	} else {
		err = config.InSection("jobs", c.Validate())
	}
	if err == nil {
		p.gateway.Jobs().SetQueues(meshfile.JobQueues(c))
	}
	return err
}

// service returns the request path, once the mesh serves.
func (m *Mesh) service() (*call.Service, error) {
	p, err := m.withGateway()
	if err != nil {
		return nil, err
	}
	if err := p.gateway.Ready(); err != nil {
		return nil, fault.Newf(fault.NoCapacity, "%w", err)
	}
	return p.gateway.Service(), nil
}

// withGateway returns the parts of a started mesh that has a gateway.
func (m *Mesh) withGateway() (*parts, error) {
	p := m.parts.Load()
	switch {
	case p == nil:
		return nil, fault.Newf(fault.NoCapacity, "%w", ErrNotStarted)
	case p.gateway == nil:
		return nil, fault.New(fault.NoCapacity, "the process has no gateway")
	}
	return p, nil
}

// URL returns where callers reach the mesh, or "" where nowhere, or not yet.
func (m *Mesh) URL() string { return m.gatewayURL((*gateway.Gateway).URL) }

// GRPCURL returns where callers reach the port for gRPC alone, or "" where nowhere, or not yet.
func (m *Mesh) GRPCURL() string { return m.gatewayURL((*gateway.Gateway).GRPCURL) }

// AdminURL returns where operators reach the mesh, or "" where nowhere, or not yet.
func (m *Mesh) AdminURL() string { return m.gatewayURL((*gateway.Gateway).AdminURL) }

func (m *Mesh) gatewayURL(of func(*gateway.Gateway) string) string {
	if p := m.parts.Load(); p != nil && p.gateway != nil && p.gateway.Ready() == nil {
		return of(p.gateway)
	}
	return ""
}

// Stages describes the hosts that run in this process; there are none before Start has
// returned.
func (m *Mesh) Stages() []stagehost.Description {
	if !m.started.Load() {
		return nil
	}
	p := m.parts.Load()
	out := make([]stagehost.Description, len(p.hosts))
	for i, h := range p.hosts {
		out[i] = h.Describe()
	}
	return out
}

// Restart has every runner whose code runs in processes of its own start those
// anew, one after the other, so that the mesh serves on. It returns when all are
// ready, or with what the first has failed with.
func (m *Mesh) Restart(ctx context.Context) error {
	for _, s := range m.stages {
		for _, r := range s.Runners {
			again, ok := r.(interface{ Restart(context.Context) error })
			if !ok {
				continue
			}
			if err := again.Restart(ctx); err != nil {
				return fmt.Errorf("stage %s: %w", s.Name, err)
			}
		}
	}
	return nil
}

// BrokerURL returns where the broker listens, for other processes to join, or
// "" where it does not.
func (m *Mesh) BrokerURL() string {
	if url := m.settings.NATS.URL; url != "" {
		return url
	}
	p := m.parts.Load()
	if p == nil || p.broker == nil {
		return ""
	}
	return p.broker.url()
}

// Broker returns how others in this process reach the mesh's broker. A broker in the
// process is reached between Start and Stop.
func (m *Mesh) Broker() bus.Settings {
	p := m.parts.Load()
	if p == nil {
		p = &parts{}
	}
	return m.bus(p.broker)
}

// Ready returns nil when every part serves, else why not.
func (m *Mesh) Ready() error {
	p := m.parts.Load()
	if p == nil {
		return ErrNotStarted
	}
	var errs []error
	if p.gateway != nil {
		errs = append(errs, p.gateway.Ready())
	}
	for _, h := range p.hosts {
		errs = append(errs, h.Ready())
	}
	return errors.Join(errs...)
}

// StoreReady returns nil while the broker stores durable requests, jobs and batches, else why not. The
// mesh is ready without that, because requests in memory go on.
func (m *Mesh) StoreReady() error {
	p := m.parts.Load()
	switch {
	case p == nil:
		return ErrNotStarted
	case p.gateway != nil:
		return p.gateway.StoreReady()
	case p.broker != nil:
		return p.broker.store.storeError()
	}
	return nil
}

// remarks returns what is wrong although the mesh is ready, one line for each worker, and one if
// nothing is stored.
func (m *Mesh) remarks() string {
	var out []string
	if p := m.parts.Load(); p != nil {
		if err := m.StoreReady(); err != nil && m.loopback == nil {
			out = append(out, "durable requests, jobs and batches: "+err.Error())
		}
		for _, h := range p.hosts {
			out = append(out, h.Remarks()...)
		}
	}
	return strings.Join(out, "\n")
}

// Run starts the mesh, serves until the context ends or a part fails, and stops it.
func (m *Mesh) Run(ctx context.Context) error {
	if err := m.Start(ctx); err != nil {
		return err
	}
	return m.stopWith(m.Wait(ctx))
}

// stopWith stops the mesh and returns the first error. Stop returns the failure of Wait too.
func (m *Mesh) stopWith(err error) error {
	return cmp.Or(err, m.Stop())
}

// Wait returns nil when the context ends, or the reason when a part fails: the
// others serve on until Stop.
func (m *Mesh) Wait(ctx context.Context) error {
	p := m.parts.Load()
	if p == nil {
		return ErrNotStarted
	}
	return p.group.Wait(ctx)
}

// Stop drains the gateway, then the hosts, ends the broker, and returns what
// they failed with. It does nothing before Start, and only once.
func (m *Mesh) Stop() error {
	p := m.parts.Load()
	if p == nil {
		return nil
	}
	m.stop.Do(func() {
		m.left = p.group.Stop()
		m.meter.unregister()
	})
	return m.left
}
