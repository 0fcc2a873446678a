package port

import (
	"context"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// jobs implements stagemesh.inference.v1.JobService.
type jobs struct{ transport.Jobs }

func newJobs(caller transport.Jobs, s transport.Settings) *transport.Service {
	descriptor := inferencev1.File_stagemesh_inference_v1_job_proto.Services().ByName("JobService")
	out, svc := transport.NewService(descriptor, s), jobs{caller}
	transport.Unary(out, "SubmitJob", svc.submit)
	transport.Unary(out, "SubmitJobs", svc.submitMany)
	transport.Unary(out, "GetJob", svc.get)
	transport.Unary(out, "CancelJob", svc.cancel)
	transport.Unary(out, "ListJobs", svc.list)
	transport.Unary(out, "ExplainJob", svc.explain)
	transport.ServerStream(out, "WatchJob", svc.watch)
	return out
}

func (s jobs) submit(ctx context.Context, _ *transport.Call, in *inferencev1.SubmitJobRequest) (*inferencev1.SubmitJobResponse, error) {
	job, err := s.SubmitJob(ctx, in)
	return &inferencev1.SubmitJobResponse{Job: job}, err
}

// maxSubmits bounds the jobs of one call of SubmitJobs.
const maxSubmits = 1000

func (s jobs) submitMany(ctx context.Context, _ *transport.Call, in *inferencev1.SubmitJobsRequest) (*inferencev1.SubmitJobsResponse, error) {
	if n := len(in.GetJobs()); n == 0 || n > maxSubmits {
		return nil, fault.InField(fault.InvalidRequest, "jobs", "%d, from 1 to %d are possible", n, maxSubmits)
	}
	requests := func(yield func(*inferencev1.SubmitJobRequest, error) bool) {
		for _, job := range in.GetJobs() {
			if !yield(job, nil) {
				return
			}
		}
	}
	out := new(inferencev1.SubmitJobsResponse)
	return out, s.SubmitJobs(ctx, requests, func(job *inferencev1.Job, err error) error {
		answer := &inferencev1.SubmitJobAnswer{Answer: &inferencev1.SubmitJobAnswer_Job{Job: job}}
		if err != nil {
			f := fault.From(err)
			failure := &inferencev1.SubmitJobFailure{Reason: string(f.Reason), Message: f.Message}
			if f.RetryAfter > 0 {
				failure.RetryAfter = durationpb.New(f.RetryAfter)
			}
			answer.Answer = &inferencev1.SubmitJobAnswer_Failure{Failure: failure}
		}
		out.Answers = append(out.Answers, answer)
		return nil
	})
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

// AnswerJobMessage answers a message outside of RPC to a method of JobService: submit.<queue>, get
// or cancel. The answer has the form of the message, binary or JSON.
func AnswerJobMessage(ctx context.Context, to transport.Jobs, method string, data []byte) ([]byte, error) {
	method, queue, _ := strings.Cut(method, ".")
	switch svc := (jobs{to}); {
	case method == "submit" && queue != "":
		return answerMessage(data, func(in *inferencev1.SubmitJobRequest) (*inferencev1.SubmitJobResponse, error) {
			if in.GetQueue() != "" && in.GetQueue() != queue {
				return nil, fault.InField(fault.InvalidRequest, "queue", "the subject names another one")
			}
			in.Queue = queue
			return svc.submit(ctx, nil, in)
		})
	case method == "get" && queue == "":
		return answerMessage(data, func(in *inferencev1.GetJobRequest) (*inferencev1.GetJobResponse, error) { return svc.get(ctx, nil, in) })
	case method == "cancel" && queue == "":
		return answerMessage(data, func(in *inferencev1.CancelJobRequest) (*inferencev1.CancelJobResponse, error) {
			return svc.cancel(ctx, nil, in)
		})
	}
	return nil, fault.New(fault.InvalidRequest, "the subject ends with no method; there are submit.<queue>, get and cancel")
}

func answerMessage[I any, In interface {
	*I
	proto.Message
}, Out proto.Message](data []byte, serve func(In) (Out, error)) ([]byte, error) {
	in := In(new(I))
	encode, err := transport.ReadMessage(data, in)
	if err != nil {
		return nil, err
	}
	out, err := serve(in)
	if err != nil {
		return nil, err
	}
	return encode(out)
}

func (s jobs) explain(ctx context.Context, _ *transport.Call, in *inferencev1.ExplainJobRequest) (*inferencev1.ExplainJobResponse, error) {
	return s.ExplainJob(ctx, in)
}

func (s jobs) watch(ctx context.Context, _ *transport.Call, in *inferencev1.WatchJobRequest, send func(*inferencev1.WatchJobResponse) error) error {
	return s.WatchJob(ctx, in.GetId(), in.GetAfter(), send)
}
