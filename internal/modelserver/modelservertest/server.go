// Package modelservertest is a model server for tests: it speaks mmesh.ModelRuntime and the Open
// Inference Protocol on one Unix socket, and loads the models of runnertest.
package modelservertest

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/stagemesh/stagemesh/proto/gen/go/mmesh"
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
)

// Server is a model server. Set the fields before Start.
type Server struct {
	mmesh.UnimplementedModelRuntimeServer
	oipv2.UnimplementedGRPCInferenceServiceServer

	// StartsSlowly is how often it says that it is not ready.
	StartsSlowly int
	// HidesSizes has loads not return sizes.
	HidesSizes bool
	// TLS secures its socket; nil is plaintext.
	TLS *tls.Config
	// Options are further options of its gRPC server, such as an interceptor.
	Options []grpc.ServerOption
	// Unknown is the error of a batch whose model is not loaded; NOT_FOUND where it is nil.
	Unknown error

	t       *testing.T
	path    string
	runtime runnertest.ModelRuntime

	mu     sync.Mutex
	server *grpc.Server
	ended  sync.WaitGroup
	calls  []string
	models map[string]*loaded
}

type loaded struct {
	cancel  context.CancelFunc
	done    chan struct{}
	ready   bool
	add     int64
	source  string
	options map[string]string
}

// EditStatus is an option of a server: edit changes its answers to runtimeStatus.
func EditStatus(edit func(*mmesh.RuntimeStatusResponse)) grpc.ServerOption {
	return grpc.ChainUnaryInterceptor(func(ctx context.Context, in any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		out, err := next(ctx, in)
		if at, ok := out.(*mmesh.RuntimeStatusResponse); ok {
			edit(at)
		}
		return out, err
	})
}

// Start starts the server until the test ends, and returns its address.
func (s *Server) Start(t *testing.T) string {
	t.Helper()
	folder, err := os.MkdirTemp("", "ms") //nolint:usetesting // the name of a socket has at most 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	s.t, s.path = t, filepath.Join(folder, "s")
	s.Restart()
	t.Cleanup(func() {
		s.Stop()
		s.ended.Wait()
		if err := os.RemoveAll(folder); err != nil {
			t.Error(err)
		}
	})
	return "unix:" + s.path
}

// Stop ends the server, and all models with it.
func (s *Server) Stop() {
	s.mu.Lock()
	server := s.server
	s.mu.Unlock()
	server.Stop()
}

// Restart starts another server, without models.
func (s *Server) Restart() {
	listener, err := net.Listen("unix", s.path) //nolint:noctx // it does not wait
	if err != nil {
		s.t.Error(err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	options := append([]grpc.ServerOption{grpc.UnknownServiceHandler(s.echo)}, s.Options...)
	if s.TLS != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(s.TLS)))
	}
	s.server, s.models = grpc.NewServer(options...), map[string]*loaded{}
	mmesh.RegisterModelRuntimeServer(s.server, s)
	oipv2.RegisterGRPCInferenceServiceServer(s.server, s)
	server := s.server
	s.ended.Go(func() {
		if err := server.Serve(listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			s.t.Error(err)
		}
	})
}

// Calls returns the calls of mmesh.ModelRuntime so far: method and model.
func (s *Server) Calls() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.calls...)
}

// note notes a call. It holds the lock when it returns.
func (s *Server) note(call string) {
	s.mu.Lock()
	s.calls = append(s.calls, call)
}

// RuntimeStatus implements mmesh.ModelRuntimeServer.
func (s *Server) RuntimeStatus(context.Context, *mmesh.RuntimeStatusRequest) (*mmesh.RuntimeStatusResponse, error) {
	s.note("status")
	defer s.mu.Unlock()
	if s.StartsSlowly--; s.StartsSlowly >= 0 {
		return &mmesh.RuntimeStatusResponse{}, nil
	}
	s.models = map[string]*loaded{}
	limits := runnertest.ModelLimits()
	return &mmesh.RuntimeStatusResponse{
		Status: mmesh.RuntimeStatusResponse_READY, CapacityInBytes: uint64(limits.Capacity.Host),
		DefaultModelSizeInBytes: uint64(limits.DefaultSize.Host), MaxLoadingConcurrency: uint32(limits.LoadSlots),
		ModelLoadingTimeoutMs: uint32(limits.LoadTimeout.Milliseconds()), LimitModelConcurrency: true,
	}, nil
}

