package port

import (
	"context"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/jobs"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// newJobs serves stagemesh.inference.v1.JobService.
func newJobs(to *jobs.Service, s transport.Settings) *transport.Service {
	out := transport.NewService(inferencev1.File_stagemesh_inference_v1_job_proto.Services().ByName("JobService"), s)
	transport.Unary(out, "SubmitJob", withoutCall(to.SubmitJob))
	transport.Unary(out, "SubmitJobs", withoutCall(func(ctx context.Context, in *inferencev1.SubmitJobsRequest) (*inferencev1.SubmitJobsResponse, error) {
		return submitJobs(ctx, to, in)
	}))
	transport.Unary(out, "GetJob", withoutCall(to.GetJob))
	transport.Unary(out, "CancelJob", withoutCall(to.CancelJob))
	transport.Unary(out, "ListJobs", withoutCall(to.ListJobs))
	transport.Unary(out, "ExplainJob", withoutCall(to.ExplainJob))
	transport.ServerStream(out, "WatchJob", func(ctx context.Context, _ *transport.Call, in *inferencev1.WatchJobRequest, send func(*inferencev1.WatchJobResponse) error) error {
		return to.WatchJob(ctx, in.GetId(), in.GetAfter(), send)
	})
	return out
}

func withoutCall[In, Out any](f func(context.Context, In) (Out, error)) func(context.Context, *transport.Call, In) (Out, error) {
	return func(ctx context.Context, _ *transport.Call, in In) (Out, error) { return f(ctx, in) }
}

// maxSubmits bounds the jobs of one call of SubmitJobs.
const maxSubmits = 1000

func submitJobs(ctx context.Context, to *jobs.Service, in *inferencev1.SubmitJobsRequest) (*inferencev1.SubmitJobsResponse, error) {
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
	return out, to.SubmitJobs(ctx, requests, func(job *inferencev1.Job, err error) error {
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

// AnswerJobMessage answers a message outside of RPC to a method of JobService: submit.<queue>, get
// or cancel. The answer has the form of the message, binary or JSON.
func AnswerJobMessage(ctx context.Context, to *jobs.Service, method string, data []byte) ([]byte, error) {
	method, queue, _ := strings.Cut(method, ".")
	switch {
	case method == "submit" && queue != "":
		return answerMessage(ctx, data, func(ctx context.Context, in *inferencev1.SubmitJobRequest) (*inferencev1.SubmitJobResponse, error) {
			if in.GetQueue() != "" && in.GetQueue() != queue {
				return nil, fault.InField(fault.InvalidRequest, "queue", "the subject names another one")
			}
			in.Queue = queue
			return to.SubmitJob(ctx, in)
		})
	case method == "get" && queue == "":
		return answerMessage(ctx, data, to.GetJob)
	case method == "cancel" && queue == "":
		return answerMessage(ctx, data, to.CancelJob)
	}
	return nil, fault.New(fault.InvalidRequest, "the subject ends with no method; there are submit.<queue>, get and cancel")
}

func answerMessage[I any, In interface {
	*I
	proto.Message
}, Out proto.Message](ctx context.Context, data []byte, serve func(context.Context, In) (Out, error)) ([]byte, error) {
	in := In(new(I))
	encode, err := transport.ReadMessage(data, in)
	if err != nil {
		return nil, err
	}
	out, err := serve(ctx, in)
	if err != nil {
		return nil, err
	}
	return encode(out)
}
