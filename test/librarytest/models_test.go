package librarytest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/proto/gen/go/mmesh"
	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/modelserver"
	"github.com/stagemesh/stagemesh/internal/modelserver/modelservertest"
	"github.com/stagemesh/stagemesh/internal/passthrough"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// signModels returns a runner whose models append their names to each input. It cannot load
// those whose source is "broken"; those whose source is "own" have an input of that name.
func signModels() runner.Runner {
	return inproc.NewModels(inproc.Settings{}, inproc.Models{
		Load: func(_ context.Context, m model.Model) (any, runner.LoadedModel, error) {
			if m.Source == "broken" {
				return nil, runner.LoadedModel{}, errors.New("no such file")
			}
			out := runner.LoadedModel{Size: m.Size}
			if m.Source == "own" {
				out.Spec = &runner.Spec{Inputs: []runner.PartSpec{{Name: "own", ContentTypes: []string{"text/plain"}}}}
			}
			return string(m.ID), out, nil
		},
	}, func(_ context.Context, name any, b runner.Batch, sink runner.Sink) error {
		var errs []error
		for i, item := range b.Items {
			errs = append(errs, sink.SetOutcome(i, runner.Output(payload.OfBlob("text", "text/plain", fmt.Appendf(nil, "%s %s", item.Inputs[0].Blob.Data, name)))))
		}
		return errors.Join(errs...)
	})
}

