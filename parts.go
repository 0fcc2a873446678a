package stagemesh

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/jobs/dispatch"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
)

// parts are what a mesh is made of once it is started.
type parts struct {
	broker   *broker            // nil where another one is used
	registry *meshfile.Registry // nil where there is none
	hosts    []*stagehost.Host
	gateway  *gateway.Gateway // nil where there is none
	// dispatcher is nil where none runs.
	dispatcher *dispatch.Dispatcher
	group      *process.Group
}

// assemble makes the parts. It starts nothing.
func (m *Mesh) assemble() (p *parts, err error) {
	p = &parts{}
	var order []process.Part
	if m.settings.NATS.URL == "" && m.loopback == nil {
		p.broker = newBroker(m.settings.NATS, m.reserve(), m.settings.Logger)
		if err := p.broker.store.report(&m.meter); err != nil {
			return nil, err
		}
		order = append(order, process.Part{Name: "broker", Run: p.broker.run, Ready: p.broker.waitReady})
	}
	to := m.bus(p.broker)
	if !m.settings.NoLocalHops {
		to.Local = bus.NewLocal()
	}
	p.registry, err = meshfile.NewRegistry(string(m.settings.Mesh), m.registryConfig(), to, m.settings.Logger)
	if err != nil {
		return nil, err
	}
	if p.registry != nil {
		order = append(order, process.Part{Name: "registry", Run: p.registry.Run})
	}
	var models *meshfile.Registry
	if m.usesModels() {
		if models, err = p.registry.ModelTable(string(m.settings.Mesh), to, m.settings.Logger); err != nil {
			return nil, err
		}
		if models != p.registry {
			order = append(order, process.Part{Name: "models", Run: models.Run})
		}
	}
	to.Metrics, to.Process = m.metrics, newID()
	for _, s := range m.stages {
		hosts, err := m.hostsOf(s, to, p.registry.Host(models))
		if err != nil {
			return nil, err
		}
		p.hosts = append(p.hosts, hosts...)
	}
	if !m.settings.NoGateway {
		if p.gateway, err = m.newGateway(to, p.registry.Gateway(models), hostsHere{p}, &m.meter); err != nil {
			return nil, err
		}
		if err := p.gateway.ReadFiles(); err != nil {
			return nil, err
		}
	}
	if len(p.hosts) > 0 {
		order = append(order, process.Part{Name: "stages", Run: p.runHosts, Ready: p.waitHosts})
	}
	if p.gateway != nil {
		order = append(order, process.Part{Name: "gateway", Run: p.gateway.Run, Ready: p.gateway.WaitReady})
	}
	if m.settings.Dispatcher && p.gateway != nil {
		if p.dispatcher, err = dispatch.New(dispatch.Settings{
			Config: m.settings.Jobs, Mesh: m.settings.Mesh, Bus: to, DeadLetters: m.settings.DeadLetters, Logger: m.settings.Logger, Meter: &m.meter,
			Target: func(dispatch.PoolConfig) dispatch.Target { return meshTarget{p.gateway} },
			Gates:  m.settings.Gates, Stages: meshTarget{p.gateway}.stages, ReadyHosts: meshTarget{p.gateway}.readyHosts, ReadyInstances: p.registry.Passing,
		}); err != nil {
			return nil, err
		}
		order = append(order, process.Part{Name: "dispatcher", Run: p.dispatcher.Run, Ready: p.dispatcher.WaitReady})
	}
	p.group = process.New(m.settings.Logger, order...)
	return p, nil
}

// runHosts runs all hosts until the context ends, or the first of them does.
func (p *parts) runHosts(ctx context.Context) error {
	hosts, ctx := errgroup.WithContext(ctx)
	for _, h := range p.hosts {
		hosts.Go(func() error { return listenError("stages."+string(h.Describe().Stage)+".listen", h.Run(ctx)) })
	}
	return hosts.Wait()
}

// listenError adds the key of the address to an error of listening.
func listenError(key string, err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "listen" {
		return fmt.Errorf("%s: %w", key, op)
	}
	return err
}

func (p *parts) waitHosts(ctx context.Context) error {
	for _, h := range p.hosts {
		if err := h.WaitReady(ctx); err != nil {
			// A host that has stopped makes runHosts end, which knows why.
			<-ctx.Done()
			return err
		}
	}
	return nil
}

