// Package gateway is one running gateway: it takes requests on one port in every
// protocol, sends them through the mesh and returns the answers.
//
//	g, err := gateway.New(settings)
//	err = g.Run(ctx)
//
// When Run's context ends the gateway reports that it is not ready, serves on for
// DrainDelay, rejects new requests, waits for those in flight, and stops.
package gateway

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/admission"
	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/front/oip"
	"github.com/stagemesh/stagemesh/internal/front/rest"
	"github.com/stagemesh/stagemesh/internal/jobs"
	registry "github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/route"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Gateway is one running gateway.
type Gateway struct {
	settings Settings
	log      *slog.Logger
	service  *call.Service
	jobs     *jobs.Service
	bus      *bus.Bus
	// memory and connections are shared by the ports for callers.
	memory      *transport.Memory
	connections *transport.Connections
	// public and operators are the contents of the ports' files. They are set if
	// isRead is true.
	public, operators secrets
	isRead            bool
	// pipelines are the pipelines that the gateway serves.
	pipelines *pipelines.Store
	models    *models
	// registry has the models that stages load on demand, placer chooses their hosts.
	registry *registry.Registry
	placer   *registry.Placer
	router   *route.Router
	// membership is nil without a registry. members are the hosts all the same, as far as they are
	// known; nil where they are not.
	membership *discovery.Membership
	members    Members
	// scaler is nil where the mesh's file configures no scaling.
	scaler    *scaler
	scalerTLS *tls.Config
	// addr, grpcAddr, admin and scalerAddr are the listening addresses. They are set before ready closes.
	addr, grpcAddr, admin, scalerAddr net.Addr
	ready                             chan struct{}
	// stopping ends when the gateway begins to stop, by beginStop, and closing closes when it
	// admits no more requests.
	stopping  context.Context
	beginStop context.CancelFunc
	closing   chan struct{}
}

// New returns a gateway. It dials nothing and starts nothing.
func New(s Settings) (*Gateway, error) {
	if err := errors.Join(config.InSection(publicKey, s.Config.Validate()), config.InSection(adminKey, s.Admin.Validate())); err != nil {
		return nil, err
	}
	s = s.withDefaults()
	s.Call.Logger = s.Call.Logger.With("gateway", s.Call.Gateway)
	s.Bus.Mesh, s.Bus.Name, s.Bus.Logger = s.Call.Mesh, "gateway "+string(s.Call.Gateway), s.Call.Logger
	s.Call.Shared = s.TokenFile != "" || s.Jobs.NATS
	s.Call.Budget = budget.NewPool(budget.Settings{
		Limit: int64(s.MaxInFlightBytes), Name: "bytes of requests and answers", Key: publicKey + ".max_in_flight_bytes",
		// Tenants share it if one request fits into the share of one.
		Shared: s.Call.Shared && s.MaxInFlightBytes >= 2*admission.MaxRequest(s.MaxPayload),
	})
	g := &Gateway{
		settings: s, log: s.Call.Logger, ready: make(chan struct{}), closing: make(chan struct{}),
		memory: transport.NewMemory(s.Call.Budget), members: s.Members,
		connections: transport.NewConnections(min(maxConnections, max(leastConnections, int64(s.MaxInFlightBytes)/connectionCost)), s.TokenFile != ""),
	}
	g.stopping, g.beginStop = context.WithCancel(context.Background())
	seeded := pipelines.Settings{Seeds: s.Pipelines, NoImplicit: !s.hasImplicit(), Logger: g.log}
	loadable := registry.Settings{Models: s.Models, Aliases: s.Aliases, Logger: g.log}
	if r := s.Registry; r != nil {
		seeded.Table, loadable.Table = r.Table, r.Models
		g.membership = discovery.NewMembership(r.Watcher, r.Table, string(s.Call.Mesh), g.log)
		g.members = g.membership
	}
	var err error
	if g.pipelines, err = pipelines.New(seeded); err != nil {
		return nil, err
	}
	g.models, g.registry = &models{gateway: g}, registry.New(loadable)
	s.Call.Specs = g.models.stageSpecs
	s.Call.Adapt = func(r *request.Request, p pipeline.Pipeline, memory *budget.Account) (*request.Request, error) {
		return oip.Adapt(r, g.models.inputs(p), memory)
	}
	g.placer = registry.NewPlacer(g.registry, g.membership)
	g.router = route.New(g.pipelines, g.registry, g.placer)
	s.Call.Router = g.router
	s.Call.Activation = s.activation()
	if g.scaler, err = newScaler(g); err != nil {
		return nil, config.InSection(scalerKey, err)
	}
	if g.service, err = call.New(s.Call); err != nil {
		return nil, err
	}
	s.Jobs.Document, s.Jobs.Logger, s.Jobs.Meter = rest.Document, g.log, s.Call.Meter
	g.jobs, err = jobs.New(s.Jobs, g.service)
	return g, err
}

