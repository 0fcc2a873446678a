package models_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/durationpb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestMain(m *testing.M) { testbed.Main(m) }

// table returns a connection of its own to the table of the broker.
func table(t testing.TB, b *testbed.Broker) discovery.Table {
	t.Helper()
	store, err := natskv.New(natskv.Settings{Mesh: "test", URL: b.URL(), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	testbed.Background(t, store.Run)
	return store
}

// gateway returns a registry as a gateway has it.
func gateway(t testing.TB, b *testbed.Broker, edits ...func(*models.Settings)) *models.Registry {
	t.Helper()
	s := models.Settings{Table: table(t, b), Logger: slog.New(slog.DiscardHandler)}
	for _, edit := range edits {
		edit(&s)
	}
	r := models.New(s)
	testbed.Background(t, r.Run)
	testbed.Eventually(t, "the models are known", func() bool { return r.Ready() == nil })
	return r
}

func of(id string) models.Registration {
	return models.Registration{Model: model.Model{ID: model.ID(id), Stage: "score", Type: "linear", Source: id + ".json", Size: model.Size{Host: 12 << 10}}}
}

func register(t testing.TB, r *models.Registry, ids ...string) {
	t.Helper()
	for _, id := range ids {
		if _, err := r.Register(t.Context(), of(id)); err != nil {
			t.Fatal(err)
		}
	}
}

func to(id string) *meshv1.AliasRoute { return &meshv1.AliasRoute{Model: id} }

func set(t testing.TB, r *models.Registry, name, id string) {
	t.Helper()
	if _, err := r.SetAlias(t.Context(), models.AliasChange{Name: model.ID(name), Route: to(id)}); err != nil {
		t.Fatal(err)
	}
}

func has(r *models.Registry, id string) bool {
	_, _, ok := r.Model(model.ID(id))
	return ok
}

func expect(t testing.TB, what string, err error, want fault.Reason) {
	t.Helper()
	var f *fault.Fault
	if want == "" && err != nil || want != "" && (!errors.As(err, &f) || f.Reason != want) {
		t.Errorf("%s: got %v, want %q", what, err, want)
	}
}

func TestAllGatewaysHaveAModel(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	one, two := gateway(t, b), gateway(t, b)
	ids := []string{"c", "a b.*>/ü", "b", strings.Repeat("ü", 127)}
	register(t, one, ids...)
	for _, id := range ids {
		if !has(one, id) {
			t.Errorf("the gateway asked has no model %q", id)
		}
		testbed.Eventually(t, "the other gateway has it", func() bool { return has(two, id) })
	}
	m, replicas, _ := two.Model("b")
	if want := of("b").Model; fmt.Sprint(m.Model) != fmt.Sprint(want) || len(replicas.GetReplicas()) != 0 {
		t.Errorf("got %+v, %v", m.Model, replicas)
	}
	if unused := time.Since(m.LastUse); unused < 5*time.Hour || unused > 7*time.Hour {
		t.Errorf("it is unused for %s", unused)
	}
	created, err := two.Register(t.Context(), of("b"))
	if expect(t, "the same again", err, ""); created {
		t.Error("the same model was created again")
	}
	other := of("b")
	other.Options = model.NewOptions(map[string]string{"k": "v"})
	_, err = two.Register(t.Context(), other)
	expect(t, "other attributes", err, fault.ModelExists)
	for range 2 {
		expect(t, "unregister", two.Unregister(t.Context(), "b"), "")
	}
	if has(two, "b") {
		t.Error("an unregistered model is there")
	}
	register(t, one, "b")
	large := of("large")
	large.Source = strings.Repeat("x", models.MaxRecord)
	_, err = one.Register(t.Context(), large)
	expect(t, "a large record", err, fault.InvalidRequest)
}

func TestListsComeInPages(t *testing.T) {
	t.Parallel()
	r := gateway(t, testbed.StartBroker(t))
	for i := range 25 {
		m := of(fmt.Sprintf("m%02d", (i*7)%25))
		if i%5 == 0 {
			m.Stage = "other"
		}
		if _, err := r.Register(t.Context(), m); err != nil {
			t.Fatal(err)
		}
		set(t, r, fmt.Sprintf("a%02d", (i*7)%25), string(m.ID))
	}
	var got, aliases []string
	pages := 0
	for after, more := model.ID(""), true; more; pages++ {
		page, replicas, next := r.List("score", after, 6)
		if len(replicas) != len(page) {
			t.Errorf("%d models have %d lists of replicas", len(page), len(replicas))
		}
		for _, m := range page {
			got = append(got, string(m.ID))
		}
		after, more = next, next != ""
	}
	for after, more := model.ID(""), true; more; {
		page, next := r.ListAliases(after, 7)
		for _, a := range page {
			aliases = append(aliases, a.GetName())
		}
		after, more = next, next != ""
	}
	if len(got) != 20 || pages != 4 || len(aliases) != 25 {
		t.Errorf("got %d models in %d pages, %d aliases", len(got), pages, len(aliases))
	}
	for i := range got[1:] {
		if got[i] >= got[i+1] {
			t.Errorf("%s comes before %s", got[i], got[i+1])
		}
	}
}

func TestOneOfTwoRegistrationsWins(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	gateways := []*models.Registry{gateway(t, b), gateway(t, b)}
	var created, same, exists atomic.Int32
	var work sync.WaitGroup
	for i := range 16 {
		work.Go(func() {
			m := of("m")
			m.Source = fmt.Sprint(i / 2 % 2)
			isNew, err := gateways[i%2].Register(t.Context(), m)
			var f *fault.Fault
			switch {
			case err == nil && isNew:
				created.Add(1)
			case err == nil:
				same.Add(1)
			case errors.As(err, &f) && f.Reason == fault.ModelExists:
				exists.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	work.Wait()
	if created.Load() != 1 || same.Load() != 7 || exists.Load() != 8 {
		t.Errorf("%d were created, %d the same, %d others", created.Load(), same.Load(), exists.Load())
	}
}

func TestAliasesFollowTheirRules(t *testing.T) {
	t.Parallel()
	r := gateway(t, testbed.StartBroker(t))
	register(t, r, "v1", "v2", "v3")
	change := func(what string, in models.AliasChange, want fault.Reason) {
		t.Helper()
		in.Name = "iris"
		_, err := r.SetAlias(t.Context(), in)
		expect(t, what, err, want)
	}
	change("update only", models.AliasChange{Route: to("v1"), UpdateOnly: true}, fault.UnknownModel)
	change("expected model", models.AliasChange{Route: to("v1"), ExpectModel: "v2"}, fault.UnknownModel)
	change("unknown model", models.AliasChange{Route: to("v9")}, fault.UnknownModel)
	change("unknown weight", models.AliasChange{Route: &meshv1.AliasRoute{Model: "v1", Weights: map[string]uint32{"v9": 1}}}, fault.UnknownModel)
	change("unknown shadow", models.AliasChange{Route: &meshv1.AliasRoute{Model: "v1", Shadow: &meshv1.AliasShadow{Model: "v9"}}}, fault.UnknownModel)
	if _, err := r.Alias("iris", ""); err == nil {
		t.Error("a failed change has left an alias")
	}
	change("create", models.AliasChange{Route: to("v1"), Owner: "me"}, "")
	change("another owner", models.AliasChange{Route: to("v2")}, fault.AliasConflict)
	change("another model", models.AliasChange{Route: to("v2"), Owner: "me", ExpectModel: "v3"}, fault.AliasConflict)
	change("move", models.AliasChange{
		Route: &meshv1.AliasRoute{Model: "v2", Weights: map[string]uint32{"v1": 10}, Shadow: &meshv1.AliasShadow{Model: "v3", Percent: 5}},
		Owner: "me", ExpectModel: "v1", UpdateOnly: true,
	}, "")
	for _, id := range []model.ID{"v1", "v2", "v3"} {
		expect(t, "unregister "+string(id), r.Unregister(t.Context(), id), fault.ModelInUse)
	}
	change("forward", models.AliasChange{Route: to("v3"), Owner: "me", AutoDelete: true}, "")
	expect(t, "unregister", r.Unregister(t.Context(), "v1"), "")
	change("back", models.AliasChange{Route: to("v2"), Owner: "me"}, "")
	if has(r, "v3") {
		t.Error("a model with auto_delete outlives its alias")
	}
	expect(t, "delete another's", r.DeleteAlias(t.Context(), "iris", "you"), fault.UnknownModel)
	for range 2 {
		expect(t, "delete", r.DeleteAlias(t.Context(), "iris", "me"), "")
	}
	if _, err := r.Alias("iris", ""); err == nil {
		t.Error("a deleted alias is there")
	}
}

// watcher holds every state of the table to the promise that no alias points at nothing.
type watcher struct {
	t       testing.TB
	models  map[string]bool
	aliases map[string]*meshv1.Alias
}

func (w *watcher) OnDisconnect(error) {}

func (w *watcher) OnUpdate(c discovery.Change) {
	for _, e := range c.Entries {
		segments, err := e.Key.Segments()
		if err != nil || len(segments) != 3 {
			continue
		}
		w.models[segments[2]] = w.models[segments[2]] || segments[1] == "records"
		if a := (&meshv1.Alias{}); segments[1] == "aliases" && protojson.Unmarshal(e.Value, a) == nil {
			w.aliases[a.GetName()] = a
		}
	}
	for _, key := range c.Deleted {
		segments, err := key.Segments()
		if err == nil && segments[1] == "records" {
			w.models[segments[2]] = false
		} else if err == nil {
			delete(w.aliases, segments[2])
		}
	}
	for name, a := range w.aliases {
		if id := a.GetActive().GetModel(); id != "" && !w.models[id] {
			w.t.Errorf("alias %s points at model %s, which does not exist", name, id)
		}
	}
}

func TestNoAliasPointsAtNothing(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	gateways := []*models.Registry{gateway(t, b), gateway(t, b), gateway(t, b)}
	watched := table(t, b)
	testbed.Background(t, func(ctx context.Context) error {
		return watched.Observe(ctx, "models", &watcher{t: t, models: map[string]bool{}, aliases: map[string]*meshv1.Alias{}})
	})
	var work sync.WaitGroup
	var done [4]atomic.Int32
	for i := range 9 {
		work.Go(func() {
			random := rand.New(rand.NewPCG(uint64(i), 1))
			r := gateways[i%len(gateways)]
			for range 60 {
				id, name := fmt.Sprint("m", random.IntN(3)), model.ID(fmt.Sprint("a", random.IntN(2)))
				kind := random.IntN(4)
				var err error
				switch kind {
				case 0:
					_, err = r.Register(t.Context(), of(id))
				case 1:
					_, err = r.SetAlias(t.Context(), models.AliasChange{Name: name, Route: to(id), AutoDelete: random.IntN(4) == 0})
				case 2:
					err = r.DeleteAlias(t.Context(), name, "")
				case 3:
					err = r.Unregister(t.Context(), model.ID(id))
				}
				switch fault.From(err).Reason {
				case fault.UnknownModel, fault.ModelInUse, fault.RevisionMismatch:
				default:
					if err != nil {
						t.Error(err)
					}
					done[kind].Add(1)
				}
			}
		})
	}
	work.Wait()
	for kind := range done {
		if done[kind].Load() == 0 {
			t.Errorf("no change of kind %d succeeded", kind)
		}
	}
	for i := range 3 {
		// Nothing is left that hides or holds a model.
		id := fmt.Sprint("m", i)
		register(t, gateways[0], id)
		testbed.Eventually(t, "the model is known", func() bool { return has(gateways[1], id) })
	}
	for i := range 2 {
		name := model.ID(fmt.Sprint("a", i))
		expect(t, "delete", gateways[0].DeleteAlias(t.Context(), name, ""), "")
		testbed.Eventually(t, "another gateway knows that the alias is deleted", func() bool {
			_, err := gateways[1].Alias(name, "")
			return err != nil
		})
	}
	for i := range 3 {
		expect(t, "unregister", gateways[1].Unregister(t.Context(), model.ID(fmt.Sprint("m", i))), "")
	}
}

func TestWipedRegistryIsFilled(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	one, two := gateway(t, b), gateway(t, b)
	ids := make([]string, 300)
	for i := range ids {
		ids[i] = fmt.Sprint("m", i)
	}
	register(t, one, ids...)
	set(t, one, "iris", "m7")
	constraint := &meshv1.ModelSettings{Types: map[string]*meshv1.TypeConstraint{"gpu": {Required: []string{"gpu"}}}}
	expect(t, "settings", one.SetStageSettings(t.Context(), "score", constraint), "")
	inFile := &meshv1.ModelSettings{Scale: &meshv1.ScaleSettings{Busy: 0.5}}
	gateway(t, b, func(s *models.Settings) { s.Stages = map[pipeline.StageName]*meshv1.ModelSettings{"score": inFile} })
	testbed.Eventually(t, "the settings of the file are known", func() bool { return one.StageSettings("score").GetScale().GetBusy() == 0.5 })
	_, claimed, err := one.ClaimLoading(t.Context(), "m7", "host", anyway)
	if expect(t, "claim", err, ""); !claimed {
		t.Error("nothing was claimed")
	}
	testbed.Eventually(t, "both have all", func() bool {
		_, replicas, ok := two.Model("m7")
		return ok && len(replicas.GetReplicas()) == 1
	})
	b.Stop()
	b.Change(func(o *server.Options) { o.StoreDir = t.TempDir() })
	b.Restore()
	for _, r := range []*models.Registry{one, two} {
		if !has(r, "m7") {
			t.Error("a gateway has lost a model with the registry")
		}
	}
	fresh := gateway(t, b)
	testbed.Eventually(t, "the registry is filled", func() bool {
		page, replicas, _ := fresh.List("", "", len(ids))
		_, err := fresh.Alias("iris", "")
		loading := 0
		for _, r := range replicas {
			loading += len(r.GetReplicas())
		}
		return len(page) == len(ids) && err == nil && loading == 1 && fresh.StageSettings("score").GetTypes()["gpu"] != nil && fresh.StageSettings("score").GetScale().GetBusy() == 0.5
	})
	for _, r := range []*models.Registry{one, two, fresh} {
		testbed.Eventually(t, "it can be changed", func() bool { return r.SetStageSettings(t.Context(), "score", constraint) == nil })
	}
	expect(t, "unregister", fresh.Unregister(t.Context(), "m8"), "")
	testbed.Eventually(t, "the others follow", func() bool { return !has(one, "m8") && !has(two, "m8") })
}

// lines receives what is logged.
type lines chan string

func (l lines) Write(p []byte) (int, error) {
	l <- string(p)
	return len(p), nil
}

func TestNewProcessAwaitsTheRefill(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	other, logged := table(t, b), make(lines, 8)
	put := func(value string, segments ...string) {
		t.Helper()
		if _, err := other.Put(t.Context(), discovery.KeyOf(append([]string{"models"}, segments...)...), []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	}
	put(`{"model": {"id": "m", "stage": "score"}}`, "records", "m")
	r := models.New(models.Settings{Table: table(t, b), Logger: slog.New(slog.NewTextHandler(logged, nil))})
	testbed.Background(t, r.Run)
	testbed.Receive(t, "the warning that the registry is being filled", logged)
	_, _, err := r.Find(t.Context(), "n")
	expect(t, "a model that is not there yet", err, fault.RegistryUnavailable)
	put(`{"model": {"id": "n", "stage": "score"}}`, "records", "n")
	put(`{"id": "e"}`, "epoch")
	testbed.Eventually(t, "the models are known", func() bool { return r.Ready() == nil })
	if !has(r, "m") || !has(r, "n") {
		t.Error("a model is missing")
	}
}

func TestSeedsAreRegistered(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	seeds := func(s *models.Settings) {
		s.Models = []model.Model{of("v1").Model, of("v2").Model}
		s.Aliases = []models.AliasChange{{Name: "iris", Route: to("v1")}, {Name: "bad", Route: to("v9")}}
	}
	one := gateway(t, b, seeds)
	testbed.Eventually(t, "the alias is there", func() bool {
		_, err := one.Alias("iris", "")
		return err == nil && has(one, "v1") && has(one, "v2")
	})
	set(t, one, "iris", "v2")
	two := gateway(t, b, seeds)
	testbed.Eventually(t, "it has the models", func() bool { return has(two, "v1") })
	if a, err := two.Alias("iris", ""); err != nil || a.GetActive().GetModel() != "v2" {
		t.Errorf("a seed has moved an alias back: %v, %v", a, err)
	}
}

func anyway(*meshv1.ReplicasRecord) bool { return true }

func TestOneHostClaimsALoad(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	gateways := []*models.Registry{gateway(t, b), gateway(t, b)}
	register(t, gateways[0], "m")
	var claims atomic.Int32
	var work sync.WaitGroup
	for i := range 8 {
		work.Go(func() {
			none := func(r *meshv1.ReplicasRecord) bool { return len(r.GetReplicas()) == 0 }
			there, claimed, err := gateways[i%2].ClaimLoading(t.Context(), "m", pipeline.HostID(fmt.Sprint(i)), none)
			if err != nil || len(there.GetReplicas()) != 1 {
				t.Errorf("got %v, %v", there, err)
			}
			if claimed {
				claims.Add(1)
			}
		})
	}
	work.Wait()
	if claims.Load() != 1 {
		t.Errorf("%d hosts have claimed the load", claims.Load())
	}
}

// TestClaimThatOthersOutrunMayBeRetried has another gateway change the record at each try.
func TestClaimThatOthersOutrunMayBeRetried(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	one, two := gateway(t, b), gateway(t, b)
	register(t, one, "m")
	testbed.Eventually(t, "the model is known", func() bool { return has(two, "m") })
	later := time.Now()
	_, _, err := one.ClaimLoading(t.Context(), "m", "host", func(*meshv1.ReplicasRecord) bool {
		later = later.Add(time.Hour)
		expect(t, "the other change", two.Touch(t.Context(), "m", later), "")
		return true
	})
	expect(t, "the claim", err, fault.RegistryUnavailable)
}

func TestReplicasAreRecorded(t *testing.T) {
	t.Parallel()
	r := gateway(t, testbed.StartBroker(t))
	ctx := t.Context()
	register(t, r, "m")
	_, _, err := r.ClaimLoading(ctx, "unknown", "a", anyway)
	expect(t, "unknown model", err, fault.UnknownModel)
	state := func() meshv1.ReplicaState {
		_, there, _ := r.Model("m")
		return models.StateOf(there, "a")
	}
	expect(t, "loaded without a claim", r.SetLoaded(ctx, "m", "a", model.Size{Host: 5}, nil), "")
	if got := state(); got != 0 {
		t.Errorf("a load without a claim counts: %v", got)
	}
	for _, host := range []pipeline.HostID{"b", "a"} {
		_, claimed, err := r.ClaimLoading(ctx, "m", host, anyway)
		if expect(t, "claim", err, ""); !claimed {
			t.Error("nothing was claimed")
		}
	}
	expect(t, "loaded", r.SetLoaded(ctx, "m", "a", model.Size{Host: 5, Device: 6}, nil), "")
	expect(t, "failed", r.SetFailed(ctx, "m", "b", "crashed", strings.Repeat("x", 1000)), "")
	testbed.Eventually(t, "the gateway knows", func() bool {
		_, there, _ := r.Model("m")
		all := there.GetReplicas()
		return len(all) == 2 && all[0].GetState() == meshv1.ReplicaState_REPLICA_STATE_LOADED && all[0].GetSize().GetDevice() == 6 &&
			all[1].GetKind() == "crashed" && len(all[1].GetMessage()) < 300 && time.Since(there.GetLastUse().AsTime()) < time.Minute
	})
	_, there, _ := r.Model("m")
	if live := models.LiveReplicas(there, time.Now().Add(time.Hour)); len(live) != 1 || live[0].GetHost() != "a" {
		t.Errorf("after an hour there is %v", live)
	}
	used := time.Now().Add(time.Minute)
	expect(t, "remove", r.RemoveReplica(ctx, "m", "a", used), "")
	if _, there, _ := r.Model("m"); len(there.GetReplicas()) != 1 || !there.GetLastUse().AsTime().Equal(used) {
		t.Errorf("got %v", there)
	}
	_, _, err = r.ClaimLoading(ctx, "m", "a", anyway)
	expect(t, "claim again", err, "")
	expect(t, "unload", r.RemoveLoaded(ctx, "m", "a", used.Add(time.Second)), "")
	if _, there, _ := r.Model("m"); models.StateOf(there, "a") != meshv1.ReplicaState_REPLICA_STATE_LOADING || !there.GetLastUse().AsTime().Equal(used.Add(time.Second)) {
		t.Errorf("a claim that is newer than the unload: %v", there)
	}
	expect(t, "remove", r.RemoveReplica(ctx, "m", "a", used), "")
	// The replicas of another registration do not belong to this one.
	_, _, err = r.ClaimLoading(ctx, "m", "a", anyway)
	expect(t, "claim", err, "")
	expect(t, "unregister", r.Unregister(ctx, "m"), "")
	register(t, r, "m")
	if _, there, _ := r.Model("m"); len(there.GetReplicas()) != 0 {
		t.Errorf("a new registration has the replicas %v", there)
	}
	expect(t, "an old load", r.SetLoaded(ctx, "m", "a", model.Size{}, nil), "")
	if got := state(); got != 0 {
		t.Errorf("a load for another registration counts: %v", got)
	}
}

// A model that an alias keeps stays visible, with its replicas, at all times.
func TestModelInUseKeepsItsReplicas(t *testing.T) {
	t.Parallel()
	r := gateway(t, testbed.StartBroker(t))
	ctx := t.Context()
	register(t, r, "m", "canary")
	_, err := r.SetAlias(ctx, models.AliasChange{Name: "iris", Route: to("m"), AutoDelete: true})
	expect(t, "set", err, "")
	_, _, err = r.ClaimLoading(ctx, "m", "a", anyway)
	expect(t, "claim", err, "")
	changes, stop := context.WithCancel(ctx)
	defer stop()
	missing := make(chan bool, 1)
	go func() {
		isMissing := false
		for range r.ChangedModels(changes) {
			_, there, ok := r.Model("m")
			isMissing = isMissing || !ok || len(there.GetReplicas()) == 0
		}
		missing <- isMissing
	}()
	expect(t, "unregister", r.Unregister(ctx, "m"), fault.ModelInUse)
	route := &meshv1.AliasRoute{Model: "m", Weights: map[string]uint32{"canary": 10}}
	_, err = r.SetAlias(ctx, models.AliasChange{Name: "iris", Route: route, AutoDelete: true})
	expect(t, "another route", err, "")
	stop()
	if testbed.Receive(t, "the end of the changes", missing) {
		t.Error("the model was gone for a moment")
	}
}

func TestRefusedAliasMarksNoModel(t *testing.T) {
	t.Parallel()
	r := gateway(t, testbed.StartBroker(t))
	register(t, r, "m", "n")
	_, err := r.SetAlias(t.Context(), models.AliasChange{Name: "iris", Route: to("n"), Owner: "me"})
	expect(t, "set", err, "")
	_, err = r.SetAlias(t.Context(), models.AliasChange{Name: "iris", Route: to("m"), Owner: "you", AutoDelete: true})
	expect(t, "another owner", err, fault.AliasConflict)
	if m, _, _ := r.Model("m"); m.AutoDelete {
		t.Error("the model of a refused change is deleted automatically")
	}
}

func TestSameRouteTakesAutoDelete(t *testing.T) {
	t.Parallel()
	r := gateway(t, testbed.StartBroker(t))
	register(t, r, "m")
	set(t, r, "iris", "m")
	_, err := r.SetAlias(t.Context(), models.AliasChange{Name: "iris", Route: to("m"), AutoDelete: true})
	expect(t, "the same route", err, "")
	if m, _, _ := r.Model("m"); !m.AutoDelete {
		t.Error("the model is not deleted automatically")
	}
}

// putHook is a table that calls after once a value is put.
type putHook struct {
	discovery.Table
	after func(value []byte) error
}

func (p putHook) Put(ctx context.Context, key discovery.Key, value []byte, expect discovery.Revision) (discovery.Revision, error) {
	revision, err := p.Table.Put(ctx, key, value, expect)
	if err == nil {
		err = p.after(value)
	}
	return revision, err
}

func TestExpectedModelAllowsOwnWrites(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	leader := gateway(t, b)
	register(t, leader, "v1", "v2")
	for what, after := range map[string]func(*meshv1.Alias) error{
		"the leader switches first": func(a *meshv1.Alias) error { return leader.Switch(t.Context(), a) },
		"an answer is lost":         func(*meshv1.Alias) error { return discovery.ErrUnknown },
	} {
		set(t, leader, "iris", "v1")
		puts := 0
		r := gateway(t, b, func(s *models.Settings) {
			s.Table = putHook{s.Table, func(value []byte) error {
				if puts++; puts > 1 {
					return nil
				}
				a := &meshv1.Alias{}
				if err := protojson.Unmarshal(value, a); err != nil {
					return err
				}
				return after(a)
			}}
		})
		a, err := r.SetAlias(t.Context(), models.AliasChange{Name: "iris", Route: to("v2"), ExpectModel: "v1"})
		if expect(t, what, err, ""); a.GetActive().GetModel() != "v2" || a.GetTarget() != nil {
			t.Errorf("%s: got %v", what, a)
		}
	}
}

func TestChangesNeedTheRegistry(t *testing.T) {
	t.Parallel()
	none := models.New(models.Settings{Logger: slog.New(slog.DiscardHandler)})
	_, err := none.Register(t.Context(), of("m"))
	expect(t, "without a table", err, fault.NotSupported)
	b := testbed.StartBroker(t)
	r := gateway(t, b)
	register(t, r, "m")
	b.Stop()
	defer b.Restore()
	testbed.Eventually(t, "it is unavailable", func() bool {
		since, _ := r.Stale()
		return !since.IsZero()
	})
	expect(t, "unregister", r.Unregister(t.Context(), "m"), fault.RegistryUnavailable)
	_, err = r.SetAlias(t.Context(), models.AliasChange{Name: "a", Route: to("m")})
	expect(t, "alias", err, fault.RegistryUnavailable)
	if !has(r, "m") {
		t.Error("an outage hides a model")
	}
}

func TestRouteChoosesTheSameModelForEachTry(t *testing.T) {
	t.Parallel()
	route := &meshv1.AliasRoute{Model: "a", Weights: map[string]uint32{"b": 10, "c": 25}, Shadow: &meshv1.AliasShadow{Model: "c", Percent: 40}}
	const requests = 10000
	counts, shadows := map[model.ID]int{}, map[model.ID]int{}
	for i := range requests {
		request := pipeline.RequestID(fmt.Sprint("request ", i))
		id, shadow := models.Choose(route, request)
		if again, same := models.Choose(route, request); again != id || same != shadow {
			t.Fatalf("%s goes to %s and to %s, its shadows are %q and %q", request, id, again, shadow, same)
		}
		if counts[id]++; shadow != "" {
			shadows[id]++
		}
	}
	for id, percent := range map[model.ID]int{"a": 65, "b": 10, "c": 25} {
		if got := counts[id] * 100 / requests; got < percent-3 || got > percent+3 {
			t.Errorf("%s gets %d%%, want %d%%", id, got, percent)
		}
		// Each model has its share of the shadows, but none is its own.
		if got := shadows[id] * 100 / counts[id]; id == "c" && got != 0 || id != "c" && (got < 36 || got > 44) {
			t.Errorf("%d%% of the requests of %s have a shadow", got, id)
		}
	}
	if id, _ := models.Choose(&meshv1.AliasRoute{Model: "a", Weights: map[string]uint32{"b": 100}}, "x"); id != "b" {
		t.Errorf("all requests go to b, this one to %s", id)
	}
}

func TestSettingsOfTheFileCountUntilOthersAreSet(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
	types := func(label string) *meshv1.ModelSettings {
		return &meshv1.ModelSettings{Types: map[string]*meshv1.TypeConstraint{"large": {Required: []string{label}}}}
	}
	start := func(s *meshv1.ModelSettings) *models.Registry {
		return gateway(t, b, func(to *models.Settings) { to.Stages = map[pipeline.StageName]*meshv1.ModelSettings{"score": s} })
	}
	one := start(types("file"))
	shows := func(want string) {
		t.Helper()
		testbed.Eventually(t, "it shows "+want, func() bool {
			got := one.StageSettings("score").GetTypes()["large"].GetRequired()
			return strings.Join(got, "") == want
		})
	}
	shows("file")
	expect(t, "set", one.SetStageSettings(t.Context(), "score", types("live")), "")
	shows("live")
	start(types("changed"))
	busy := types("live")
	busy.Scale = &meshv1.ScaleSettings{Busy: 0.5}
	expect(t, "set more", one.SetStageSettings(t.Context(), "score", busy), "")
	shows("live")
	expect(t, "set only others", one.SetStageSettings(t.Context(), "score", &meshv1.ModelSettings{Scale: busy.Scale}), "")
	shows("changed")
	expect(t, "remove", one.SetStageSettings(t.Context(), "score", &meshv1.ModelSettings{}), "")
	if got := one.StageSettings("score"); got.GetScale() != nil {
		t.Errorf("got %v after the settings were removed", got)
	}
	shows("changed")
	start(&meshv1.ModelSettings{})
	shows("")
}

func TestInvalidSettingsNameTheirField(t *testing.T) {
	t.Parallel()
	for field, s := range map[string]*meshv1.ModelSettings{
		"in.types.gpu":        {Types: map[string]*meshv1.TypeConstraint{"gpu": {Required: []string{""}}}},
		"in.scale.busy":       {Scale: &meshv1.ScaleSettings{Busy: 2}},
		"in.scale.queue_time": {Scale: &meshv1.ScaleSettings{QueueTime: durationpb.New(-1)}},
		"in.capacity":         {Capacity: &meshv1.ModelSize{Device: 1 << 63}},
		"in.load_slots":       {LoadSlots: 257},
	} {
		err := models.ValidateSettings("in.", s)
		if f := fault.From(err); f.Reason != fault.InvalidRequest || len(f.Violations) != 1 || f.Violations[0].Field != field {
			t.Errorf("%s: got %v", field, err)
		}
	}
	if err := models.ValidateSettings("", &meshv1.ModelSettings{Capacity: &meshv1.ModelSize{Host: 1 << 30}, LoadSlots: 256}); err != nil {
		t.Error(err)
	}
}