// reserve is what the broker sets aside for the stages of this process, and for the
// registry.
func (m *Mesh) reserve() meshfile.Reserve {
	var queues []stagehost.QueueSettings
	for _, s := range m.stages {
		queues = append(queues, s.Queues(len(s.Runners))...)
	}
	return meshfile.ReserveOf(queues, m.settings.Results, m.settings.DeadLetters, m.settings.Idempotency).Registry(m.registryConfig()).Jobs(m.settings.Jobs)
}

// inProcess is the broker's URL where connections do not use it.
const inProcess = "nats://in-process"

func (m *Mesh) bus(own *broker) bus.Settings {
	if m.loopback != nil {
		return bus.Settings{Loopback: m.loopback}
	}
	if own != nil {
		return bus.Settings{URL: inProcess, Server: own, Auth: own.auth(), Store: own.store.storeError}
	}
	return bus.Settings{URL: m.settings.NATS.URL, Auth: m.settings.NATS.Broker}
}

func (m *Mesh) registryConfig() meshfile.RegistryConfig {
	if m.settings.Registry == nil || m.loopback != nil {
		return meshfile.RegistryConfig{None: true}
	}
	return *m.settings.Registry
}

// usesModels reports whether a part of this process needs the registry of models.
func (m *Mesh) usesModels() bool {
	return !m.settings.NoGateway || slices.ContainsFunc(m.stages, func(s Stage) bool { return s.Models != nil })
}

func (m *Mesh) hostsOf(s Stage, to bus.Settings, known *stagehost.Registry) ([]*stagehost.Host, error) {
	out := make([]*stagehost.Host, len(s.Runners))
	for i, r := range s.Runners {
		settings := s.host(r)
		settings.Mesh, settings.Version, settings.Operations = m.settings.Mesh, m.settings.Version, m.settings.Operations
		settings.Advertise = m.settings.Advertise
		settings.Host = cmp.Or(s.Host, pipeline.HostID(newID()))
		settings.Results, settings.DeadLetters = m.settings.Results, m.settings.DeadLetters
		settings.Bus, settings.Logger, settings.Meter, settings.Registry = to, m.settings.Logger, &m.meter, known
		settings.Tracer = m.tracer(string(s.Name), string(settings.Host))
		if i > 0 {
			settings.Listen = ""
		}
		h, err := stagehost.New(settings)
		if err != nil {
			return nil, fmt.Errorf("stage %s: %w", s.Name, err)
		}
		out[i] = h
	}
	return out, nil
}

// hostsHere are the hosts of a process without a broker, which nobody joins.
type hostsHere struct{ of *parts }

var _ gateway.Members = hostsHere{}

// Hosts implements gateway.Members.
func (h hostsHere) Hosts() []discovery.Host {
	out := make([]discovery.Host, len(h.of.hosts))
	for i, host := range h.of.hosts {
		out[i] = discovery.Host{Record: host.Record(), Alive: true}
	}
	return out
}

// The other methods of gateway.Members: the hosts of the process are always known.
func (hostsHere) Loaded(context.Context) error { return nil }
func (hostsHere) Stale() (time.Time, error)    { return time.Time{}, nil }
func (hostsHere) Changed() <-chan struct{}     { return nil }

func (m *Mesh) newGateway(to bus.Settings, known *gateway.Registry, here gateway.Members, meter metric.Meter) (*gateway.Gateway, error) {
	s := m.settings.Gateway
	if m.loopback != nil {
		s.Members = here
	}
	s.Bus, s.Pipelines, s.Registry = to, m.pipelines, known
	s.Version, s.Operations = m.settings.Version, m.settings.Operations
	s.Call.Mesh, s.Call.Gateway = m.settings.Mesh, pipeline.GatewayID(newID())
	s.Call.Results, s.Call.Idempotency = m.settings.Results, m.settings.Idempotency
	s.Call.Logger, s.Call.Meter = m.settings.Logger, meter
	s.Call.Tracer = m.tracer("gateway", string(s.Call.Gateway))
	return gateway.New(s)
}

// tracer returns the tracer of a service of the mesh; nil where nothing is traced.
func (m *Mesh) tracer(name, instance string) trace.Tracer {
	if m.settings.TracerProvider == nil {
		return nil
	}
	mesh := string(m.settings.Mesh)
	return m.settings.TracerProvider.Tracer("stagemesh", trace.WithInstrumentationVersion(m.settings.Version),
		trace.WithInstrumentationAttributes(semconv.ServiceName(mesh+"-"+name), semconv.ServiceNamespace(mesh), semconv.ServiceInstanceID(instance)))
}

// newID returns an id that fits a subject token.
func newID() string { return uuid.Must(uuid.NewV7()).String() }

// File is a mesh file that has been read and checked.
type File = meshfile.File

