package modelserver_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/stagemesh/stagemesh/proto/gen/go/mmesh"
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/internal/modelserver"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
)

// The servers of this file answer as Triton, OpenVINO Model Server and TensorFlow Serving do by
// their public protocols: the same methods, order of calls, states, codes and messages. Their models
// add 10 to the rows of input x. Models whose name begins with "broken" cannot be loaded.

// serve serves gRPC until the test ends, and returns the address.
func serve(t *testing.T, register func(*grpc.Server), options ...grpc.ServerOption) string {
	t.Helper()
	folder, err := os.MkdirTemp("", "ms") //nolint:usetesting // the name of a socket has at most 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(folder, "s")
	listener, err := net.Listen("unix", path) //nolint:noctx // it does not wait
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(options...)
	register(server)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := errors.Join(<-ended, os.RemoveAll(folder)); err != nil {
			t.Error(err)
		}
	})
	return "unix:" + path
}

// startWith starts a runner.
func startWith(t *testing.T, s modelserver.Settings) *modelserver.Runner {
	t.Helper()
	r := newRunner(t, s)
	ctx, cancel := context.WithTimeout(t.Context(), testbed.Patience)
	defer cancel()
	if err := r.Start(ctx); err != nil {
		t.Fatal(err)
	}
	return r
}

// checkRefused checks that a runner does not start, and names the words.
func checkRefused(t *testing.T, s modelserver.Settings, words ...string) {
	t.Helper()
	r := newRunner(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	started := make(chan error, 1)
	go func() { started <- r.Start(ctx) }()
	testbed.Eventually(t, strings.Join(words, ", "), func() bool {
		_, err := r.Health()
		return err != nil && !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(err.Error(), word) })
	})
	cancel()
	if err := testbed.Receive(t, "end", started); err == nil {
		t.Error("the server is taken")
	}
}

// checkAdds checks that a model answers, and fails with INVALID_INPUT for another input.
func checkAdds(t *testing.T, r *modelserver.Runner, id string) {
	t.Helper()
	other := itemOf(1)
	other.Inputs[0].Name = "z"
	rows, faults, err := ask(t.Context(), t, r, id, itemOf(1), other)
	if err != nil || !slices.Equal(rows, []int64{11}) || len(faults) != 1 || faults[0].Reason != fault.InvalidInput || faults[0].Code != code.Code_INVALID_ARGUMENT {
		t.Errorf("model %s: rows %d, faults %v, %v", id, rows, faults, err)
	}
}

// add answers a request of the Open Inference Protocol by raw contents, as both servers do.
func add(ctx context.Context, in *oipv2.ModelInferRequest, unexpected string) (*oipv2.ModelInferResponse, error) {
	if len(in.GetInputs()) != 1 || len(in.GetRawInputContents()) != 1 || in.GetInputs()[0].GetName() != "x" {
		return nil, status.Error(codes.InvalidArgument, unexpected)
	}
	x := in.GetInputs()[0]
	y, err := runnertest.AnswerModel(ctx, 10, tensor.Tensor{Datatype: tensor.Datatype(x.GetDatatype()), Shape: x.GetShape(), Raw: in.GetRawInputContents()[0]})
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &oipv2.ModelInferResponse{
		ModelName: in.GetModelName(), ModelVersion: "1", Id: in.GetId(), RawOutputContents: [][]byte{y.Raw},
		Outputs: []*oipv2.ModelInferResponse_InferOutputTensor{{Name: "y", Datatype: string(y.Datatype), Shape: y.Shape}},
	}, nil
}

// triton has the repository a, b, left and broken, of which left is loaded when it starts.
type triton struct {
	oipv2.UnimplementedGRPCInferenceServiceServer

	// polls is true for --model-control-mode=poll, where clients may not load models.
	polls bool
	mu    sync.Mutex
	// states has the models that were loaded once, with the reason of those that are UNAVAILABLE:
	// "unloaded", or why the load failed. An empty reason is READY.
	states map[string]string
	calls  []string
}

func newTriton() *triton { return &triton{states: map[string]string{"left": ""}} }