// ReadFiles reads the files of the ports. Run calls it if nobody has called it before:
// a program calls it to find errors in the files before it starts other parts.
func (g *Gateway) ReadFiles() (err error) {
	if g.isRead {
		return nil
	}
	if g.settings.Listen != "" || g.settings.GRPCListen != "" {
		if g.public, err = g.settings.Access.read(g.log, credentials.ReadTokens); err != nil {
			return config.InSection(publicKey, err)
		}
	}
	if g.settings.Admin.Listen != "" {
		if g.operators, err = g.settings.Admin.read(g.log, credentials.ReadOperatorTokens); err != nil {
			return config.InSection(adminKey, err)
		}
	}
	if g.settings.scaler().Listen != "" {
		if err = g.readScaler(); err != nil {
			return config.InSection(scalerKey, err)
		}
	}
	g.isRead = true
	return nil
}

// Run serves until the context ends, and drains. It is called once.
func (g *Gateway) Run(ctx context.Context) error {
	if err := g.ReadFiles(); err != nil {
		return err
	}
	g.settings.Bus.Meter = g.settings.Call.Meter
	conn, err := bus.Connect(g.settings.Bus)
	if err != nil {
		return err
	}
	defer conn.Close()
	g.bus = conn
	if err := g.service.Start(conn); err != nil {
		return err
	}
	if err := g.reportConnections(); err != nil {
		return err
	}
	g.jobs.Start(conn)
	if g.membership == nil && g.scaler == nil {
		return g.serve(ctx)
	}
	running, ctx := errgroup.WithContext(ctx)
	watching, stop := context.WithCancel(context.WithoutCancel(ctx))
	if g.scaler != nil {
		g.scaler.store = store.NewScales(conn)
		if err := g.scaler.report(g.settings.Call.Meter); err != nil {
			stop()
			return err
		}
		running.Go(func() error { return g.scaler.run(watching) })
	}
	if g.membership != nil {
		running.Go(func() error { return g.membership.Run(watching) })
		running.Go(func() error { return g.membership.Sweep(watching) })
		running.Go(func() error { return g.pipelines.Run(watching) })
		running.Go(func() error { return g.registry.Run(watching) })
		running.Go(func() error { return g.announce(watching) })
	}
	running.Go(func() error {
		defer stop()
		return g.serve(ctx)
	})
	return running.Wait()
}

// announce keeps the gateway registered until the context ends. Nobody needs that to be
// served, so failures are only logged.
func (g *Gateway) announce(ctx context.Context) error {
	to := g.settings.Registry.Announcer
	if to == nil {
		return nil
	}
	self := discovery.GatewayInstance(string(g.settings.Call.Mesh), string(g.settings.Call.Gateway), g.settings.Version, g.settings.Operations)
	if err := discovery.KeepAnnounced(ctx, to, self, func(error) {}, g.log); err != nil {
		g.log.Warn("the registry may keep the gateway for a while", "error", err)
	}
	return nil
}

// serve listens, then drains: it reports that it is not ready, takes requests for the
// drain delay, and keeps the ports open until the requests in flight are answered.
func (g *Gateway) serve(ctx context.Context) error {
	ports, err := g.open(ctx)
	if err != nil {
		return errors.Join(err, g.stopService(ctx))
	}
	onBroker, err := g.serveTenants()
	if err != nil {
		return errors.Join(err, g.stop(ctx, ports))
	}
	close(g.ready)
	err = ports.until(ctx)
	g.beginStop()
	g.log.Info("draining", "delay", g.settings.DrainDelay)
	if err == nil {
		err = ports.linger(ctx, g.settings.DrainDelay)
	}
	drain, cancel := process.DrainContext(ctx, g.settings.DrainTimeout)
	defer cancel()
	err = errors.Join(err, onBroker.stop(func() error { return g.stop(drain, ports) }))
	g.log.Info("drained")
	return err
}

// stop closes the request path and then the ports. If no time is left, the ports still
// get lastResponses to write the responses of failed requests.
func (g *Gateway) stop(ctx context.Context, p ports) error {
	close(g.closing)
	p.grpc.disconnectGRPC()
	err := g.stopService(ctx)
	if ctx.Err() != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), lastResponses)
		defer cancel()
	}
	if errors.Is(err, process.ErrShutdown) {
		g.log.Warn("shut down at once: requests in flight failed")
		err = nil
	}
	return errors.Join(err, p.stop(ctx))
}

func (g *Gateway) stopService(ctx context.Context) error {
	err := g.service.Stop(ctx)
	g.jobs.Stop()
	return err
}

// Jobs returns the jobs, for use as a library.
func (g *Gateway) Jobs() *jobs.Service { return g.jobs }

// Service returns the request path, for use as a library.
func (g *Gateway) Service() *call.Service { return g.service }

