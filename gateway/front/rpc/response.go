package rpc

import (
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

func timeline(t call.Timeline) *inferencev1.Timeline {
	out := &inferencev1.Timeline{Total: durationpb.New(t.Total)}
	for _, step := range t.Steps {
		out.Steps = append(out.Steps, step.ToProto())
	}
	return out
}
