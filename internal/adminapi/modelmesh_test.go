package adminapi_test

import (
	"log/slog"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stagemesh/stagemesh/proto/gen/go/mmesh"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/adminapi"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// modelHosts are hosts of stages that load models, and one of another stage.
func modelHosts(stages ...string) fakeMembership {
	out := fakeMembership{hosts: []discovery.Host{{Record: &meshv1.HostRecord{Stage: "plain", Host: "p"}, Alive: true}}}
	for _, stage := range stages {
		out.hosts = append(out.hosts, discovery.Host{Record: &meshv1.HostRecord{Stage: stage, Host: stage, Cache: &meshv1.CacheRecord{}}, Alive: true})
	}
	return out
}

// openModelMesh returns a client of mmesh.ModelMesh as generated code of others is one, and the
// registry.
func openModelMesh(t *testing.T, hosts fakeMembership) (mmesh.ModelMeshClient, *models.Registry) {
	t.Helper()
	_, registry, _ := openModels(t)
	mux := http.NewServeMux()
	for _, service := range adminapi.ModelServices(adminapi.Settings{Models: registry, Membership: hosts, Logger: slog.New(slog.DiscardHandler)}) {
		mux.Handle(service.Path(), service)
	}
	conn := testbed.Dial(t, fronttest.Serve(t, mux))
	return mmesh.NewModelMeshClient(conn), registry
}

func TestModelMeshRegistersModels(t *testing.T) {
	t.Parallel()
	client, registry := openModelMesh(t, modelHosts("score", "score"))
	info := &mmesh.ModelInfo{Type: "linear", Path: "iris.json", Key: `{"bucket": "b", "disk_size_bytes": 12, "model_type": {"name": "x"}}`}
	used := time.Now().Add(-time.Minute).Truncate(time.Millisecond)
	for range 2 {
		got, err := client.RegisterModel(t.Context(), &mmesh.RegisterModelRequest{ModelId: "iris", ModelInfo: info, LastUsedTime: uint64(used.UnixMilli())})
		if err != nil || got.GetStatus() != mmesh.ModelStatusInfo_NOT_LOADED {
			t.Fatalf("%v, %v", got, err)
		}
	}
	m, _, ok := registry.Model("iris")
	if !ok || m.Stage != "score" || m.Type != "linear" || m.Source != "iris.json" || !m.LastUse.Equal(used) ||
		!maps.Equal(m.Options.Map(), map[string]string{"bucket": "b", "disk_size_bytes": "12", "model_type": `{"name": "x"}`}) {
		t.Errorf("registered is %+v", m)
	}
	info.Path = "other.json"
	if _, err := client.RegisterModel(t.Context(), &mmesh.RegisterModelRequest{ModelId: "iris", ModelInfo: info}); status.Code(err) != codes.AlreadyExists {
		t.Errorf("the same ID with another path: %v", err)
	}
	if _, err := client.RegisterModel(t.Context(), &mmesh.RegisterModelRequest{ModelId: "plain", ModelInfo: &mmesh.ModelInfo{Key: "secret text"}}); err != nil {
		t.Error(err)
	}
	if m, _, _ := registry.Model("plain"); m == nil || m.Options.Map()["key"] != "secret text" {
		t.Errorf("a key that is not JSON becomes %+v", m)
	}
	if _, err := client.RegisterModel(t.Context(), &mmesh.RegisterModelRequest{ModelInfo: info}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("without an ID: %v", err)
	}
	for range 2 {
		if _, err := client.UnregisterModel(t.Context(), &mmesh.UnregisterModelRequest{ModelId: "iris"}); err != nil {
			t.Error(err)
		}
	}
	if got, err := client.GetModelStatus(t.Context(), &mmesh.GetStatusRequest{ModelId: "iris"}); err != nil || got.GetStatus() != mmesh.ModelStatusInfo_NOT_FOUND {
		t.Errorf("an unregistered model is %v, %v", got, err)
	}
}

func TestModelMeshFindsTheStage(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		hosts []string
		key   string
		code  codes.Code
		stage string
	}{
		{[]string{"a"}, "", codes.OK, "a"},
		{[]string{"a", "b"}, "", codes.InvalidArgument, ""},
		{[]string{"a", "b"}, `{"stage": "b"}`, codes.OK, "b"},
		{nil, "", codes.Unavailable, ""},
		{nil, `{"stage": "c"}`, codes.OK, "c"},
		{nil, `{"stage": "no stage"}`, codes.InvalidArgument, ""},
	} {
		client, registry := openModelMesh(t, modelHosts(test.hosts...))
		_, err := client.RegisterModel(t.Context(), &mmesh.RegisterModelRequest{ModelId: "m", ModelInfo: &mmesh.ModelInfo{Key: test.key}})
		if status.Code(err) != test.code {
			t.Errorf("%v, %q: %v", test.hosts, test.key, err)
		}
		if m, _, ok := registry.Model("m"); ok && (string(m.Stage) != test.stage || len(m.Options) > 0) {
			t.Errorf("%v, %q: registered is %+v", test.hosts, test.key, m)
		}
	}
}

