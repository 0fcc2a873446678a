package stagehost

import (
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Description is a host's description of its stage.
type Description struct {
	Mesh    pipeline.MeshName
	Stage   pipeline.StageName
	Host    pipeline.HostID
	Version string
	Spec    runner.Spec
	Limits  Limits
	// Engine is empty where the runner is no runner.EngineReporter.
	Engine string
}

// Limits bound the items that one host takes at a time.
type Limits struct {
	// MaxSize is in rows, MaxBytes in bytes of payload, per batch.
	MaxSize, MaxBytes int
	MaxWait           time.Duration
	// MaxInFlight bounds the items that are not settled, Concurrency batches at once.
	MaxInFlight, Concurrency int
}

// Describe describes the stage.
func (h *Host) Describe() Description {
	s, engine := h.settings, ""
	if r, ok := s.Runner.(runner.EngineReporter); ok {
		engine = strings.ToValidUTF8(r.Engine(), "?")
		engine = strings.ToValidUTF8(engine[:min(len(engine), maxEngine)], "")
	}
	return Description{
		Mesh: s.Mesh, Stage: s.Stage, Host: s.Host, Version: s.Version,
		Spec: h.spec, Engine: engine,
		Limits: Limits{
			MaxSize: s.Batch.MaxSize, MaxBytes: s.Batch.MaxBytes, MaxWait: s.Batch.MaxWait,
			MaxInFlight: s.MaxInFlight, Concurrency: s.Runner.Concurrency(),
		},
	}
}

const (
	// maxPublished bounds what Published returns of a spec without its texts, in bytes,
	// and maxTexts its descriptions and examples together.
	maxPublished = 64 << 10
	maxTexts     = 4 << 10
	// maxEngine bounds the name of an engine, in bytes.
	maxEngine = 200
)

// Published returns the spec and the limits for the mesh's registry: with the
// descriptions and examples that fit, without schemas where it is too
// large with them, and no spec where it is too large for that.
func (d Description) Published() (*stagev1.Spec, *stagev1.Limits) {
	full, spec := specToProto(d.Spec), specToProto(d.Spec)
	for _, text := range textsOf(spec) {
		*text = ""
	}
	spec.Examples = nil
	if proto.Size(spec) > maxPublished {
		for _, part := range partsOf(spec) {
			part.Schema = ""
		}
	}
	if proto.Size(spec) > maxPublished {
		return nil, d.Limits.toProto()
	}
	left := maxTexts
	texts := textsOf(spec)
	for i, text := range textsOf(full) {
		if n := len(*text); n <= left {
			*texts[i] = *text
			left -= n
		}
	}
	for _, example := range full.GetExamples() {
		if n := proto.Size(example); n <= left {
			spec.Examples = append(spec.Examples, example)
			left -= n
		}
	}
	return spec, d.Limits.toProto()
}

func partsOf(spec *stagev1.Spec) []*stagev1.PartSpec {
	return slices.Concat(spec.GetInputs(), spec.GetOutputs())
}

// textsOf returns the descriptions in a spec.
func textsOf(spec *stagev1.Spec) (out []*string) {
	for _, part := range partsOf(spec) {
		out = append(out, &part.Description)
	}
	for _, parameter := range spec.GetParameters().GetSpecs() {
		out = append(out, &parameter.Description)
	}
	return out
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
	out.Parameters = parametersToProto(s.Parameters)
	for _, example := range s.Examples {
		out.Examples = append(out.Examples, &stagev1.Example{Name: example.Name, Inputs: payload.ToProto(example.Inputs)})
	}
	return out
}

// parametersToProto returns nil for nil: a runner that declares nothing reads any.
func parametersToProto(specs []runner.ParameterSpec) *stagev1.ParameterSpecs {
	if specs == nil {
		return nil
	}
	out := &stagev1.ParameterSpecs{}
	for _, p := range specs {
		out.Specs = append(out.Specs, &stagev1.ParameterSpec{Name: p.Name, Type: string(p.Type), Description: p.Description})
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
