package pipelines

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Stage is what the mesh knows about a stage.
type Stage struct {
	// Served is true if a host takes items.
	Served bool
	// Durabilities are its queues; empty means all.
	Durabilities []pipeline.Durability
	// Spec and Limits are nil if they are unknown.
	Spec   *stagev1.Spec
	Limits *stagev1.Limits
}

// Check returns the problems of a valid pipeline in a mesh: unknown stages, queues that
// they do not have, parameters that they do not read, inputs that the previous step does not output, and items that are too
// large. It reports nothing about what is unknown.
// maxPayload bounds the inputs of a request, in bytes; 0 means unknown.
func Check(p pipeline.Pipeline, stages map[pipeline.StageName]Stage, maxPayload int) []*adminv1.PipelineProblem {
	c := newChecker(p, stages, maxPayload)
	c.steps(p.Steps, "steps", 0)
	c.ends()
	return *c.problems
}

func newChecker(p pipeline.Pipeline, stages map[pipeline.StageName]Stage, maxPayload int) *checker {
	return &checker{pipeline: p, hasBlocks: p.HasBlocks(), stages: stages, maxPayload: maxPayload, problems: new([]*adminv1.PipelineProblem), tree: new([]treeLine), kept: map[string][]output{}, open: new(bool)}
}

// checker checks one pipeline, step by step.
type checker struct {
	pipeline   pipeline.Pipeline
	hasBlocks  bool
	stages     map[pipeline.StageName]Stage
	maxPayload int
	// Those that check the branches of a block share problems and tree.
	problems *[]*adminv1.PipelineProblem
	tree     *[]treeLine
	// previous are the outputs of the previous step, nil if they are unknown.
	previous []output
	// kept are the known outputs that the pipeline keeps, by name, the latest first: an
	// optional output leaves those before it. Parts that callers send are unknown.
	kept map[string][]output
	// asked are the parts that callers send. lost is true after a step whose outputs are unknown, and
	// open becomes true where a step takes any part of a caller.
	asked []Input
	lost  bool
	open  *bool
}

// output is an output of a step.
type output struct {
	*stagev1.PartSpec
	step pipeline.StepName
	// rowless is true if the part may come as a single row, without its rows axis.
	rowless bool
}

// stepCheck is a step and its stage.
type stepCheck struct {
	pipeline.Step
	Stage
	field string
	// known is true if the mesh knows the stage.
	first, last, known bool
}

// source returns the name of the part that feeds an input.
func (p stepCheck) source(input string) (name string, renamed bool) {
	if name, renamed = p.Inputs[input]; renamed {
		return name, true
	}
	return input, false
}

func (c *checker) report(s adminv1.PipelineSeverity, field, format string, args ...any) {
	*c.problems = append(*c.problems, &adminv1.PipelineProblem{Severity: s, Field: field, Message: fmt.Sprintf(format, args...)})
}

const (
	// requestsMayFail and requestsFail are the severities of problems.
	requestsMayFail = adminv1.PipelineSeverity_PIPELINE_SEVERITY_WARNING
	requestsFail    = adminv1.PipelineSeverity_PIPELINE_SEVERITY_ERROR
)

func (c *checker) step(at stepCheck) {
	c.ask(at)
	if at.known {
		c.queues(at)
		c.renames(at)
		c.sizes(at)
		c.inputs(at)
		c.streams(at)
		c.parameters(at)
	} else {
		c.report(requestsFail, at.field+".stage", "the stage %s is unknown; known stages are %s", at.Step.Stage, listed(slices.Sorted(maps.Keys(c.stages))))
	}
	c.give(outputs(at))
}

// keeps reports whether a part stays at hand for later steps.
func (c *checker) keeps(name string) bool {
	return c.hasBlocks || slices.Contains(c.pipeline.Keep, name)
}