func TestModelMeshReportsCopies(t *testing.T) {
	t.Parallel()
	client, registry := openModelMesh(t, modelHosts("score"))
	if _, err := client.RegisterModel(t.Context(), &mmesh.RegisterModelRequest{ModelId: "m"}); err != nil {
		t.Fatal(err)
	}
	always := func(*meshv1.ReplicasRecord) bool { return true }
	if err := registry.SetFailed(t.Context(), "m", "h1", models.KindLoad, "no file"); err != nil {
		t.Fatal(err)
	}
	if _, _, err := registry.ClaimLoading(t.Context(), "m", "h2", always); err != nil {
		t.Fatal(err)
	}
	check := func(want mmesh.ModelStatusInfo_ModelStatus, copies string) {
		t.Helper()
		got := awaitStatus(t, client, "m", want)
		var text []string
		for i, one := range got.GetModelCopyInfos() {
			text = append(text, one.GetLocation()+" "+one.GetCopyStatus().String())
			if age := time.Since(time.UnixMilli(int64(one.GetTime()))); age < -time.Second || age > time.Minute || i > 0 && one.GetTime() > got.GetModelCopyInfos()[i-1].GetTime() {
				t.Errorf("the times of %v", got)
			}
		}
		if strings.Join(text, ", ") != copies || len(got.GetErrors()) != 1 || got.GetErrors()[0] != "h1: no file" {
			t.Errorf("the status is %v", got)
		}
	}
	check(mmesh.ModelStatusInfo_LOADING, "h2 LOADING, h1 LOADING_FAILED")
	if err := registry.RemoveReplica(t.Context(), "m", "h2", time.Time{}); err != nil {
		t.Fatal(err)
	}
	check(mmesh.ModelStatusInfo_LOADING_FAILED, "h1 LOADING_FAILED")
}

// awaitStatus waits until the gateway knows that a model has a status.
func awaitStatus(t *testing.T, client mmesh.ModelMeshClient, id string, want mmesh.ModelStatusInfo_ModelStatus) (out *mmesh.ModelStatusInfo) {
	t.Helper()
	testbed.Eventually(t, "the status is "+want.String(), func() bool {
		var err error
		if out, err = client.GetModelStatus(t.Context(), &mmesh.GetStatusRequest{ModelId: id}); err != nil {
			t.Fatal(err)
		}
		return out.GetStatus() == want
	})
	return out
}

func TestModelMeshSetsVModels(t *testing.T) {
	t.Parallel()
	client, registry := openModelMesh(t, modelHosts("score"))
	set := func(in *mmesh.SetVModelRequest) (*mmesh.VModelStatusInfo, codes.Code) {
		in.VModelId = "best"
		out, err := client.SetVModel(t.Context(), in)
		return out, status.Code(err)
	}
	if _, code := set(&mmesh.SetVModelRequest{TargetModelId: "m1"}); code != codes.NotFound {
		t.Errorf("without the model: %s", code)
	}
	out, code := set(&mmesh.SetVModelRequest{TargetModelId: "m1", ModelInfo: &mmesh.ModelInfo{Type: "linear"}, AutoDeleteTargetModel: true, Owner: "team", ExpectedTargetModelId: "m1"})
	if code != codes.OK || out.GetStatus() != mmesh.VModelStatusInfo_DEFINED || out.GetActiveModelId() != "m1" || out.GetTargetModelId() != "m1" || out.GetOwner() != "team" ||
		out.GetActiveModelStatus().GetStatus() != mmesh.ModelStatusInfo_NOT_LOADED || out.GetTargetModelStatus() != nil {
		t.Errorf("%v, %s", out, code)
	}
	for _, test := range []struct {
		in   *mmesh.SetVModelRequest
		code codes.Code
	}{
		{&mmesh.SetVModelRequest{TargetModelId: "m1", Owner: "other"}, codes.Aborted},
		{&mmesh.SetVModelRequest{TargetModelId: "m1", Owner: "team", ExpectedTargetModelId: "m2"}, codes.Aborted},
		{&mmesh.SetVModelRequest{TargetModelId: "m2", Owner: "team", ModelInfo: &mmesh.ModelInfo{}, ExpectedTargetModelId: "m1"}, codes.OK},
	} {
		if _, code := set(test.in); code != test.code {
			t.Errorf("%v: %s", test.in, code)
		}
	}
	testbed.Eventually(t, "the first model is deleted with its last alias", func() bool {
		_, _, ok := registry.Model("m1")
		return !ok
	})
	for owner, want := range map[string]mmesh.VModelStatusInfo_VModelStatus{"": mmesh.VModelStatusInfo_DEFINED, "team": mmesh.VModelStatusInfo_DEFINED, "other": mmesh.VModelStatusInfo_NOT_FOUND} {
		got, err := client.GetVModelStatus(t.Context(), &mmesh.GetVModelStatusRequest{VModelId: "best", Owner: owner})
		if err != nil || got.GetStatus() != want || want == mmesh.VModelStatusInfo_DEFINED && got.GetActiveModelId() != "m2" {
			t.Errorf("for %q: %v, %v", owner, got, err)
		}
	}
	for _, owner := range []string{"other", "team", "team"} {
		if _, err := client.DeleteVModel(t.Context(), &mmesh.DeleteVModelRequest{VModelId: "best", Owner: owner}); err != nil {
			t.Error(err)
		}
		got, err := client.GetVModelStatus(t.Context(), &mmesh.GetVModelStatusRequest{VModelId: "best"})
		if err != nil || (got.GetStatus() == mmesh.VModelStatusInfo_NOT_FOUND) != (owner == "team") || got.GetStatus() == mmesh.VModelStatusInfo_NOT_FOUND && got.GetActiveModelId() != "" {
			t.Errorf("deleted by %s: %v, %v", owner, got, err)
		}
	}
	if _, code := set(&mmesh.SetVModelRequest{TargetModelId: "m2", UpdateOnly: true}); code != codes.NotFound {
		t.Errorf("an update of none: %s", code)
	}
}
