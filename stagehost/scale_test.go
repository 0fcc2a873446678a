package stagehost_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// pair starts two hosts with room for that many models, and returns them once both are known,
// with a placer.
func (b *modelBed) pair(room int64, loads *[2]loads) (one, other *host, members *discovery.Membership, placer *models.Placer) {
	b.t.Helper()
	one, other = b.host(&loads[0], room), b.host(&loads[1], room)
	members = discovery.NewMembership(b.table, b.table, string(mesh), discard())
	testbed.Background(b.t, members.Run)
	testbed.Eventually(b.t, "both hosts have published their memory", func() bool {
		known := members.Hosts()
		return len(known) == 2 && !slices.ContainsFunc(known, func(h discovery.Host) bool { return !h.Alive || h.Record.GetCache() == nil })
	})
	return one, other, members, models.NewPlacer(b.registry, members)
}

// ensure has so many hosts load a model.
func (b *modelBed) ensure(placer *models.Placer, id model.ID, replicas int) {
	b.t.Helper()
	if err := placer.EnsureLoaded(b.t.Context(), id, models.Wanted{Replicas: replicas, LastUse: time.Now()}, true); err != nil {
		b.t.Fatal(err)
	}
}

// loaded returns how many hosts have loaded a model.
func (b *modelBed) loaded(id model.ID) (n int) {
	for _, state := range b.states(id) {
		if state == meshv1.ReplicaState_REPLICA_STATE_LOADED {
			n++
		}
	}
	return n
}

// catchUp returns when the bed's registry has what was written to it before.
func (b *modelBed) catchUp() {
	b.t.Helper()
	mark := model.ID(uuid.NewString())
	if _, err := b.registry.Register(b.t.Context(), models.Registration{Model: model.Model{ID: mark, Stage: "other"}}); err != nil {
		b.t.Fatal(err)
	}
	testbed.Eventually(b.t, "the mark is seen", func() bool { _, _, ok := b.registry.Model(mark); return ok })
}

// clock runs the loop of a host that follows the use of models; tick is its clock, and returns once the
// loop has taken the time.
func (b *modelBed) clock(h *host) (tick func(now time.Time)) {
	ticks := make(chan time.Time)
	testbed.Background(b.t, func(ctx context.Context) error { h.Scale(ctx, ticks); return nil })
	return func(now time.Time) {
		b.t.Helper()
		select {
		case ticks <- now:
		case <-time.After(testbed.Patience):
			b.t.Fatal("the loop takes no time")
		}
	}
}

func TestModelsInUseGetReplicas(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("busy", "idle", "regular")
	if err := b.registry.SetStageSettings(t.Context(), stage, &meshv1.ModelSettings{Scale: &meshv1.ScaleSettings{RequestsPerMinute: 50}}); err != nil {
		t.Fatal(err)
	}
	var all [2]loads
	one, _, _, _ := b.pair(8, &all)
	tick := b.clock(one)
	ask := func(id model.ID, n int) {
		t.Helper()
		for range n {
			checkModel(t, id, b.ask("x", of(id), at(one)))
		}
	}
	ask("idle", 1)
	// The loop of the host itself may take what was asked, so it is asked again.
	now := time.Now().Add(2 * time.Minute)
	testbed.Eventually(t, "the busy model has two replicas", func() bool {
		ask("busy", 10)
		tick(now)
		return b.loaded("busy") == 2
	})
	if n := b.loaded("idle"); n != 1 {
		t.Errorf("the idle model has %d replicas", n)
	}
	// One that is used again a while later gets a second replica, however few the requests.
	later := now.Add(20 * time.Minute)
	testbed.Eventually(t, "the regular model has two replicas", func() bool {
		for _, at := range []time.Time{now, later} {
			ask("regular", 1)
			tick(at)
		}
		return b.loaded("regular") == 2
	})
	// The last use is on record once the one there is an hour old.
	later = time.Now().Add(2 * time.Hour)
	testbed.Eventually(t, "the last use is on record", func() bool {
		ask("idle", 1)
		tick(later)
		_, there, _ := b.registry.Model("idle")
		return there.GetLastUse().AsTime().Equal(later)
	})
}

func TestUnusedReplicasAreRemovedWhereRoomIsShort(t *testing.T) {
	t.Parallel()
	const many = 12
	b := newModelBed(t)
	var ids []model.ID
	for i := range many {
		ids = append(ids, model.ID(fmt.Sprint("m", i)))
	}
	b.register(ids...)
	var all [2]loads
	one, other, _, placer := b.pair(many, &all)
	for _, id := range ids {
		b.ensure(placer, id, 2)
	}
	replicas := func() (n int) {
		for _, id := range ids {
			loaded := b.loaded(id)
			if n += loaded; loaded == 0 {
				t.Fatalf("no host has model %s any more", id)
			}
		}
		return n
	}
	now := time.Now()
	for _, h := range []*host{one, other} {
		tick := b.clock(h)
		at := now.Add(11 * time.Hour)
		// keeps fails the test if a replica is removed within six minutes.
		keeps := func() {
			t.Helper()
			tick(at) // which ends what the last one has begun
			b.catchUp()
			before := replicas()
			tick(at.Add(5 * time.Minute))
			tick(at.Add(5 * time.Minute))
			b.catchUp()
			if n := replicas(); n != before {
				t.Errorf("%d replicas five minutes after there were %d", n, before)
			}
		}
		keeps()
		// Room is short while the hosts have twelve models each, and one goes at a time.
		before := replicas()
		testbed.Eventually(t, "a replica is removed", func() bool {
			at = at.Add(7 * time.Minute)
			tick(at)
			tick(at) // which ends what the last one has begun: unseen removals would leave the other host nothing to do
			b.catchUp()
			return replicas() < before
		})
		keeps()
	}
	own := pipeline.HostID(one.Record().GetHost())
	for _, id := range ids {
		_, there, _ := b.registry.Model(id)
		testbed.Eventually(t, "the host has unloaded what it removed", func() bool {
			all[0].mu.Lock()
			defer all[0].mu.Unlock()
			return (all[0].now[id] > 0) == models.HasReplica(there, own)
		})
	}
}

