package envelope

import (
	"fmt"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func routeToProto(route []pipeline.Hop) []*meshv1.Step {
	out := make([]*meshv1.Step, len(route))
	for i, hop := range route {
		out[i] = &meshv1.Step{
			Name:       string(hop.Step),
			Stage:      string(hop.Stage),
			Model:      hop.Model.ToProto(),
			Parameters: hop.Parameters.ToProto(),
			Inputs:     hop.Inputs,
			Keep:       hop.Keep,
			Host:       string(hop.Host),
		}
	}
	return out
}

func routeFromProto(in []*meshv1.Step) ([]pipeline.Hop, error) {
	if len(in) == 0 || len(in) > pipeline.MaxSteps {
		return nil, fmt.Errorf("a route of %d steps", len(in))
	}
	out := make([]pipeline.Hop, len(in))
	for i, step := range in {
		hop, err := hopFromProto(step)
		if err != nil {
			return nil, fmt.Errorf("route[%d]: %w", i, err)
		}
		out[i] = hop
	}
	return out, nil
}

func hopFromProto(in *meshv1.Step) (pipeline.Hop, error) {
	if err := pipeline.ValidName("step", in.GetName()); err != nil {
		return pipeline.Hop{}, err
	}
	if err := pipeline.ValidName("stage", in.GetStage()); err != nil {
		return pipeline.Hop{}, err
	}
	if in.GetHost() != "" {
		if err := pipeline.ValidName("host", in.GetHost()); err != nil {
			return pipeline.Hop{}, err
		}
	}
	if len(in.GetKeep()) > payload.MaxParts {
		return pipeline.Hop{}, fmt.Errorf("keeps %d parts, at most %d are taken", len(in.GetKeep()), payload.MaxParts)
	}
	parameters, err := payload.ParametersFromProto(in.GetParameters())
	if err != nil {
		return pipeline.Hop{}, err
	}
	return pipeline.Hop{
		Step:       pipeline.StepName(in.GetName()),
		Stage:      pipeline.StageName(in.GetStage()),
		Model:      payload.ModelFromProto(in.GetModel()),
		Parameters: parameters,
		Inputs:     in.GetInputs(),
		Keep:       in.GetKeep(),
		Host:       pipeline.HostID(in.GetHost()),
	}, nil
}
