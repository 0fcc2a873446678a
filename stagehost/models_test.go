package stagehost_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/models/placement"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

const (
	loading = meshv1.ReplicaState_REPLICA_STATE_LOADING
	loaded  = meshv1.ReplicaState_REPLICA_STATE_LOADED
)

// modelBed is a bed with a registry of models.
type modelBed struct {
	*bed
	table    *natskv.Store
	registry *models.Registry
}

func newModelBed(t *testing.T) *modelBed {
	t.Helper()
	b := newBed(t)
	m := &modelBed{bed: b, table: b.store(b.broker.URL())}
	m.registry = models.New(models.Settings{Table: m.table, Logger: discard()})
	testbed.Background(b.t, m.registry.Run)
	testbed.Eventually(t, "the models are known", func() bool { return m.registry.Ready() == nil })
	return m
}

// register registers models of 1 MiB.
func (b *modelBed) register(ids ...model.ID) {
	b.t.Helper()
	for _, id := range ids {
		_, err := b.registry.Register(b.t.Context(), models.Registration{Model: model.Model{ID: id, Stage: stage, Source: string(id), Size: model.Size{Host: 1 << 20}}})
		if err != nil {
			b.t.Fatal(err)
		}
	}
}

// loads is what the runner of a host has loaded.
type loads struct {
	mu sync.Mutex
	// of counts the loads of each model, now are the loaded ones.
	of, now map[model.ID]int
	// load runs in each load, unlocked; it may be nil.
	load func(ctx context.Context, id model.ID) error
	// describe returns what a load does; run runs before each batch. They may be nil.
	describe func(id model.ID) runner.LoadedModel
	run      func(id model.ID, batch runner.Batch) error
	// measured is the size of each model where loads do not tell it.
	measured model.Size
	// capacity is the runtime's; zero is no limit.
	capacity model.Size
}

func (l *loads) count(id model.ID) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.of[id]
}

// host starts a host with room for that many models of 1 MiB. A model answers with its name
// and the input.
func (b *modelBed) host(l *loads, room int64, edits ...func(*stagehost.Settings)) *host {
	b.t.Helper()
	l.of, l.now = map[model.ID]int{}, map[model.ID]int{}
	r := inproc.NewModels(inproc.Settings{Concurrency: 2}, inproc.Models{
		Limits: runner.ModelLimits{LoadSlots: 2, Capacity: l.capacity},
		Load: func(ctx context.Context, m model.Model) (any, runner.LoadedModel, error) {
			if l.load != nil {
				if err := l.load(ctx, m.ID); err != nil {
					return nil, runner.LoadedModel{}, err
				}
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			l.of[m.ID]++
			l.now[m.ID]++
			out := runner.LoadedModel{}
			if l.describe != nil {
				out = l.describe(m.ID)
			}
			if l.measured == (model.Size{}) {
				out.Size = m.Size
			}
			return string(m.ID), out, nil
		},
		Size: func(context.Context, model.Model) (model.Size, error) { return l.measured, nil },
		Unload: func(_ context.Context, id model.ID, _ any) error {
			l.mu.Lock()
			defer l.mu.Unlock()
			delete(l.now, id)
			return nil
		},
	}, func(_ context.Context, value any, batch runner.Batch, sink runner.Sink) error {
		if l.run != nil {
			if err := l.run(model.ID(value.(string)), batch); err != nil {
				return err
			}
		}
		var errs []error
		for i, item := range batch.Items {
			if item.Inputs[0].Tensor != nil {
				errs = append(errs, sink.SetOutcome(i, runner.Output(item.Inputs...)))
				continue
			}
			errs = append(errs, sink.SetOutcome(i, runner.Output(payload.OfBlob("", "text/plain", []byte(value.(string)+":"+string(item.Inputs[0].Blob.Data))))))
		}
		return errors.Join(errs...)
	})
	edits = append([]func(*stagehost.Settings){func(s *stagehost.Settings) {
		s.Runner = r
		s.Registry = &stagehost.Registry{Announcer: b.table, Table: b.table, Models: b.table, Watcher: b.table}
		// The unload buffer takes a part.
		s.Models = &stagehost.ModelSettings{Capacity: room<<20 + 512<<10, DefaultSize: 64 << 10}
	}}, edits...)
	return b.bed.host(r, edits...)
}

// of is an edit: the request is for a model.
func of(id model.ID) func(*envelope.Envelope) {
	return func(e *envelope.Envelope) { e.Route[0].Model = payload.ModelRef{Model: string(id)} }
}

// at is an edit: the request goes to the host's own queue.
func at(h *host) func(*envelope.Envelope) {
	return func(e *envelope.Envelope) { e.Route[0].Host = pipeline.HostID(h.Record().GetHost()) }
}

// states returns the states of a model's replicas in the registry.
func (b *modelBed) states(id model.ID) (out []meshv1.ReplicaState) {
	b.t.Helper()
	_, replicas, err := b.registry.Find(b.t.Context(), id)
	if err != nil {
		b.t.Fatal(err)
	}
	for _, one := range replicas.GetReplicas() {
		out = append(out, one.GetState())
	}
	return out
}

func checkModel(t *testing.T, id model.ID, c *call) *envelope.Reply {
	t.Helper()
	got := c.output()
	if want := fmt.Sprintf("%s:%s", id, c.text()); first(got.Parts) != want {
		t.Errorf("answered with %q, want %q", first(got.Parts), want)
	}
	c.answeredOnce()
	return got
}

func TestColdModelIsLoadedOnceAndAnswersAll(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("iris")
	begun, goOn := make(chan struct{}, 8), make(chan struct{})
	l := &loads{load: func(context.Context, model.ID) error {
		begun <- struct{}{}
		<-goOn
		return nil
	}}
	h := b.host(l, 8)
	var calls []*call
	for i := range 20 {
		calls = append(calls, b.ask(fmt.Sprint(i), of("iris")))
	}
	testbed.Receive(t, "begin of the load", begun)
	testbed.Eventually(t, "the registry shows the load", func() bool {
		got := b.states("iris")
		return len(got) == 1 && got[0] == meshv1.ReplicaState_REPLICA_STATE_LOADING
	})
	h.awaitCount("stagemesh.stage.model_requests miss", int64(len(calls)))
	close(goOn)
	for _, c := range calls {
		got := checkModel(t, "iris", c).Timings[0]
		if got.ModelWait <= 0 || got.ModelWait > got.BatchWait {
			t.Errorf("it waited %s for its model, %s in all", got.ModelWait, got.BatchWait)
		}
	}
	if got := checkModel(t, "iris", b.ask("to its own queue", of("iris"), at(h))).Timings[0]; got.ModelWait != 0 {
		t.Errorf("it waited %s for a model that is loaded", got.ModelWait)
	}
	h.awaitCount("stagemesh.stage.model_requests hit", 1)
	h.awaitCount("stagemesh.stage.model_requests miss", int64(len(calls)))
	h.awaitCount("stagemesh.stage.model_loads loaded", 1)
	if n := l.count("iris"); n != 1 {
		t.Errorf("it was loaded %d times", n)
	}
	testbed.Eventually(t, "the registry shows it", func() bool {
		got := b.states("iris")
		return len(got) == 1 && got[0] == meshv1.ReplicaState_REPLICA_STATE_LOADED
	})
}

func TestFullHostEvictsTheModelUsedLongestAgo(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	ids := []model.ID{"a", "b", "c", "d", "e", "f"}
	b.register(ids...)
	l := &loads{}
	h := b.host(l, 4)
	for range 3 {
		for _, id := range ids {
			var reply *envelope.Reply
			testbed.Eventually(t, "there is room", func() bool {
				reply = b.ask("x", of(id)).next()
				return reply.Fault == nil || reply.Fault.Reason != fault.CacheFull
			})
			if got, want := first(reply.Parts), string(id)+":x"; reply.Fault != nil || got != want {
				t.Fatalf("answered with %q, %v, want %q", got, reply.Fault, want)
			}
			l.mu.Lock()
			loaded := len(l.now)
			l.mu.Unlock()
			if loaded > 5 {
				t.Fatalf("%d models are loaded", loaded)
			}
		}
	}
	loaded, evicted := h.counts.Of("stagemesh.stage.model_loads loaded"), h.counts.Of("stagemesh.stage.model_evictions")
	if left := loaded - evicted; evicted == 0 || left < 1 || left > 5 {
		t.Errorf("%d loads and %d evictions", loaded, evicted)
	}
	testbed.Eventually(t, "the registry has what is loaded", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, id := range ids {
			if states := b.states(id); len(states) != l.now[id] {
				return false
			}
		}
		return true
	})
}

