// Package stageapi serves stagemesh.stage.v1.StageService over gRPC, with
// health and reflection: a description of the host's stage, and a direct call past its
// queue. It translates only; a Stage does the work.
package stageapi

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Stage is the stage that the service serves.
type Stage interface {
	Describe() Description
	Infer(ctx context.Context, r Request) Response
}

// Description is a host's description of its stage.
type Description struct {
	Mesh    pipeline.MeshName
	Stage   pipeline.StageName
	Host    pipeline.HostID
	Version string
	Spec    runner.Spec
	Limits  Limits
}

// Limits bound the items that one host takes at a time.
type Limits struct {
	// MaxSize is in rows, MaxBytes in bytes of payload, per batch.
	MaxSize, MaxBytes int
	MaxWait           time.Duration
	// MaxInFlight counts unsettled items, Concurrency batches at once.
	MaxInFlight, Concurrency int
}

// Request is one direct call.
type Request struct {
	Inputs     []payload.Part
	Model      payload.ModelRef
	Parameters payload.Parameters
	Metadata   map[string]string
}

// Response is its answer: Fault, or else Parts.
type Response struct {
	Parts    []payload.Part
	Metadata map[string]string
	Fault    *fault.Fault
	Timing   envelope.StepTiming
}

// Server is the gRPC server of one stage.
type Server struct {
	*grpc.Server
	health *health.Server
}

// NewServer returns a server that takes messages of at most maxMessage bytes.
// Its health is NOT_SERVING until SetServing(true).
func NewServer(stage Stage, maxMessage int, options ...grpc.ServerOption) *Server {
	s := &Server{
		Server: grpc.NewServer(append(options, grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage))...),
		health: health.NewServer(),
	}
	stagev1.RegisterStageServiceServer(s, service{stage: stage})
	healthv1.RegisterHealthServer(s, s.health)
	reflection.Register(s)
	s.SetServing(false)
	return s
}

// SetServing sets the status of the health service.
func (s *Server) SetServing(serving bool) {
	answer := healthv1.HealthCheckResponse_NOT_SERVING
	if serving {
		answer = healthv1.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus("", answer)
	s.health.SetServingStatus(stagev1.StageService_ServiceDesc.ServiceName, answer)
}

type service struct {
	stagev1.UnimplementedStageServiceServer
	stage Stage
}

// Describe implements stagev1.StageServiceServer.
func (s service) Describe(context.Context, *stagev1.DescribeRequest) (*stagev1.DescribeResponse, error) {
	return s.stage.Describe().toProto(), nil
}

// Infer implements stagev1.StageServiceServer.
func (s service) Infer(ctx context.Context, in *stagev1.InferRequest) (*stagev1.InferResponse, error) {
	r, err := requestFromProto(in)
	if err != nil {
		return nil, statusOf(fault.From(err))
	}
	if in.GetTimeout() != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, in.GetTimeout().AsDuration())
		defer cancel()
	}
	out := s.stage.Infer(ctx, r)
	if out.Fault != nil {
		return nil, statusOf(out.Fault)
	}
	return &stagev1.InferResponse{
		Outputs:  payload.ToProto(out.Parts),
		Metadata: out.Metadata,
		Timing:   out.Timing.ToProto(),
	}, nil
}

func requestFromProto(in *stagev1.InferRequest) (Request, error) {
	inputs, err := payload.FromProto("inputs", in.GetInputs())
	if err != nil {
		return Request{}, err
	}
	parameters, err := payload.ParametersFromProto(in.GetParameters())
	if err != nil {
		return Request{}, fault.Newf(fault.InvalidRequest, "parameters: %w", err)
	}
	return Request{
		Inputs:     inputs,
		Model:      payload.ModelFromProto(in.GetModel()),
		Parameters: parameters,
		Metadata:   in.GetMetadata(),
	}, nil
}

// statusOf returns the fault as an RPC's status with its details.
func statusOf(f *fault.Fault) error {
	st := status.New(codes.Code(f.GRPCCode()), f.Message)
	var details []protoadapt.MessageV1
	for _, d := range f.Details() {
		details = append(details, protoadapt.MessageV1Of(d))
	}
	with, err := st.WithDetails(details...)
	if err != nil {
		return st.Err()
	}
	return with.Err()
}
