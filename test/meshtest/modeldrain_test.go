package meshtest_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// modelMesh is a bed with two gateways that have some models, and the test's own view of these.
type modelMesh struct {
	*meshtest.Bed
	t        *testing.T
	table    *natskv.Store
	registry *models.Registry
	members  *discovery.Membership
	gateways [2]meshtest.Gateway
}

func newModelMesh(t *testing.T, ids ...model.ID) *modelMesh {
	t.Helper()
	m := &modelMesh{Bed: meshtest.New(t), t: t}
	log := slog.New(slog.DiscardHandler)
	var err error
	if m.table, err = natskv.New(natskv.Settings{Mesh: string(meshtest.Mesh), URL: m.Broker.URL(), Logger: log}); err != nil {
		t.Fatal(err)
	}
	m.registry = models.New(models.Settings{Table: m.table, Logger: log})
	m.members = discovery.NewMembership(m.table, m.table, string(meshtest.Mesh), log)
	for _, run := range []func(context.Context) error{m.table.Run, m.registry.Run, m.members.Run} {
		testbed.Background(t, run)
	}
	var registered []model.Model
	for _, id := range ids {
		registered = append(registered, model.Model{ID: id, Stage: "score", Size: model.Size{Host: 64 << 10}})
	}
	for i := range m.gateways {
		m.gateways[i] = m.Gateway(nil, func(s *gateway.Settings) {
			s.Registry = &gateway.Registry{Watcher: m.table, Table: m.table, Models: m.table}
			s.Models = registered
		})
	}
	testbed.Eventually(t, "the models are registered", func() bool {
		return !slices.ContainsFunc(ids, func(id model.ID) bool { _, _, ok := m.registry.Model(id); return !ok })
	})
	return m
}

// host starts a host of the models, which answer with their names; load is called in each load.
func (m *modelMesh) host(load func(ctx context.Context, id model.ID) error) meshtest.Host {
	m.t.Helper()
	return m.Host("score", inproc.NewModels(inproc.Settings{Concurrency: 4}, inproc.Models{
		Limits: runner.ModelLimits{LoadSlots: 2},
		Load: func(ctx context.Context, m model.Model) (any, runner.LoadedModel, error) {
			return m.ID, runner.LoadedModel{Size: m.Size}, load(ctx, m.ID)
		},
	}, func(_ context.Context, id any, b runner.Batch, sink runner.Sink) error {
		var errs []error
		for i := range b.Items {
			errs = append(errs, sink.SetOutcome(i, runner.Output(text(fmt.Sprint(id))...)))
		}
		return errors.Join(errs...)
	}), func(s *stagehost.Settings) {
		s.Registry = &stagehost.Registry{Announcer: m.table, Table: m.table, Models: m.table, Watcher: m.table}
		never := models.ScaleConfig{RequestsPerMinute: math.MaxInt32, Busy: 1} // a model would get the replicas that a drain has lost
		s.Models = &stagehost.ModelSettings{Capacity: 16 << 20, DefaultSize: 64 << 10, StageConfig: models.StageConfig{Scale: never}}
	})
}

// awaitHosts waits until so many hosts are known, with their memory.
func (m *modelMesh) awaitHosts(n int) {
	m.t.Helper()
	testbed.Eventually(m.t, fmt.Sprint(n, " hosts are known"), func() bool {
		known := 0
		for _, h := range m.members.Hosts() {
			if h.Alive && h.Record.GetCache() != nil {
				known++
			}
		}
		return known == n
	})
}

// loadedOn returns the hosts that have loaded a model.
func (m *modelMesh) loadedOn(id model.ID) (hosts []string) {
	_, there, _ := m.registry.Model(id)
	for _, one := range there.GetReplicas() {
		if one.GetState() == meshv1.ReplicaState_REPLICA_STATE_LOADED {
			hosts = append(hosts, one.GetHost())
		}
	}
	return hosts
}

// ask has callers ask for the models by both gateways until stop is called, and counts the answers.
func (m *modelMesh) ask(ids []model.ID) (answered *atomic.Int64, stop func()) {
	ctx, cancel := context.WithCancel(m.t.Context())
	var asking sync.WaitGroup
	answered, stop = &atomic.Int64{}, func() { cancel(); asking.Wait() }
	for caller := range 12 {
		asking.Go(func() {
			for n := caller; ctx.Err() == nil; n++ {
				id := ids[n%len(ids)]
				a := infer(context.WithoutCancel(ctx), m.gateways[caller%2], requestFor("model:"+string(id), "x"))
				if a.fault != nil || a.text() != string(id) {
					m.t.Errorf("model %s is answered with %+v, %v after %s", id, a.response, a.fault, a.took)
					return
				}
				answered.Add(1)
			}
		})
	}
	return answered, stop
}

