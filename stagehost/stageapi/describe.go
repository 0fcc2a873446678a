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

const (
	// maxPublished bounds what Published returns of a spec without its texts, in bytes,
	// and maxTexts its descriptions and examples together.
	maxPublished = 64 << 10
	maxTexts     = 4 << 10
)

// Published returns the spec and the limits for the mesh's registry: with the
// descriptions and examples that fit, without schemas where it is too
// large with them, and no spec where it is too large for that.
func (d Description) Published() (*stagev1.Spec, *stagev1.Limits) {
	spec := specToProto(d.Spec)
	texts := takeTexts(spec)
	if proto.Size(spec) > maxPublished {
		for _, part := range partsOf(spec) {
			part.Schema = ""
		}
	}
	if proto.Size(spec) > maxPublished {
		return nil, d.Limits.toProto()
	}
	texts.restore(spec, maxTexts)
	return spec, d.Limits.toProto()
}

// texts are the parts of a spec that only people read.
type texts struct {
	// descriptions are of the inputs and the outputs after them.
	descriptions []string
	examples     []*stagev1.Example
}

func takeTexts(spec *stagev1.Spec) (out texts) {
	for _, part := range partsOf(spec) {
		out.descriptions = append(out.descriptions, part.GetDescription())
		part.Description = ""
	}
	out.examples, spec.Examples = spec.Examples, nil
	return out
}

// restore puts texts of at most left bytes back into the spec: descriptions
// first.
func (w texts) restore(spec *stagev1.Spec, left int) {
	for i, part := range partsOf(spec) {
		if n := len(w.descriptions[i]); n <= left {
			part.Description = w.descriptions[i]
			left -= n
		}
	}
	for _, example := range w.examples {
		if n := proto.Size(example); n <= left {
			spec.Examples = append(spec.Examples, example)
			left -= n
		}
	}
}

func partsOf(spec *stagev1.Spec) []*stagev1.PartSpec {
	return slices.Concat(spec.GetInputs(), spec.GetOutputs())
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
