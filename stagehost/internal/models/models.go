// Package models loads, moves and scales the models of a stage host.
//
//	ms, err := models.New(ctx, settings)                   // once the runner has started
//	items := item.New(ctx, item.Settings{Models: ms.Connect(bus), ...})
//	go ms.Follow(followCtx)                                // until the host has drained
//	err = ms.Run(ctx)                                      // while its loop of items runs
//	ms.Move(ctx, leave)                                    // the host is to leave
//	ms.RemoveReplicas(ctx)                                 // it drains
//	ms.DeleteOwnQueue()                                    // it has drained
//
// set.go has an item wait for its model, loads.go does what stagehost/internal/modelcache decides,
// and records.go reads and writes the registry of models. leader.go looks after a stage's dead
// hosts, and scale.go after the number of replicas.
//
// The loop of items owns the set of models: only events change it. Any goroutine may use Models.
// It reaches the host through Settings and Queues.
package models

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
	registry "github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/internal/item"
	"github.com/stagemesh/stagemesh/stagehost/internal/modelcache"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Queues are the queues of the stage's hosts, and which of these answer.
type Queues interface {
	Alive(ctx context.Context, name pipeline.StageName) (bus.Availability, error)
	HostQueues(ctx context.Context, stage pipeline.StageName) ([]pipeline.HostID, error)
	Queue(ctx context.Context, name pipeline.StageName, d pipeline.Durability) (bus.QueueInfo, error)
	DeleteQueue(ctx context.Context, name pipeline.StageName, d pipeline.Durability) error
}

// Settings configure the models of a host.
type Settings struct {
	Mesh  pipeline.MeshName
	Stage pipeline.StageName
	Host  pipeline.HostID
	// Loader is the host's runner, which has started. MaxBatch is how many items its batches have.
	Loader   runner.ModelLoader
	MaxBatch int
	Cache    modelcache.Settings
	// Table has the models, Live what is set of the stage where the table has nothing.
	Table discovery.Table
	Live  *meshv1.ModelSettings
	// Watcher and Hosts find the hosts of the mesh.
	Watcher discovery.Watcher
	Hosts   discovery.Table
	// StageContract applies to models without a contract of their own. SpecToProto encodes specs
	// for the registry.
	StageContract *schema.Contract
	SpecToProto   func(runner.Spec) *stagev1.Spec
	// IsLeaving reports whether the host is about to stop.
	IsLeaving func() bool
	// Pull returns a puller of another host's queue.
	Pull    func(name pipeline.StageName) (*bus.Puller, error)
	Metrics *item.Metrics
	Logger  *slog.Logger
}

// Models loads, moves and scales a host's models. Any goroutine may use it. The set is the loop's:
// others reach it by post.
type Models struct {
	Settings
	// ctx is the context of changes and loads.
	ctx      context.Context
	registry *registry.Registry
	members  *discovery.Membership
	placer   *registry.Placer
	// loaded has a *loadedModel for each model.ID that is loaded.
	loaded sync.Map
	// published is how the cache stood last.
	published atomic.Pointer[meshv1.CacheRecord]

	queues Queues
	items  *item.Items
	// post has the loop call a function.
	post func(func(*set))
}

// New returns the models of a host, none of which is loaded. The context ends their loads.
func New(ctx context.Context, s Settings) (*Models, error) {
	ms := &Models{Settings: s, ctx: ctx}
	ms.registry = registry.New(registry.Settings{
		Table: s.Table, Logger: s.Logger, Stages: map[pipeline.StageName]*meshv1.ModelSettings{s.Stage: s.Live},
	})
	ms.members = discovery.NewMembership(s.Watcher, s.Hosts, string(s.Mesh), s.Logger)
	ms.placer = registry.NewPlacer(ms.registry, ms.members)
	return ms, s.Cache.Validate()
}

// Connect returns what the loop of items asks. Call it once, and create the loop, before you call the
// methods below.
func (ms *Models) Connect(q Queues) item.Models {
	ms.queues = q
	return newSet(ms)
}

// ask returns what the loop answers, or the error of the context.
func ask[T any](ctx context.Context, ms *Models, f func(*set) T) (answer T, err error) {
	answers := make(chan T, 1)
	ms.post(func(s *set) { answers <- f(s) })
	select {
	case answer = <-answers:
	case <-ctx.Done():
		err = ctx.Err()
	}
	return answer, err
}

// Follow follows the registry of models and the hosts until the context ends.
func (ms *Models) Follow(ctx context.Context) {
	var following sync.WaitGroup
	following.Go(func() { _ = ms.registry.Run(ctx) }) // its end is the context's
	following.Go(func() { _ = ms.members.Run(ctx) })
	following.Wait()
}

// AwaitReady waits a moment until the registry of models is known.
func (ms *Models) AwaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, knownWait)
	defer cancel()
	return ms.registry.AwaitReady(ctx)
}

// Run has the host load and unload what the registry says, lead its stage and scale its models, until
// the context ends.
func (ms *Models) Run(ctx context.Context) error {
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
func (ms *Models) Record() *meshv1.CacheRecord { return ms.published.Load() }