func TestModelIsServedByTheHostThatHasIt(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("iris")
	var both [2]loads
	one, other := b.host(&both[0], 8), b.host(&both[1], 8)
	checkModel(t, "iris", b.ask("x", of("iris"), at(one)))
	got := checkModel(t, "iris", b.ask("y", of("iris"), at(other)))
	if host := got.Timings[0].Host; string(host) != one.Record().GetHost() {
		t.Errorf("host %s ran it, want %s", host, one.Record().GetHost())
	}
	if n := both[1].count("iris"); n != 0 {
		t.Errorf("the other host loaded it too")
	}
	other.awaitCount("stagemesh.stage.model_forwards", 1)
	one.stop()
	_, there, err := b.registry.Find(t.Context(), "iris")
	if err != nil || models.HasReplica(there, pipeline.HostID(one.Record().GetHost())) {
		t.Errorf("the registry has %v of a host that has left, %v", there, err)
	}
	checkModel(t, "iris", b.ask("z", of("iris"), at(other)))
	if n := both[1].count("iris"); n != 1 {
		t.Errorf("the other host loaded it %d times", n)
	}
	own := pipeline.HostQueue(stage, pipeline.HostID(one.Record().GetHost()))
	checkModel(t, "iris", b.ask("late", of("iris"), at(one)))
	testbed.Eventually(t, "the queue of the host that has left is deleted", func() bool {
		_, err := b.bus.Queue(t.Context(), own, pipeline.Memory)
		return errors.Is(err, bus.ErrNoQueue)
	})
	other.stop()
	if _, err := b.bus.Queue(t.Context(), pipeline.HostQueue(stage, pipeline.HostID(other.Record().GetHost())), pipeline.Memory); !errors.Is(err, bus.ErrNoQueue) {
		t.Errorf("the queue of the last host: %v", err)
	}
}

