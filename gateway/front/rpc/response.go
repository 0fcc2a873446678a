package rpc

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

func response(r *call.Response) *inferencev1.InferResponse {
	return &inferencev1.InferResponse{
		RequestId: r.RequestID,
		Outputs:   payload.ToProto(r.Outputs),
		Metadata:  r.Metadata,
		Timeline:  timeline(r.Timeline),
	}
}

// timeline makes all messages of one kind together: every answer has as many as its
// route is long, and they are of no use but together.
func timeline(t call.Timeline) *inferencev1.Timeline {
	const durationsOfStep = 3 // those that fillStep takes
	n := len(t.Steps)
	times := make(durations, 0, 1+durationsOfStep*n)
	steps, out := make([]inferencev1.StepTiming, n), &inferencev1.Timeline{Total: times.next(t.Total), Steps: make([]*inferencev1.StepTiming, n)}
	for i, step := range t.Steps {
		out.Steps[i] = &steps[i]
		fillStep(out.Steps[i], step, &times)
	}
	return out
}

// fillStep is envelope.StepTiming.ToProto into a message that is there.
func fillStep(out *inferencev1.StepTiming, s call.StepTiming, times *durations) {
	out.Step, out.Stage, out.Host, out.Attempt = string(s.Step), string(s.Stage), string(s.Host), s.Attempt
	out.QueueWait, out.BatchWait, out.Run = times.next(s.QueueWait), times.next(s.BatchWait), times.next(s.Run)
	out.BatchSize, out.BatchRows, out.DispatchReason = s.BatchSize, s.BatchRows, s.Dispatch
}

// durations are messages that lie side by side. There is room for all that are taken.
type durations []durationpb.Duration

func (d *durations) next(of time.Duration) *durationpb.Duration {
	*d = (*d)[:len(*d)+1]
	out := &(*d)[len(*d)-1]
	out.Seconds, out.Nanos = int64(of/time.Second), int32(of%time.Second)
	return out
}
