package librarytest

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/proto/gen/go/mmesh"
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// modelMesh is a mesh whose stage score loads models, and a client of its OIP service.
type modelMesh struct {
	*stagemesh.Mesh
	grpc oipv2.GRPCInferenceServiceClient
	conn *grpc.ClientConn
}

// startModelMesh starts a mesh with the models iris-v1 and iris-v2 among others. The names all
// and both name models, too: a pipeline and an alias.
func startModelMesh(t *testing.T, c gateway.Config) modelMesh {
	t.Helper()
	c.Listen, c.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	s := stagemesh.Settings{
		Registry: &meshfile.RegistryConfig{},
		Gateway: gateway.Settings{Config: c, Aliases: []models.AliasChange{
			{Name: "iris", Route: &meshv1.AliasRoute{Model: "iris-v1"}}, {Name: "both", Route: &meshv1.AliasRoute{Model: "iris-v2"}},
		}},
	}
	for _, id := range []model.ID{"all", "both", "iris-v1", "iris-v2", "team/iris"} {
		s.Gateway.Models = append(s.Gateway.Models, model.Model{ID: id, Stage: "score", Size: model.Size{Host: 1 << 20}})
	}
	out := modelMesh{Mesh: meshtest.Start(t, newMesh(t, s, stagemesh.Stage{
		Name: "score", Runner: signModels(), Inputs: []runner.PartSpec{{Name: "text", ContentTypes: []string{"text/plain"}}},
		Config: stagehost.Config{Models: &stagehost.ModelSettings{Capacity: 16 << 20, DefaultSize: 1 << 20}},
	}))}
	var err error
	if out.conn, err = grpc.NewClient(strings.TrimPrefix(out.URL(), "http://"), grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = out.conn.Close() })
	out.grpc = oipv2.NewGRPCInferenceServiceClient(out.conn)
	// Aliases are registered after the models.
	for _, alias := range []string{"alias:iris", "alias:both"} {
		testbed.Eventually(t, "the alias and the inputs of the stage are known", func() bool {
			m, err := out.grpc.ModelMetadata(t.Context(), &oipv2.ModelMetadataRequest{Name: alias})
			return err == nil && len(m.GetInputs()) == 1
		})
	}
	return out
}

// rest asks a path below /v2, and returns the status and the body.
func (m modelMesh) rest(t *testing.T, method, path, body string) (int, string) {
	t.Helper()
	r := testbed.Request(t, method, m.URL()+"/v2"+path, strings.NewReader(body))
	r.Close = true
	answer, text := testbed.Do(t, http.DefaultClient, r)
	return answer.StatusCode, string(text)
}

// inferText runs a request over gRPC, and returns the text that the model has signed.
func (m modelMesh) inferText(t *testing.T, name string) (string, error) {
	t.Helper()
	answer, err := m.grpc.ModelInfer(t.Context(), &oipv2.ModelInferRequest{
		ModelName: name, Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{
			Name: "text", Datatype: "BYTES", Shape: []int64{1}, Contents: &oipv2.InferTensorContents{BytesContents: [][]byte{[]byte("to")}},
		}},
	})
	if err != nil {
		return "", err
	}
	if answer.GetModelName() != name {
		t.Errorf("%s is answered as %s", name, answer.GetModelName())
	}
	return string(answer.GetRawOutputContents()[0][4:]), nil
}

// states returns the states of the models by both forms of the index.
func (m modelMesh) states(t *testing.T) map[string]string {
	t.Helper()
	code, text := m.rest(t, http.MethodPost, "/repository/index", "")
	var listed []struct{ Name, State string }
	if err := json.Unmarshal([]byte(text), &listed); err != nil || code != http.StatusOK {
		t.Fatalf("%d, %v: %s", code, err, text)
	}
	index, err := m.grpc.RepositoryIndex(t.Context(), &oipv2.RepositoryIndexRequest{})
	if err != nil || len(index.GetModels()) != len(listed) {
		t.Fatalf("%v, %v", index, err)
	}
	out := map[string]string{}
	for i, one := range listed {
		out[one.Name] = one.State
		if index.GetModels()[i].GetName() != one.Name {
			t.Errorf("gRPC lists %v, REST %v", index.GetModels()[i], one)
		}
	}
	return out
}