func TestBadModelsGetTheirFaults(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("broken", "slow")
	size := model.Size{Host: 1 << 40}
	if _, err := b.registry.Register(t.Context(), models.Registration{Model: model.Model{ID: "large", Stage: stage, Size: size}}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.registry.Register(t.Context(), models.Registration{Model: model.Model{ID: "elsewhere", Stage: "other"}}); err != nil {
		t.Fatal(err)
	}
	slow := make(chan struct{})
	h := b.host(&loads{load: func(ctx context.Context, id model.ID) error {
		if id == "broken" {
			return fmt.Errorf("%w: it has no weights", runner.ErrInvalidModel)
		}
		select {
		case <-slow:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}}, 8)
	defer close(slow)
	for id, want := range map[model.ID]struct {
		reason fault.Reason
		text   string
	}{
		"":          {fault.InvalidRequest, "model"},
		"unknown":   {fault.UnknownModel, "unknown"},
		"elsewhere": {fault.InvalidRequest, "stage other"},
		"large":     {fault.ModelTooLarge, "large"},
		"broken":    {fault.InvalidModel, "it has no weights"},
	} {
		if f := b.ask("x", of(id)).fault(want.reason); !strings.Contains(f.Message, want.text) {
			t.Errorf("model %q: %s", id, f.Message)
		}
	}
	if f := b.ask("x", of("slow"), deadline(3*time.Second)).fault(fault.ModelLoading); f.RetryAfter <= 0 {
		t.Errorf("no retry after: %+v", f)
	}
	h.awaitCount("stagemesh.stage.model_loads failed", 1)
	testbed.Eventually(t, "the failure is on record", func() bool {
		got := b.states("broken")
		return len(got) == 1 && got[0] == meshv1.ReplicaState_REPLICA_STATE_FAILED
	})
}

// asked asks until the answer comes from no host which does not know the others yet, and
// returns it.
func (b *modelBed) asked(reason fault.Reason, edits ...func(*envelope.Envelope)) (out *call) {
	b.t.Helper()
	testbed.Eventually(b.t, "the host knows the others", func() bool {
		out = b.ask("x", edits...)
		reply := out.next()
		return reply.Fault == nil || reply.Fault.Reason != reason
	})
	return out
}

func TestFailedLoadMovesToAnotherHost(t *testing.T) {
	t.Parallel()
	for name, edits := range map[string][]func(*envelope.Envelope){"memory": nil, "file": {durable}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newModelBed(t)
			b.register("iris")
			var good loads
			bad := b.host(&loads{load: func(context.Context, model.ID) error { return errors.New("its disk is broken") }}, 8)
			b.ask("x", append(edits, of("iris"))...).fails(fault.ModelLoadFailed)
			b.host(&good, 8)
			if name == "memory" {
				edits = append(edits, at(bad))
			}
			b.asked(fault.ModelLoadFailed, append(edits, of("iris"))...)
			if good.count("iris") != 1 {
				t.Error("the other host has not loaded it")
			}
		})
	}
}

func TestFullHostPassesRequestsOn(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	var ids []model.ID
	for i := range 8 {
		ids = append(ids, model.ID(fmt.Sprint("m", i)))
	}
	b.register(ids...)
	hold, held := make(chan struct{}), make(chan struct{}, 8)
	defer close(hold)
	one := &loads{load: func(_ context.Context, id model.ID) error {
		if id != "m0" {
			held <- struct{}{}
			<-hold
		}
		return nil
	}}
	full := b.host(one, 2)
	checkModel(t, "m0", b.ask("x", of("m0"), at(full)))
	// Two loads take all of its memory for as long as they run.
	b.ask("x", of("m1"), at(full))
	b.ask("x", of("m2"), at(full))
	testbed.Receive(t, "begin of a load", held)
	testbed.Receive(t, "begin of a load", held)
	b.ask("x", of("m3"), at(full)).fails(fault.CacheFull)
	b.host(&loads{}, 8)
	for _, id := range ids[3:] {
		c := b.asked(fault.CacheFull, of(id), at(full))
		c.answeredOnce()
	}
}

func TestHostDoesWhatTheRegistrySays(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("a", "b", "c")
	l := &loads{}
	h := b.host(l, 8)
	b.claim("a", h)
	b.claim("b", h)
	b.awaitModel(l, "a", 1, 1, loaded)
	b.awaitModel(l, "b", 1, 1, loaded)
	b.evict("a")
	b.awaitModel(l, "a", 1, 0)
	if err := b.registry.Unregister(t.Context(), "b"); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the unregistered model is unloaded", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.now["b"] == 0
	})
	b.ask("x", of("b")).fails(fault.UnknownModel)
	b.claim("c", h)
	b.claim("a", h)
	checkModel(t, "a", b.ask("x", of("a"), at(h)))
	b.awaitModel(l, "c", 1, 1, loaded)
}

// claim has a host load a model.
func (b *modelBed) claim(id model.ID, h *host) {
	b.t.Helper()
	_, claimed, err := b.registry.ClaimLoading(b.t.Context(), id, pipeline.HostID(h.Record().GetHost()), func(*meshv1.ReplicasRecord) bool { return true })
	if err != nil || !claimed {
		b.t.Fatalf("claim of %s: %v, %v", id, claimed, err)
	}
}

// evict removes the replicas of a model from the registry.
func (b *modelBed) evict(id model.ID) {
	b.t.Helper()
	if err := b.registry.Evict(b.t.Context(), id); err != nil {
		b.t.Fatal(err)
	}
}