// give records what a step or a block outputs, nil if that is unknown. One without outputs passes on
// what there was.
func (c *checker) give(outputs []output) {
	if outputs != nil && len(outputs) == 0 {
		return
	}
	c.previous = outputs
	if c.previous == nil {
		// The step may output anything, including the parts that are kept.
		clear(c.kept)
		c.lost = true
	}
	for _, o := range c.previous {
		name := o.GetName()
		switch {
		case !c.keeps(name):
		case o.GetOptional() && len(c.kept[name]) > 0:
			c.kept[name] = append([]output{o}, c.kept[name]...)
		case o.GetOptional():
			// Without it the part may be a caller's.
		default:
			c.kept[name] = []output{o}
		}
	}
}

// outputs returns the outputs of a step, nil if they are unknown.
func outputs(at stepCheck) []output {
	rowless := at.Spec.GetBatchAxis() == stagev1.BatchAxis_BATCH_AXIS_ROWS && (len(at.Spec.GetInputs()) == 0 || slices.ContainsFunc(at.Spec.GetInputs(), isTensor))
	var out []output
	for _, part := range at.Spec.GetOutputs() {
		out = append(out, output{PartSpec: part, step: at.Name, rowless: rowless})
	}
	return out
}

func (c *checker) queues(at stepCheck) {
	durability, severity := c.pipeline.Durability, requestsFail
	if durability == pipeline.DurabilityUnset {
		// A request may choose another.
		durability, severity = pipeline.Memory, requestsMayFail
	}
	if len(at.Durabilities) > 0 && !slices.Contains(at.Durabilities, durability) {
		c.report(severity, at.field+".stage", "the pipeline's durability is %s, and the stage %s has only the queue %s", durability, at.Step.Stage, listed(at.Durabilities))
	}
	if !at.Served {
		c.report(requestsMayFail, at.field+".stage", "no host of the stage %s takes items now", at.Step.Stage)
	}
}

// streams checks that a stage that streams is the last step.
func (c *checker) streams(at stepCheck) {
	if at.Spec.GetStream() && !at.last {
		c.report(requestsFail, at.field+".stage", "the stage %s streams its reply to the caller, so it has to be the last step", at.Step.Stage)
	}
}

// renames checks that the stage has the inputs that the step renames parts to.
func (c *checker) renames(at stepCheck) {
	inputs := at.Spec.GetInputs()
	for _, input := range slices.Sorted(maps.Keys(at.Inputs)) {
		if len(inputs) > 0 && !slices.ContainsFunc(inputs, func(s *stagev1.PartSpec) bool { return s.GetName() == input }) {
			c.report(requestsFail, at.field+".inputs."+input, "the stage %s has no such input; it takes %s", at.Step.Stage, listed(names(inputs)))
		}
	}
}

// parameters checks that the stage reads the parameters of the step.
func (c *checker) parameters(at stepCheck) {
	for _, name := range slices.Sorted(maps.Keys(at.Parameters)) {
		if why, _ := payload.Unread(at.Spec.GetParameters(), name, at.Parameters[name]); why != "" {
			c.report(requestsFail, at.field+".parameters."+name, "the stage %s %s", at.Step.Stage, why)
		}
	}
}

// CheckParameters returns INVALID_REQUEST for a request's parameter that no step and no condition of the
// pipeline reads, or not with that value. A stage without a known spec reads any.
func CheckParameters(p *pipeline.Pipeline, o pipeline.Options, specs map[string]*stagev1.Spec) *fault.Fault {
	for _, name := range slices.Sorted(maps.Keys(o.Parameters)) {
		var why []string
		isRead := decides(p.Steps, name)
		for _, step := range p.StageSteps() {
			text, named := payload.Unread(specs[string(step.Stage)].GetParameters(), name, o.Parameters[name])
			if named && text != "" {
				return fault.InField(fault.InvalidRequest, "parameters."+name, "the stage %s %s", step.Stage, text)
			}
			isRead = isRead || text == ""
			why = append(why, fmt.Sprintf("the stage %s %s", step.Stage, text))
		}
		if !isRead {
			return fault.InField(fault.InvalidRequest, "parameters."+name, "%s", strings.Join(why[:min(len(why), maxListed)], "; "))
		}
	}
	for _, step := range p.StageSteps() {
		own := o.Steps[step.Name].Parameters
		for _, name := range slices.Sorted(maps.Keys(own)) {
			if why, _ := payload.Unread(specs[string(step.Stage)].GetParameters(), name, own[name]); why != "" {
				return fault.InField(fault.InvalidRequest, fmt.Sprintf("steps.%s.parameters.%s", step.Name, name), "the stage %s %s", step.Stage, why)
			}
		}
	}
	return nil
}

