package adminapi

import (
	"context"
	"log/slog"
	"net/http"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"

	"github.com/stagemesh/stagemesh/gateway/front/failure"
	"github.com/stagemesh/stagemesh/gateway/front/port"
	"github.com/stagemesh/stagemesh/gateway/front/procedure"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/store"
)

// Letters are the dead letters of the mesh. Errors are ErrNoDeadLetter, ErrUnreadable
// and ErrNotReplayable of mesh/store, the context's, and those with a
// *fault.Fault in their chain.
type Letters interface {
	List(ctx context.Context, q store.DeadLetterQuery) (store.DeadLetterPage, error)
	Get(ctx context.Context, seq uint64) (store.DeadLetter, error)
	Replay(ctx context.Context, seq uint64) (store.Replayed, error)
	Delete(ctx context.Context, seq uint64) error
}

var _ Letters = (*store.DeadLetters)(nil)

// Settings are what Handler is made of.
type Settings struct {
	Letters Letters
	// Roster is nil where the mesh has no registry.
	Roster    Roster
	Pipelines Pipelines
	Traffic   Traffic
	// MaxPayload bounds the inputs of a request to the gateway, in bytes.
	MaxPayload int
	// Stopping is closed when the gateway stops: then watches end.
	Stopping <-chan struct{}
	// Health says whether the gateway can be used; nil says that it can.
	Health func() error
	// Tokens are what callers have to know one of; without any they have to be on
	// this machine.
	Tokens port.Tokens
	// Logger gets what is done to letters, and the causes of INTERNAL, which
	// callers do not see; nil logs nothing.
	Logger *slog.Logger
}

const (
	// maxMessageBytes bounds one request of numbers and names, maxPipelinesBytes one
	// with pipelines.
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
	mux.Handle(s.lettersHandler())
	mux.Handle(s.meshHandler())
	mux.Handle(s.pipelinesHandler())
	port.MountHealth(mux, s.health, services...)
	port.MountReflection(mux, services...)
	mux.HandleFunc("/", nothing)
	guard := port.Guard{Tokens: s.Tokens, Key: "gateway.admin.token_file", Near: true, Services: services}
	// Only a list of origins can be wrong.
	out, _ := port.CrossOrigin(guard.Before(mux), port.Origins{})
	return out
}

func (s Settings) lettersHandler() (string, http.Handler) {
	descriptor := adminv1.File_stagemesh_admin_v1_deadletter_proto.Services().ByName("DeadLetterService")
	out := procedure.NewService(descriptor, procedure.Settings{MaxMessageBytes: maxMessageBytes})
	d, c := &desk{letters: s.Letters, log: s.Logger}, newCounter("dead letters", atOnce, s.Logger)
	procedure.Unary(out, "ListDeadLetters", bounded(c, d.list))
	procedure.Unary(out, "GetDeadLetter", bounded(c, d.get))
	procedure.Unary(out, "ReplayDeadLetter", bounded(c, d.replay))
	procedure.Unary(out, "DeleteDeadLetter", bounded(c, d.discard))
	return out.Path(), out
}

func (s Settings) meshHandler() (string, http.Handler) {
	descriptor := adminv1.File_stagemesh_admin_v1_mesh_proto.Services().ByName("MeshService")
	out := procedure.NewService(descriptor, procedure.Settings{MaxMessageBytes: maxMessageBytes})
	hosts, stages := crowd{s.Roster}, s.census()
	asked, watching := newCounter("the mesh", atOnce, s.Logger), newCounter("changes of the mesh", watchesAtOnce, s.Logger)
	procedure.Unary(out, "ListHosts", bounded(asked, hosts.list))
	procedure.Unary(out, "ListStages", bounded(asked, stages.list))
	procedure.Stream(out, "WatchHosts", watched(s, watching, hosts.changed, hosts.look))
	procedure.Stream(out, "WatchStages", watched(s, watching, hosts.changed, stages.look))
	return out.Path(), out
}

func (s Settings) pipelinesHandler() (string, http.Handler) {
	descriptor := adminv1.File_stagemesh_admin_v1_pipeline_proto.Services().ByName("PipelineService")
	out := procedure.NewService(descriptor, procedure.Settings{MaxMessageBytes: maxPipelinesBytes})
	p := &planner{pipelines: s.Pipelines, traffic: s.Traffic, stages: s.census(), maxPayload: s.MaxPayload, log: s.Logger}
	asked, watching := newCounter("pipelines", atOnce, s.Logger), newCounter("changes of pipelines", watchesAtOnce, s.Logger)
	procedure.Unary(out, "ListPipelines", bounded(asked, p.list))
	procedure.Unary(out, "GetPipeline", bounded(asked, p.get))
	procedure.Unary(out, "PlanPipelines", bounded(asked, p.plan))
	procedure.Unary(out, "ApplyPipeline", bounded(asked, p.apply))
	procedure.Unary(out, "DeletePipeline", bounded(asked, p.remove))
	procedure.Stream(out, "WatchPipelines", watched(s, watching, s.Pipelines.Changed, p.look))
	return out.Path(), out
}

func (s Settings) census() *census {
	return &census{roster: s.Roster, pipelines: s.Pipelines, traffic: s.Traffic}
}

// health answers for the gateway and knows nothing else by name.
func (s Settings) health(_ context.Context, name string) error {
	switch {
	case name != "":
		return fault.New(fault.NotFound, "this port knows the health of the gateway and of its own services")
	case s.Health == nil:
		return nil
	}
	return s.Health()
}

// shown is how much of a path or name is repeated to its caller, in runes.
const shown = 80

func nothing(w http.ResponseWriter, r *http.Request) {
	failure.Write(w, fault.Newf(fault.NotFound, "there is nothing at %.*q; this is the admin port, inference has another", shown, r.URL.Path))
}
