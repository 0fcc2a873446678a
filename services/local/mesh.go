package local

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/credentials"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/store"
	"github.com/stagemesh/stagemesh/services/meshfile"
	"github.com/stagemesh/stagemesh/services/registry"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/stageapi"
)

// Settings are what a mesh in one process is made of. Zero values mean the
// defaults.
type Settings struct {
	// Mesh names the mesh; empty means "local".
	Mesh pipeline.MeshName
	// NATS is the URL of a broker to use instead of one in the process.
	NATS string
	// Auth are the files by which it and this process know each other.
	Auth credentials.Broker
	// Broker are settings of the broker in the process.
	Broker BrokerSettings
	// Gateway is the public port and the bounds of the gateway. Its mesh, id,
	// catalog, results, idempotency and bus are filled in.
	Gateway gateway.Settings
	// Results are where answers are stored, DeadLetters what was given up on, and
	// Idempotency which request has an idempotency key; every process of a mesh
	// has the same.
	Results     store.Settings
	DeadLetters store.Settings
	Idempotency store.Settings
	// Registry is where hosts say that they are there; nil means nowhere. Its mesh and
	// logger, and for NATS the broker in the process, are filled in.
	Registry *registry.Settings
	// Logger may be nil: nothing is logged.
	Logger *slog.Logger
	// Meter may be nil: nothing is counted.
	Meter metric.Meter
	// Version of the program, for descriptions.
	Version string
}

// Stage is one stage with its hosts, each of which needs a runner of its own.
type Stage struct {
	Name pipeline.StageName
	// Runner of the stage's only host; or one for each of several Runners.
	Runner  runner.Runner
	Runners []runner.Runner
	// Inputs and Outputs add to what the runners say that they take and give.
	Inputs, Outputs []runner.PartSpec
	// Batch of zero means DefaultBatch.
	Batch   batch.Settings
	BatchBy []string
	// Stream bounds the silence of runners that answer in chunks.
	Stream      stagehost.StreamSettings
	MaxInFlight int
	Queue       stagehost.QueueSettings
	// CrashLimit is how many runs of an item alone may end their process; 0 means
	// stagehost.DefaultCrashLimit.
	CrashLimit int
	// Labels are shown in the registry, where there is one.
	Labels map[string]string
	// Listen is the address of the gRPC StageService of the first host; empty
	// means none.
	Listen string
	// CertFile and KeyFile hold its certificate and the key; without them it is
	// plain. ServerName is the name in the certificate that the registry's checks
	// ask for, the address's where empty.
	CertFile, KeyFile, ServerName string
	// StartTimeout bounds how long the runner may take to be ready.
	StartTimeout time.Duration
	DrainTimeout time.Duration
}

// DefaultBatch is what a stage gets that says nothing.
func DefaultBatch() batch.Settings { return meshfile.DefaultBatch() }

// Mesh is a mesh in one process. What adds to it is for one goroutine before
// Start; everything else is safe for concurrent use, Stop once Start has
// returned.
type Mesh struct {
	settings  Settings
	stages    []Stage
	pipelines []pipeline.Pipeline

	begun atomic.Bool
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
	return &Mesh{settings: s}, nil
}

// AddStage adds a stage before the start.
func (m *Mesh) AddStage(s Stage) error {
	if m.begun.Load() {
		return fmt.Errorf("stage %s: %w", s.Name, ErrStarted)
	}
	s = s.withDefaults()
	if err := s.Validate(); err != nil {
		return fmt.Errorf("stage %s: %w", s.Name, err)
	}
	for _, other := range m.stages {
		if other.Name == s.Name {
			return fmt.Errorf("stage %s: there is one of that name", s.Name)
		}
	}
	m.stages = append(m.stages, s)
	return nil
}

func (s Stage) withDefaults() Stage {
	if s.Runner != nil {
		s.Runners, s.Runner = append([]runner.Runner{s.Runner}, s.Runners...), nil
	}
	if s.Batch == (batch.Settings{}) {
		s.Batch = DefaultBatch()
	}
	return s
}

// Validate checks what can be told before the start.
func (s Stage) Validate() error {
	s = s.withDefaults()
	if len(s.Runners) == 0 {
		return errors.New("runner: there is none")
	}
	for _, r := range s.Runners {
		settings := s.host(r)
		settings.Mesh, settings.Host = "any", "any"
		if err := settings.Validate(); err != nil {
			return err
		}
	}
	return nil
}

// host returns the settings of one host that are the stage's own.
func (s Stage) host(r runner.Runner) stagehost.Settings {
	return stagehost.Settings{
		Stage: s.Name, Runner: r, Inputs: s.Inputs, Outputs: s.Outputs,
		Batch: s.Batch, BatchBy: s.BatchBy, Stream: s.Stream, MaxInFlight: s.MaxInFlight,
		Queue: s.Queue, CrashLimit: s.CrashLimit, Labels: s.Labels,
		CertFile: s.CertFile, KeyFile: s.KeyFile, ServerName: s.ServerName,
		StartTimeout: s.StartTimeout, DrainTimeout: s.DrainTimeout,
	}
}