// A host publishes its rate although nothing else about it changes.
func TestHostPublishesItsRate(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("a")
	var all [2]loads
	one, _, members, _ := b.pair(8, &all)
	checkModel(t, "a", b.ask("x", of("a"), at(one)))
	testbed.Eventually(t, "the rate is published", func() bool {
		for range 5 {
			checkModel(t, "a", b.ask("x", of("a"), at(one)))
		}
		return slices.ContainsFunc(members.Hosts(), func(h discovery.Host) bool {
			return h.Record.GetHost() == one.Record().GetHost() && h.Record.GetCache().GetRate() >= 50
		})
	})
	if took := one.Record().GetCache().GetLoadTimes()[""].AsDuration(); took <= 0 {
		t.Errorf("a load takes %s by its record", took)
	}
}

func TestLeaderLoadsModelsAheadOfRequests(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("a", "b")
	l := &loads{}
	h := b.host(l, 8)
	start := time.Now()
	first := start.Add(2*time.Minute + time.Second)
	lead := func() (tick func(time.Time)) {
		tickOnce := h.Lead(start)
		return func(now time.Time) {
			t.Helper()
			if err := tickOnce(t.Context(), now); err != nil {
				t.Fatal(err)
			}
		}
	}
	testbed.Eventually(t, "the host knows that it leads", func() bool {
		lead()(first)
		return b.loaded("a") == 1
	})
	evict := func() {
		t.Helper()
		if err := b.registry.Evict(t.Context(), "b"); err != nil {
			t.Fatal(err)
		}
		testbed.Eventually(t, "the host has unloaded it", func() bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			return l.now["b"] == 0 && len(b.states("b")) == 0
		})
	}
	tick := lead()
	for _, due := range []time.Time{first, first.Add(7*time.Minute + time.Second)} {
		after := due.Sub(start)
		checkModel(t, "b", b.ask("x", of("b")))
		testbed.Eventually(t, "it is on record", func() bool { return b.loaded("b") == 1 })
		evict()
		tick(due.Add(-time.Second))
		if b.catchUp(); len(b.states("b")) > 0 {
			t.Errorf("it is loaded before %s after the start", after)
		}
		tick(due)
		if b.catchUp(); len(b.states("b")) != 1 {
			t.Errorf("it is not loaded %s after the start", after)
		}
		testbed.Eventually(t, "it is loaded", func() bool { return b.loaded("b") == 1 })
	}
}

func TestAliasSwitchesToAsManyReplicas(t *testing.T) {
	t.Parallel()
	b := newModelBed(t)
	b.register("v1", "v2", "v3")
	var all [2]loads
	held, goOn := make(chan struct{}, 2), make(chan struct{})
	for i := range all {
		all[i].load = func(ctx context.Context, id model.ID) error {
			switch {
			case id == "v3" && i == 1:
				return fmt.Errorf("no space")
			case id != "v2":
				return nil
			}
			held <- struct{}{}
			select {
			case <-goOn:
			case <-ctx.Done():
			}
			return ctx.Err()
		}
	}
	_, _, _, placer := b.pair(8, &all)
	b.ensure(placer, "v1", 2)
	set := func(id string) {
		t.Helper()
		if _, err := b.registry.SetAlias(t.Context(), models.AliasChange{Name: "best", Route: &meshv1.AliasRoute{Model: id}}); err != nil {
			t.Fatal(err)
		}
	}
	await := func(id string, replicas int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), testbed.Patience)
		defer cancel()
		if alias, err := b.registry.AwaitSwitch(ctx, "best"); err != nil || alias.GetActive().GetModel() != id {
			t.Errorf("the alias is %v, %v, want %s", alias, err, id)
		}
		if n := b.loaded(model.ID(id)); n != replicas {
			t.Errorf("%s has %d replicas at the switch, want %d", id, n, replicas)
		}
	}
	set("v1")
	await("v1", 2)
	set("v2")
	for range 2 {
		testbed.Receive(t, "a load of the target on each host", held)
	}
	goOn <- struct{}{}
	testbed.Eventually(t, "one has loaded it", func() bool { return b.loaded("v2") == 1 })
	if alias, err := b.registry.Alias("best", ""); err != nil || alias.GetActive().GetModel() != "v1" {
		t.Errorf("with one of two replicas the alias is %v, %v", alias, err)
	}
	goOn <- struct{}{}
	await("v2", 2)
	// A host that cannot load the target does not prevent the switch.
	set("v3")
	await("v3", 1)
}