func TestMetadataOfALoadedModelIsItsOwn(t *testing.T) {
	t.Parallel()
	m := startModelMesh(t, gateway.Config{ModelControl: true})
	client := adminv1connect.NewModelServiceClient(http.DefaultClient, m.URL())
	own := &meshv1.Model{Id: "own", Stage: "score", Source: "own"}
	if _, err := client.SetAlias(t.Context(), connect.NewRequest(&adminv1.SetAliasRequest{Name: "mine", Register: own, Route: &meshv1.AliasRoute{Model: "own"}})); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct{ change, want string }{{"unload", "text"}, {"load", "own"}, {"unload", "own"}} {
		if code, text := m.rest(t, http.MethodPost, "/repository/models/own/"+row.change, ""); code != http.StatusOK {
			t.Fatalf("%d: %s", code, text)
		}
		for _, name := range []string{"own", "mine", "model:own"} {
			got, err := m.grpc.ModelMetadata(t.Context(), &oipv2.ModelMetadataRequest{Name: name})
			if err != nil || len(got.GetInputs()) != 1 || got.GetInputs()[0].GetName() != row.want {
				t.Errorf("%s after %s: %v, %v, want input %s", name, row.change, got, err, row.want)
			}
		}
	}
}

func TestOIPNamesPipelinesAliasesAndModels(t *testing.T) {
	t.Parallel()
	m := startModelMesh(t, gateway.Config{})
	for name, want := range map[string]string{
		"iris-v1": "to iris-v1", "iris": "to iris-v1", "model:iris-v2": "to iris-v2", "alias:iris": "to iris-v1",
		"both": "to iris-v2", "model:both": "to both", "team/iris": "to team/iris",
	} {
		if got, err := m.inferText(t, name); err != nil || got != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
		escaped := strings.ReplaceAll(name, "/", "%2F")
		code, text := m.rest(t, http.MethodPost, "/models/"+escaped+"/infer", `{"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["to"]}]}`)
		if code != http.StatusOK || !strings.Contains(text, `"model_name":"`+name+`"`) || !strings.Contains(text, `"`+want+`"`) {
			t.Errorf("%s over REST: %d %s", name, code, text)
		}
		if code, text := m.rest(t, http.MethodPost, "/models/"+escaped+"/generate", `{"text_input": "to"}`); code != http.StatusOK || !strings.Contains(text, want) {
			t.Errorf("%s generates %d %s", name, code, text)
		}
		if code, text := m.rest(t, http.MethodGet, "/models/"+escaped, ""); code != http.StatusOK || !strings.Contains(text, `"text"`) {
			t.Errorf("%s is described by %d %s", name, code, text)
		}
		if code, text := m.rest(t, http.MethodGet, "/models/"+escaped+"/ready", ""); code != http.StatusOK {
			t.Errorf("%s is ready: %d %s", name, code, text)
		}
	}
	// The pipeline has the name, and its step names no model.
	if got, err := m.inferText(t, "all"); err == nil {
		t.Errorf("the pipeline answers %q", got)
	}
	for _, name := range []string{"nothing", "model:nothing", "alias:nothing"} {
		_, err := m.inferText(t, name)
		_, ready := m.grpc.ModelReady(t.Context(), &oipv2.ModelReadyRequest{Name: name})
		if status.Code(err) != codes.NotFound || status.Code(ready) != codes.NotFound {
			t.Errorf("%s: %v, %v", name, err, ready)
		}
	}
	// Probes need no token, so they do not know the models.
	for _, name := range []string{"iris", "iris-v1", "model:iris-v1", "stage:score"} {
		if _, err := healthpb.NewHealthClient(m.conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: name}); status.Code(err) != codes.NotFound {
			t.Errorf("a probe of %s: %v", name, err)
		}
	}
}

func TestRepositoryIndexHasTheLoadedModels(t *testing.T) {
	t.Parallel()
	m := startModelMesh(t, gateway.Config{})
	for name, state := range m.states(t) {
		if state != "UNAVAILABLE" {
			t.Errorf("%s is %s before its first request", name, state)
		}
	}
	if _, err := m.inferText(t, "iris"); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the gateway knows what is loaded", func() bool { return m.states(t)["iris-v1"] == "READY" })
	index, err := m.grpc.RepositoryIndex(t.Context(), &oipv2.RepositoryIndexRequest{Ready: true})
	if err != nil || len(index.GetModels()) != 1 || index.GetModels()[0].GetName() != "iris-v1" {
		t.Errorf("ready are %v, %v", index, err)
	}
	_, text := m.rest(t, http.MethodPost, "/repository/index", `{"ready": true}`)
	if want := `[{"name":"iris-v1","version":"1","state":"READY","reason":""}]` + "\n"; text != want {
		t.Errorf("ready are %s", text)
	}
	if names := slices.Collect(func(yield func(string) bool) {
		for name := range m.states(t) {
			if !yield(name) {
				return
			}
		}
	}); len(names) != 5 {
		t.Errorf("listed are %v", names)
	}
}

