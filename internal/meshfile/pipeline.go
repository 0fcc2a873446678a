package meshfile

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Routes returns the pipelines, sorted by name.
func (f *File) Routes() ([]pipeline.Pipeline, error) {
	var out []pipeline.Pipeline
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(f.Pipelines)) {
		p, err := f.route(name)
		errs = append(errs, f.At(err, "pipelines", name))
		out = append(out, p)
	}
	return out, errors.Join(errs...)
}

func (f *File) route(name string) (pipeline.Pipeline, error) {
	in := f.Pipelines[name]
	out := pipeline.Pipeline{
		Name: pipeline.Name(name), Timeout: in.Timeout,
		Durability: pipeline.Durability(in.Durability), Keep: in.Keep,
		MaxInFlight: in.MaxInFlight, WaitForCapacity: in.WaitForCapacity,
	}
	var errs []error
	for i, step := range in.Steps {
		s, err := f.step(step, pipeline.Durability(cmp.Or(in.Durability, string(pipeline.Memory))))
		if err != nil {
			errs = append(errs, fmt.Errorf("steps[%d].%w", i, err))
		}
		out.Steps = append(out.Steps, s)
	}
	if len(errs) > 0 {
		return out, errors.Join(errs...)
	}
	return out, validateRoute(out)
}

// validateRoute checks the pipeline; its name is in the path of the message.
func validateRoute(p pipeline.Pipeline) error {
	if err := pipeline.ValidName("pipeline", string(p.Name)); err != nil {
		return err
	}
	if _, err := pipeline.ParseDurability(string(p.Durability)); err != nil {
		return fmt.Errorf("durability: %w", err)
	}
	if err := p.Validate(); err != nil {
		if inner := errors.Unwrap(err); inner != nil {
			return inner
		}
		return err
	}
	return nil
}

// step returns one step of a pipeline of that durability; an error begins with
// the step's key.
func (f *File) step(in Step, durability pipeline.Durability) (pipeline.Step, error) {
	out := pipeline.Step{
		Name: pipeline.StepName(in.Name), Stage: pipeline.StageName(in.Stage),
		Model:  payload.ModelRef{Model: in.Model, Alias: in.Alias, Version: in.Version},
		Inputs: in.Inputs,
	}
	if _, here := f.Stages[in.Stage]; !here && !f.pipelinesOnly && !f.Joinable() {
		return out, fmt.Errorf("stage: there is no stage %q; there are %s, and without nats.url or nats.listen no other process can add one",
			in.Stage, strings.Join(f.StageNames(), ", "))
	}
	if err := f.checkQueue(in.Stage, durability); err != nil && !f.pipelinesOnly {
		return out, fmt.Errorf("stage: %w", err)
	}
	var err error
	out.Parameters, err = parameters(in.Parameters)
	return out, err
}

// checkQueue returns an error if the stage has no queue of that durability.
func (f *File) checkQueue(stage string, d pipeline.Durability) error {
	if _, err := pipeline.ParseDurability(string(d)); err != nil || has(f.Stages[stage].Queue.Durabilities, d) {
		return nil //nolint:nilerr // a bad durability is an error of its own key
	}
	return fmt.Errorf("the pipeline's durability is %s, and the stage %s has no such queue; change durability, or the stage's queue.durabilities", d, stage)
}

func parameters(in map[string]any) (payload.Parameters, error) {
	if len(in) == 0 {
		return nil, nil
	}
	out := make(payload.Parameters, len(in))
	for _, name := range slices.Sorted(maps.Keys(in)) {
		value, err := payload.ValueOf(in[name])
		if err != nil {
			return nil, fmt.Errorf("parameters.%s: a parameter is true or false, a number or text", name)
		}
		out[name] = value
	}
	return out, nil
}