// LoadFile reads a mesh file and checks all of it, with the kinds of stages that the program has.
func LoadFile(path string, kinds ...Kind) (*File, error) { return meshfile.Load(path, kinds...) }

// FileSettings are the settings of a mesh that its file does not have.
type FileSettings struct {
	// Stages names the stages of the file that this process runs; nil means all.
	Stages []string
	// NoGateway is true for a process that only serves stages.
	NoGateway bool
	// NoPorts is true for a process whose gateway nobody calls, such as a dispatcher alone.
	NoPorts bool
	// NoBroker has the process serve one stage without a broker, see File.ValidateWithoutBroker.
	NoBroker bool
	// Dispatcher has this process forward the jobs of the file; Gates are as in Settings.
	Dispatcher bool
	Gates      map[string]GateFunc
	// Host is the id of the host, for one stage with one host; empty means a new one.
	Host pipeline.HostID
	// Logger, Meter and Version are as in Settings.
	Logger  *slog.Logger
	Meter   metric.Meter
	Version string
	// Advertise and TracerProvider are as in Settings.
	Advertise      string
	TracerProvider trace.TracerProvider
}

// ErrAlone is returned when some stages of the file are left out, and no other process
// can join the mesh to serve them.
var ErrAlone = errors.New("no other process can join this mesh to serve the other stages; its file needs nats.url or nats.listen")

// FromFile returns the mesh that a file describes. More stages and pipelines
// may be added to it.
func FromFile(f *File, s FileSettings) (*Mesh, error) {
	if s.NoBroker {
		if err := f.ValidateWithoutBroker(); err != nil {
			return nil, err
		}
	}
	front, err := f.GatewaySettings()
	if err != nil && !s.NoGateway {
		return nil, err
	}
	if s.NoPorts {
		front.Listen, front.GRPCListen, front.Admin.Listen = "", "", ""
		if front.Scaler != nil {
			scaler := *front.Scaler
			scaler.Listen, front.Scaler = "", &scaler
		}
	}
	if s.NoBroker {
		front.Scaler, front.Bounds = nil, nil // there is nobody to ask
	}
	m, err := New(Settings{
		Mesh: pipeline.MeshName(f.Mesh), NATS: f.NATS, Gateway: front, NoGateway: s.NoGateway,
		NoLocalHops: f.LocalHops != nil && !*f.LocalHops,
		Results:     f.Results, DeadLetters: f.DeadLetters, Idempotency: f.Idempotency, Registry: &f.Registry,
		Jobs: f.Jobs, Dispatcher: s.Dispatcher, Gates: s.Gates,
		Logger: s.Logger, Meter: s.Meter, Version: s.Version, Advertise: s.Advertise, TracerProvider: s.TracerProvider,
	})
	if err != nil {
		return nil, err
	}
	if s.NoBroker {
		m.loopback = &bus.Loopback{}
	}
	if s.Stages == nil {
		s.Stages = f.StageNames()
	} else if !f.Joinable() {
		return nil, ErrAlone
	}
	m.pipelines = front.Pipelines
	for _, name := range s.Stages {
		stage, err := stageIn(f, name)
		if err != nil {
			return nil, err
		}
		stage.Host = s.Host
		if s.NoBroker {
			stage.Queue.Durabilities = []pipeline.Durability{pipeline.Memory}
		}
		if err := m.AddStage(stage); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// stageIn returns a stage of the file, with a runner for each of its hosts.
func stageIn(f *meshfile.File, name string) (Stage, error) {
	var out Stage
	for len(out.Runners) < max(1, f.Stages[name].Hosts) {
		host, err := f.Host(name)
		if err != nil {
			return Stage{}, err
		}
		out = Stage{Name: host.Stage, Runners: append(out.Runners, host.Runner), Inputs: host.Inputs, Outputs: host.Outputs, Config: host.Config}
	}
	return out, nil
}

// meshMeter is a Meter whose callbacks are unregistered when the mesh stops.
type meshMeter struct {
	metric.Meter

	mu         sync.Mutex
	registered []metric.Registration
}

// RegisterCallback implements metric.Meter.
func (m *meshMeter) RegisterCallback(f metric.Callback, of ...metric.Observable) (metric.Registration, error) {
	r, err := m.Meter.RegisterCallback(f, of...)
	if err == nil {
		m.mu.Lock()
		m.registered = append(m.registered, r)
		m.mu.Unlock()
	}
	return r, err
}

// unregister ends all callbacks.
func (m *meshMeter) unregister() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.registered {
		_ = r.Unregister()
	}
	m.registered = nil
}
