package pipeline

import (
	"fmt"
	"math"

	"google.golang.org/protobuf/types/known/durationpb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/payload"
)

// ToProto returns the pipeline as the registry and the admin port have it.
func (p Pipeline) ToProto() *meshv1.Pipeline {
	out := &meshv1.Pipeline{
		Name: string(p.Name), Steps: make([]*meshv1.PipelineStep, len(p.Steps)), Keep: p.Keep,
		Durability: p.Durability.ToProto(), MaxInFlight: uint32(p.MaxInFlight), WaitForCapacity: p.WaitForCapacity,
	}
	if p.Timeout != 0 {
		out.Timeout = durationpb.New(p.Timeout)
	}
	for i, step := range p.Steps {
		out.Steps[i] = &meshv1.PipelineStep{
			Name: string(step.Name), Stage: string(step.Stage), Model: step.Model.ToProto(),
			Parameters: step.Parameters.ToProto(), Inputs: step.Inputs,
		}
	}
	return out
}

// FromProto returns a valid pipeline, or what is wrong with it.
func FromProto(in *meshv1.Pipeline) (Pipeline, error) {
	if err := ValidName("pipeline", in.GetName()); err != nil {
		return Pipeline{}, err
	}
	out, err := fromProto(in)
	if err != nil {
		return Pipeline{}, fmt.Errorf("pipeline %s: %w", in.GetName(), err)
	}
	return out, out.Validate()
}

func fromProto(in *meshv1.Pipeline) (Pipeline, error) {
	if in.GetMaxInFlight() > math.MaxInt32 {
		return Pipeline{}, fmt.Errorf("max_in_flight: %d, at most %d are taken", in.GetMaxInFlight(), math.MaxInt32)
	}
	durability, err := DurabilityFromProto(in.GetDurability())
	if err != nil {
		return Pipeline{}, err
	}
	out := Pipeline{
		Name: Name(in.GetName()), Durability: durability, Keep: in.GetKeep(),
		MaxInFlight: int(in.GetMaxInFlight()), WaitForCapacity: in.GetWaitForCapacity(),
	}
	if d := in.GetTimeout(); d != nil {
		if err := d.CheckValid(); err != nil {
			return Pipeline{}, fmt.Errorf("timeout: %w", err)
		}
		out.Timeout = d.AsDuration()
	}
	for i, step := range in.GetSteps() {
		s, err := stepFromProto(step)
		if err != nil {
			return Pipeline{}, fmt.Errorf("steps[%d]: %w", i, err)
		}
		out.Steps = append(out.Steps, s)
	}
	return out, nil
}

func stepFromProto(in *meshv1.PipelineStep) (Step, error) {
	parameters, err := payload.ParametersFromProto(in.GetParameters())
	if err != nil {
		return Step{}, fmt.Errorf("parameters: %w", err)
	}
	for name, value := range parameters {
		// A file has one kind of whole numbers, as far as it goes.
		if n, is := value.Any().(uint64); is && n <= math.MaxInt64 {
			parameters[name] = payload.Int64(int64(n))
		}
	}
	return Step{
		Name: StepName(in.GetName()), Stage: StageName(in.GetStage()), Model: payload.ModelFromProto(in.GetModel()),
		Parameters: parameters, Inputs: in.GetInputs(),
	}, nil
}