// awaitModel waits until a host has loaded a model so many times, has so many of it now, and has it
// on record in that state.
func (b *modelBed) awaitModel(l *loads, id model.ID, times, now int, state ...meshv1.ReplicaState) {
	b.t.Helper()
	testbed.Eventually(b.t, fmt.Sprintf("model %s is loaded %d times, %d now, and on record as %v", id, times, now, state), func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.of[id] == times && l.now[id] == now && slices.Equal(b.states(id), state)
	})
}

func TestUnloadCancelsTheLoad(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("iris")
	begun, isHeld := make(chan context.Context, 8), atomic.Bool{}
	l := &loads{load: func(ctx context.Context, _ model.ID) error {
		if !isHeld.Load() {
			return nil
		}
		begun <- ctx
		<-ctx.Done()
		return ctx.Err()
	}}
	h := b.host(l, 8)
	isHeld.Store(true)
	b.claim("iris", h)
	ctx := testbed.Receive(t, "begin of the load", begun)
	b.evict("iris")
	testbed.Receive(t, "end of the load's context", ctx.Done())
	isHeld.Store(false)
	b.claim("iris", h)
	b.awaitModel(l, "iris", 1, 1, loaded)
	checkModel(t, "iris", b.ask("x", of("iris"), at(h)))
	h.awaitCount("stagemesh.stage.model_loads loaded", 1)
	h.awaitCount("stagemesh.stage.model_loads failed", 0)
}

// A load that ignores its context keeps its slot and its memory, and serves no later claim.
func TestCancelledLoadServesNoLaterClaim(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("a", "b", "c", "d")
	begun, end := make(chan model.ID, 8), map[model.ID]chan struct{}{"a": make(chan struct{}), "b": make(chan struct{})}
	l := &loads{load: func(_ context.Context, id model.ID) error {
		begun <- id
		if end[id] != nil {
			select {
			case <-end[id]:
			case <-t.Context().Done():
			}
		}
		return nil
	}}
	h := b.host(l, 8)
	for _, id := range []model.ID{"a", "b"} {
		b.claim(id, h)
		testbed.Receive(t, "begin of the load", begun)
	}
	b.claim("c", h)
	b.claim("d", h)
	b.evict("a")
	b.evict("b")
	testbed.Eventually(t, "their loads are queued", func() bool { return h.Record().GetCache().GetQueued() == 2 })
	b.claim("a", h)
	close(end["b"])
	b.awaitModel(l, "c", 1, 1, loaded)
	b.awaitModel(l, "d", 1, 1, loaded)
	b.awaitModel(l, "b", 1, 0)
	b.awaitModel(l, "a", 0, 0, loading)
	close(end["a"])
	b.awaitModel(l, "a", 2, 1, loaded)
	checkModel(t, "a", b.ask("x", of("a"), at(h)))
}

func TestModelOnRecordIsLoadedAfterCancelledLoads(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("iris")
	begun := make(chan struct{}, 1)
	l := &loads{load: func(ctx context.Context, _ model.ID) error {
		select {
		case begun <- struct{}{}:
		default:
		}
		select {
		case <-time.After(rand.N(3 * time.Millisecond)):
			return nil
		case <-ctx.Done():
			return []error{nil, ctx.Err()}[rand.N(2)] // it may have ended already
		}
	}}
	b.host(l, 8)
	members := discovery.NewMembership(b.table, b.table, string(mesh), discard())
	testbed.Background(t, members.Run)
	testbed.Eventually(t, "the host is known", func() bool { return len(members.Hosts()) == 1 && members.Hosts()[0].Alive })
	placer := models.NewPlacer(b.registry, members)
	load := func(wait bool) {
		t.Helper()
		if err := placer.EnsureLoaded(t.Context(), "iris", models.Wanted{Replicas: 1, LastUse: time.Now()}, wait); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 25 {
		load(false)
		testbed.Receive(t, "begin of the load", begun)
		b.evict("iris")
		load(true)
		l.mu.Lock()
		n := l.now["iris"]
		l.mu.Unlock()
		if states := b.states("iris"); n != 1 || !slices.Equal(states, []meshv1.ReplicaState{loaded}) {
			t.Fatalf("round %d: it is loaded %d times, and on record as %v", i, n, states)
		}
		b.evict("iris")
		testbed.Eventually(t, "it is unloaded", func() bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			return l.now["iris"] == 0
		})
		select {
		case <-begun:
		default:
		}
	}
}

func TestLoadThatDoesNotStartLeavesNoClaim(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("iris")
	isBusy := atomic.Bool{}
	isBusy.Store(true)
	l := &loads{load: func(context.Context, model.ID) error {
		if isBusy.Load() {
			return fmt.Errorf("%w: it loads another model", runner.ErrNotStarted)
		}
		return nil
	}}
	h := b.host(l, 8)
	b.claim("iris", h)
	h.awaitCount("stagemesh.stage.model_loads failed", 1)
	b.awaitModel(l, "iris", 0, 0)
	if f := b.ask("x", of("iris"), at(h)).fault(fault.ModelLoadFailed); !strings.Contains(f.Message, "it loads another model") {
		t.Errorf("a request: %s", f.Message)
	}
	b.awaitModel(l, "iris", 0, 0)
	isBusy.Store(false)
	checkModel(t, "iris", b.ask("y", of("iris"), at(h)))
}