func TestModelsAreServedByNameAndAlias(t *testing.T) {
	t.Parallel()
	const many = 30
	var registered []model.Model
	for i := range many {
		registered = append(registered, model.Model{ID: model.ID(fmt.Sprintf("m%d", i)), Stage: "score", Size: model.Size{Host: 1 << 20}})
	}
	m := meshtest.Start(t, newMesh(t, stagemesh.Settings{
		Registry: &meshfile.RegistryConfig{},
		Gateway: gateway.Settings{
			Models: registered,
			Aliases: []models.AliasChange{
				{Name: "best", Route: &meshv1.AliasRoute{Model: "m7"}},
				{Name: "canary", Route: &meshv1.AliasRoute{Model: "m7", Weights: map[string]uint32{"m8": 30, "m9": 20}}},
			},
		},
	}, stagemesh.Stage{
		Name: "score", Runners: []runner.Runner{signModels(), signModels(), signModels()},
		Config: stagehost.Config{Models: &stagehost.ModelSettings{Capacity: 8 << 20, DefaultSize: 64 << 10}},
	}))
	hosts := map[string]int{}
	infer := func(name string, steps map[pipeline.StepName]pipeline.StepOptions) (string, error) {
		response, err := m.Infer(t.Context(), &request.Request{
			Pipeline: name, Steps: steps, Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("to"))},
		})
		if err != nil {
			return "", err
		}
		hosts[string(response.Timeline.Steps[0].Host)]++
		return string(response.Outputs[0].Blob.Data), nil
	}
	testbed.Eventually(t, "the models are registered", func() bool {
		_, err := infer(fmt.Sprintf("model:m%d", many-1), nil)
		return err == nil
	})
	// A host takes no load that would evict a model which was used a moment ago.
	answers := func(want, name string, steps map[pipeline.StepName]pipeline.StepOptions) {
		testbed.Eventually(t, "there is room", func() bool {
			got, err := infer(name, steps)
			if err != nil && fault.From(err).Reason == fault.CacheFull {
				return false
			}
			if err != nil || got != "to "+want {
				t.Fatalf("%s answered %q, %v", name, got, err)
			}
			return true
		})
	}
	for i := range many {
		answers(fmt.Sprintf("m%d", i), fmt.Sprintf("model:m%d", i), nil)
	}
	if len(hosts) != 3 {
		t.Errorf("hosts answered as often as %v", hosts)
	}
	answers("m7", "alias:best", nil)
	answers("m7", "all", map[pipeline.StepName]pipeline.StepOptions{"score": {Model: payload.ModelRef{Alias: "best"}}})
	for _, name := range []string{"m7", "m8", "m9"} {
		answers(name, "model:"+name, nil)
	}
	const asked = 400
	answered := map[string]int{}
	for range asked {
		got, err := infer("alias:canary", nil)
		if err != nil {
			t.Fatal(err)
		}
		answered[got]++
	}
	for name, percent := range map[string]int{"m7": 50, "m8": 30, "m9": 20} {
		if got, want := answered["to "+name], asked*percent/100; got < want/2 || got > want*2 {
			t.Errorf("%s answered %d of %d requests, want about %d", name, got, asked, want)
		}
	}
	if _, err := infer("all", map[pipeline.StepName]pipeline.StepOptions{"score": {Model: payload.ModelRef{Alias: "none"}}}); fault.From(err).Reason != fault.UnknownModel {
		t.Errorf("a step with an unknown alias: %v", err)
	}
	for _, name := range []string{"model:none", "alias:none"} {
		if _, err := infer(name, nil); fault.From(err).Reason != fault.UnknownModel {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestModelServerServesModels(t *testing.T) {
	t.Parallel()
	server := &modelservertest.Server{Options: []grpc.ServerOption{modelservertest.EditStatus(func(s *mmesh.RuntimeStatusResponse) {
		path := &mmesh.RuntimeStatusResponse_MethodInfo{IdInjectionPath: []uint32{1}}
		s.MethodInfos = map[string]*mmesh.RuntimeStatusResponse_MethodInfo{"predict.Predictor/Predict": path, "inference.GRPCInferenceService/ModelInfer": path}
	})}}
	r, err := modelserver.New(modelserver.Settings{Address: server.Start(t)})
	if err != nil {
		t.Fatal(err)
	}
	m := meshtest.Start(t, newMesh(t, stagemesh.Settings{
		Registry: &meshfile.RegistryConfig{},
		Gateway: gateway.Settings{
			Config: gateway.Config{Listen: "127.0.0.1:0", Passthrough: map[string]string{"predict.Predictor/Predict": "", "predict.Predictor/Unlisted": "1"}},
			Models: []model.Model{{ID: "a", Stage: "score", Options: model.NewOptions(map[string]string{"add": "10", "size": "4096"})}},
		},
	}, stagemesh.Stage{
		Name: "score", Runner: r,
		Config: stagehost.Config{Models: &stagehost.ModelSettings{Capacity: 1 << 20}},
	}))
	ask := func() (int64, error) {
		x, err := tensor.FromInt64([]int64{1}, []int64{1})
		if err != nil {
			return 0, err
		}
		out, err := m.Infer(t.Context(), &request.Request{Pipeline: "model:a", Inputs: []payload.Part{payload.OfTensor("x", x)}})
		if err != nil {
			return 0, err
		}
		rows, err := out.Outputs[0].Tensor.Int64Values()
		return rows[0], err
	}
	testbed.Eventually(t, "the model answers", func() bool {
		row, err := ask()
		return err == nil && row == 11
	})
	for name, lose := range map[string]func(){
		"the server forgot the model": func() { server.Forget("a") },
		"the server restarted":        func() { server.Stop(); server.Restart() },
	} {
		lose()
		if row, err := ask(); err != nil || row != 11 {
			t.Errorf("%s: %d, %v", name, row, err)
		}
	}
	t.Run("calls are passed on", func(t *testing.T) { checkPassthrough(t, m) })
}

func checkPassthrough(t *testing.T, m *stagemesh.Mesh) {
	t.Helper()
	conn := testbed.Dial(t, m.URL())
	const method = "/predict.Predictor/Predict"
	ctx := metadata.AppendToOutgoingContext(t.Context(), "mm-model-id", "a", "x-user", "me")
	var out wrapperspb.StringValue
	var header, trailer metadata.MD
	err := conn.Invoke(ctx, method, wrapperspb.String("an alias, maybe"), &out, grpc.Header(&header), grpc.Trailer(&trailer))
	if err != nil || out.GetValue() != "a" || !slices.Equal(header["x-model"], []string{"a"}) || !slices.Equal(trailer["x-user"], []string{"me"}) {
		t.Errorf("got %v, header %v, trailer %v, %v", &out, header, trailer, err)
	}
	err = conn.Invoke(metadata.AppendToOutgoingContext(ctx, "x-fail", "no"), method, &out, &out)
	if status.Code(err) != codes.Aborted || status.Convert(err).Message() != "no" {
		t.Errorf("a call that fails: %v", err)
	}
	err = conn.Invoke(ctx, "/predict.Predictor/Unlisted", wrapperspb.String("a"), &out)
	if status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), "only of inference.GRPCInferenceService/ModelInfer, predict.Predictor/Predict") {
		t.Errorf("a method that the server does not list: %v", err)
	}
	forged := payload.OfBlob("request", "", nil)
	forged.Parameters = payload.Parameters{passthrough.Method: payload.String("predict.Predictor/Other")}
	_, err = m.Infer(t.Context(), &request.Request{Pipeline: "model:a", Inputs: []payload.Part{forged}})
	if fault.From(err).Reason != fault.InvalidRequest {
		t.Errorf("a request that names a method: %v", err)
	}
}

