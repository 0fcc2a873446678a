package oip

import (
	"context"
	"net/http"

	"connectrpc.com/connect"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/body"
	"github.com/stagemesh/stagemesh/gateway/front/header"
	"github.com/stagemesh/stagemesh/gateway/front/procedure"
)

// ServiceName is the protocol's service.
const ServiceName = "inference.GRPCInferenceService"

// Caller does the work: gateway/call's service. Its errors have a *fault.Fault in their
// chain. Stream calls emit in order, and not after it returned; an error of emit ends the
// call.
type Caller interface {
	Infer(ctx context.Context, r *call.Request) (*call.Response, error)
	Stream(ctx context.Context, r *call.Request, emit func(call.Chunk) error) (*call.Response, error)
}

// Models are the pipelines. Errors have a *fault.Fault in their chain.
type Models interface {
	// Ready returns nil when the gateway, named "", or a model can be used.
	Ready(ctx context.Context, name string) error
	// Model returns what is known of a model, or UNKNOWN_PIPELINE.
	Model(name string) (Model, error)
	// Version is that of the server.
	Version() string
}

// Model is what a pipeline takes and gives; what is not known is empty.
type Model struct {
	Inputs, Outputs []*stagev1.PartSpec
}

// service answers the procedures.
type service struct {
	caller Caller
	models Models
	// maxPayload bounds what is made of a request's inputs, in bytes.
	maxPayload int
}

// New returns the path under which the service is to be mounted, and its handler.
func New(caller Caller, models Models, s procedure.Settings) (string, http.Handler) {
	descriptor := oipv2.File_oip_v2_inference_proto.Services().ByName("GRPCInferenceService")
	out, svc := procedure.NewService(descriptor, s), &service{caller: caller, models: models, maxPayload: s.MaxPayload}
	procedure.Unary(out, "ServerLive", svc.serverLive)
	procedure.Unary(out, "ServerReady", svc.serverReady)
	procedure.Unary(out, "ModelReady", svc.modelReady)
	procedure.Unary(out, "ServerMetadata", svc.serverMetadata)
	procedure.Unary(out, "ModelMetadata", svc.modelMetadata)
	procedure.Unary(out, "ModelInfer", svc.modelInfer)
	procedure.Each(out, "ModelStreamInfer", requestsAtOnce, svc.modelStreamInfer)
	return out.Path(), out
}

func (s *service) serverLive(context.Context, procedure.Request[*oipv2.ServerLiveRequest]) (*connect.Response[oipv2.ServerLiveResponse], error) {
	return connect.NewResponse(&oipv2.ServerLiveResponse{Live: true}), nil
}

func (s *service) serverReady(ctx context.Context, _ procedure.Request[*oipv2.ServerReadyRequest]) (*connect.Response[oipv2.ServerReadyResponse], error) {
	return connect.NewResponse(&oipv2.ServerReadyResponse{Ready: s.models.Ready(ctx, "") == nil}), nil
}

// modelReady says whether a model can be used. A model that there is not is an error:
// clients tell it from one that is not ready.
func (s *service) modelReady(ctx context.Context, in procedure.Request[*oipv2.ModelReadyRequest]) (*connect.Response[oipv2.ModelReadyResponse], error) {
	if err := known(in.Message.GetName(), in.Message.GetVersion()); err != nil {
		return nil, err
	}
	err := s.models.Ready(ctx, in.Message.GetName())
	if unknown(err) {
		return nil, err
	}
	return connect.NewResponse(&oipv2.ModelReadyResponse{Ready: err == nil}), nil
}

func (s *service) modelInfer(ctx context.Context, in procedure.Request[*oipv2.ModelInferRequest]) (*connect.Response[oipv2.ModelInferResponse], error) {
	room := body.NewRoom(ctx, s.maxPayload)
	defer room.Close()
	asked, err := s.asked(ctx, in, room)
	if err != nil {
		return nil, err
	}
	answer, err := s.caller.Infer(ctx, asked)
	if err != nil {
		return nil, err
	}
	out := connect.NewResponse(response(in.Message, answer.Outputs))
	out.Header().Set(header.RequestID, answer.RequestID)
	out.Trailer().Set(header.ServerTiming, header.Timing(answer.Timeline))
	return out, nil
}

// asked converts a request for a model that there is.
func (s *service) asked(ctx context.Context, in procedure.Request[*oipv2.ModelInferRequest], room *body.Room) (*call.Request, error) {
	m := in.Message
	if err := known(m.GetModelName(), m.GetModelVersion()); err != nil {
		return nil, err
	}
	model, err := s.models.Model(m.GetModelName())
	if err != nil {
		return nil, err
	}
	out, err := request(ctx, m, model, room)
	if err != nil {
		return nil, err
	}
	out.Trace = header.Trace(in.Header)
	return out, nil
}