func optionsOf(key string) (out map[string]string) {
	_ = json.Unmarshal([]byte(key), &out)
	return out
}

// LoadModel implements mmesh.ModelRuntimeServer.
func (s *Server) LoadModel(ctx context.Context, in *mmesh.LoadModelRequest) (out *mmesh.LoadModelResponse, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	m := &loaded{cancel: cancel, done: make(chan struct{}), source: in.GetModelPath(), options: optionsOf(in.GetModelKey())}
	defer close(m.done)
	s.note("load " + in.GetModelId())
	models := s.models
	models[in.GetModelId()] = m
	s.mu.Unlock()
	defer func() {
		if recover() != nil {
			s.Stop()
			s.Restart()
			err = status.Error(codes.Unavailable, "crash")
		}
	}()
	add, err := s.runtime.Load(ctx, m.source, m.options)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case errors.Is(err, runnertest.ErrInvalidSource):
		err = status.Error(codes.InvalidArgument, err.Error())
	case errors.Is(err, runnertest.ErrTooLarge):
		err = status.Error(codes.ResourceExhausted, err.Error())
	}
	if err != nil {
		delete(models, in.GetModelId())
		return nil, err
	}
	m.ready, m.add = true, add
	out = &mmesh.LoadModelResponse{MaxConcurrency: 3}
	if !s.HidesSizes {
		out.SizeInBytes = uint64(s.runtime.Size(m.source, m.options))
	}
	return out, nil
}

// UnloadModel implements mmesh.ModelRuntimeServer.
func (s *Server) UnloadModel(_ context.Context, in *mmesh.UnloadModelRequest) (*mmesh.UnloadModelResponse, error) {
	s.note("unload " + in.GetModelId())
	m := s.models[in.GetModelId()]
	s.mu.Unlock()
	if m != nil {
		m.cancel()
		<-m.done
		s.Forget(in.GetModelId())
	}
	return &mmesh.UnloadModelResponse{}, nil
}

// Forget loses a model.
func (s *Server) Forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.models, id)
}

// PredictModelSize implements mmesh.ModelRuntimeServer.
func (s *Server) PredictModelSize(_ context.Context, in *mmesh.PredictModelSizeRequest) (*mmesh.PredictModelSizeResponse, error) {
	return &mmesh.PredictModelSizeResponse{SizeInBytes: uint64(s.runtime.Size(in.GetModelPath(), optionsOf(in.GetModelKey())))}, nil
}

// ModelSize implements mmesh.ModelRuntimeServer.
func (s *Server) ModelSize(_ context.Context, in *mmesh.ModelSizeRequest) (*mmesh.ModelSizeResponse, error) {
	s.note("size " + in.GetModelId())
	defer s.mu.Unlock()
	m := s.models[in.GetModelId()]
	if m == nil || !m.ready {
		return nil, status.Error(codes.NotFound, "no such model")
	}
	return &mmesh.ModelSizeResponse{SizeInBytes: uint64(s.runtime.Size(m.source, m.options))}, nil
}