func TestModelsAreManagedOnThePublicPortOnlyIfAllowed(t *testing.T) {
	t.Parallel()
	for _, allowed := range []bool{false, true} {
		m := startModelMesh(t, gateway.Config{GRPCListen: "127.0.0.1:0", ModelControl: allowed})
		second := testbed.Dial(t, m.GRPCURL())
		want := map[bool]codes.Code{false: codes.Unimplemented, true: codes.OK}[allowed]
		for _, conn := range []*grpc.ClientConn{m.conn, second} {
			_, admin := adminv1.NewModelServiceClient(conn).GetModel(t.Context(), &adminv1.GetModelRequest{Id: "iris-v1"})
			_, mesh := mmesh.NewModelMeshClient(conn).RegisterModel(t.Context(), &mmesh.RegisterModelRequest{ModelId: "another"})
			_, other := adminv1.NewDeadLetterServiceClient(conn).ListDeadLetters(t.Context(), &adminv1.ListDeadLettersRequest{})
			if status.Code(admin) != want || status.Code(mesh) != want || status.Code(other) != codes.Unimplemented {
				t.Errorf("allowed is %t: %v, %v, %v", allowed, admin, mesh, other)
			}
		}
		_, err := adminv1connect.NewModelServiceClient(http.DefaultClient, m.URL()).GetModel(t.Context(), connect.NewRequest(&adminv1.GetModelRequest{Id: "iris-v1"}))
		if (err == nil) != allowed {
			t.Errorf("allowed is %t, over Connect: %v", allowed, err)
		}
		http.DefaultClient.CloseIdleConnections()
	}
}

// A host that sees an unload late keeps the claim of the load that follows it.
func TestModelIsLoadedRightAfterItsUnload(t *testing.T) {
	t.Parallel()
	m := startModelMesh(t, gateway.Config{ModelControl: true})
	for i := range 200 {
		for _, change := range []string{"unload", "load"} {
			if code, text := m.rest(t, http.MethodPost, "/repository/models/iris-v1/"+change, ""); code != http.StatusOK {
				t.Fatalf("%s %d: %d %s", change, i, code, text)
			}
		}
		if state := m.states(t)["iris-v1"]; state != "READY" {
			t.Fatalf("after load %d it is %s", i, state)
		}
	}
}