func TestFailingModelServerIsNamedAndMayRecover(t *testing.T) {
	t.Parallel()
	var failing atomic.Bool
	server := &modelservertest.Server{Options: []grpc.ServerOption{modelservertest.EditStatus(func(s *mmesh.RuntimeStatusResponse) {
		if failing.Load() {
			s.Status = mmesh.RuntimeStatusResponse_FAILING
		}
	})}}
	r, err := modelserver.New(modelserver.Settings{Address: server.Start(t)})
	if err != nil {
		t.Fatal(err)
	}
	settings := stagemesh.Settings{
		Registry: &meshfile.RegistryConfig{}, Gateway: gateway.Settings{Models: []model.Model{{ID: "a", Stage: "score", Options: model.NewOptions(map[string]string{"add": "10"})}}},
	}
	settings.Gateway.HostGrace = 100 * time.Millisecond
	m := meshtest.Start(t, newMesh(t, settings, stagemesh.Stage{
		Name: "score", Runner: r, Config: stagehost.Config{Models: &stagehost.ModelSettings{Capacity: 1 << 20}},
	}))
	x, err := tensor.FromInt64([]int64{1}, []int64{1})
	if err != nil {
		t.Fatal(err)
	}
	ask := func() error {
		_, err := m.Infer(t.Context(), &request.Request{Pipeline: "model:a", Inputs: []payload.Part{payload.OfTensor("x", x)}})
		return err
	}
	testbed.Eventually(t, "the model answers", func() bool { return ask() == nil })
	failing.Store(true)
	server.Stop()
	server.Restart()
	testbed.Eventually(t, "the mesh says why it is not ready", func() bool {
		err := m.Ready()
		return err != nil && strings.Contains(err.Error(), "FAILING")
	})
	testbed.Eventually(t, "callers learn why the stage is not served", func() bool {
		err := ask()
		return err != nil && fault.From(err).Reason == fault.NoCapacity && strings.Contains(err.Error(), "FAILING")
	})
	failing.Store(false)
	testbed.Eventually(t, "the model answers again", func() bool { return ask() == nil && m.Ready() == nil })
}

// addModels returns a runner whose models add 20, in this process. Loads wait for the gate.
func addModels(gate <-chan struct{}) runner.Runner {
	return inproc.NewModels(inproc.Settings{}, inproc.Models{
		Load: func(ctx context.Context, m model.Model) (any, runner.LoadedModel, error) {
			select {
			case <-gate:
			case <-ctx.Done():
				return nil, runner.LoadedModel{}, ctx.Err()
			}
			if m.Source == "broken" {
				return nil, runner.LoadedModel{}, errors.New("no such file")
			}
			return int64(20), runner.LoadedModel{Size: model.Size{Host: 4096}}, nil
		},
	}, func(ctx context.Context, add any, b runner.Batch, sink runner.Sink) error {
		var errs []error
		for i, item := range b.Items {
			y, err := runnertest.AnswerModel(ctx, add.(int64), *item.Inputs[0].Tensor)
			errs = append(errs, err, sink.SetOutcome(i, runner.Output(payload.OfTensor("y", y))))
		}
		return errors.Join(errs...)
	})
}