// ModelInfer implements oipv2.GRPCInferenceServiceServer. It returns typed contents where the
// parameter "typed" is set.
func (s *Server) ModelInfer(ctx context.Context, in *oipv2.ModelInferRequest) (*oipv2.ModelInferResponse, error) {
	s.mu.Lock()
	m := s.models[in.GetModelName()]
	isReady := m != nil && m.ready
	s.mu.Unlock()
	switch {
	case !isReady && s.Unknown != nil:
		return nil, s.Unknown
	case !isReady:
		return nil, status.Errorf(codes.NotFound, "model %s", in.GetModelName())
	case len(in.GetInputs()) != 1 || len(in.GetRawInputContents()) != 1:
		return nil, status.Error(codes.InvalidArgument, "one input")
	}
	x := in.GetInputs()[0]
	y, err := runnertest.AnswerModel(ctx, m.add, tensor.Tensor{Datatype: tensor.Datatype(x.GetDatatype()), Shape: x.GetShape(), Raw: in.GetRawInputContents()[0]})
	if err != nil {
		return nil, err
	}
	out := &oipv2.ModelInferResponse{Outputs: []*oipv2.ModelInferResponse_InferOutputTensor{{Name: "y", Datatype: string(y.Datatype), Shape: y.Shape}}}
	if !in.GetParameters()["typed"].GetBoolParam() {
		out.RawOutputContents = [][]byte{y.Raw}
		return out, nil
	}
	rows, err := y.Int64Values()
	out.Outputs[0].Contents = &oipv2.InferTensorContents{Int64Contents: rows}
	return out, err
}

// RepositoryModelLoad implements oipv2.GRPCInferenceServiceServer: its models add 10.
func (s *Server) RepositoryModelLoad(ctx context.Context, in *oipv2.RepositoryModelLoadRequest) (*oipv2.RepositoryModelLoadResponse, error) {
	if in.GetModelName() == "missing" {
		return nil, status.Error(codes.InvalidArgument, "Model missing not found")
	}
	_, err := s.LoadModel(ctx, &mmesh.LoadModelRequest{ModelId: in.GetModelName(), ModelKey: `{"add": "10"}`})
	return &oipv2.RepositoryModelLoadResponse{}, err
}

// RepositoryModelUnload implements oipv2.GRPCInferenceServiceServer.
func (s *Server) RepositoryModelUnload(ctx context.Context, in *oipv2.RepositoryModelUnloadRequest) (*oipv2.RepositoryModelUnloadResponse, error) {
	s.mu.Lock()
	_, ok := s.models[in.GetModelName()]
	s.mu.Unlock()
	if !ok {
		return nil, status.Errorf(codes.NotFound, "Model %s not found", in.GetModelName())
	}
	_, err := s.UnloadModel(ctx, &mmesh.UnloadModelRequest{ModelId: in.GetModelName()})
	return &oipv2.RepositoryModelUnloadResponse{}, err
}

// RepositoryIndex implements oipv2.GRPCInferenceServiceServer.
func (s *Server) RepositoryIndex(context.Context, *oipv2.RepositoryIndexRequest) (*oipv2.RepositoryIndexResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &oipv2.RepositoryIndexResponse{}
	for name := range s.models {
		out.Models = append(out.Models, &oipv2.RepositoryIndexResponse_ModelIndex{Name: name, State: "READY"})
	}
	return out, nil
}

// ServerReady implements oipv2.GRPCInferenceServiceServer.
func (*Server) ServerReady(context.Context, *oipv2.ServerReadyRequest) (*oipv2.ServerReadyResponse, error) {
	return &oipv2.ServerReadyResponse{Ready: true}, nil
}

// echo answers any other method with its message, the header x-model with the model that the
// call names, and the caller's header x-user as a trailer. The header x-fail is its error.
func (s *Server) echo(_ any, stream grpc.ServerStream) error {
	in := &emptypb.Empty{}
	if err := stream.RecvMsg(in); err != nil {
		return err
	}
	headers, _ := metadata.FromIncomingContext(stream.Context())
	if fail := headers.Get("x-fail"); len(fail) > 0 {
		return status.Error(codes.Aborted, fail[0])
	}
	name := strings.Join(headers.Get("mm-model-id"), ",")
	s.mu.Lock()
	_, ok := s.models[name]
	s.mu.Unlock()
	if !ok {
		return status.Errorf(codes.NotFound, "model %q", name)
	}
	stream.SetTrailer(metadata.MD{"x-user": headers.Get("x-user")})
	if err := stream.SetHeader(metadata.Pairs("x-model", name)); err != nil {
		return err
	}
	return stream.SendMsg(in)
}
