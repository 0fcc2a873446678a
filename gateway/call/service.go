package call

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"go.opentelemetry.io/otel/metric"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/gateway/catalog"
	"github.com/stagemesh/stagemesh/gateway/correlate"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/store"
)

// Catalog is the pipelines that are served now.
type Catalog interface {
	// Resolve returns the pipeline of that name, or the implicit one of
	// "stage:<name>".
	Resolve(name string) (pipeline.Pipeline, *fault.Fault)
	// Label returns the value of a metric's label for a request that names a
	// pipeline; there are not many.
	Label(name string) string
}

var _ Catalog = (*catalog.Catalog)(nil)

// Settings are what the request path is made of.
type Settings struct {
	Mesh    pipeline.MeshName
	Gateway pipeline.GatewayID
	Catalog Catalog
	// Timeout is a request's where neither it nor its pipeline says; 0 means
	// 30 s. MaxTimeout bounds all; 0 means 10 minutes.
	Timeout    time.Duration
	MaxTimeout time.Duration
	// MaxInFlight bounds the requests in flight; 0 means 4096.
	MaxInFlight int
	// Bodies bounds the bytes of all requests together: what they are in hand as,
	// besides what they came as. nil means that nothing does.
	Bodies *admission.ByteBudget
	// HostGrace is how long a request in memory waits for its first step while
	// the step's stage has no host; 0 means 10 s.
	HostGrace time.Duration
	// MaxPayload bounds the inputs of a request, in bytes; 0 means what the
	// broker takes.
	MaxPayload int
	// Metadata are the keys that a request may hand to runners.
	Metadata []string
	// Results are where answers are stored: the same as
	// the hosts'.
	Results store.Settings
	// Idempotency is where it is kept which request has an idempotency key. Its
	// retention is the window in which a key means that request: no more than
	// that of the results, which is what 0 means, and more than any request
	// takes.
	Idempotency store.Settings
	Logger      *slog.Logger
	Meter       metric.Meter
}

// Defaults of Settings.
const (
	DefaultTimeout     = 30 * time.Second
	DefaultMaxTimeout  = 10 * time.Minute
	DefaultMaxInFlight = 4096
	DefaultHostGrace   = 10 * time.Second
)

// Service is the request path of one gateway.
type Service struct {
	settings Settings
	metrics  *metrics
	gate     *admission.Limiter
	shares   *admission.PipelineLimits
	table    *correlate.Table
	bus      *bus.Bus
	capacity *admission.Availability
	results  *results
	keys     *keys
	waiting  *waiting
	callOffs *callOffs

	stopReplies func() error
	stopCancels func() error
	stopWatch   context.CancelFunc
	watching    sync.WaitGroup
}

// New returns a service that is not started.
func New(s Settings) (*Service, error) {
	if err := pipeline.ValidName("gateway", string(s.Gateway)); err != nil {
		return nil, err
	}
	if s.Timeout == 0 {
		s.Timeout = DefaultTimeout
	}
	if s.MaxTimeout == 0 {
		s.MaxTimeout = DefaultMaxTimeout
	}
	if s.HostGrace == 0 {
		s.HostGrace = DefaultHostGrace
	}
	if s.MaxInFlight == 0 {
		s.MaxInFlight = DefaultMaxInFlight
	}
	if s.Idempotency.Retention == 0 {
		s.Idempotency.Retention = s.Results.Retention
	}
	out := &Service{settings: s, gate: admission.NewLimiter(s.MaxInFlight), shares: admission.NewPipelineLimits(), table: correlate.New(s.MaxInFlight, streamsBytes), waiting: newWaiting()}
	m, err := newMetrics(s.Meter, out.table, out.gate)
	out.metrics = m
	return out, err
}