// Model a is on a model server, b on a runner in the process: each has a stage of its own.
func TestAliasMovesToTheStageOfAnotherRuntime(t *testing.T) {
	t.Parallel()
	server, err := modelserver.New(modelserver.Settings{Address: (&modelservertest.Server{}).Start(t)})
	if err != nil {
		t.Fatal(err)
	}
	gate := make(chan struct{})
	memory := stagehost.Config{Models: &stagehost.ModelSettings{Capacity: 1 << 20, DefaultSize: 4096}}
	m := meshtest.Start(t, newMesh(t, stagemesh.Settings{
		Registry: &meshfile.RegistryConfig{},
		Gateway: gateway.Settings{
			Config: gateway.Config{Listen: "127.0.0.1:0", ModelControl: true},
			Models: []model.Model{
				{ID: "a", Stage: "served", Options: model.NewOptions(map[string]string{"add": "10", "size": "4096"})},
				{ID: "b", Stage: "inside"},
				{ID: "broken", Stage: "inside", Source: "broken"},
			},
			Aliases: []models.AliasChange{{Name: "best", Route: &meshv1.AliasRoute{Model: "a"}}},
		},
	}, stagemesh.Stage{Name: "served", Runner: server, Config: memory}, stagemesh.Stage{Name: "inside", Runner: addModels(gate), Config: memory}))
	x, err := tensor.FromInt64([]int64{1}, []int64{1})
	if err != nil {
		t.Fatal(err)
	}
	ask := func() (int64, error) {
		out, err := m.Infer(t.Context(), &request.Request{Pipeline: "alias:best", Inputs: []payload.Part{payload.OfTensor("x", x)}})
		if err != nil {
			return 0, err
		}
		rows, err := out.Outputs[0].Tensor.Int64Values()
		return rows[0], err
	}
	testbed.Eventually(t, "the alias answers", func() bool { row, err := ask(); return err == nil && row == 11 })
	client := adminv1connect.NewModelServiceClient(&http.Client{}, m.URL())
	move := func(to string, force bool) *meshv1.Alias {
		out, err := client.SetAlias(t.Context(), connect.NewRequest(&adminv1.SetAliasRequest{Name: "best", Route: &meshv1.AliasRoute{Model: to}, Force: force}))
		if err != nil {
			t.Fatal(err)
		}
		return out.Msg.GetAlias()
	}
	// Callers go on all the time. No request fails, whichever runtime it gets.
	ctx, end := context.WithCancel(t.Context())
	var callers errgroup.Group
	for range 4 {
		callers.Go(func() error {
			for ctx.Err() == nil {
				if row, err := ask(); err != nil || row != 11 && row != 21 {
					return fmt.Errorf("a caller meanwhile got %d, %w", row, err)
				}
			}
			return nil
		})
	}
	if alias := move("b", false); alias.GetActive().GetModel() != "a" || alias.GetTarget().GetModel() != "b" {
		t.Errorf("before the model is loaded: %v", alias)
	}
	if row, err := ask(); err != nil || row != 11 {
		t.Errorf("before the model is loaded: %d, %v", row, err)
	}
	close(gate)
	testbed.Eventually(t, "the other runtime answers", func() bool { row, err := ask(); return err == nil && row == 21 })
	if alias := move("broken", false); alias.GetActive().GetModel() != "b" {
		t.Errorf("to a model that cannot be loaded: %v", alias)
	}
	for range 50 { // at any point of a request
		move("a", true)
		move("b", true)
	}
	end()
	if err := callers.Wait(); err != nil {
		t.Error(err)
	}
	if row, err := ask(); err != nil || row != 21 {
		t.Errorf("after the moves: %d, %v", row, err)
	}
}

// A server whose models are elsewhere is an error, and not a loop.
func TestModelThatIsNeverThereIsAnError(t *testing.T) {
	t.Parallel()
	server := &modelservertest.Server{}
	r, err := modelserver.New(modelserver.Settings{Address: server.Start(t), DataAddress: (&modelservertest.Server{}).Start(t)})
	if err != nil {
		t.Fatal(err)
	}
	m := meshtest.Start(t, newMesh(t, stagemesh.Settings{
		Registry: &meshfile.RegistryConfig{}, Gateway: gateway.Settings{Models: []model.Model{{ID: "a", Stage: "score", Options: model.NewOptions(map[string]string{"add": "10"})}}},
	}, stagemesh.Stage{
		Name: "score", Runner: r, Config: stagehost.Config{Models: &stagehost.ModelSettings{Capacity: 1 << 20}},
	}))
	x, err := tensor.FromInt64([]int64{1}, []int64{1})
	if err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the model is loaded", func() bool {
		_, err = m.Infer(t.Context(), &request.Request{Pipeline: "model:a", Inputs: []payload.Part{payload.OfTensor("x", x)}})
		return slices.Contains(server.Calls(), "load a")
	})
	if fault.From(err).Reason != fault.ModelLoadFailed {
		t.Errorf("got %v", err)
	}
	loads := 0
	for _, c := range server.Calls() {
		if c == "load a" {
			loads++
		}
	}
	if loads < 2 || loads > 10 {
		t.Errorf("the model was loaded %d times", loads)
	}
}