func TestSizeOfALoadedModelIsMeasured(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("a")
	measured := model.Size{Host: 3 << 20}
	b.host(&loads{measured: measured}, 8)
	checkModel(t, "a", b.ask("x", of("a")))
	testbed.Eventually(t, "the registry has the size", func() bool {
		_, there, _ := b.registry.Model("a")
		return len(there.GetReplicas()) == 1 && there.GetReplicas()[0].GetSize().GetHost() == uint64(measured.Host)
	})
}

func TestCapacityIsAtMostTheRuntimes(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	h := b.host(&loads{capacity: model.Size{Host: 4 << 20, Device: 2 << 20}}, 8)
	testbed.Eventually(t, "the host publishes its memory", func() bool { return h.Record().GetCache() != nil })
	if c := h.Record().GetCache().GetCapacity(); c.GetHost() > 4<<20 || c.GetHost() < 3<<20 || c.GetDevice() > 2<<20 || c.GetDevice() == 0 {
		t.Errorf("models may use %v", c)
	}
}

func TestModelWithMinReplicasIsNotEvicted(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	_, err := b.registry.Register(t.Context(), models.Registration{Model: model.Model{ID: "kept", Stage: stage, Size: model.Size{Host: 1 << 20}, MinReplicas: 1}})
	if err != nil {
		t.Fatal(err)
	}
	ids := []model.ID{"a", "b", "c", "d"}
	b.register(ids...)
	l := &loads{}
	b.host(l, 3)
	checkModel(t, "kept", b.ask("x", of("kept")))
	for range 3 {
		for _, id := range ids {
			testbed.Eventually(t, "there is room", func() bool {
				reply := b.ask("x", of(id)).next()
				return reply.Fault == nil || reply.Fault.Reason != fault.CacheFull
			})
		}
	}
	if n, a := l.count("kept"), l.count("a"); n != 1 || a < 2 {
		t.Errorf("the kept model was loaded %d times, another one %d times", n, a)
	}
}

// tableAway is a table that cannot be read or written while it is away.
type tableAway struct {
	discovery.Table
	away atomic.Bool
}

func (t *tableAway) Get(ctx context.Context, key discovery.Key) (discovery.Entry, error) {
	if t.away.Load() {
		return discovery.Entry{}, errors.New("away")
	}
	return t.Table.Get(ctx, key)
}

func TestDurableRequestsAwaitTheRegistry(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("a", "b")
	table := &tableAway{Table: b.table}
	h := b.host(&loads{}, 8, func(s *stagehost.Settings) { s.Registry.Models = table })
	checkModel(t, "a", b.ask("x", of("a")))
	table.away.Store(true)
	b.ask("y", of("b")).fails(fault.RegistryUnavailable)
	checkModel(t, "a", b.ask("y", of("a")))
	c := b.ask("z", of("b"), durable)
	testbed.Eventually(t, "the durable request has returned to its queue, and comes again", func() bool { return h.counts.Of("stagemesh.stage.redelivered") > 0 })
	table.away.Store(false)
	checkModel(t, "b", c)
}

func TestPlacerEnsuresThatAModelIsLoaded(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("iris", "broken")
	members := discovery.NewMembership(b.table, b.table, string(mesh), discard())
	testbed.Background(b.t, members.Run)
	placer := models.NewPlacer(b.registry, members)
	if err := placer.EnsureLoaded(t.Context(), "iris", models.Wanted{Replicas: 1, LastUse: time.Now()}, true); fault.From(err).Reason != fault.NoCapacity {
		t.Errorf("without hosts: %v", err)
	}
	var all [3]loads
	for i := range all {
		all[i].load = func(_ context.Context, id model.ID) error {
			if id == "broken" {
				return errors.New("it has no weights")
			}
			return nil
		}
		b.host(&all[i], 8)
	}
	testbed.Eventually(t, "all hosts are known", func() bool {
		return !slices.ContainsFunc(members.Hosts(), func(h discovery.Host) bool { return !h.Alive }) && len(members.Hosts()) == len(all)
	})
	later := time.Now().Add(time.Hour)
	for _, lastUse := range []time.Time{time.Now(), later} {
		if err := placer.EnsureLoaded(t.Context(), "iris", models.Wanted{Replicas: 1, LastUse: lastUse}, true); err != nil {
			t.Fatal(err)
		}
	}
	if _, there, _ := b.registry.Model("iris"); !there.GetLastUse().AsTime().Equal(later) {
		t.Errorf("its last use is %v, want %v", there.GetLastUse().AsTime(), later)
	}
	testbed.Eventually(t, "its host keeps it as one used later", func() bool {
		return slices.ContainsFunc(members.Hosts(), func(h discovery.Host) bool {
			return h.Record.GetCache().GetOldestUse().AsTime().Equal(later)
		})
	})
	if n := all[0].count("iris") + all[1].count("iris") + all[2].count("iris"); n != 1 {
		t.Errorf("it was loaded %d times", n)
	}
	f := fault.From(placer.EnsureLoaded(t.Context(), "broken", models.Wanted{Replicas: 1, LastUse: time.Now()}, true))
	if f.Reason != fault.ModelLoadFailed || !strings.Contains(f.Message, "it has no weights") {
		t.Errorf("a broken model: %v", f)
	}
	if err := placer.EnsureLoaded(t.Context(), "none", models.Wanted{Replicas: 1, LastUse: time.Now()}, true); fault.From(err).Reason != fault.UnknownModel {
		t.Errorf("an unknown model: %v", err)
	}
}

