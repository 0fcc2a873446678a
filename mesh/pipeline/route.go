package pipeline

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/mesh/payload"
)

// Hop is one entry of a route: a step with the request's options in it.
type Hop struct {
	Step       StepName
	Stage      StageName
	Model      payload.ModelRef
	Parameters payload.Parameters
	// Inputs renames: input of the stage -> name of the part that feeds it.
	Inputs map[string]string
	// Keep are names of this step's inputs and outputs that later steps need.
	Keep []string
	// Host must run the step; empty means any host of the stage.
	Host HostID
}

// Options are a request's options for all steps, and for single ones.
type Options struct {
	// Parameters are those of every step.
	Parameters payload.Parameters
	Steps      map[StepName]StepOptions
}

// StepOptions are a request's options for one step.
type StepOptions struct {
	Model      payload.ModelRef
	Parameters payload.Parameters
}

// Route returns the pipeline's steps with the request's options in them. A
// parameter of the request for the step precedes one for all steps, and that the
// pipeline's own. Options for an unknown step are an error, and so are too many
// parameters together.
func (p Pipeline) Route(o Options) ([]Hop, error) {
	if err := p.knows(o.Steps); err != nil {
		return nil, err
	}
	route := make([]Hop, len(p.Steps))
	for i, step := range p.Steps {
		own := o.Steps[step.Name]
		route[i] = Hop{
			Step:       step.Name,
			Stage:      step.Stage,
			Model:      step.Model,
			Parameters: payload.Merge(step.Parameters, o.Parameters, own.Parameters),
			Inputs:     step.Inputs,
		}
		if err := route[i].Parameters.Validate(); err != nil {
			return nil, fmt.Errorf("steps.%s: %w", step.Name, err)
		}
		if own.Model != (payload.ModelRef{}) {
			route[i].Model = own.Model
		}
		if i < len(p.Steps)-1 {
			route[i].Keep = p.Keep
		}
	}
	return route, nil
}

func (p Pipeline) knows(options map[StepName]StepOptions) error {
	if len(options) == 0 {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(options)) {
		if !slices.ContainsFunc(p.Steps, func(s Step) bool { return s.Name == name }) {
			return fmt.Errorf("steps.%.*s: pipeline %s has no such step; it has %s", maxName, name, p.Name, p.stepNames())
		}
	}
	return nil
}

func (p Pipeline) stepNames() string {
	names := make([]string, len(p.Steps))
	for i, step := range p.Steps {
		names[i] = string(step.Name)
	}
	return strings.Join(names, ", ")
}