func (s *triton) start(t *testing.T) modelserver.Settings {
	t.Helper()
	address := serve(t, func(server *grpc.Server) { oipv2.RegisterGRPCInferenceServiceServer(server, s) })
	return modelserver.Settings{Address: address, Control: modelserver.ControlRepository}
}

// ServerReady is false after a load that failed, until the model was loaded and unloaded, since
// --strict-readiness is on by default.
func (s *triton) ServerReady(context.Context, *oipv2.ServerReadyRequest) (*oipv2.ServerReadyResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &oipv2.ServerReadyResponse{Ready: true}
	for _, reason := range s.states {
		out.Ready = out.GetReady() && (reason == "" || reason == "unloaded")
	}
	return out, nil
}

// RepositoryIndex has the models of the repository; those that were never loaded have no state.
func (s *triton) RepositoryIndex(_ context.Context, in *oipv2.RepositoryIndexRequest) (*oipv2.RepositoryIndexResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &oipv2.RepositoryIndexResponse{}
	for _, name := range []string{"a", "b", "broken", "left"} {
		one := &oipv2.RepositoryIndexResponse_ModelIndex{Name: name}
		reason, wasLoaded := s.states[name]
		switch {
		case wasLoaded && reason == "":
			one.Version, one.State = "1", "READY"
		case in.GetReady():
			continue
		case wasLoaded:
			one.Version, one.State, one.Reason = "1", "UNAVAILABLE", reason
		}
		out.Models = append(out.Models, one)
	}
	return out, nil
}

func (s *triton) note(verb, name string) error {
	s.mu.Lock()
	s.calls = append(s.calls, verb+" "+name)
	if s.polls {
		return status.Error(codes.Unavailable, "explicit model load / unload is not allowed if polling is enabled")
	}
	return nil
}

// RepositoryModelLoad returns when the model is loaded. The code of all loads that fail is
// INVALID_ARGUMENT.
func (s *triton) RepositoryModelLoad(_ context.Context, in *oipv2.RepositoryModelLoadRequest) (*oipv2.RepositoryModelLoadResponse, error) {
	name := in.GetModelName()
	defer s.mu.Unlock()
	switch err := s.note("load", name); {
	case err != nil:
		return nil, err
	case strings.Contains(name, "/"):
		return nil, status.Errorf(codes.InvalidArgument, "invalid model name '%s', model name must not contain path traversal characters", name)
	case !slices.Contains([]string{"a", "b", "broken", "left"}, name):
		return nil, status.Errorf(codes.Internal, "failed to load '%s', failed to poll from model repository", name)
	case name == "broken":
		s.states[name] = "Internal: unable to allocate memory"
		return nil, status.Errorf(codes.InvalidArgument, "load failed for model '%s': version 1 is at UNAVAILABLE state: %s;", name, s.states[name])
	}
	s.states[name] = ""
	return &oipv2.RepositoryModelLoadResponse{}, nil
}

// RepositoryModelUnload succeeds also for a model that is not loaded, and does not change its state.
func (s *triton) RepositoryModelUnload(_ context.Context, in *oipv2.RepositoryModelUnloadRequest) (*oipv2.RepositoryModelUnloadResponse, error) {
	defer s.mu.Unlock()
	if err := s.note("unload", in.GetModelName()); err != nil {
		return nil, err
	}
	if reason, wasLoaded := s.states[in.GetModelName()]; wasLoaded && reason == "" {
		s.states[in.GetModelName()] = "unloaded"
	}
	return &oipv2.RepositoryModelUnloadResponse{}, nil
}

func (s *triton) ModelInfer(ctx context.Context, in *oipv2.ModelInferRequest) (*oipv2.ModelInferResponse, error) {
	s.mu.Lock()
	reason, wasLoaded := s.states[in.GetModelName()]
	s.mu.Unlock()
	switch {
	case !wasLoaded:
		return nil, status.Errorf(codes.NotFound, "Request for unknown model: '%s' is not found", in.GetModelName())
	case reason != "":
		return nil, status.Errorf(codes.NotFound, "Request for unknown model: '%s' has no available versions", in.GetModelName())
	}
	return add(ctx, in, fmt.Sprintf("[request id: %s] expected 1 inputs but got %d inputs for model '%s'", in.GetId(), len(in.GetInputs()), in.GetModelName()))
}

