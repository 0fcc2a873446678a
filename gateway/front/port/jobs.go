package port

import (
	"context"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
)

// jobs implements stagemesh.inference.v1.JobService.
type jobs struct{ transport.Jobs }

func newJobs(caller transport.Jobs, s transport.Settings) *transport.Service {
	descriptor := inferencev1.File_stagemesh_inference_v1_job_proto.Services().ByName("JobService")
	out, svc := transport.NewService(descriptor, s), jobs{caller}
	transport.Unary(out, "SubmitJob", svc.submit)
	transport.Unary(out, "GetJob", svc.get)
	transport.Unary(out, "CancelJob", svc.cancel)
	transport.Unary(out, "ListJobs", svc.list)
	return out
}

func (s jobs) submit(ctx context.Context, _ *transport.Call, in *inferencev1.SubmitJobRequest) (*inferencev1.SubmitJobResponse, error) {
	job, err := s.SubmitJob(ctx, in)
	return &inferencev1.SubmitJobResponse{Job: job}, err
}

func (s jobs) get(ctx context.Context, _ *transport.Call, in *inferencev1.GetJobRequest) (*inferencev1.GetJobResponse, error) {
	wait, err := call.DurationFromProto("wait", in.GetWait())
	if err != nil {
		return nil, err
	}
	return s.GetJob(ctx, in.GetId(), wait)
}

func (s jobs) cancel(ctx context.Context, _ *transport.Call, in *inferencev1.CancelJobRequest) (*inferencev1.CancelJobResponse, error) {
	job, err := s.CancelJob(ctx, in.GetId())
	return &inferencev1.CancelJobResponse{Job: job}, err
}

func (s jobs) list(ctx context.Context, _ *transport.Call, in *inferencev1.ListJobsRequest) (*inferencev1.ListJobsResponse, error) {
	return s.ListJobs(ctx, in)
}