// stageOf returns the stage whose host has those settings.
func stageOf(h stagehost.Settings) Stage {
	return Stage{
		Name: h.Stage, Runners: []runner.Runner{h.Runner}, Inputs: h.Inputs, Outputs: h.Outputs,
		Batch: h.Batch, BatchBy: h.BatchBy, Stream: h.Stream, MaxInFlight: h.MaxInFlight,
		Queue: h.Queue, CrashLimit: h.CrashLimit, Labels: h.Labels,
		Listen: h.Listen, CertFile: h.CertFile, KeyFile: h.KeyFile, ServerName: h.ServerName,
		StartTimeout: h.StartTimeout, DrainTimeout: h.DrainTimeout,
	}
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

// Validate checks what the settings and the pipelines say, without starting
// anything.
func (m *Mesh) Validate() error {
	_, err := m.newGateway(bus.Settings{}, nil)
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
	if err != nil {
		return err
	}
	m.parts.Store(p)
	return p.group.Start(ctx)
}

// Infer runs one request through a pipeline. Errors are *fault.Fault. Of a stage
// that answers in chunks the caller gets the outcome alone.
func (m *Mesh) Infer(ctx context.Context, r *call.Request) (*call.Response, error) {
	return m.Stream(ctx, r, nil)
}

// Stream is Infer that hands each chunk to emit as it comes: in order, one at a
// time, on the caller's goroutine, and all of them before it returns the
// outcome. A pipeline whose last stage does not stream calls emit never. An
// error of emit ends the call with CANCELLED, which wraps it; an emit that falls
// too far behind ends the call with SLOW_READER.
func (m *Mesh) Stream(ctx context.Context, r *call.Request, emit func(call.Chunk) error) (*call.Response, error) {
	service, err := m.service()
	if err != nil {
		return nil, err
	}
	return service.Stream(ctx, r, emit)
}

// Result returns the stored answer to a durable request, or to one with an
// idempotency key, whichever gateway of the mesh took it: the request's own fault
// where it failed, NOT_FOUND where no answer is stored. It waits for one as long
// as wait says.
func (m *Mesh) Result(ctx context.Context, requestID string, wait time.Duration) (*call.Response, error) {
	service, err := m.service()
	if err != nil {
		return nil, err
	}
	return service.Result(ctx, requestID, wait)
}

// Cancel calls a request off, whichever gateway of the mesh took it. It is best
// effort, and nil also for a request that is finished, or that nobody made.
func (m *Mesh) Cancel(ctx context.Context, requestID string) error {
	service, err := m.service()
	if err != nil {
		return err
	}
	return service.Cancel(ctx, requestID)
}

// service returns the request path, once the mesh serves.
func (m *Mesh) service() (*call.Service, error) {
	p := m.parts.Load()
	if p == nil {
		return nil, fault.Newf(fault.NoCapacity, "%w", ErrNotStarted)
	}
	if err := p.gateway.Ready(); err != nil {
		return nil, fault.Newf(fault.NoCapacity, "%w", err)
	}
	return p.gateway.Service(), nil
}

// Addr returns the public address, or nil where there is none, or none yet.
func (m *Mesh) Addr() net.Addr {
	p := m.parts.Load()
	if p == nil || p.gateway.Ready() != nil {
		return nil
	}
	return p.gateway.Addr()
}

// AdminAddr returns the address for operators, or nil where there is none, or
// none yet.
func (m *Mesh) AdminAddr() net.Addr {
	p := m.parts.Load()
	if p == nil || p.gateway.Ready() != nil {
		return nil
	}
	return p.gateway.AdminAddr()
}

// URL returns where callers reach the mesh, or "" where nowhere, or not yet.
func (m *Mesh) URL() string {
	p := m.parts.Load()
	if p == nil || p.gateway.Ready() != nil {
		return ""
	}
	return p.gateway.URL()
}

// AdminURL returns where operators reach the mesh, or "" where nowhere, or not yet.
func (m *Mesh) AdminURL() string {
	p := m.parts.Load()
	if p == nil || p.gateway.Ready() != nil {
		return ""
	}
	return p.gateway.AdminURL()
}

// Stages describes the hosts that run in this process; there are none before the
// start.
func (m *Mesh) Stages() []stageapi.Description {
	p := m.parts.Load()
	if p == nil {
		return nil
	}
	out := make([]stageapi.Description, len(p.hosts))
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
	if m.settings.NATS != "" {
		return m.settings.NATS
	}
	p := m.parts.Load()
	if p == nil {
		return ""
	}
	return p.broker.url()
}

// Broker returns how others in this process reach the mesh's broker. A broker in the
// process is reached between Start and Stop.
func (m *Mesh) Broker() bus.Settings {
	if p := m.parts.Load(); p != nil {
		return m.bus(p.broker)
	}
	return m.bus(nil)
}

// Ready returns nil when every part serves, else why not.
func (m *Mesh) Ready() error {
	p := m.parts.Load()
	if p == nil {
		return ErrNotStarted
	}
	errs := []error{p.gateway.Ready()}
	for _, h := range p.hosts {
		errs = append(errs, h.Ready())
	}
	return errors.Join(errs...)
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
	m.stop.Do(func() { m.left = p.group.Stop() })
	return m.left
}
