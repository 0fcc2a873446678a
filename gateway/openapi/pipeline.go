package openapi

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// pipelineDocs is the document's description of a pipeline.
type pipelineDocs struct {
	tag            object
	paths, schemas object
}

// describe returns the description of a pipeline.
func describe(p Pipeline) pipelineDocs {
	first, last := p.Steps[0], p.Steps[len(p.Steps)-1]
	in := side{spec: p.First, key: "stage." + string(first.Stage), rename: first.Inputs}
	if len(first.Inputs) > 0 {
		// Callers use other input names than for the stage alone.
		in.key = "pipeline." + string(p.Name)
	}
	out := side{spec: p.Last, key: "stage." + string(last.Stage)}
	a := operations{pipeline: p, in: in, out: out, schemas: object{}}
	made := pipelineDocs{
		tag:     object{"name": string(p.Name), "description": route(p)},
		paths:   object{inferPath(string(p.Name)): object{"post": a.infer()}},
		schemas: a.schemas,
	}
	if p.Last.GetStream() {
		made.paths[streamPath(string(p.Name))] = object{"post": a.stream()}
	}
	return made
}

func inferPath(name string) string  { return "/v1/pipelines/" + name + ":infer" }
func streamPath(name string) string { return "/v1/pipelines/" + name + ":stream" }

// route lists the stages that a request passes.
func route(p Pipeline) string {
	steps := make([]string, len(p.Steps))
	for i, step := range p.Steps {
		steps[i] = string(step.Name)
		if string(step.Stage) != string(step.Name) {
			steps[i] += " (" + string(step.Stage) + ")"
		}
	}
	return strings.Join(steps, " → ")
}

// side is the input or the output side of a pipeline.
type side struct {
	// spec is nil if it is not known.
	spec *stagev1.Spec
	// key begins the keys of its components.
	key string
	// rename maps inputs to the names that callers use.
	rename map[string]string
}

// inputs are the parts that callers send; nil means any.
func (s side) inputs() []part { return s.parts("input", s.spec.GetInputs()) }

// outputs are the parts that callers receive; nil means any.
func (s side) outputs() []part { return s.parts("output", s.spec.GetOutputs()) }

func (s side) parts(kind string, specs []*stagev1.PartSpec) []part {
	var out []part
	for i, spec := range specs {
		one := part{PartSpec: spec, name: cmp.Or(s.rename[spec.GetName()], spec.GetName()), rows: s.spec.GetBatchAxis() == stagev1.BatchAxis_BATCH_AXIS_ROWS}
		one.key = fmt.Sprintf("%s.%s.%s", s.key, kind, one.name)
		if !plainKey(one.key) {
			one.key = fmt.Sprintf("%s.%ss.%d", s.key, kind, i)
		}
		out = append(out, one)
	}
	return out
}

// plainKey reports whether the text may be a component's key.
func plainKey(text string) bool {
	return !strings.ContainsFunc(text, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("._-", r)
	})
}

// operations describes the operations of one pipeline.
type operations struct {
	pipeline Pipeline
	in, out  side
	// schemas are the components that it needs.
	schemas object
}

func (a operations) infer() object {
	return object{
		"operationId": "infer_" + string(a.pipeline.Name),
		"tags":        []any{string(a.pipeline.Name)},
		"summary":     "Ask " + string(a.pipeline.Name) + " and wait for the answer",
		"description": a.about(),
		"parameters":  a.parameters(),
		"requestBody": a.body(),
		"responses":   withFaults(a.answer()),
	}
}

func (a operations) stream() object {
	return object{
		"operationId": "stream_" + string(a.pipeline.Name),
		"tags":        []any{string(a.pipeline.Name)},
		"summary":     "Ask " + string(a.pipeline.Name) + " and get the answer in pieces",
		"description": a.about() + "\n\n" + strings.TrimSpace(aboutStreams),
		"parameters":  a.parameters(),
		"requestBody": a.body(),
		"responses":   withFaults(a.events()),
	}
}

// about is an operation's description.
func (a operations) about() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Steps: %s.", route(a.pipeline))
	if a.pipeline.Timeout > 0 {
		fmt.Fprintf(&b, " A request may take %s.", a.pipeline.Timeout)
	}
	if a.pipeline.Durability == pipeline.File {
		b.WriteString(" Requests are durable: their answers are stored.")
	}
	a.list(&b, "Inputs", a.in.inputs())
	a.list(&b, "Outputs", a.out.outputs())
	return b.String()
}

// list describes parts, one a line.
func (a operations) list(b *strings.Builder, title string, parts []part) {
	if parts == nil {
		fmt.Fprintf(b, "\n\n%s: not known, anything.", title)
		return
	}
	fmt.Fprintf(b, "\n\n%s:\n", title)
	for _, p := range parts {
		fmt.Fprintf(b, "\n- `%s`: %s", strings.ReplaceAll(p.name, "`", "'"), p.about())
	}
}

// parameters are the options of all pipelines, and the parameters that the pipeline
// sets for its steps. A request may override these.
func (a operations) parameters() []any {
	var out []any
	for _, key := range []string{"Timeout", "Priority", "Durability", "WaitForCapacity", "IdempotencyKey", "TraceParent", "TraceState", "Outputs", "More"} {
		out = append(out, component("parameters", key))
	}
	for _, step := range a.pipeline.Steps {
		for _, name := range slices.Sorted(maps.Keys(step.Parameters)) {
			out = append(out, object{
				"name": "steps." + string(step.Name) + "." + name, "in": "query",
				"description": fmt.Sprintf("Parameter `%s` of the step %s. The pipeline says %s.", name, step.Name, step.Parameters[name]),
				"schema":      object{"type": []any{"string", "number", "boolean"}},
			})
		}
	}
	return out
}