// Hosts leave one after the other under load; models keep their replicas, and callers notice
// nothing.
func TestModelsKeepTheirReplicasWhenHostsLeave(t *testing.T) {
	t.Parallel()
	ids := []model.ID{"a", "b", "c", "d", "e", "f", "g", "h"}
	once := ids[:4] // the others are loaded twice
	m := newModelMesh(t, ids...)
	quick := func(context.Context, model.ID) error { return nil }
	var hosts []meshtest.Host
	for range 4 {
		hosts = append(hosts, m.host(quick))
	}
	m.awaitHosts(len(hosts))
	placer := models.NewPlacer(m.registry, m.members)
	for i, id := range ids {
		wanted := models.Wanted{Replicas: 1 + i/len(once), LastUse: time.Now()}
		if err := placer.EnsureLoaded(t.Context(), id, wanted, true); err != nil {
			t.Fatal(err)
		}
	}
	answered, stop := m.ask(ids)
	defer stop()
	// The last to leave finds one host, which has a replica of each model used twice or gets one.
	for i, replicas := range []int{2, 2, 1} {
		due := answered.Load() + 500
		testbed.Eventually(t, "requests are answered", func() bool { return answered.Load() >= due || t.Failed() })
		hosts[i].Stop()
		want := slices.Concat(slices.Repeat([]int{1}, len(once)), slices.Repeat([]int{replicas}, len(ids)-len(once)))
		testbed.Eventually(t, fmt.Sprintf("models have %v replicas after %d hosts have left", want, i+1), func() bool {
			return slices.EqualFunc(ids, want, func(id model.ID, n int) bool { return len(m.loadedOn(id)) == n })
		})
	}
	due := answered.Load() + 500
	testbed.Eventually(t, "requests are answered", func() bool { return answered.Load() >= due || t.Failed() })
}

// A host that leaves begins no load that waits for its turn; another one answers the requests.
func TestLeavingHostGivesUpItsQueuedLoads(t *testing.T) {
	t.Parallel()
	ids := []model.ID{"hot", "a", "b", "c", "d", "e", "f"}
	m := newModelMesh(t, ids...)
	goOn := make(chan struct{})
	letGo := sync.OnceFunc(func() { close(goOn) })
	defer letGo()
	var mu sync.Mutex
	begun := map[model.ID]bool{}
	leaving := m.host(func(ctx context.Context, id model.ID) error {
		mu.Lock()
		begun[id] = true
		mu.Unlock()
		if id == "hot" {
			return nil
		}
		select {
		case <-goOn:
		case <-ctx.Done():
		}
		return ctx.Err()
	})
	countBegun := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(begun)
	}
	m.awaitHosts(1)
	for _, g := range m.gateways {
		testbed.Eventually(t, "the gateway knows the host", func() bool { return infer(t.Context(), g, requestFor("model:hot", "x")).fault == nil })
	}
	calls := map[model.ID]<-chan answer{}
	for i, id := range ids[1:] {
		calls[id] = send(t.Context(), m.gateways[i%2], requestFor("model:"+string(id), "x"))
	}
	testbed.Eventually(t, "two loads run and four are queued", func() bool {
		c := leaving.Record().GetCache()
		return countBegun() == 3 && c.GetLoading() == 2 && c.GetQueued() == 4
	})
	_, stop := m.ask(ids[:1])
	defer stop()
	var other atomic.Int64
	m.host(func(context.Context, model.ID) error { other.Add(1); return nil })
	m.awaitHosts(2)
	left := make(chan struct{})
	go func() {
		defer close(left)
		leaving.Stop()
	}()
	answers := func(ofRunning bool) {
		t.Helper()
		for id, c := range calls {
			mu.Lock()
			isRunning := begun[id]
			mu.Unlock()
			if isRunning != ofRunning {
				continue
			}
			if got := await(t, c).checkOK(t).text(); got != string(id) {
				t.Errorf("model %s is answered with %q", id, got)
			}
		}
	}
	answers(false)
	select {
	case <-left:
		t.Error("the host left before its loads had ended")
	default:
	}
	if n := countBegun(); n != 3 {
		t.Errorf("the host that leaves began %d loads", n-1)
	}
	letGo()
	answers(true)
	<-left
	stop()
	testbed.Eventually(t, "the other host has all models", func() bool { return other.Load() == int64(len(ids)) })
}