func (s *triton) called(call string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.calls, call)
}

func TestTritonLoadsModels(t *testing.T) {
	t.Parallel()
	server := newTriton()
	settings := server.start(t)
	r := startWith(t, settings)
	if !server.called("unload left") || server.called("unload a") {
		t.Errorf("calls %q", server.calls)
	}
	load(t, r, model.Model{ID: "a"})
	checkAdds(t, r, "a")
	for id, text := range map[model.ID]string{"broken": "unable to allocate", "missing": "failed to poll", "a/b": "path traversal"} {
		_, err := r.Load(t.Context(), model.Model{ID: id})
		// Another host may be able to load it.
		if err == nil || errors.Is(err, runner.ErrInvalidModel) || errors.Is(err, runner.ErrNotStarted) || !strings.Contains(err.Error(), text) {
			t.Errorf("the load of %s: %v", id, err)
		}
		if !server.called("unload " + string(id)) {
			t.Errorf("the load of %s is not undone", id)
		}
	}
	for _, id := range []string{"missing", "left"} { // never loaded, and unloaded
		if _, _, err := ask(t.Context(), t, r, id, itemOf(1)); !errors.Is(err, runner.ErrModelGone) {
			t.Errorf("model %s: %v", id, err)
		}
	}
	// The server is not ready any more after the load that failed. A host that starts again uses it
	// all the same.
	if ready, err := server.ServerReady(t.Context(), nil); err != nil || ready.GetReady() {
		t.Fatal("the server is ready", err)
	}
	r = startWith(t, settings)
	if !server.called("unload a") {
		t.Error("the model of the host before is not unloaded")
	}
	load(t, r, model.Model{ID: "b"})
	checkAdds(t, r, "b")
}

func TestTritonThatPollsIsRefused(t *testing.T) {
	t.Parallel()
	checkRefused(t, (&triton{polls: true, states: map[string]string{"left": ""}}).start(t), "not allowed if polling is enabled")
	// Without models, the first load says so.
	r := startWith(t, (&triton{polls: true, states: map[string]string{}}).start(t))
	if _, err := r.Load(t.Context(), model.Model{ID: "a"}); !errors.Is(err, runner.ErrNotStarted) || !strings.Contains(err.Error(), "polling is enabled") {
		t.Errorf("a load: %v", err)
	}
}

// openVINO has no repository extension: its models are listed in a file, which it reads again when
// POST /v1/config/reload asks for it.
type openVINO struct {
	oipv2.UnimplementedGRPCInferenceServiceServer

	mu sync.Mutex
	// models are the file's, by name, with the error of their requests.
	models map[string]error
}

// reload reads a file with one model more, or less.
func (s *openVINO) reload(change func(file map[string]error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s.models)
}

func (s *openVINO) ServerReady(context.Context, *oipv2.ServerReadyRequest) (*oipv2.ServerReadyResponse, error) {
	return &oipv2.ServerReadyResponse{Ready: true}, nil
}

func (s *openVINO) ModelInfer(ctx context.Context, in *oipv2.ModelInferRequest) (*oipv2.ModelInferResponse, error) {
	s.mu.Lock()
	err, ok := s.models[in.GetModelName()]
	s.mu.Unlock()
	switch {
	case !ok:
		return nil, status.Error(codes.NotFound, "Model with requested name is not found")
	case err != nil:
		return nil, err
	}
	return add(ctx, in, "Missing input with specific name - Required input: x")
}

// openVINOAdapter is mmesh.ModelRuntime as KServe's adapter of OpenVINO has it.
type openVINOAdapter struct {
	mmesh.UnimplementedModelRuntimeServer
	server *openVINO
}