// Start receives replies and notices from the bus and watches the queues that
// calls wait in.
func (s *Service) Start(b *bus.Bus) error {
	s.bus = b
	s.capacity = admission.NewAvailability(b, s.gate.Closing().Done())
	if err := s.capacity.Report(s.settings.Meter); err != nil {
		return err
	}
	s.results = newResults(b, s.settings.Results, s.settings.Logger)
	s.keys = newKeys(b, s, s.settings.Idempotency, s.settings.Logger)
	s.callOffs = newCallOffs(b, s.settings.MaxInFlight, s.metrics.cancelled)
	s.callOffs.withdrawn = s.capacity.Withdrawn
	if err := s.subscribe(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.stopWatch = cancel
	s.watching.Go(func() { s.watch(ctx) })
	s.watching.Go(func() { s.results.watch(ctx, b.Reconnects()) })
	return nil
}

func (s *Service) subscribe() (err error) {
	if s.stopReplies, err = s.bus.ServeReplies(s.settings.Gateway, s.receive); err != nil {
		return err
	}
	if s.stopCancels, err = s.bus.ServeCancels(s.hear); err != nil {
		return errors.Join(err, s.stopReplies())
	}
	return nil
}

// Stop lets nobody in, waits for those inside until the context ends, and sends
// away who is left then; it returns the context's cause where there was anybody. It
// waits for what is being called off, which takes a second, or five where much is,
// and for idempotency keys that are given back, and stops receiving replies.
func (s *Service) Stop(ctx context.Context) error {
	s.gate.Close()
	err := s.gate.AwaitIdle(ctx)
	if err != nil {
		err = errors.Join(context.Cause(ctx), s.sendAway())
	}
	s.callOffs.stop()
	s.keys.stop()
	s.stopWatch()
	s.watching.Wait()
	s.capacity.Stop()
	return errors.Join(err, s.stopCancels(), s.stopReplies())
}

// sendAway answers those who wait still.
func (s *Service) sendAway() error {
	s.table.FailIf(func(*correlate.Waiter) bool { return true }, fault.New(fault.ShuttingDown,
		"the gateway stopped before there was an answer; that to a durable request is stored, and can be had by its id"))
	ctx, cancel := context.WithTimeout(context.Background(), leave)
	defer cancel()
	return s.gate.AwaitIdle(ctx)
}

// leave is how long calls have to leave that were sent away.
const leave = time.Second

// Close lets nobody in any more.
func (s *Service) Close() { s.gate.Close() }

// Ready returns nil when requests can be served, else a fault that says why
// not.
func (s *Service) Ready() error {
	if err := s.bus.Away(); err != nil {
		return unavailable(err)
	}
	return nil
}

// PipelineReady returns nil when every stage of the pipeline has a host, else a
// fault that says which has none, or that there is no such pipeline.
func (s *Service) PipelineReady(ctx context.Context, name string) error {
	p, f := s.settings.Catalog.Resolve(name)
	if f != nil {
		return f
	}
	route, err := p.Route(pipeline.Options{})
	if err != nil {
		return err
	}
	durability, f := durabilityOf(&Request{}, p)
	if f != nil {
		return f
	}
	if f := s.capacity.CheckHosts(ctx, route, durability); f != nil {
		return f
	}
	return nil
}

// receive is the handler of the shared reply subscription.
func (s *Service) receive(id pipeline.ExecutionID, data []byte) meshv1.ReplyDisposition {
	terminal, err := envelope.PeekTerminal(data)
	if err != nil {
		s.metrics.reply("malformed")
		return meshv1.ReplyDisposition_REPLY_DISPOSITION_MALFORMED
	}
	switch s.table.Deliver(id, terminal, data) {
	case correlate.Delivered:
		return meshv1.ReplyDisposition_REPLY_DISPOSITION_DELIVERED
	case correlate.Duplicate:
		s.metrics.reply("duplicate")
		return meshv1.ReplyDisposition_REPLY_DISPOSITION_DUPLICATE
	case correlate.Overflow:
		s.metrics.reply("overflow")
		return meshv1.ReplyDisposition_REPLY_DISPOSITION_OVERFLOW
	default:
		s.metrics.reply("late")
		return meshv1.ReplyDisposition_REPLY_DISPOSITION_UNKNOWN
	}
}

// Inside returns how many requests are in the gateway: in flight, or waiting for
// room or for a result.
func (s *Service) Inside() int { return s.gate.InFlight() }
