package stagehost

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/internal/item"
	"github.com/stagemesh/stagemesh/stagehost/internal/modelcache"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// modelQueues are the queues of the stage's hosts, and which of these answer.
type modelQueues interface {
	Alive(ctx context.Context, name pipeline.StageName) (bus.Availability, error)
	HostQueues(ctx context.Context, stage pipeline.StageName) ([]pipeline.HostID, error)
	Queue(ctx context.Context, name pipeline.StageName, d pipeline.Durability) (bus.QueueInfo, error)
	DeleteQueue(ctx context.Context, name pipeline.StageName, d pipeline.Durability) error
}

var _ modelQueues = (*bus.Bus)(nil)

// modelHostSettings configure what a host does about models.
type modelHostSettings struct {
	Mesh  pipeline.MeshName
	Stage pipeline.StageName
	Host  pipeline.HostID
	// Loader is the host's runner, which has started. MaxBatch is how many items its batches have.
	Loader   runner.ModelLoader
	MaxBatch int
	Cache    modelcache.Settings
	// Models is the table of models, Live what is set of the stage where the table has nothing.
	Models discovery.Table
	Live   *meshv1.ModelSettings
	// Watcher and Hosts find the hosts of the mesh.
	Watcher discovery.Watcher
	Hosts   discovery.Table
	// StageContract is of models without their own. SpecToProto is for the registry.
	StageContract *schema.Contract
	SpecToProto   func(runner.Spec) *stagev1.Spec
	// IsLeaving reports whether the host is about to stop.
	IsLeaving func() bool
	// Pull returns a puller of another host's queue.
	Pull    func(name pipeline.StageName) (*bus.Puller, error)
	Metrics *item.Metrics
	Logger  *slog.Logger
}

// hostModels is what a host does about models. Any goroutine may use it; what the loop has is in set.
type hostModels struct {
	modelHostSettings
	// ctx is the context of changes and loads.
	ctx      context.Context
	registry *models.Registry
	members  *discovery.Membership
	placer   *models.Placer
	// loaded has a *loadedModel for each model.ID that is loaded.
	loaded sync.Map
	// published is how the cache stood last.
	published atomic.Pointer[meshv1.CacheRecord]

	queues modelQueues
	set    *modelSet
	items  *item.Items
}

// newHostModels returns the models of a host, none of which is loaded. The context ends what goes on
// about them.
func newHostModels(ctx context.Context, s modelHostSettings) (*hostModels, error) {
	ms := &hostModels{modelHostSettings: s, ctx: ctx}
	ms.registry = models.New(models.Settings{
		Table: s.Models, Logger: s.Logger, Stages: map[pipeline.StageName]*meshv1.ModelSettings{s.Stage: s.Live},
	})
	ms.members = discovery.NewMembership(s.Watcher, s.Hosts, string(s.Mesh), s.Logger)
	ms.placer = models.NewPlacer(ms.registry, ms.members)
	return ms, s.Cache.Validate()
}

// Connect returns what the loop of items asks. Call it once, before the methods below.
func (ms *hostModels) Connect(q modelQueues) item.Models {
	ms.queues, ms.set = q, newModelSet(ms)
	return ms.set
}

// post has the loop call f.
func (ms *hostModels) post(f func(*modelSet)) {
	ms.items.Post(item.EventFunc(func(*item.Loop) { f(ms.set) }))
}

// Follow follows the registry of models and the hosts until the context ends.
func (ms *hostModels) Follow(ctx context.Context) {
	var following sync.WaitGroup
	following.Go(func() { _ = ms.registry.Run(ctx) }) // its end is the context's
	following.Go(func() { _ = ms.members.Run(ctx) })
	following.Wait()
}

// AwaitReady waits a moment until the registry of models is known.
func (ms *hostModels) AwaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, knownWait)
	defer cancel()
	return ms.registry.AwaitReady(ctx)
}

// Run has the host load and unload what the registry says, lead its stage and scale its models, until
// the context ends.
func (ms *hostModels) Run(ctx context.Context) error {
	pumps, ctx := errgroup.WithContext(ctx)
	pumps.Go(func() error { return ms.watchRuntime(ctx) })
	pumps.Go(func() error { return ms.followModels(ctx) })
	pumps.Go(func() error { return ms.lead(ctx) })
	scaling := time.NewTicker(scaleEvery)
	defer scaling.Stop()
	pumps.Go(func() error { return ms.Scale(ctx, scaling.C) })
	return pumps.Wait()
}

// Record returns what the host publishes of its memory for models.
func (ms *hostModels) Record() *meshv1.CacheRecord { return ms.published.Load() }
