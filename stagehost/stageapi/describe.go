package stageapi

import (
	"google.golang.org/protobuf/types/known/durationpb"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

func (d Description) toProto() *stagev1.DescribeResponse {
	return &stagev1.DescribeResponse{
		Mesh:    string(d.Mesh),
		Stage:   string(d.Stage),
		Host:    string(d.Host),
		Version: d.Version,
		Spec:    specToProto(d.Spec),
		Limits: &stagev1.Limits{
			MaxSize:     uint32(d.Limits.MaxSize),
			MaxBytes:    uint64(d.Limits.MaxBytes),
			MaxWait:     durationpb.New(d.Limits.MaxWait),
			MaxInFlight: uint32(d.Limits.MaxInFlight),
			Concurrency: uint32(d.Limits.Concurrency),
		},
	}
}

func specToProto(s runner.Spec) *stagev1.Spec {
	out := &stagev1.Spec{
		Inputs:    partSpecsToProto(s.Inputs),
		Outputs:   partSpecsToProto(s.Outputs),
		BatchAxis: stagev1.BatchAxis_BATCH_AXIS_NONE,
	}
	if s.BatchAxis == runner.BatchRows {
		out.BatchAxis = stagev1.BatchAxis_BATCH_AXIS_ROWS
	}
	for _, example := range s.Examples {
		out.Examples = append(out.Examples, &stagev1.Example{Name: example.Name, Inputs: payload.ToProto(example.Inputs)})
	}
	return out
}

func partSpecsToProto(specs []runner.PartSpec) []*stagev1.PartSpec {
	out := make([]*stagev1.PartSpec, len(specs))
	for i, s := range specs {
		out[i] = &stagev1.PartSpec{Name: s.Name, Optional: s.Optional, Description: s.Description}
		if s.IsTensor() {
			out[i].Body = &stagev1.PartSpec_Tensor{Tensor: &stagev1.TensorSpec{Datatype: string(s.Datatype), Shape: s.Shape}}
			continue
		}
		out[i].Body = &stagev1.PartSpec_Blob{Blob: &stagev1.BlobSpec{ContentTypes: s.ContentTypes}}
	}
	return out
}