func (s *openVINOAdapter) RuntimeStatus(context.Context, *mmesh.RuntimeStatusRequest) (*mmesh.RuntimeStatusResponse, error) {
	s.server.reload(func(file map[string]error) { clear(file) })
	return &mmesh.RuntimeStatusResponse{
		Status: mmesh.RuntimeStatusResponse_READY, CapacityInBytes: 1 << 20, MaxLoadingConcurrency: 1, DefaultModelSizeInBytes: 1 << 10, LimitModelConcurrency: true,
		MethodInfos: map[string]*mmesh.RuntimeStatusResponse_MethodInfo{
			"tensorflow.serving.PredictionService/Predict": {IdInjectionPath: []uint32{1, 1}},
			"inference.GRPCInferenceService/ModelInfer":    {IdInjectionPath: []uint32{1}},
			"inference.GRPCInferenceService/ModelMetadata": {IdInjectionPath: []uint32{1}},
		},
	}, nil
}

// LoadModel does not tell a broken model from other errors.
func (s *openVINOAdapter) LoadModel(_ context.Context, in *mmesh.LoadModelRequest) (*mmesh.LoadModelResponse, error) {
	if strings.HasPrefix(in.GetModelId(), "broken") {
		return nil, status.Error(codes.Unknown, "Failed to load model due to error: OVMS model load failed. code: 'FAILED_PRECONDITION' reason: 'FAILED_PRECONDITION'")
	}
	s.server.reload(func(file map[string]error) { file[in.GetModelId()] = nil })
	return &mmesh.LoadModelResponse{SizeInBytes: 4096, MaxConcurrency: 2}, nil
}

func (s *openVINOAdapter) UnloadModel(_ context.Context, in *mmesh.UnloadModelRequest) (*mmesh.UnloadModelResponse, error) {
	s.server.reload(func(file map[string]error) { delete(file, in.GetModelId()) })
	return &mmesh.UnloadModelResponse{}, nil
}

func TestOpenVINOLoadsModelsByItsAdapter(t *testing.T) {
	t.Parallel()
	server := &openVINO{models: map[string]error{"left": nil}}
	data := serve(t, func(s *grpc.Server) { oipv2.RegisterGRPCInferenceServiceServer(s, server) })
	adapter := serve(t, func(s *grpc.Server) { mmesh.RegisterModelRuntimeServer(s, &openVINOAdapter{server: server}) })
	checkRefused(t, modelserver.Settings{Address: data, Control: modelserver.ControlRepository}, runner.ErrStartFailed.Error(), "lacks a method of control: repository", "adapter")
	checkRefused(t, modelserver.Settings{Address: data}, runner.ErrStartFailed.Error(), "lacks a method of control: mmesh", "mmesh.ModelRuntime")

	r := startWith(t, modelserver.Settings{Address: adapter, DataAddress: data})
	if _, _, err := ask(t.Context(), t, r, "left", itemOf(1)); !errors.Is(err, runner.ErrModelGone) {
		t.Errorf("a model that was there before: %v", err)
	}
	if got := load(t, r, model.Model{ID: "a"}); got.MaxConcurrency != 2 || got.Size.Host != 4096 {
		t.Errorf("loaded is %+v", got)
	}
	checkAdds(t, r, "a")
	if _, err := r.Load(t.Context(), model.Model{ID: "broken"}); err == nil || errors.Is(err, runner.ErrInvalidModel) || !strings.Contains(err.Error(), "OVMS model load failed") {
		t.Errorf("a broken model: %v", err)
	}
	for want, err := range map[error]error{
		runner.ErrModelGone:  status.Error(codes.NotFound, "Model with requested version is retired"),
		runner.ErrNotStarted: status.Error(codes.Unavailable, "Model with requested version is not loaded yet"),
	} {
		server.reload(func(file map[string]error) { file["a"] = err })
		if _, _, got := ask(t.Context(), t, r, "a", itemOf(1)); !errors.Is(got, want) {
			t.Errorf("%v is %v", err, got)
		}
	}
	server.reload(func(file map[string]error) { file["a"] = status.Error(codes.Internal, "Internal inference error") })
	_, faults, err := ask(t.Context(), t, r, "a", itemOf(1))
	if err != nil || len(faults) != 1 || faults[0].Reason != fault.RunnerFailed || faults[0].Code != code.Code_INTERNAL {
		t.Errorf("a request that fails: %v, %v", faults, err)
	}
}

