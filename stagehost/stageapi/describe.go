package stageapi

import (
	"slices"

	"google.golang.org/protobuf/proto"
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
		Limits:  d.Limits.toProto(),
	}
}

// maxPublished bounds what Published returns of a spec, in bytes.
const maxPublished = 64 << 10

// Published returns the spec and the limits for the mesh's registry: without examples
// and descriptions, without schemas where it is too large with them, and no spec where
// it is too large for that.
func (d Description) Published() (*stagev1.Spec, *stagev1.Limits) {
	spec := specToProto(runner.Spec{Inputs: d.Spec.Inputs, Outputs: d.Spec.Outputs, BatchAxis: d.Spec.BatchAxis, Stream: d.Spec.Stream})
	for _, part := range slices.Concat(spec.GetInputs(), spec.GetOutputs()) {
		part.Description = ""
	}
	if proto.Size(spec) > maxPublished {
		for _, part := range slices.Concat(spec.GetInputs(), spec.GetOutputs()) {
			part.Schema = ""
		}
	}
	if proto.Size(spec) > maxPublished {
		spec = nil
	}
	return spec, d.Limits.toProto()
}

func (l Limits) toProto() *stagev1.Limits {
	return &stagev1.Limits{
		MaxSize:     uint32(l.MaxSize),
		MaxBytes:    uint64(l.MaxBytes),
		MaxWait:     durationpb.New(l.MaxWait),
		MaxInFlight: uint32(l.MaxInFlight),
		Concurrency: uint32(l.Concurrency),
	}
}

func specToProto(s runner.Spec) *stagev1.Spec {
	out := &stagev1.Spec{
		Inputs:    partSpecsToProto(s.Inputs),
		Outputs:   partSpecsToProto(s.Outputs),
		BatchAxis: stagev1.BatchAxis_BATCH_AXIS_NONE,
		Stream:    s.Stream,
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
		out[i] = &stagev1.PartSpec{Name: s.Name, Optional: s.Optional, Description: s.Description, Schema: string(s.Schema)}
		if s.IsTensor() {
			out[i].Body = &stagev1.PartSpec_Tensor{Tensor: &stagev1.TensorSpec{Datatype: string(s.Datatype), Shape: s.Shape}}
			continue
		}
		out[i].Body = &stagev1.PartSpec_Blob{Blob: &stagev1.BlobSpec{ContentTypes: s.ContentTypes}}
	}
	return out
}
