// Package adminapi serves stagemesh.admin.v1 to operators, over Connect, gRPC and
// gRPC-Web, on a port of its own: the mesh's hosts and stages, its pipelines, its
// models, its queues of jobs and its dead letters.
//
//	handler := adminapi.Handler(adminapi.Settings{DeadLetters: store, Health: health, Tokens: tokens})
//	server := port.NewServer(handler, logger)
//
// Two pages show the mesh as it runs, and models with their hosts; their scripts call these
// services.
//
// With Tokens every call needs one, and a token with the role read may call what changes nothing
// and shows no payload. Without any the port is for this machine alone: callers
// have to name it by a loopback address, which stops pages whose own name resolves to
// 127.0.0.1. Pages of other origins may
// never call.
//
// Faults are as on the public port; see docs/faults.md. This package adds NOT_FOUND,
// NOT_REPLAYABLE, and OVERLOADED for too many concurrent calls. Each service runs at most
// eight calls at a time, each for at most half a minute: a page of dead letters may be
// 32 MiB. The handler is safe for concurrent use and starts no goroutine.
package adminapi

import (
	"context"
	"embed"
	"log/slog"
	"net/http"

	"github.com/stagemesh/stagemesh/proto/gen/go/mmesh"
	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/jobs"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// DeadLetters are the dead letters of the mesh. Errors are ErrNoDeadLetter, ErrUnreadable
// and ErrNotReplayable of internal/store, the context's, and those with a
// *fault.Fault in their chain.
type DeadLetters interface {
	List(ctx context.Context, q store.DeadLetterQuery) (store.DeadLetterPage, error)
	Get(ctx context.Context, seq uint64) (store.DeadLetter, error)
	Replay(ctx context.Context, seq uint64, body []byte) (store.Replayed, error)
	Delete(ctx context.Context, seq uint64) error
}

var _ DeadLetters = (*store.DeadLetters)(nil)

// Settings configure Handler.
type Settings struct {
	Mesh        pipeline.MeshName
	DeadLetters DeadLetters
	// Jobs may be nil, and then there are no calls about jobs.
	Jobs *jobs.Service
	// Membership is nil if the mesh has no registry.
	Membership Membership
	Pipelines  Pipelines
	Models     *models.Registry
	// Placer chooses the hosts that load models.
	Placer  *models.Placer
	Traffic Traffic
	// HostsWanted returns how many hosts a stage should have, nil where that is not known; it may be nil.
	HostsWanted func(pipeline.StageName) *adminv1.HostsWanted
	// Metrics returns the metrics of all processes of the mesh.
	Metrics func(context.Context) ([]*meshv1.ProcessMetrics, error)
	// Store returns STORE_FULL while the broker stores nothing in files; it may be nil.
	Store func() *fault.Fault
	// Stopping ends when the gateway stops, and then watches and waits do; nil means never.
	Stopping context.Context
	// Health returns nil when the gateway can be used; nil means always healthy.
	Health func() error
	// Memory is what the requests of operators hold together; nil does not bound it.
	Memory *transport.Memory
	// Tokens are the accepted tokens. Without any, callers have to name the port by a loopback
	// address, unless AnyHost is true.
	Tokens  credentials.Tokens
	AnyHost bool
	// Logger logs changes, and the causes of INTERNAL, which callers do not see; nil
	// logs nothing.
	Logger *slog.Logger
}

// The most bytes of one request, by its content.
const (
	maxMessageBytes   = 64 << 10 // numbers and names
	maxBodyBytes      = 8 << 20  // the payload of a dead letter
	maxPipelinesBytes = 4 << 20  // pipelines
)

// handler implements the services of the port.
type handler struct {
	Settings

	figures sharedFigures
}

func newHandler(s Settings) *handler {
	if s.Logger == nil {
		s.Logger = slog.New(slog.DiscardHandler)
	}
	if s.Stopping == nil {
		s.Stopping = context.Background()
	}
	return &handler{Settings: s, figures: sharedFigures{turn: make(chan struct{}, 1)}}
}

// Handler returns the handler of everything on the admin port.
func Handler(s Settings) http.Handler {
	h, mux := newHandler(s), http.NewServeMux()
	dead := h.mount(mux, adminv1.File_stagemesh_admin_v1_deadletter_proto, "dead letters", maxBodyBytes)
	query(dead, "ListDeadLetters", h.listDeadLetters)
	query(dead, "GetDeadLetter", h.getDeadLetter)
	unary(dead, "ReplayDeadLetter", h.replayDeadLetter)
	unary(dead, "DeleteDeadLetter", h.deleteDeadLetter)
	queues := h.mount(mux, adminv1.File_stagemesh_admin_v1_job_proto, "jobs", maxMessageBytes)
	if s.Jobs != nil {
		query(queues, "ListGates", s.Jobs.ListGates)
		query(queues, "ListQueues", s.Jobs.ListQueues)
		unary(queues, "PauseQueue", s.Jobs.PauseQueue)
		unary(queues, "ResumeQueue", s.Jobs.ResumeQueue)
	}
	mesh := h.mount(mux, adminv1.File_stagemesh_admin_v1_mesh_proto, "the mesh", maxMessageBytes)
	query(mesh, "ListHosts", h.listHosts)
	query(mesh, "ListStages", h.listStages)
	query(mesh, "ListRequests", h.listRequests)
	query(mesh, "ListMetrics", h.listMetrics)
	query(mesh, "ExplainRequest", h.explainRequest)
	query(mesh, "ListEndedRequests", h.listEndedRequests)
	watch(mesh, "WatchFigures", func() <-chan struct{} { return nil }, h.currentFigures)
	watch(mesh, "WatchHosts", h.membershipChanged, h.currentHosts)
	watch(mesh, "WatchStages", h.membershipChanged, h.currentStages)
	routes := h.mount(mux, adminv1.File_stagemesh_admin_v1_pipeline_proto, "pipelines", maxPipelinesBytes)
	query(routes, "ListPipelines", h.listPipelines)
	query(routes, "GetPipeline", h.getPipeline)
	query(routes, "PlanPipelines", h.planPipelines)
	unary(routes, "ApplyPipeline", h.applyPipeline)
	unary(routes, "DeletePipeline", h.deletePipeline)
	watch(routes, "WatchPipelines", s.Pipelines.Changed, h.currentPipelines)
	loadable := h.modelService()
	transport.ServerStream(loadable.Service, "TapModel", h.tapModel)
	mux.Handle(loadable.Path(), loadable)
	mountPage(mux)
	mux.HandleFunc("/", notFound)
	p := port.Port{
		Open:   []string{"/", pagePath},
		Memory: s.Memory,
		Health: h.health, Tokens: s.Tokens, TokensKey: "gateway.admin.token_file", IsPrivate: !s.AnyHost,
		Services: []string{adminv1connect.DeadLetterServiceName, adminv1connect.JobAdminServiceName, adminv1connect.MeshServiceName, adminv1connect.PipelineServiceName, adminv1connect.ModelServiceName},
	}
	// Only a list of origins can be wrong.
	out, _ := p.Handler(mux)
	return out
}

// modelService returns ModelService.
func (h *handler) modelService() *service {
	loadable := h.newService(adminv1.File_stagemesh_admin_v1_model_proto, "models", maxMessageBytes, maxModelCalls)
	unary(loadable, "RegisterModel", h.registerModel)
	unary(loadable, "UnregisterModel", h.unregisterModel)
	unary(loadable, "EnsureLoaded", h.ensureLoaded)
	unary(loadable, "EvictModel", h.evictModel)
	query(loadable, "GetModel", h.getModel)
	query(loadable, "ListModels", h.listModels)
	unary(loadable, "SetAlias", h.setAlias)
	unary(loadable, "DeleteAlias", h.deleteAlias)
	query(loadable, "GetAlias", h.getAlias)
	query(loadable, "ListAliases", h.listAliases)
	query(loadable, "GetSettings", h.getModelSettings)
	unary(loadable, "SetSettings", h.setModelSettings)
	return loadable
}

// ModelServices returns ModelService and mmesh.ModelMesh, for a public port.
func ModelServices(s Settings) []*transport.Service {
	h := modelMesh{newHandler(s)}
	old := h.newService(mmesh.File_mmesh_model_mesh_proto, "models", maxMessageBytes, maxModelCalls)
	unary(old, "registerModel", h.registerModel)
	unary(old, "unregisterModel", h.unregisterModel)
	unary(old, "getModelStatus", h.getModelStatus)
	unary(old, "ensureLoaded", h.ensureLoaded)
	unary(old, "setVModel", h.setVModel)
	unary(old, "deleteVModel", h.deleteVModel)
	unary(old, "getVModelStatus", h.getVModelStatus)
	return []*transport.Service{h.modelService().Service, old.Service}
}

// health answers for the gateway, and rejects other names.
func (h *handler) health(_ context.Context, name string) error {
	switch {
	case name != "":
		return fault.New(fault.NotFound, "this port knows the health of the gateway and of its own services")
	case h.Health == nil:
		return nil
	}
	return h.Health()
}

func notFound(w http.ResponseWriter, r *http.Request) {
	transport.WriteFault(w, fault.Newf(fault.NotFound, "there is nothing at %.*q; this is the admin port, inference has another", fault.MaxQuoted, r.URL.Path))
}

// pagePath is the path of the page about models, and of the files of the page at the root.
const pagePath = "/page/"

//go:embed page
var page embed.FS

// contentPolicy allows the page nothing but this port.
const contentPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// mountPage serves the pages. They have no data: their scripts call the services.
func mountPage(mux *http.ServeMux) {
	files := http.FileServerFS(page)
	mux.Handle("/{$}", transport.ReadOnly(func(w http.ResponseWriter, r *http.Request) {
		r.URL.Path = pagePath + "live.html"
		mux.ServeHTTP(w, r)
	}))
	mux.Handle(pagePath, transport.WithStallTimeout(transport.ReadOnly(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Security-Policy", contentPolicy)
		w.Header().Set("Cache-Control", "no-cache")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		files.ServeHTTP(w, r)
	}), transport.DefaultStallTimeout))
}