func TestRequestsOfADeadHostAreTakenOver(t *testing.T) {
	t.Parallel()
	const dead pipeline.HostID = "dead"
	b := newModelBed(t)
	b.register("iris", "lily")
	for _, id := range []model.ID{"iris", "lily"} {
		if _, _, err := b.registry.ClaimLoading(t.Context(), id, dead, func(*meshv1.ReplicasRecord) bool { return true }); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.registry.SetLoaded(t.Context(), "iris", dead, model.Size{Host: 1 << 20}, nil); err != nil {
		t.Fatal(err)
	}
	l := &loads{}
	h := b.host(l, 8)
	if _, err := b.bus.EnsureQueue(t.Context(), bus.QueueSettings{
		Stage: pipeline.HostQueue(stage, dead), Durability: pipeline.Memory, MaxItems: 100, MaxBytes: 1 << 20, MaxAge: time.Minute, AckWait: stagehost.DefaultAckWait, Replicas: 1,
	}); err != nil {
		t.Fatal(err)
	}
	var calls []*call
	for i := range 20 {
		calls = append(calls, b.ask(fmt.Sprint(i), of("iris"), func(e *envelope.Envelope) { e.Route[0].Host = dead }))
	}
	checkModel(t, "lily", b.ask("x", of("lily"), at(h)))
	for _, c := range calls {
		checkModel(t, "iris", c)
	}
	testbed.Eventually(t, "its queue is deleted", func() bool {
		_, err := b.bus.Queue(t.Context(), pipeline.HostQueue(stage, dead), pipeline.Memory)
		return errors.Is(err, bus.ErrNoQueue)
	})
	for _, id := range []model.ID{"iris", "lily"} {
		testbed.Eventually(t, "its replicas are removed", func() bool { return len(b.states(id)) == 1 })
	}
}

func TestLeavingHostMovesItsModels(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	ids := []model.ID{"a", "b", "c", "d"}
	b.register(ids...)
	var both [2]loads
	one := b.host(&both[0], 8)
	for _, id := range ids {
		checkModel(t, id, b.ask("x", of(id), at(one)))
	}
	other := b.host(&both[1], 8)
	members := discovery.NewMembership(b.table, b.table, string(mesh), discard())
	testbed.Background(b.t, members.Run)
	testbed.Eventually(t, "both hosts are known", func() bool {
		known := members.Hosts()
		return len(known) == 2 && known[0].Alive && known[1].Alive
	})
	one.stop()
	for _, id := range ids {
		_, there, err := b.registry.Find(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		if got := there.GetReplicas(); len(got) != 1 || got[0].GetHost() != other.Record().GetHost() || got[0].GetState() != meshv1.ReplicaState_REPLICA_STATE_LOADED {
			t.Errorf("model %s is on record as %v", id, got)
		}
		checkModel(t, id, b.ask("y", of(id)))
	}
}

func TestAliasSwitchesOnceItsModelIsLoaded(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("v1", "v2", "broken")
	goOn := make(chan struct{})
	l := &loads{load: func(ctx context.Context, id model.ID) error {
		switch id {
		case "broken":
			return errors.New("it has no weights")
		case "v2":
			select {
			case <-goOn:
			case <-ctx.Done():
			}
		}
		return nil
	}}
	h := b.host(l, 8)
	set := func(id string, force bool) *meshv1.Alias {
		t.Helper()
		alias, err := b.registry.SetAlias(t.Context(), models.AliasChange{Name: "best", Route: &meshv1.AliasRoute{Model: id}, Force: force})
		if err != nil {
			t.Fatal(err)
		}
		return alias
	}
	if alias := set("v1", false); alias.GetActive().GetModel() != "v1" || alias.GetTarget() != nil {
		t.Errorf("a new alias: %v", alias)
	}
	checkModel(t, "v1", b.ask("x", of("v1"), at(h)))
	testbed.Eventually(t, "the registry has v1 as loaded", func() bool {
		return slices.Equal(b.states("v1"), []meshv1.ReplicaState{meshv1.ReplicaState_REPLICA_STATE_LOADED})
	})
	if alias := set("broken", false); alias.GetActive().GetModel() != "v1" || alias.GetTarget().GetModel() != "broken" {
		t.Errorf("an alias of a model that cannot be loaded: %v", alias)
	}
	testbed.Eventually(t, "the load of the target has failed", func() bool {
		return slices.Equal(b.states("broken"), []meshv1.ReplicaState{meshv1.ReplicaState_REPLICA_STATE_FAILED})
	})
	if alias := set("v2", false); alias.GetActive().GetModel() != "v1" || alias.GetTarget().GetModel() != "v2" {
		t.Errorf("an alias of a model that is not loaded: %v", alias)
	}
	testbed.Eventually(t, "the target is being loaded", func() bool { return len(b.states("v2")) == 1 })
	if alias, err := b.registry.Alias("best", ""); err != nil || alias.GetActive().GetModel() != "v1" {
		t.Errorf("while its target is being loaded: %v, %v", alias, err)
	}
	close(goOn)
	alias, err := b.registry.AwaitSwitch(t.Context(), "best")
	if err != nil || alias.GetActive().GetModel() != "v2" || alias.GetTarget() != nil {
		t.Errorf("after the load: %v, %v", alias, err)
	}
	if alias := set("broken", true); alias.GetActive().GetModel() != "broken" {
		t.Errorf("a forced switch: %v", alias)
	}
}

func TestReplicasFollowTheUse(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("busy", "idle", "next")
	var both [2]loads
	one := b.host(&both[0], 8)
	b.host(&both[1], 8)
	members := discovery.NewMembership(b.table, b.table, string(mesh), discard())
	testbed.Background(b.t, members.Run)
	placer := models.NewPlacer(b.registry, members)
	testbed.Eventually(t, "both hosts have published their memory", func() bool {
		known := members.Hosts()
		return len(known) == 2 && known[0].Record.GetCache() != nil && known[1].Record.GetCache() != nil
	})
	await := func(id model.ID, want int) {
		t.Helper()
		testbed.Eventually(t, fmt.Sprintf("model %s has %d replicas", id, want), func() bool {
			got := b.states(id)
			return len(got) == want && !slices.Contains(got, meshv1.ReplicaState_REPLICA_STATE_LOADING)
		})
	}
	checkModel(t, "busy", b.ask("x", of("busy"), at(one)))
	checkModel(t, "idle", b.ask("x", of("idle"), at(one)))
	await("busy", 1)
	// Young replicas stay alone.
	later := time.Now().Add(time.Hour)
	used := map[model.ID]*placement.Usage{"busy": {}, "idle": {}}
	used["busy"].Observe(later, 3)
	used["idle"].Observe(later, 0.1)
	own := pipeline.HostID(one.Record().GetHost())
	placer.Scale(t.Context(), later, stage, own, used, false)
	await("busy", 2)
	await("idle", 1)
	for id, want := range map[model.ID]int{"busy": 1, "idle": 1} {
		if err := b.registry.RemoveSpare(t.Context(), id, own, 0); err != nil {
			t.Fatal(err)
		}
		await(id, want)
	}
	await("next", 0)
	if _, err := b.registry.SetAlias(t.Context(), models.AliasChange{Name: "iris", Route: &meshv1.AliasRoute{Model: "next"}, AutoDelete: true}); err != nil {
		t.Fatal(err)
	}
	// As if the process that moved its last alias had stopped then.
	if _, err := b.registry.Register(t.Context(), models.Registration{Model: model.Model{ID: "left", Stage: stage}, AutoDelete: true}); err != nil {
		t.Fatal(err)
	}
	if err := placer.Preload(t.Context(), stage); err != nil {
		t.Fatal(err)
	}
	await("next", 1)
	if _, _, err := b.registry.Find(t.Context(), "left"); err == nil {
		t.Error("a model that is to be deleted with its last alias outlives that")
	}
}

func TestLiveCapacityAndLoadSlotsCountAtOnce(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	l := &loads{}
	h := b.host(l, 8, func(s *stagehost.Settings) { s.Models.Scale.Busy = 0.5 })
	testbed.Eventually(t, "the settings of the file are in the registry", func() bool { return b.registry.StageSettings(stage).GetScale().GetBusy() == 0.5 })
	b.register("a", "b", "c", "d", "e")
	for _, id := range []model.ID{"a", "b", "c", "d", "e"} {
		checkModel(t, id, b.ask("x", of(id), at(h)))
	}
	set := func(s *meshv1.ModelSettings) {
		t.Helper()
		if err := b.registry.SetStageSettings(t.Context(), stage, s); err != nil {
			t.Fatal(err)
		}
	}
	cache := func() *meshv1.CacheRecord { return h.Record().GetCache() }
	before := cache().GetCapacity().GetHost()
	set(&meshv1.ModelSettings{Capacity: &meshv1.ModelSize{Host: 2<<20 + 512<<10}, LoadSlots: 1})
	testbed.Eventually(t, "all but the models used last are evicted", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.now) == 2 && l.now["d"]+l.now["e"] == 2 && cache().GetLoadSlots() == 1
	})
	// A host has no more than it has started with, nor less than its default size needs.
	set(&meshv1.ModelSettings{Capacity: &meshv1.ModelSize{Host: 1 << 40}, LoadSlots: 200})
	testbed.Eventually(t, "the capacity is back", func() bool { return cache().GetCapacity().GetHost() == before && cache().GetLoadSlots() == 2 })
	set(&meshv1.ModelSettings{Capacity: &meshv1.ModelSize{Host: 1}})
	testbed.Eventually(t, "the least capacity", func() bool { return cache().GetUsed().GetHost() == 0 && cache().GetCapacity().GetHost() == 9*64<<10 })
	if f := b.ask("x", of("a"), at(h)).fault(fault.ModelTooLarge); !strings.Contains(f.Message, "model a") {
		t.Errorf("got %v", f)
	}
	failure := func() *meshv1.Replica {
		_, there, _ := b.registry.Model("a")
		return models.FailureOf(there, pipeline.HostID(h.Record().GetHost()), time.Now())
	}
	testbed.Eventually(t, "the model is on record as too large", func() bool { return failure().GetKind() == models.KindTooLarge })
	set(&meshv1.ModelSettings{})
	testbed.Eventually(t, "the record of that ends with the setting", func() bool { return failure() == nil })
	checkModel(t, "a", b.ask("x", of("a"), at(h)))
}