// ReadyStages sums up the hosts that take items. It returns an error while they are not known.
func (g *Gateway) ReadyStages() ([]discovery.Stage, error) {
	if g.members == nil {
		return nil, errors.New("the mesh has no registry, which knows the hosts")
	}
	if since, why := g.members.Stale(); !since.IsZero() {
		return nil, fmt.Errorf("the registry is unavailable: %w", why)
	}
	return discovery.Stages(slices.DeleteFunc(g.members.Hosts(), func(h discovery.Host) bool {
		return !h.Alive || !h.Record.GetReady() || h.Record.GetDraining()
	})), nil
}

// Addr returns the public listening address. It is nil before WaitReady returns and
// without a public port.
func (g *Gateway) Addr() net.Addr { return g.addr }

// AdminAddr returns the listening address for operators. It is nil before WaitReady
// returns and without an admin port.
func (g *Gateway) AdminAddr() net.Addr { return g.admin }

// ScalerAddr returns the address that KEDA asks. It is nil before WaitReady returns and without that
// port.
func (g *Gateway) ScalerAddr() net.Addr { return g.scalerAddr }

// URL returns the gateway's public URL. It is "" before the gateway listens and
// without a public port.
func (g *Gateway) URL() string { return urlOf(g.settings.Access, g.addr) }

// GRPCURL returns the URL of the gateway's port for gRPC alone. It is "" before the gateway
// listens and without that port.
func (g *Gateway) GRPCURL() string { return urlOf(g.settings.Access, g.grpcAddr) }

// AdminURL returns the gateway's admin URL. It is "" before the gateway listens and
// without an admin port.
func (g *Gateway) AdminURL() string { return urlOf(g.settings.Admin.Access, g.admin) }

func urlOf(a Access, addr net.Addr) string {
	switch {
	case addr == nil:
		return ""
	case a.CertFile != "":
		return "https://" + addr.String()
	}
	return "http://" + addr.String()
}

// WaitReady returns when the gateway serves and has loaded the registry.
func (g *Gateway) WaitReady(ctx context.Context) error {
	select {
	case <-g.ready:
	case <-ctx.Done():
		return fmt.Errorf("gateway: %w", ctx.Err())
	}
	if err := g.bus.WaitConnected(ctx); err != nil {
		return err
	}
	if g.membership != nil && g.membership.Loaded(ctx) != nil {
		return errors.Join(ctx.Err(), g.hostsKnown())
	}
	return g.pipelines.WaitReady(ctx)
}

// Ready returns nil when the gateway can serve requests, and the cause otherwise:
// SHUTTING_DOWN, BROKER_UNAVAILABLE and REGISTRY_UNAVAILABLE are faults.
// REGISTRY_UNAVAILABLE is for a gateway that has never loaded the registry. A gateway
// that has loaded it stays ready during an outage.
func (g *Gateway) Ready() error {
	select {
	case <-g.ready:
	default:
		return errors.New("the gateway is starting")
	}
	if g.isStopping() {
		return fault.New(fault.ShuttingDown, "the gateway is stopping")
	}
	err := g.service.Ready()
	if err == nil {
		err = cmp.Or(g.pipelinesKnown(), g.hostsKnown())
	}
	if cause := errors.Unwrap(err); cause != nil {
		// Callers get the fault without its cause.
		return fmt.Errorf("%w: %w", err, cause)
	}
	return err
}

// StoreReady returns nil while durable requests, jobs and batches can be stored, else STORE_FULL. A
// gateway is ready without that, because requests in memory go on.
func (g *Gateway) StoreReady() error {
	select {
	case <-g.ready:
	default:
		return errors.New("the gateway is starting")
	}
	if f := cmp.Or(g.service.BrokerFault(), g.service.StoreFault()); f != nil {
		return f
	}
	return nil
}

// hostsKnown returns nil once the gateway knows the hosts of its registry.
func (g *Gateway) hostsKnown() error {
	if g.membership == nil {
		return nil
	}
	if why := g.membership.Ready(); why != nil {
		return discovery.NotLoaded("hosts", why)
	}
	return nil
}

func (g *Gateway) isStopping() bool { return g.stopping.Err() != nil }

// probe is health for callers without a token. Stages and models are unknown to it: they have
// any name, and each would be a question to the broker.
func (g *Gateway) probe(ctx context.Context, name string) error {
	if name != "" && g.Ready() == nil {
		if _, err := g.pipelines.Get(pipeline.Name(name)); err != nil {
			return err
		}
	}
	return g.health(ctx, name)
}

// health reports the health of the gateway, named "", or of a pipeline or model. Without a broker no
// other process has hosts, so the gateway is as ready as its pipelines.
func (g *Gateway) health(ctx context.Context, name string) error {
	if err := g.Ready(); err != nil {
		return err
	}
	if name != "" {
		return g.service.PipelineReady(ctx, name, false)
	}
	if g.bus.BrokerError() == nil {
		return nil
	}
	for _, e := range g.pipelines.List() {
		if err := g.service.PipelineReady(ctx, string(e.Pipeline.Name), false); err != nil {
			return err
		}
	}
	return nil
}