// message is a message of protobuf on the wire.
type message []byte

func (m message) text(number protowire.Number, value string) message {
	return m.with(number, message(value))
}

func (m message) with(number protowire.Number, value message) message {
	return protowire.AppendBytes(protowire.AppendTag(m, number, protowire.BytesType), value)
}

func (m message) number(number protowire.Number, value uint64) message {
	return protowire.AppendVarint(protowire.AppendTag(m, number, protowire.VarintType), value)
}

// all returns the values of a field of bytes.
func (m message) all(number protowire.Number) (out []message) {
	for len(m) > 0 {
		of, kind, n := protowire.ConsumeTag(m)
		size := protowire.ConsumeFieldValue(of, kind, m[n:])
		if of == number {
			value, _ := protowire.ConsumeBytes(m[n:])
			out = append(out, value)
		}
		m = m[n+size:]
	}
	return out
}

// last returns the value of a field as a decoder finds it.
func (m message) last(number protowire.Number) message {
	return append([]message{nil}, m.all(number)...)[len(m.all(number))]
}

// tensorFlow is TensorFlow Serving. Its public protocol has the numbers of fields.
type tensorFlow struct {
	mu sync.Mutex
	// models are those that are AVAILABLE.
	models map[string]bool
}

// The services of TensorFlow Serving.
const (
	tfPredict   = "tensorflow.serving.PredictionService/Predict"
	tfClassify  = "tensorflow.serving.PredictionService/Classify"
	tfReload    = "tensorflow.serving.ModelService/HandleReloadConfigRequest"
	tfInt64     = 9 // DataType
	tfModelSpec = 1 // of all requests: name 1, version 2, signature_name 3
)

func (s *tensorFlow) handle(_ any, stream grpc.ServerStream) error {
	in, out := &emptypb.Empty{}, &emptypb.Empty{}
	if err := stream.RecvMsg(in); err != nil {
		return err
	}
	method, _ := grpc.MethodFromServerStream(stream)
	handler := map[string]func(message) (message, error){"/" + tfPredict: s.predict, "/" + tfReload: s.reloadConfig}[method]
	if handler == nil {
		return status.Error(codes.Unimplemented, "")
	}
	answer, err := handler(message(in.ProtoReflect().GetUnknown()))
	if err != nil {
		return err
	}
	out.ProtoReflect().SetUnknown([]byte(answer))
	return stream.SendMsg(out)
}

// predict takes inputs 2, a map of names to tensors: dtype 1, tensor_shape 2, tensor_content 4. It
// returns outputs 1 and model_spec 2.
func (s *tensorFlow) predict(in message) (message, error) {
	spec := in.last(tfModelSpec)
	name := string(spec.last(1))
	s.mu.Lock()
	isAvailable := s.models[name]
	s.mu.Unlock()
	inputs := in.all(2)
	switch signature := string(spec.last(3)); {
	case name == "":
		return nil, status.Error(codes.InvalidArgument, "ModelSpec has no name specified.")
	case !isAvailable:
		return nil, status.Errorf(codes.NotFound, "Servable not found for request: Latest(%s)", name)
	case signature != "" && signature != "serving_default":
		return nil, status.Errorf(codes.FailedPrecondition, "Serving signature key %q not found.", signature)
	case len(inputs) != 1 || string(inputs[0].last(1)) != "x":
		return nil, status.Errorf(codes.InvalidArgument, "input size does not match signature: %d!=1 len({}) != len({x}). Sent extra: {}. Missing but required: {x}.", len(inputs))
	}
	x := inputs[0].last(2)
	content := slices.Clone(x.last(4))
	for at := range len(content) / 8 {
		row := content[8*at:]
		binary.LittleEndian.PutUint64(row, binary.LittleEndian.Uint64(row)+10)
	}
	y := message{}.number(1, tfInt64).with(2, x.last(2)).with(4, content)
	return message{}.with(1, message{}.text(1, "y").with(2, y)).with(2, message{}.text(1, name).text(3, "serving_default")), nil
}