// The process of a crashed batch is ready again before it has loaded its models.
func TestQuarantineOutlastsTheLoadOfTheModel(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("iris")
	batches := make(chan int, roomy)
	l := &loads{}
	var hasCrashed atomic.Bool
	l.run = func(id model.ID, batch runner.Batch) error {
		batches <- len(batch.Items)
		switch {
		case !hasCrashed.Swap(true):
			return runner.ErrCrashed
		case l.count(id) == 1:
			return runner.ErrModelGone
		}
		return nil
	}
	const count = 4
	b.host(l, 8, together(count))
	var calls []*call
	for i := range count {
		calls = append(calls, b.ask(fmt.Sprint(i), of("iris")))
	}
	if n := testbed.Receive(t, "batch at the runner", batches); n != count {
		t.Fatalf("the first batch has %d items", n)
	}
	for _, c := range calls {
		checkModel(t, "iris", c)
	}
	close(batches)
	for n := range batches {
		if n != 1 {
			t.Errorf("%d items ran together in quarantine", n)
		}
	}
}

func TestCrashesCountAcrossARunThatFindsNoModel(t *testing.T) {
	t.Parallel()
	for name, edits := range map[string][]func(*envelope.Envelope){"memory": nil, "file": {durable}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newModelBed(t)
			b.register("iris")
			var runs atomic.Int64
			b.host(&loads{run: func(model.ID, runner.Batch) error {
				if runs.Add(1) == 2 {
					return runner.ErrModelGone
				}
				return runner.ErrCrashed
			}}, 8)
			b.ask("poison", append(edits, of("iris"))...).fails(fault.RunnerCrashed)
			if n := runs.Load(); n != stagehost.DefaultCrashLimit+1 {
				t.Errorf("%d runs", n)
			}
		})
	}
}

