package adminapi

import (
	"context"
	"log/slog"
	"net/http"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"

	"github.com/stagemesh/stagemesh/gateway/front/port"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/store"
)

// DeadLetters are the dead letters of the mesh. Errors are ErrNoDeadLetter, ErrUnreadable
// and ErrNotReplayable of mesh/store, the context's, and those with a
// *fault.Fault in their chain.
type DeadLetters interface {
	List(ctx context.Context, q store.DeadLetterQuery) (store.DeadLetterPage, error)
	Get(ctx context.Context, seq uint64) (store.DeadLetter, error)
	Replay(ctx context.Context, seq uint64) (store.Replayed, error)
	Delete(ctx context.Context, seq uint64) error
}

var _ DeadLetters = (*store.DeadLetters)(nil)

// Settings configure Handler.
type Settings struct {
	DeadLetters DeadLetters
	// Membership is nil if the mesh has no registry.
	Membership Membership
	Pipelines  Pipelines
	Traffic    Traffic
	// MaxPayload bounds the inputs of a request to the gateway, in bytes.
	MaxPayload int
	// Stopping closes when the gateway stops. Watches end then.
	Stopping <-chan struct{}
	// Health returns nil when the gateway can be used; nil means always healthy.
	Health func() error
	// Tokens are the accepted tokens. Without any, only callers on this machine are
	// accepted.
	Tokens port.Tokens
	// Logger logs changes, and the causes of INTERNAL, which callers do not see; nil
	// logs nothing.
	Logger *slog.Logger
}

const (
	// maxMessageBytes bounds one request of numbers and names, and maxPipelinesBytes
	// one with pipelines.
	maxMessageBytes   = 64 << 10
	maxPipelinesBytes = 4 << 20
)

// services are the names of the RPC services on the port.
var services = []string{adminv1connect.DeadLetterServiceName, adminv1connect.MeshServiceName, adminv1connect.PipelineServiceName}

// Handler returns the handler of everything on the admin port.
func Handler(s Settings) http.Handler {
	if s.Logger == nil {
		s.Logger = slog.New(slog.DiscardHandler)
	}
	mux := http.NewServeMux()
	mux.Handle(s.deadLettersHandler())
	mux.Handle(s.meshHandler())
	mux.Handle(s.pipelinesHandler())
	port.MountHealth(mux, s.health, services...)
	port.MountReflection(mux, services...)
	mux.HandleFunc("/", notFound)
	guard := port.Guard{Tokens: s.Tokens, Key: "gateway.admin.token_file", LoopbackOnly: true, Services: services}
	// Only a list of origins can be wrong.
	out, _ := port.CrossOrigin(guard.Before(mux), port.Origins{})
	return out
}

func (s Settings) deadLettersHandler() (string, http.Handler) {
	descriptor := adminv1.File_stagemesh_admin_v1_deadletter_proto.Services().ByName("DeadLetterService")
	out := transport.NewService(descriptor, transport.Settings{MaxMessageBytes: maxMessageBytes})
	d, l := &deadLetters{store: s.DeadLetters, log: s.Logger}, newLimiter("dead letters", maxCalls, s.Logger)
	transport.Unary(out, "ListDeadLetters", limit(l, d.list))
	transport.Unary(out, "GetDeadLetter", limit(l, d.get))
	transport.Unary(out, "ReplayDeadLetter", limit(l, d.replay))
	transport.Unary(out, "DeleteDeadLetter", limit(l, d.remove))
	return out.Path(), out
}

func (s Settings) meshHandler() (string, http.Handler) {
	descriptor := adminv1.File_stagemesh_admin_v1_mesh_proto.Services().ByName("MeshService")
	out := transport.NewService(descriptor, transport.Settings{MaxMessageBytes: maxMessageBytes})
	h, st := hosts{s.Membership}, s.stages()
	calls, watches := newLimiter("the mesh", maxCalls, s.Logger), newLimiter("changes of the mesh", maxWatches, s.Logger)
	transport.Unary(out, "ListHosts", limit(calls, h.list))
	transport.Unary(out, "ListStages", limit(calls, st.list))
	transport.ServerStream(out, "WatchHosts", watch(s, watches, h.changed, h.current))
	transport.ServerStream(out, "WatchStages", watch(s, watches, h.changed, st.current))
	return out.Path(), out
}

func (s Settings) pipelinesHandler() (string, http.Handler) {
	descriptor := adminv1.File_stagemesh_admin_v1_pipeline_proto.Services().ByName("PipelineService")
	out := transport.NewService(descriptor, transport.Settings{MaxMessageBytes: maxPipelinesBytes})
	p := &pipelineService{pipelines: s.Pipelines, traffic: s.Traffic, stages: s.stages(), maxPayload: s.MaxPayload, log: s.Logger}
	calls, watches := newLimiter("pipelines", maxCalls, s.Logger), newLimiter("changes of pipelines", maxWatches, s.Logger)
	transport.Unary(out, "ListPipelines", limit(calls, p.list))
	transport.Unary(out, "GetPipeline", limit(calls, p.get))
	transport.Unary(out, "PlanPipelines", limit(calls, p.plan))
	transport.Unary(out, "ApplyPipeline", limit(calls, p.apply))
	transport.Unary(out, "DeletePipeline", limit(calls, p.remove))
	transport.ServerStream(out, "WatchPipelines", watch(s, watches, s.Pipelines.Changed, p.current))
	return out.Path(), out
}

func (s Settings) stages() *stages {
	return &stages{membership: s.Membership, pipelines: s.Pipelines, traffic: s.Traffic}
}

// health answers for the gateway, and rejects other names.
func (s Settings) health(_ context.Context, name string) error {
	switch {
	case name != "":
		return fault.New(fault.NotFound, "this port knows the health of the gateway and of its own services")
	case s.Health == nil:
		return nil
	}
	return s.Health()
}

// maxQuoted bounds how much of a path messages repeat, in runes.
const maxQuoted = 80

func notFound(w http.ResponseWriter, r *http.Request) {
	transport.WriteFault(w, fault.Newf(fault.NotFound, "there is notFound at %.*q; this is the admin port, inference has another", maxQuoted, r.URL.Path))
}