// reloadConfig takes config 1, model_config_list 1, config 1: name 1, base_path 2. The list replaces
// all models. It waits until they are available; those that are stay also where another is not.
func (s *tensorFlow) reloadConfig(in message) (message, error) {
	now, broken := map[string]bool{}, ""
	for _, one := range in.last(1).last(1).all(1) {
		name, path := string(one.last(1)), string(one.last(2))
		switch {
		case now[name]:
			return nil, status.Errorf(codes.InvalidArgument, "Illegal to list model %s multiple times in config list", name)
		case !filepath.IsAbs(path):
			return nil, status.Errorf(codes.InvalidArgument, "Expected model %s to have an absolute path or URI; got base_path()=%s", name, path)
		case strings.HasPrefix(name, "broken"):
			broken = name
		default:
			now[name] = true
		}
	}
	s.mu.Lock()
	s.models = now
	s.mu.Unlock()
	if broken != "" {
		return nil, status.Errorf(codes.Unknown, "1 model(s) did not become available: {{name: %s version: 1} due to error: NOT_FOUND: Could not find SavedModel}, }", broken)
	}
	return message{}.with(1, nil), nil // status: OK
}

// tensorFlowAdapter is the mmesh.ModelRuntime that TensorFlow Serving needs in front of it. It has
// the whole list, and sends it with each change.
type tensorFlowAdapter struct {
	mmesh.UnimplementedModelRuntimeServer
	server *grpc.ClientConn

	mu    sync.Mutex
	paths map[string]string
}

// change sends a list; one that fails is followed by the list before.
func (s *tensorFlowAdapter) change(ctx context.Context, edit func(paths map[string]string)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := maps.Clone(s.paths)
	edit(s.paths)
	err := s.send(ctx)
	if err != nil {
		s.paths = before
		_ = s.send(ctx)
	}
	return err
}

func (s *tensorFlowAdapter) send(ctx context.Context) error {
	var list message
	for name, path := range s.paths {
		list = list.with(1, message{}.text(1, name).text(2, path).text(4, "tensorflow"))
	}
	in := &emptypb.Empty{}
	in.ProtoReflect().SetUnknown([]byte(message{}.with(1, message{}.with(1, list))))
	return s.server.Invoke(ctx, "/"+tfReload, in, &emptypb.Empty{})
}

func (s *tensorFlowAdapter) RuntimeStatus(ctx context.Context, _ *mmesh.RuntimeStatusRequest) (*mmesh.RuntimeStatusResponse, error) {
	name := &mmesh.RuntimeStatusResponse_MethodInfo{IdInjectionPath: []uint32{tfModelSpec, 1}}
	return &mmesh.RuntimeStatusResponse{
		Status: mmesh.RuntimeStatusResponse_READY, CapacityInBytes: 1 << 20, MaxLoadingConcurrency: 1, DefaultModelSizeInBytes: 1 << 10,
		MethodInfos: map[string]*mmesh.RuntimeStatusResponse_MethodInfo{tfPredict: name, tfClassify: name},
	}, s.change(ctx, func(paths map[string]string) { clear(paths) })
}

func (s *tensorFlowAdapter) LoadModel(ctx context.Context, in *mmesh.LoadModelRequest) (*mmesh.LoadModelResponse, error) {
	err := s.change(ctx, func(paths map[string]string) { paths[in.GetModelId()] = in.GetModelPath() })
	return &mmesh.LoadModelResponse{SizeInBytes: 4096}, err
}

func (s *tensorFlowAdapter) UnloadModel(ctx context.Context, in *mmesh.UnloadModelRequest) (*mmesh.UnloadModelResponse, error) {
	return &mmesh.UnloadModelResponse{}, s.change(ctx, func(paths map[string]string) { delete(paths, in.GetModelId()) })
}

