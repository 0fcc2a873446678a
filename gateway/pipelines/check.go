package pipelines

import (
	"fmt"
	"maps"
	"slices"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Stage is what is known of a stage.
type Stage struct {
	// Served says that a host takes items.
	Served bool
	// Durabilities are its queues; all where there are none.
	Durabilities []pipeline.Durability
	// Spec and Limits may be nil: nothing is known of them.
	Spec   *stagev1.Spec
	Limits *stagev1.Limits
}

// Mesh is what a pipeline has to fit.
type Mesh struct {
	Stages map[pipeline.StageName]Stage
	// MaxPayload bounds the inputs of a request, in bytes; 0 means that nothing is
	// known of it.
	MaxPayload int
}

// Severity says what a problem means.
type Severity int

const (
	// Warning says that requests may fail.
	Warning Severity = iota
	// Error says that they would.
	Error
)

// Problem is something that is wrong with a pipeline.
type Problem struct {
	Severity Severity
	// Field is what it is about, such as steps[1].stage.
	Field string
	// Message is a sentence for a person.
	Message string
}

// Check says what is wrong with a valid pipeline in a mesh: stages that nobody knows,
// queues that they do not have, inputs that the step before does not give, and items
// that are too large. What it cannot know it takes to be fine.
func Check(p pipeline.Pipeline, m Mesh) []Problem {
	c := &checking{pipeline: p, mesh: m, kept: map[string]*stagev1.PartSpec{}}
	for i, step := range p.Steps {
		at := place{Step: step, field: fmt.Sprintf("steps[%d]", i), first: i == 0}
		at.Stage, at.known = m.Stages[step.Stage]
		c.step(at)
	}
	return c.problems
}

// checking is a pipeline that is being checked.
type checking struct {
	pipeline pipeline.Pipeline
	mesh     Mesh
	problems []Problem
	// before is what the step before gives, nil where that is not known.
	before *output
	// kept are the parts so far that are known and may be kept.
	kept map[string]*stagev1.PartSpec
}

// output is what a step gives.
type output struct {
	step  pipeline.StepName
	parts []*stagev1.PartSpec
	axis  stagev1.BatchAxis
}

// place is a step and its stage.
type place struct {
	pipeline.Step
	Stage
	field        string
	first, known bool
}

func (c *checking) found(s Severity, field, format string, args ...any) {
	c.problems = append(c.problems, Problem{Severity: s, Field: field, Message: fmt.Sprintf(format, args...)})
}

func (c *checking) step(at place) {
	if at.known {
		c.queues(at)
		c.renames(at)
		c.sizes(at)
		c.inputs(at)
	} else {
		c.found(Error, at.field+".stage", "nobody knows a stage %s; there is %s", at.Step.Stage, listed(slices.Sorted(maps.Keys(c.mesh.Stages))))
	}
	c.before = nil
	if outputs := at.Spec.GetOutputs(); len(outputs) > 0 {
		c.before = &output{step: at.Name, parts: outputs, axis: at.Spec.GetBatchAxis()}
	}
	for _, part := range slices.Concat(at.Spec.GetInputs(), at.Spec.GetOutputs()) {
		if slices.Contains(c.pipeline.Keep, part.GetName()) {
			c.kept[part.GetName()] = part
		}
	}
}

func (c *checking) queues(at place) {
	durability := c.pipeline.Durability
	if durability == pipeline.DurabilityUnset {
		durability = pipeline.Memory
	}
	if len(at.Durabilities) > 0 && !slices.Contains(at.Durabilities, durability) {
		c.found(Error, at.field+".stage", "the pipeline's durability is %s, and the stage %s has a queue of %s", durability, at.Step.Stage, listed(at.Durabilities))
	}
	if !at.Served {
		c.found(Warning, at.field+".stage", "no host of the stage %s takes items now", at.Step.Stage)
	}
}

// renames checks that the step renames to inputs that the stage has.
func (c *checking) renames(at place) {
	inputs := at.Spec.GetInputs()
	for _, input := range slices.Sorted(maps.Keys(at.Inputs)) {
		if len(inputs) > 0 && find(inputs, input) == nil {
			c.found(Error, at.field+".inputs."+input, "the stage %s has no such input; it takes %s", at.Step.Stage, listed(names(inputs)))
		}
	}
}

// sizes checks that the smallest item that the stage takes is not too large.
func (c *checking) sizes(at place) {
	least := leastBytes(at.Spec)
	if limit := at.Limits.GetMaxBytes(); limit > 0 && least > limit {
		c.found(Error, at.field+".stage", "the inputs of the stage %s are at least %d bytes, and its batch.max_bytes is %d", at.Step.Stage, least, limit)
	}
	if limit := c.mesh.MaxPayload; at.first && limit > 0 && least > uint64(limit) {
		c.found(Error, at.field+".stage", "the inputs of the stage %s are at least %d bytes, and gateway.max_payload is %d", at.Step.Stage, least, limit)
	}
}

// inputs checks that the step before gives what the stage takes. What callers send,
// to the first step or for later ones, is not known.
func (c *checking) inputs(at place) {
	wanted := at.Spec.GetInputs()
	for _, want := range wanted {
		source, renamed := at.Inputs[want.GetName()]
		if !renamed {
			source = want.GetName()
		}
		field := at.field + ".inputs." + want.GetName()
		if c.before == nil {
			continue
		}
		given, axis := find(c.before.parts, source), c.before.axis
		if given == nil && slices.Contains(c.pipeline.Keep, source) {
			if given = c.kept[source]; given == nil {
				continue
			}
		}
		if given == nil && !renamed && len(wanted) == 1 && len(c.before.parts) == 1 {
			given = c.before.parts[0]
		}
		switch {
		case given == nil && want.GetOptional():
		case given == nil:
			c.found(Error, field, "the step %s does not give %s; it gives %s: rename one of those, or keep what an earlier step had", c.before.step, source, listed(names(c.before.parts)))
		case !fits(given, axis, want, at.Spec.GetBatchAxis()):
			c.found(Error, field, "the stage %s takes %s, and is given %s", at.Step.Stage, describe(want), describe(given))
		case given.GetOptional() && !want.GetOptional():
			c.found(Warning, field, "the step %s may leave %s out, and the stage %s needs it", c.before.step, source, at.Step.Stage)
		}
	}
}
