package adminapi_test

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/internal/adminapi"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
)

// openModels returns a client of a port that serves models, its registry on a real broker, and
// what has the gateway begin to stop.
func openModels(t *testing.T) (client adminv1connect.ModelServiceClient, registry *models.Registry, stop context.CancelFunc) {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	table, err := natskv.New(natskv.Settings{Mesh: string(mesh), URL: testbed.StartBroker(t).URL(), Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	registry = models.New(models.Settings{Table: table, Logger: log})
	testbed.Background(t, table.Run)
	testbed.Background(t, registry.Run)
	testbed.Eventually(t, "the models are known", func() bool { return registry.Ready() == nil })
	stopping, stop := context.WithCancel(t.Context())
	url := serve(t, adminapi.Settings{DeadLetters: &fake{}, Models: registry, Placer: models.NewPlacer(registry, discovery.NewMembership(nil, nil, string(mesh), log)), Stopping: stopping})
	return adminv1connect.NewModelServiceClient(fronttest.Client(t, false), url), registry, stop
}

func registerModel(t *testing.T, client adminv1connect.ModelServiceClient, m *meshv1.Model) (*adminv1.RegisterModelResponse, error) {
	t.Helper()
	out, err := client.RegisterModel(t.Context(), connect.NewRequest(&adminv1.RegisterModelRequest{Model: m}))
	if err != nil {
		return nil, err
	}
	return out.Msg, nil
}

func setAlias(t *testing.T, client adminv1connect.ModelServiceClient, in *adminv1.SetAliasRequest) error {
	t.Helper()
	_, err := client.SetAlias(t.Context(), connect.NewRequest(in))
	return err
}

func to(id string) *meshv1.AliasRoute { return &meshv1.AliasRoute{Model: id} }

func TestModelsAreManaged(t *testing.T) {
	t.Parallel()
	client, registry, _ := openModels(t)
	ctx := t.Context()
	for i := range 5 {
		in := &meshv1.Model{Id: fmt.Sprint("m", i), Stage: "score", Type: "linear", Source: "a.json", Options: map[string]string{"k": "v"}, Size: &meshv1.ModelSize{Host: 5}, MinReplicas: 1}
		out, err := registerModel(t, client, in)
		if err != nil || !out.GetCreated() || out.GetModel().GetState() != adminv1.ModelState_MODEL_STATE_NOT_LOADED || out.GetModel().GetModel().String() != in.String() {
			t.Errorf("got %v, %v", out, err)
		}
	}
	if out, err := registerModel(t, client, &meshv1.Model{Id: "m1", Stage: "other"}); out != nil {
		t.Error("another model of the same ID was registered")
	} else {
		expect(t, "other attributes", err, fault.ModelExists)
	}
	_, _, err := registry.ClaimLoading(ctx, "m1", "host", func(*meshv1.ReplicasRecord) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the model loads", func() bool {
		out, err := client.GetModel(ctx, connect.NewRequest(&adminv1.GetModelRequest{Id: "m1"}))
		return err == nil && out.Msg.GetModel().GetState() == adminv1.ModelState_MODEL_STATE_LOADING && out.Msg.GetModel().GetReplicas()[0].GetHost() == "host"
	})
	if err := registry.SetLoaded(ctx, "m1", "host", model.Size{Host: 1}, nil); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the model is loaded", func() bool {
		out, err := client.GetModel(ctx, connect.NewRequest(&adminv1.GetModelRequest{Id: "m1"}))
		return err == nil && out.Msg.GetModel().GetState() == adminv1.ModelState_MODEL_STATE_LOADED
	})
	evicted, err := client.EvictModel(ctx, connect.NewRequest(&adminv1.EvictModelRequest{Id: "m1"}))
	if err != nil || evicted.Msg.GetModel().GetState() != adminv1.ModelState_MODEL_STATE_NOT_LOADED {
		t.Errorf("evicted: %v, %v", evicted, err)
	}
	_, err = client.EnsureLoaded(ctx, connect.NewRequest(&adminv1.EnsureLoadedRequest{Id: "m1", Wait: true}))
	expect(t, "load without hosts", err, fault.NoCapacity)
	_, err = client.EnsureLoaded(ctx, connect.NewRequest(&adminv1.EnsureLoadedRequest{Id: "none"}))
	expect(t, "load of an unknown model", err, fault.UnknownModel)
	hurried, err := client.RegisterModel(ctx, connect.NewRequest(&adminv1.RegisterModelRequest{Model: &meshv1.Model{Id: "hurried", Stage: "score"}, LoadNow: true, Wait: true}))
	if err != nil || !hurried.Msg.GetCreated() || hurried.Msg.GetModel().GetState() != adminv1.ModelState_MODEL_STATE_NOT_LOADED || time.Since(hurried.Msg.GetModel().GetLastUse().AsTime()) > 2*time.Hour {
		t.Errorf("registered without a host to load it: %v, %v", hurried, err)
	}
	if err := registry.Unregister(ctx, "hurried"); err != nil {
		t.Fatal(err)
	}
	if err := registry.SetFailed(ctx, "m2", "host", "crashed", "it is broken"); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the failure shows", func() bool {
		out, err := client.GetModel(ctx, connect.NewRequest(&adminv1.GetModelRequest{Id: "m2"}))
		return err == nil && out.Msg.GetModel().GetState() == adminv1.ModelState_MODEL_STATE_LOADING_FAILED
	})
	var listed []string
	for token, more := "", true; more; {
		page, err := client.ListModels(ctx, connect.NewRequest(&adminv1.ListModelsRequest{Stage: "score", PageSize: 2, PageToken: token}))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range page.Msg.GetModels() {
			listed = append(listed, m.GetModel().GetId())
		}
		token = page.Msg.GetNextPageToken()
		more = token != ""
	}
	if got := strings.Join(listed, " "); got != "m0 m1 m2 m3 m4" {
		t.Errorf("lists %s", got)
	}
	err = setAlias(t, client, &adminv1.SetAliasRequest{Name: "iris", Route: to("m9"), Owner: "me", Register: &meshv1.Model{Id: "m9", Stage: "score"}})
	if err != nil {
		t.Error(err)
	}
	expect(t, "another owner", setAlias(t, client, &adminv1.SetAliasRequest{Name: "iris", Route: to("m1"), Owner: "you"}), fault.AliasConflict)
	_, err = client.UnregisterModel(ctx, connect.NewRequest(&adminv1.UnregisterModelRequest{Id: "m9"}))
	expect(t, "a model with an alias", err, fault.ModelInUse)
	aliases, err := client.ListAliases(ctx, connect.NewRequest(&adminv1.ListAliasesRequest{}))
	if err != nil || len(aliases.Msg.GetAliases()) != 1 || aliases.Msg.GetAliases()[0].GetActive().GetModel() != "m9" {
		t.Errorf("got %v, %v", aliases, err)
	}
	_, err = client.GetAlias(ctx, connect.NewRequest(&adminv1.GetAliasRequest{Name: "iris", Owner: "you"}))
	expect(t, "another's alias", err, fault.UnknownModel)
	if _, err = client.GetAlias(ctx, connect.NewRequest(&adminv1.GetAliasRequest{Name: "iris"})); err != nil {
		t.Error(err)
	}
	if _, err = client.DeleteAlias(ctx, connect.NewRequest(&adminv1.DeleteAliasRequest{Name: "iris", Owner: "me"})); err != nil {
		t.Error(err)
	}
	for range 2 {
		if _, err = client.UnregisterModel(ctx, connect.NewRequest(&adminv1.UnregisterModelRequest{Id: "m9"})); err != nil {
			t.Error(err)
		}
	}
	_, err = client.GetModel(ctx, connect.NewRequest(&adminv1.GetModelRequest{Id: "m9"}))
	expect(t, "an unregistered model", err, fault.UnknownModel)

	settings := &meshv1.ModelSettings{Types: map[string]*meshv1.TypeConstraint{"gpu": {Required: []string{"gpu"}, Preferred: []string{"big"}}}}
	if _, err := client.SetSettings(ctx, connect.NewRequest(&adminv1.SetSettingsRequest{Stage: "score", Settings: settings})); err != nil {
		t.Error(err)
	}
	bad := &meshv1.ModelSettings{Types: map[string]*meshv1.TypeConstraint{"gpu": {Required: []string{""}}}}
	_, err = client.SetSettings(ctx, connect.NewRequest(&adminv1.SetSettingsRequest{Stage: "score", Settings: bad}))
	expect(t, "a bad label", err, fault.InvalidRequest)
	got, err := client.GetSettings(ctx, connect.NewRequest(&adminv1.GetSettingsRequest{Stage: "score"}))
	if err != nil || got.Msg.GetSettings().String() != settings.String() {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestWaitEndsWhenGatewayStops(t *testing.T) {
	t.Parallel()
	client, registry, stop := openModels(t)
	for _, id := range []model.ID{"old", "new"} {
		if _, err := registry.Register(t.Context(), models.Registration{Model: model.Model{ID: id, Stage: "score"}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := registry.ClaimLoading(t.Context(), "old", "host", func(*meshv1.ReplicasRecord) bool { return true }); err != nil {
		t.Fatal(err)
	}
	if err := registry.SetLoaded(t.Context(), "old", "host", model.Size{Host: 1}, nil); err != nil {
		t.Fatal(err)
	}
	if err := setAlias(t, client, &adminv1.SetAliasRequest{Name: "iris", Route: to("old")}); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		ended <- setAlias(t, client, &adminv1.SetAliasRequest{Name: "iris", Route: to("new"), Wait: true})
	}()
	testbed.Eventually(t, "the alias has a target", func() bool {
		alias, err := registry.Alias("iris", "")
		return err == nil && alias.GetTarget() != nil
	})
	stop()
	expect(t, "the wait", testbed.Receive(t, "the end of the wait", ended), fault.ModelLoading)
}

func TestLatestModelsAreThoseUsedLast(t *testing.T) {
	t.Parallel()
	client, registry, _ := openModels(t)
	now := time.Now()
	for i := range 5 {
		id := model.ID(fmt.Sprintf("%c%d", 'a'+i%2, i))
		if _, err := registry.Register(t.Context(), models.Registration{Model: model.Model{ID: id, Stage: "score"}, LastUse: now.Add(time.Duration(i*7%5) * time.Minute)}); err != nil {
			t.Fatal(err)
		}
	}
	for want, in := range map[string]*adminv1.ListModelsRequest{
		"a2 a4 b1 b3 a0": {Latest: true},
		"a2 a4":          {Latest: true, PageSize: 2},
		"b1 b3":          {Latest: true, IdPrefix: "b"},
		"":               {Latest: true, Stage: "other"},
	} {
		out, err := client.ListModels(t.Context(), connect.NewRequest(in))
		if err != nil {
			t.Fatal(err)
		}
		var ids []string
		for _, m := range out.Msg.GetModels() {
			ids = append(ids, m.GetModel().GetId())
		}
		if got := strings.Join(ids, " "); got != want || out.Msg.GetNextPageToken() != "" {
			t.Errorf("%v lists %s, not %s", in, got, want)
		}
	}
	_, err := client.ListModels(t.Context(), connect.NewRequest(&adminv1.ListModelsRequest{IdPrefix: "b"}))
	expect(t, "a prefix without latest", err, fault.InvalidRequest)
}

func TestBadModelsNameTheirField(t *testing.T) {
	t.Parallel()
	client, _, _ := openModels(t)
	edit := func(change func(m *meshv1.Model)) *meshv1.Model {
		m := &meshv1.Model{Id: "m", Stage: "score"}
		change(m)
		return m
	}
	long := strings.Repeat("x", model.MaxID+1)
	for _, test := range []struct {
		field string
		model *meshv1.Model
	}{
		{"model.id: ", nil},
		{"model.id: ", edit(func(m *meshv1.Model) { m.Id = long })},
		{"model.id: ", edit(func(m *meshv1.Model) { m.Id = "a\nb" })},
		{"model.stage: ", edit(func(m *meshv1.Model) { m.Stage = "no stage" })},
		{"model.type: ", edit(func(m *meshv1.Model) { m.Type = long })},
		{"model.size: ", edit(func(m *meshv1.Model) { m.Size = &meshv1.ModelSize{Device: math.MaxUint64} })},
		{"model.min_replicas: ", edit(func(m *meshv1.Model) { m.MinReplicas = math.MaxUint32 })},
		{"the record takes 10", edit(func(m *meshv1.Model) { m.Source = strings.Repeat("x", 10_000) })},
		{"the record takes 24", edit(func(m *meshv1.Model) { m.Options = map[string]string{"k": strings.Repeat("\x00", 4_000)} })},
	} {
		_, err := registerModel(t, client, test.model)
		expect(t, test.field, err, fault.InvalidRequest)
		if err != nil && !strings.Contains(err.Error(), test.field) {
			t.Errorf("%q does not name %q", err, test.field)
		}
	}
	for field, in := range map[string]*adminv1.SetAliasRequest{
		"name":                 {Route: to("m")},
		"route.model":          {Name: "a"},
		"owner":                {Name: "a", Route: to("m"), Owner: "\n"},
		"expect_model":         {Name: "a", Route: to("m"), ExpectModel: long},
		"route.weights":        {Name: "a", Route: &meshv1.AliasRoute{Model: "m", Weights: map[string]uint32{"n": 60, "o": 41}}},
		"route.shadow.model":   {Name: "a", Route: &meshv1.AliasRoute{Model: "m", Shadow: &meshv1.AliasShadow{Percent: 5}}},
		"route.shadow.percent": {Name: "a", Route: &meshv1.AliasRoute{Model: "m", Shadow: &meshv1.AliasShadow{Model: "m", Percent: 101}}},
		"register.stage":       {Name: "a", Route: to("m"), Register: &meshv1.Model{Id: "m"}},
	} {
		err := setAlias(t, client, in)
		expect(t, field, err, fault.InvalidRequest)
		if err != nil && !strings.Contains(err.Error(), field+": ") {
			t.Errorf("%q does not name %s", err, field)
		}
	}
	_, err := client.RegisterModel(t.Context(), connect.NewRequest(&adminv1.RegisterModelRequest{Model: edit(func(*meshv1.Model) {}), LastUse: &timestamppb.Timestamp{Nanos: -1}}))
	expect(t, "last_use", err, fault.InvalidRequest)
	_, err = client.ListModels(t.Context(), connect.NewRequest(&adminv1.ListModelsRequest{PageSize: 1001}))
	expect(t, "page_size", err, fault.InvalidRequest)
	_, err = client.ListModels(t.Context(), connect.NewRequest(&adminv1.ListModelsRequest{Stage: "."}))
	expect(t, "stage", err, fault.InvalidRequest)
}

func TestModelsNeedARegistry(t *testing.T) {
	t.Parallel()
	client := adminv1connect.NewModelServiceClient(fronttest.Client(t, false), serve(t, adminapi.Settings{DeadLetters: &fake{}}))
	_, err := registerModel(t, client, &meshv1.Model{Id: "m", Stage: "score"})
	expect(t, "register", err, fault.NotSupported)
	_, err = client.ListModels(t.Context(), connect.NewRequest(&adminv1.ListModelsRequest{}))
	expect(t, "list", err, fault.NotSupported)
	_, err = client.GetModel(t.Context(), connect.NewRequest(&adminv1.GetModelRequest{Id: "m"}))
	expect(t, "get", err, fault.NotSupported)
}