func TestTensorFlowServingRunsCallsThatArePassedOn(t *testing.T) {
	t.Parallel()
	server := &tensorFlow{models: map[string]bool{"left": true}}
	data := serve(t, func(*grpc.Server) {}, grpc.UnknownServiceHandler(server.handle))
	conn, err := grpc.NewClient("passthrough:///"+data, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", strings.TrimPrefix(data, "unix:"))
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	adapter := serve(t, func(s *grpc.Server) {
		mmesh.RegisterModelRuntimeServer(s, &tensorFlowAdapter{server: conn, paths: map[string]string{}})
	})
	r := startWith(t, modelserver.Settings{Address: adapter, DataAddress: data})

	content := binary.LittleEndian.AppendUint64(nil, 1)
	x := message{}.number(1, tfInt64).with(2, message{}.with(2, message{}.number(1, 1))).with(4, content)
	request := func(signature string) message {
		spec := message{}.text(1, "the client's name").text(3, signature)
		return message{}.with(tfModelSpec, spec).with(2, message{}.text(1, "x").with(2, x))
	}
	if _, err := passTo(t, r, "left", tfPredict, request("")); !errors.Is(err, runner.ErrModelGone) {
		t.Errorf("a model that was there before: %v", err)
	}
	load(t, r, model.Model{ID: "a", Source: "/models/a"})
	load(t, r, model.Model{ID: "b", Source: "/models/b"})
	for id, kind := range map[model.ID]error{"relative": runner.ErrInvalidModel, "broken": nil} {
		_, err := r.Load(t.Context(), model.Model{ID: id, Source: map[bool]string{true: "/models/x", false: "x"}[kind == nil]})
		if err == nil || errors.Is(err, runner.ErrInvalidModel) != (kind != nil) {
			t.Errorf("the load of %s: %v", id, err)
		}
	}
	for _, id := range []string{"a", "b"} {
		out, err := passTo(t, r, id, tfPredict, request("serving_default"))
		if err != nil {
			t.Fatal(err)
		}
		answer := message(out.Parts[0].Blob.Data)
		y := answer.last(1).last(2).last(4)
		if out.Fault != nil || string(answer.last(2).last(1)) != id || len(y) != 8 || binary.LittleEndian.Uint64(y) != 11 {
			t.Errorf("model %s answers %x, %v", id, answer, out.Fault)
		}
	}
	for name, row := range map[string]struct {
		method string
		in     message
		want   code.Code
		text   string
	}{
		"another signature":           {tfPredict, request("other"), code.Code_FAILED_PRECONDITION, "Serving signature key"},
		"no input":                    {tfPredict, nil, code.Code_INVALID_ARGUMENT, "input size does not match"},
		"a method that it lacks":      {tfClassify, request(""), code.Code_UNIMPLEMENTED, ""},
		"a method that is not listed": {tfReload, nil, code.Code_UNIMPLEMENTED, "only of " + tfClassify},
	} {
		out, err := passTo(t, r, "a", row.method, row.in)
		if err != nil || out.Fault.GRPCCode() != row.want || !strings.Contains(out.Fault.Message, row.text) {
			t.Errorf("%s: %v, %v", name, out.Fault, err)
		}
	}
	// It does not speak the Open Inference Protocol, and says which methods it has.
	if _, faults, err := ask(t.Context(), t, r, "a", itemOf(1)); err != nil || len(faults) != 1 || faults[0].Reason != fault.NotSupported || !strings.Contains(faults[0].Message, tfPredict) {
		t.Errorf("a request of the Open Inference Protocol: %v, %v", faults, err)
	}
	if err := r.Unload(t.Context(), "b"); err != nil {
		t.Fatal(err)
	}
	if _, err := passTo(t, r, "b", tfPredict, request("")); !errors.Is(err, runner.ErrModelGone) {
		t.Errorf("a model that is unloaded: %v", err)
	}
	if _, err := passTo(t, r, "a", tfPredict, request("")); err != nil {
		t.Errorf("the other model: %v", err)
	}
}
