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
	c := &checking{pipeline: p, mesh: m, kept: map[string][]offer{}}
	for i, step := range p.Steps {
		at := place{Step: step, field: fmt.Sprintf("steps[%d]", i), first: i == 0, last: i == len(p.Steps)-1}
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
	before []offer
	// kept are the outputs so far that are kept and known, by name, the last first: one
	// that may be left out leaves those before it. What callers send to be kept is not
	// known.
	kept map[string][]offer
}

// offer is an output of a step.
type offer struct {
	*stagev1.PartSpec
	step pipeline.StepName
	// lowered says that it may come without its rows.
	lowered bool
}

// place is a step and its stage.
type place struct {
	pipeline.Step
	Stage
	field string
	// known says that the stage is.
	first, last, known bool
}

// source returns the name of the part that feeds an input.
func (p place) source(input string) (name string, renamed bool) {
	if name, renamed = p.Inputs[input]; renamed {
		return name, true
	}
	return input, false
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
		c.streams(at)
	} else {
		c.found(Error, at.field+".stage", "nobody knows a stage %s; there is %s", at.Step.Stage, listed(slices.Sorted(maps.Keys(c.mesh.Stages))))
	}
	c.before = offers(at)
	if c.before == nil {
		// It may give anything, and what is kept may be its.
		clear(c.kept)
	}
	for _, o := range c.before {
		name := o.GetName()
		switch {
		case !slices.Contains(c.pipeline.Keep, name):
		case o.GetOptional() && len(c.kept[name]) > 0:
			c.kept[name] = append([]offer{o}, c.kept[name]...)
		case o.GetOptional():
			// Else it is what a caller may have sent.
		default:
			c.kept[name] = []offer{o}
		}
	}
}

// offers are the outputs of a step, nil where they are not known.
func offers(at place) []offer {
	lowered := at.Spec.GetBatchAxis() == stagev1.BatchAxis_BATCH_AXIS_ROWS && (len(at.Spec.GetInputs()) == 0 || slices.ContainsFunc(at.Spec.GetInputs(), isTensor))
	var out []offer
	for _, part := range at.Spec.GetOutputs() {
		out = append(out, offer{PartSpec: part, step: at.Name, lowered: lowered})
	}
	return out
}

func (c *checking) queues(at place) {
	durability, severity := c.pipeline.Durability, Error
	if durability == pipeline.DurabilityUnset {
		// A request may ask for another.
		durability, severity = pipeline.Memory, Warning
	}
	if len(at.Durabilities) > 0 && !slices.Contains(at.Durabilities, durability) {
		c.found(severity, at.field+".stage", "the pipeline's durability is %s, and the stage %s has a queue of %s", durability, at.Step.Stage, listed(at.Durabilities))
	}
	if !at.Served {
		c.found(Warning, at.field+".stage", "no host of the stage %s takes items now", at.Step.Stage)
	}
}

// streams checks that a stage that answers in chunks has nobody behind it.
func (c *checking) streams(at place) {
	if at.Spec.GetStream() && !at.last {
		c.found(Error, at.field+".stage", "the stage %s answers in chunks, which go to the caller: it has to be the last step", at.Step.Stage)
	}
}

// renames checks that the step renames to inputs that the stage has.
func (c *checking) renames(at place) {
	inputs := at.Spec.GetInputs()
	for _, input := range slices.Sorted(maps.Keys(at.Inputs)) {
		if len(inputs) > 0 && !slices.ContainsFunc(inputs, func(s *stagev1.PartSpec) bool { return s.GetName() == input }) {
			c.found(Error, at.field+".inputs."+input, "the stage %s has no such input; it takes %s", at.Step.Stage, listed(names(inputs)))
		}
	}
}

// sizes checks that the smallest item that the stage takes is not too large.
func (c *checking) sizes(at place) {
	least, sent := at.leastBytes()
	if limit := at.Limits.GetMaxBytes(); limit > 0 && least > limit {
		c.found(Error, at.field+".stage", "the inputs of the stage %s are at least %d bytes, and its batch.max_bytes is %d", at.Step.Stage, least, limit)
	}
	if limit := c.mesh.MaxPayload; at.first && limit > 0 && sent > uint64(limit) {
		c.found(Error, at.field+".stage", "the inputs of the stage %s are at least %d bytes, and gateway.max_payload is %d", at.Step.Stage, sent, limit)
	}
}

// inputs checks that the step before gives what the stage takes. What callers send,
// to the first step or for later ones, is not known.
func (c *checking) inputs(at place) {
	if c.before == nil {
		return
	}
	for _, want := range at.Spec.GetInputs() {
		field := at.field + ".inputs." + want.GetName()
		given, known := c.offered(at, want)
		switch {
		case !known, len(given) == 0 && want.GetOptional():
		case len(given) == 0:
			source, _ := at.source(want.GetName())
			c.found(Error, field, "the step %s does not give %s; it gives %s: rename one of those, or keep what an earlier step had", c.before[0].step, source, listed(namesOf(c.before)))
		case !slices.ContainsFunc(given, func(o offer) bool { return fits(o, want, at.Spec.GetBatchAxis()) }):
			c.found(Error, field, "the stage %s takes %s, and is given %s", at.Step.Stage, describe(want), describe(given[0].PartSpec))
		case !want.GetOptional() && !slices.ContainsFunc(given, func(o offer) bool { return !o.GetOptional() }):
			c.found(Warning, field, "the step %s may leave %s out, and the stage %s needs it", given[0].step, given[0].GetName(), at.Step.Stage)
		}
	}
}

// offered returns what may feed an input, the first first; it is not known where a
// caller may have sent it.
func (c *checking) offered(at place, want *stagev1.PartSpec) (out []offer, known bool) {
	source, renamed := at.source(want.GetName())
	if i := slices.IndexFunc(c.before, func(o offer) bool { return o.GetName() == source }); i >= 0 {
		out = append(out, c.before[i])
	}
	if len(out) > 0 && !out[0].GetOptional() {
		return out, true
	}
	if slices.Contains(c.pipeline.Keep, source) {
		kept, ok := c.kept[source]
		if !ok {
			return nil, false
		}
		return append(out, kept...), true
	}
	if len(out) > 0 || renamed || len(at.Spec.GetInputs()) != 1 {
		return out, true
	}
	return c.only(), true
}

// only is the one output that is there whatever is left out, if there is one: alone it
// feeds the only input, whatever their names.
func (c *checking) only() []offer {
	if len(c.before) == 1 {
		return c.before
	}
	sure := slices.DeleteFunc(slices.Clone(c.before), func(o offer) bool { return o.GetOptional() })
	if len(sure) != 1 {
		return nil
	}
	return sure
}