// sizes checks that the smallest item of the stage is not too large.
func (c *checker) sizes(at stepCheck) {
	least, sent := at.leastBytes()
	if limit := at.Limits.GetMaxBytes(); limit > 0 && least > limit {
		c.report(requestsFail, at.field+".stage", "the inputs of the stage %s are at least %d bytes, and its batch.max_bytes is %d", at.Step.Stage, least, limit)
	}
	if limit := c.maxPayload; at.first && limit > 0 && sent > uint64(limit) {
		c.report(requestsFail, at.field+".stage", "the inputs of the stage %s are at least %d bytes, and gateway.max_payload is %d", at.Step.Stage, sent, limit)
	}
}

// inputs checks that the previous step outputs the inputs of the stage. Parts that callers
// send, to the first step or for later ones, are unknown.
func (c *checker) inputs(at stepCheck) {
	if c.previous == nil {
		return
	}
	for _, want := range at.Spec.GetInputs() {
		field := at.field + ".inputs." + want.GetName()
		given, known := c.candidates(at, want)
		switch {
		case !known, len(given) == 0 && want.GetOptional():
		case len(given) == 0:
			source, _ := at.source(want.GetName())
			c.report(requestsFail, field, "the step %s does not output %s; it outputs %s: rename one of those, or keep the output of an earlier step", c.previous[0].step, source, listed(names(c.previous)))
		case !slices.ContainsFunc(given, func(o output) bool { return fits(o, want, at.Spec.GetBatchAxis()) }):
			c.report(requestsFail, field, "the stage %s takes %s, and is given %s", at.Step.Stage, describe(want), describe(given[0].PartSpec))
		case !want.GetOptional() && !slices.ContainsFunc(given, func(o output) bool { return !o.GetOptional() }):
			c.report(requestsMayFail, field, "the step %s may leave %s out, and the stage %s needs it", given[0].step, given[0].GetName(), at.Step.Stage)
		}
	}
}