func TestRepositoryLoadsAndUnloads(t *testing.T) {
	t.Parallel()
	m := startModelMesh(t, gateway.Config{ModelControl: true})
	load := func(name string) error {
		_, err := m.grpc.RepositoryModelLoad(t.Context(), &oipv2.RepositoryModelLoadRequest{ModelName: name})
		return err
	}
	if err := load("iris"); err != nil {
		t.Fatal(err)
	}
	if code, text := m.rest(t, http.MethodPost, "/repository/models/team%2Firis/load", ""); code != http.StatusOK {
		t.Fatalf("%d %s", code, text)
	}
	for name, state := range m.states(t) {
		if want := map[bool]string{true: "READY", false: "UNAVAILABLE"}[name == "iris-v1" || name == "team/iris"]; state != want {
			t.Errorf("%s is %s, not %s", name, state, want)
		}
	}
	if _, err := m.grpc.RepositoryModelUnload(t.Context(), &oipv2.RepositoryModelUnloadRequest{ModelName: "iris-v1"}); err != nil {
		t.Fatal(err)
	}
	if code, text := m.rest(t, http.MethodPost, "/repository/models/team%2Firis/unload", `{"parameters": {"unload_dependents": false}}`); code != http.StatusOK {
		t.Fatalf("%d %s", code, text)
	}
	for name, state := range m.states(t) {
		if state != "UNAVAILABLE" {
			t.Errorf("%s is %s after all were unloaded", name, state)
		}
	}
	// A request loads it again.
	if got, err := m.inferText(t, "iris"); err != nil || got != "to iris-v1" {
		t.Errorf("%q, %v", got, err)
	}
	for name, want := range map[string]codes.Code{"all": codes.Unimplemented, "stage:score": codes.Unimplemented, "model:all": codes.OK, "none": codes.NotFound, "model:none": codes.NotFound} {
		if err := load(name); status.Code(err) != want {
			t.Errorf("load of %s: %v", name, err)
		}
	}
	mesh := mmesh.NewModelMeshClient(m.conn)
	for id, want := range map[string]codes.Code{"iris-v2": codes.OK, "none": codes.NotFound} {
		got, err := mesh.EnsureLoaded(t.Context(), &mmesh.EnsureLoadedRequest{ModelId: id, Sync: true})
		if status.Code(err) != want || err == nil && got.GetStatus() != mmesh.ModelStatusInfo_LOADED {
			t.Errorf("ModelMesh loads %s: %v, %v", id, got, err)
		}
	}
	got, err := mesh.RegisterModel(t.Context(), &mmesh.RegisterModelRequest{ModelId: "broken", ModelInfo: &mmesh.ModelInfo{Path: "broken"}, LoadNow: true, Sync: true})
	if err != nil || got.GetStatus() != mmesh.ModelStatusInfo_LOADING_FAILED || len(got.GetErrors()) != 1 {
		t.Errorf("a model that cannot be loaded is registered as %v, %v", got, err)
	}
	if err := load("broken"); status.Code(err) != codes.Unavailable {
		t.Errorf("load of a broken model: %v", err)
	}
	if again, err := mesh.EnsureLoaded(t.Context(), &mmesh.EnsureLoadedRequest{ModelId: "broken", Sync: true}); err != nil || again.GetStatus() != mmesh.ModelStatusInfo_LOADING_FAILED {
		t.Errorf("ModelMesh loads a broken model: %v, %v", again, err)
	}
	alias, err := mesh.SetVModel(t.Context(), &mmesh.SetVModelRequest{VModelId: "fresh", TargetModelId: "team/iris", LoadNow: true, Sync: true})
	if err != nil || alias.GetActiveModelId() != "team/iris" || alias.GetActiveModelStatus().GetStatus() != mmesh.ModelStatusInfo_LOADED {
		t.Errorf("an alias whose target is loaded is %v, %v", alias, err)
	}
	if reason := m.reason(t, "broken"); !strings.Contains(reason, "no such file") {
		t.Errorf("the index says %q of a broken model", reason)
	}
}

// reason returns why a model is in its state.
func (m modelMesh) reason(t *testing.T, name string) string {
	t.Helper()
	index, err := m.grpc.RepositoryIndex(t.Context(), &oipv2.RepositoryIndexRequest{})
	if err != nil {
		t.Fatal(err)
	}
	at := slices.IndexFunc(index.GetModels(), func(one *oipv2.RepositoryIndexResponse_ModelIndex) bool { return one.GetName() == name })
	return index.GetModels()[at].GetReason()
}

func TestRepositoryIsNotChangedWithoutLeave(t *testing.T) {
	t.Parallel()
	m := startModelMesh(t, gateway.Config{})
	for _, verb := range []string{"load", "unload"} {
		if code, text := m.rest(t, http.MethodPost, "/repository/models/iris/"+verb, ""); code != http.StatusForbidden || !strings.Contains(text, "PERMISSION_DENIED") {
			t.Errorf("%s: %d %s", verb, code, text)
		}
	}
	_, load := m.grpc.RepositoryModelLoad(t.Context(), &oipv2.RepositoryModelLoadRequest{ModelName: "iris"})
	_, unload := m.grpc.RepositoryModelUnload(t.Context(), &oipv2.RepositoryModelUnloadRequest{ModelName: "iris"})
	if status.Code(load) != codes.PermissionDenied || status.Code(unload) != codes.PermissionDenied {
		t.Errorf("%v, %v", load, unload)
	}
}