// deafLoader is a runner whose load ends only when it is killed.
type deafLoader struct {
	*inproc.ModelRunner
	killed chan struct{}
}

// Kill implements runner.Killer.
func (d *deafLoader) Kill() { close(d.killed) }

func TestDrainKillsALoadThatGoesOn(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("iris")
	begun, killed := make(chan struct{}, 8), make(chan struct{})
	h := b.host(&loads{load: func(context.Context, model.ID) error {
		begun <- struct{}{}
		select {
		case <-killed:
		case <-t.Context().Done():
		}
		return runner.ErrCrashed
	}}, 8, func(s *stagehost.Settings) {
		s.Runner = &deafLoader{s.Runner.(*inproc.ModelRunner), killed}
	})
	b.claim("iris", h)
	testbed.Receive(t, "begin of the load", begun)
	h.stop()
}

// They do not count for max_in_flight, so they are bounded until they are settled.
func TestItemsThatWaitedForAModelCount(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("a", "b")
	entered, goOn, release := make(chan struct{}, 2), make(chan struct{}), make(chan struct{})
	l := &loads{load: func(_ context.Context, id model.ID) error {
		if id == "a" {
			<-goOn
		}
		return nil
	}}
	l.run = func(model.ID, runner.Batch) error {
		entered <- struct{}{}
		<-release
		return nil
	}
	h := b.host(l, 8, together(stagehost.MaxWaiting)) // its batch has all that waited
	var calls []*call
	for i := range stagehost.MaxWaiting {
		calls = append(calls, b.ask(fmt.Sprint(i), of("a")))
	}
	h.awaitCount("stagemesh.stage.model_requests miss", stagehost.MaxWaiting)
	close(goOn)
	testbed.Receive(t, "batch at the runner", entered)
	f := b.ask("x", of("b")).next().Fault
	close(release)
	if f == nil || f.Reason != fault.Overloaded {
		t.Errorf("answered with %v", f)
	}
	for _, c := range calls {
		checkModel(t, "a", c)
	}
}

// moodyModels is a runner of models that can say that it cannot run anything.
type moodyModels struct {
	*inproc.ModelRunner
	mood *moody
}

// Health implements runner.HealthReporter.
func (m *moodyModels) Health() (changed <-chan struct{}, err error) { return m.mood.Health() }

func TestQueueOfAHostThatCannotRunIsTakenOver(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("iris")
	mood := &moody{changed: make(chan struct{})}
	broken := b.host(&loads{}, 8, func(s *stagehost.Settings) {
		s.Runner = &moodyModels{s.Runner.(*inproc.ModelRunner), mood}
	})
	other := b.host(&loads{}, 8)
	mood.outcomeOf(errLoop)
	own := pipeline.HostQueue(stage, pipeline.HostID(broken.Record().GetHost()))
	testbed.Eventually(t, "the host has left its queue", func() bool {
		_, err := b.bus.Alive(t.Context(), own)
		return errors.Is(err, bus.ErrNoHost)
	})
	testbed.Eventually(t, "the other host runs what is sent to it", func() bool { // its last pulls may be open still
		got := checkModel(t, "iris", b.ask("x", of("iris"), at(broken))).Timings[0].Host
		return string(got) == other.Record().GetHost()
	})
	mood.outcomeOf(nil)
	b.waitReady(broken)
	checkModel(t, "iris", b.ask("y", of("iris"), at(broken)))
}