// candidates returns the parts that may feed an input, the preferred one first. They are
// unknown if a caller may have sent the part.
func (c *checker) candidates(at stepCheck, want *stagev1.PartSpec) (out []output, known bool) {
	source, renamed := at.source(want.GetName())
	if i := slices.IndexFunc(c.previous, func(o output) bool { return o.GetName() == source }); i >= 0 {
		out = append(out, c.previous[i])
	}
	if len(out) > 0 && !out[0].GetOptional() {
		return out, true
	}
	if c.keeps(source) {
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

// only returns the one output that is not optional, if there is exactly one: alone it
// feeds the only input, whatever their names.
func (c *checker) only() []output {
	if len(c.previous) == 1 {
		return c.previous
	}
	sure := slices.DeleteFunc(slices.Clone(c.previous), func(o output) bool { return o.GetOptional() })
	if len(sure) != 1 {
		return nil
	}
	return sure
}

func names[S interface{ GetName() string }](specs []S) []string {
	out := make([]string, len(specs))
	for i, s := range specs {
		out[i] = s.GetName()
	}
	return out
}

func isTensor(s *stagev1.PartSpec) bool { return s.GetTensor() != nil }

// maxListed is how many names a message lists.
const maxListed = 10

func listed[S ~string](names []S) string {
	if len(names) == 0 {
		return "none"
	}
	out := make([]string, 0, maxListed+1)
	for _, name := range names[:min(len(names), maxListed)] {
		out = append(out, string(name))
	}
	if more := len(names) - maxListed; more > 0 {
		out = append(out, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(out, ", ")
}

// fits reports whether the output of one stage may be the input of another. Single rows
// travel without the rows axis, so the shapes may differ by that axis if a stage has rows.
func fits(given output, want *stagev1.PartSpec, to stagev1.BatchAxis) bool {
	have, need := given.GetTensor(), want.GetTensor()
	if (have == nil) != (need == nil) {
		return false
	}
	if have == nil {
		return mediaFit(given.GetBlob().GetContentTypes(), want.GetBlob().GetContentTypes())
	}
	if have.GetDatatype() != need.GetDatatype() {
		return false
	}
	for _, a := range shapes(have.GetShape(), given.rowless) {
		for _, b := range shapes(need.GetShape(), to == stagev1.BatchAxis_BATCH_AXIS_ROWS) {
			if overlap(a, b) {
				return true
			}
		}
	}
	return false
}

// shapes returns the shapes that a tensor may travel with: its own and, if it has rows,
// that without the rows axis.
func shapes(shape []int64, rows bool) [][]int64 {
	if rows && len(shape) > 0 {
		return [][]int64{shape, shape[1:]}
	}
	return [][]int64{shape}
}

// overlap reports whether a shape can match both; -1 is any extent.
func overlap(a, b []int64) bool {
	return slices.EqualFunc(a, b, func(x, y int64) bool { return x == y || x < 0 || y < 0 })
}

// mediaFit reports whether a blob of a given type may have a wanted type; an empty list
// means any. A host converts MessagePack to JSON.
func mediaFit(given, want []string) bool {
	if len(given) == 0 || len(want) == 0 {
		return true
	}
	return slices.ContainsFunc(given, func(a string) bool {
		return slices.ContainsFunc(want, func(b string) bool {
			return payload.AcceptsType(b, a) || isRange(a) && payload.AcceptsType(a, b) ||
				payload.BareType(a) == payload.OctetStream || msgpack.Is(a) && payload.AcceptsType(b, payload.JSONType)
		})
	})
}

// isRange reports whether a media type is a pattern, such as image/*.
func isRange(mediaType string) bool { return strings.HasSuffix(payload.BareType(mediaType), "*") }

// leastBytes returns the size of the stage's smallest inputs: one row, no optional part,
// and 0 for extents that may be any. sent is the size of the parts for them, as one part
// may feed several inputs.
func (p stepCheck) leastBytes() (sum, sent uint64) {
	sources := map[string]uint64{}
	for _, input := range p.Spec.GetInputs() {
		t := input.GetTensor()
		if t == nil || input.GetOptional() {
			continue
		}
		size := tensorBytes(t, p.Spec.GetBatchAxis())
		sum += size
		source, _ := p.source(input.GetName())
		sources[source] = max(sources[source], size)
	}
	for _, size := range sources {
		sent += size
	}
	return sum, sent
}

func tensorBytes(t *stagev1.TensorSpec, axis stagev1.BatchAxis) uint64 {
	size := max(0, tensor.Datatype(t.GetDatatype()).Size())
	out := uint64(size)
	for i, extent := range t.GetShape() {
		switch {
		case i == 0 && axis == stagev1.BatchAxis_BATCH_AXIS_ROWS:
		case extent < 0:
			return 0
		case extent > 0 && out > maxBytes/uint64(extent):
			return maxBytes
		default:
			out *= uint64(extent)
		}
	}
	return out
}

// maxBytes caps sizes, so that they cannot overflow.
const maxBytes = 1 << 50

// describe returns a part as text.
func describe(s *stagev1.PartSpec) string {
	if t := s.GetTensor(); t != nil {
		return fmt.Sprintf("%s, a tensor %s%v", s.GetName(), t.GetDatatype(), t.GetShape())
	}
	if types := s.GetBlob().GetContentTypes(); len(types) > 0 {
		return fmt.Sprintf("%s, a blob of %s", s.GetName(), strings.Join(types, " or "))
	}
	return s.GetName() + ", a blob"
}