// Clients of ModelMesh name a model or an alias in a header.
func TestModelMeshHeadersNameModels(t *testing.T) {
	t.Parallel()
	m := startModelMesh(t, gateway.Config{})
	ask := &oipv2.ModelInferRequest{Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{
		Name: "text", Datatype: "BYTES", Shape: []int64{1}, Contents: &oipv2.InferTensorContents{BytesContents: [][]byte{[]byte("to")}},
	}}}
	for name, row := range map[string]struct {
		headers             []string
		model, as, want, by string
	}{
		"an alias":             {[]string{"mm-vmodel-id", "iris"}, "", "iris", "", "iris-v1"},
		"an alias of the name": {[]string{"mm-vmodel-id", "both"}, "all", "all", "", "iris-v2"},
		"a model":              {[]string{"mm-model-id", "both"}, "", "both", "", "both"},
		"an unknown alias":     {[]string{"mm-vmodel-id", "iris-v1"}, "", "", "UNKNOWN_MODEL", ""},
		"several":              {[]string{"mm-vmodel-id", "iris", "mm-vmodel-id", "both"}, "", "", "INVALID_REQUEST", ""},
		"both kinds":           {[]string{"mm-vmodel-id", "iris", "mm-model-id", "both"}, "", "", "INVALID_REQUEST", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := metadata.AppendToOutgoingContext(t.Context(), row.headers...)
			request := proto.CloneOf(ask)
			request.ModelName = row.model
			stream, err := m.grpc.ModelStreamInfer(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if err := stream.Send(request); err != nil {
				t.Fatal(err)
			}
			streamed, err := stream.Recv()
			if err != nil {
				t.Fatal(err)
			}
			answer, err := m.grpc.ModelInfer(ctx, request)
			if row.want != "" {
				if reason := detailOf(t, err); reason != row.want || !strings.HasPrefix(streamed.GetErrorMessage(), row.want) {
					t.Errorf("got %v, in the stream %s", err, streamed.GetErrorMessage())
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, got := range []*oipv2.ModelInferResponse{answer, streamed.GetInferResponse()} {
				if text := string(got.GetRawOutputContents()[0]); !strings.HasSuffix(text, row.by) || got.GetModelName() != row.as {
					t.Errorf("answered %q as %s", text, got.GetModelName())
				}
			}
			if _, err := m.grpc.ModelMetadata(ctx, &oipv2.ModelMetadataRequest{}); err != nil {
				t.Error(err)
			}
		})
	}
}

// detailOf returns the reason of an error.
func detailOf(t *testing.T, err error) string {
	t.Helper()
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info.GetReason()
		}
	}
	return ""
}

// Statistics have what this gateway answered, on any protocol, by the name that callers used.
func TestStatisticsCountRequestsByName(t *testing.T) {
	t.Parallel()
	m := startModelMesh(t, gateway.Config{})
	for range 3 {
		if _, err := m.inferText(t, "iris"); err != nil {
			t.Fatal(err)
		}
	}
	text := func(name string) *stagemesh.Request {
		return &stagemesh.Request{Pipeline: name, Inputs: []payload.Part{payload.OfBlob("text", "text/plain", []byte("to"))}}
	}
	if _, err := m.Infer(t.Context(), text("model:iris-v2")); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Infer(t.Context(), &stagemesh.Request{Pipeline: "model:iris-v2"}); err == nil {
		t.Fatal("a request without its input succeeded")
	}
	if _, err := m.Infer(t.Context(), text("model:none")); err == nil {
		t.Fatal("a request for an unknown model succeeded")
	}
	for name, want := range map[string]struct{ succeeded, failed uint64 }{
		"iris": {3, 0}, "alias:iris": {3, 0}, "iris-v2": {1, 1}, "model:iris-v2": {1, 1}, "iris-v1": {0, 0}, "all": {0, 0},
	} {
		got, err := m.grpc.ModelStatistics(t.Context(), &oipv2.ModelStatisticsRequest{Name: name})
		if err != nil || len(got.GetModelStats()) != 1 {
			t.Fatalf("%s: %v, %v", name, got, err)
		}
		one := got.GetModelStats()[0]
		spent := one.GetInferenceStats()
		if one.GetName() != name || spent.GetSuccess().GetCount() != want.succeeded || spent.GetFail().GetCount() != want.failed ||
			one.GetInferenceCount() != want.succeeded || one.GetExecutionCount() != want.succeeded || spent.GetComputeInfer().GetCount() != want.succeeded ||
			spent.GetQueue().GetCount() != want.succeeded || (spent.GetSuccess().GetNs() > 0) != (want.succeeded > 0) || (one.GetLastInference() > 0) != (want.succeeded > 0) {
			t.Errorf("%s: got %v", name, one)
		}
	}
	all, err := m.grpc.ModelStatistics(t.Context(), &oipv2.ModelStatisticsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, one := range all.GetModelStats() {
		names = append(names, one.GetName())
	}
	if !slices.Equal(names, []string{"alias:iris", "model:iris-v2"}) {
		t.Errorf("all are %v", names)
	}
	if _, err := m.grpc.ModelStatistics(t.Context(), &oipv2.ModelStatisticsRequest{Name: "none"}); status.Code(err) != codes.NotFound {
		t.Errorf("an unknown one: %v", err)
	}
}
