package modelserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stagemesh/stagemesh/proto/gen/go/mmesh"
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/internal/passthrough"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// control is how a server loads models. Errors come from gRPC.
type control interface {
	// status returns the status of a server that is ready and has no models. An error that wraps
	// runner.ErrStartFailed means that the server does not become ready by itself.
	status(ctx context.Context) (serverStatus, error)
	load(ctx context.Context, m model.Model) (runner.LoadedModel, error)
	// unload is called for models that are absent, too.
	unload(ctx context.Context, id model.ID) error
	// predict returns the size of a model before its load; zero where the server does not know.
	predict(ctx context.Context, m model.Model) (model.Size, error)
}

// serverStatus is what a server that is ready tells about itself.
type serverStatus struct {
	runner.ModelLimits
	// limitsCalls is true if models take only so many calls at a time as their loads return.
	limitsCalls bool
	// idPaths has, by method, the text of the passthrough.Path to the ID of the model; it may be
	// empty. Methods that are missing are refused if onlyListed is true.
	idPaths    map[string]string
	onlyListed bool
}

// idPath returns the text of the path to the ID of the model in messages of a method: the
// server's, or else the gateway's.
func (s serverStatus) idPath(method, gateways string) (string, error) {
	path, isListed := s.idPaths[method]
	if s.onlyListed && !isListed {
		return "", fault.Newf(fault.NotSupported, "the model server takes no calls of %s, only of %.500s (methodInfos of its runtimeStatus)",
			method, strings.Join(slices.Sorted(maps.Keys(s.idPaths)), ", "))
	}
	return cmp.Or(path, gateways), nil
}

// spi is the control by mmesh.ModelRuntime.
type spi struct{ mmesh.ModelRuntimeClient }

func (s spi) status(ctx context.Context) (out serverStatus, err error) {
	at, err := s.RuntimeStatus(ctx, &mmesh.RuntimeStatusRequest{}, grpc.WaitForReady(true))
	switch {
	case err != nil:
		return out, err
	case at.GetStatus() == mmesh.RuntimeStatusResponse_STARTING:
		return out, errors.New("its status is STARTING")
	case at.GetStatus() != mmesh.RuntimeStatusResponse_READY:
		return out, fmt.Errorf("%w: its status is %s; see the server's log", runner.ErrStartFailed, at.GetStatus())
	}
	out.idPaths = map[string]string{}
	for method, info := range at.GetMethodInfos() {
		text := strings.Trim(strings.ReplaceAll(fmt.Sprint(info.GetIdInjectionPath()), " ", "."), "[]")
		if _, err := passthrough.ParsePath(text); err != nil {
			return out, fmt.Errorf("%w: idInjectionPath of %.80s: %w", runner.ErrStartFailed, method, err)
		}
		out.idPaths[method] = text
	}
	out.onlyListed = len(out.idPaths) > 0 && !at.GetAllowAnyMethod()
	out.limitsCalls = at.GetLimitModelConcurrency()
	out.ModelLimits = runner.ModelLimits{
		Capacity: bytesOf(at.GetCapacityInBytes()), DefaultSize: bytesOf(at.GetDefaultModelSizeInBytes()),
		LoadSlots: max(1, int(at.GetMaxLoadingConcurrency())), LoadTimeout: time.Duration(at.GetModelLoadingTimeoutMs()) * time.Millisecond,
	}
	return out, nil
}

func bytesOf(n uint64) model.Size { return model.Size{Host: int64(min(n, math.MaxInt64))} }

func (s spi) load(ctx context.Context, m model.Model) (out runner.LoadedModel, err error) {
	loaded, err := s.LoadModel(ctx, &mmesh.LoadModelRequest{ModelId: string(m.ID), ModelType: m.Type, ModelPath: m.Source, ModelKey: string(m.Options)})
	if err != nil {
		return out, err
	}
	out = runner.LoadedModel{Size: bytesOf(loaded.GetSizeInBytes()), MaxConcurrency: int(loaded.GetMaxConcurrency())}
	if out.Size == (model.Size{}) {
		ctx, cancel := context.WithTimeout(ctx, answerTimeout)
		defer cancel()
		size, err := s.ModelSize(ctx, &mmesh.ModelSizeRequest{ModelId: string(m.ID)})
		if err != nil && status.Code(err) != codes.Unimplemented {
			return out, status.Errorf(codes.Internal, "its size: %v", err) // it is loaded, whatever the code
		}
		out.Size = bytesOf(size.GetSizeInBytes())
	}
	return out, nil
}

func (s spi) unload(ctx context.Context, id model.ID) error {
	_, err := s.UnloadModel(ctx, &mmesh.UnloadModelRequest{ModelId: string(id)})
	return err
}

func (s spi) predict(ctx context.Context, m model.Model) (model.Size, error) {
	size, err := s.PredictModelSize(ctx, &mmesh.PredictModelSizeRequest{
		ModelId: string(m.ID), ModelType: m.Type, ModelPath: m.Source, ModelKey: string(m.Options),
	})
	if status.Code(err) == codes.Unimplemented {
		err = nil
	}
	return bytesOf(size.GetSizeInBytes()), err
}

// repository is the control by the repository extension of the Open Inference Protocol. The ID of a
// model is its name in the server's repository. Sizes are not known.
type repository struct {
	oipv2.GRPCInferenceServiceClient
}

// repositoryLoads is how many models such a server loads at a time.
const repositoryLoads = 2

func (s repository) status(ctx context.Context) (out serverStatus, err error) {
	ready, err := s.ServerReady(ctx, &oipv2.ServerReadyRequest{}, grpc.WaitForReady(true))
	if err == nil && !ready.GetReady() && !s.hasFailedLoad(ctx) {
		err = errors.New("its answer to ServerReady is false")
	}
	if err != nil {
		return out, err
	}
	index, err := s.RepositoryIndex(ctx, &oipv2.RepositoryIndexRequest{Ready: true})
	for _, m := range index.GetModels() {
		if err == nil {
			err = s.unload(ctx, model.ID(m.GetName()))
		}
	}
	out.LoadSlots = repositoryLoads
	return out, err
}

// hasFailedLoad reports whether a load has failed, after which Triton is not ready any more, by
// default, but loads other models.
func (s repository) hasFailedLoad(ctx context.Context) bool {
	index, _ := s.RepositoryIndex(ctx, &oipv2.RepositoryIndexRequest{})
	return slices.ContainsFunc(index.GetModels(), func(m *oipv2.RepositoryIndexResponse_ModelIndex) bool {
		return m.GetState() == "UNAVAILABLE" && m.GetReason() != "" && m.GetReason() != "unloaded"
	})
}

func (s repository) load(ctx context.Context, m model.Model) (out runner.LoadedModel, err error) {
	_, err = s.RepositoryModelLoad(ctx, &oipv2.RepositoryModelLoadRequest{ModelName: string(m.ID)})
	if status.Code(err) == codes.InvalidArgument && !isUnknownModel(err) {
		err = status.Error(codes.Internal, status.Convert(err).Message()) // Triton's code of any load that fails
	}
	return out, err
}

func (s repository) unload(ctx context.Context, id model.ID) error {
	_, err := s.RepositoryModelUnload(ctx, &oipv2.RepositoryModelUnloadRequest{ModelName: string(id)})
	if isUnknownModel(err) {
		return nil
	}
	return err
}

func (repository) predict(context.Context, model.Model) (out model.Size, err error) { return out, nil }
