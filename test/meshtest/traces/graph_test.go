package traces_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Each block and each branch of it that ran is a span around what it ran.
func TestTraceOfBlocks(t *testing.T) {
	t.Parallel()
	in := func(b pipeline.Block, name pipeline.StepName) pipeline.Step {
		return pipeline.Step{Name: name, Block: b}
	}
	step := func(name pipeline.StepName, stage pipeline.StageName) []pipeline.Step {
		return []pipeline.Step{{Name: name, Stage: stage}}
	}
	one := []payload.Value{payload.Double(1)}
	p := pipeline.Pipeline{Name: "p", Steps: []pipeline.Step{
		{Name: "first", Stage: "one"},
		in(pipeline.Block{Parallel: &pipeline.Parallel{Branches: map[string]pipeline.Branch{
			"a": {Steps: step("left", "one")},
			"b": {Steps: step("right", "two"), Missing: map[string]pipeline.Constant{"z": {Data: one}}},
		}, Quorum: 0, Within: time.Minute}}, "look"),
		in(pipeline.Block{Switch: []pipeline.Case{
			{When: &pipeline.Predicate{Tenant: true, Equals: new(payload.String("somebody"))}, Steps: step("never", "one")},
			{Else: []pipeline.Step{in(pipeline.Block{Map: &pipeline.Map{Over: map[string]string{"i": "x"}, Steps: step("item", "one")}}, "each")}},
		}}, "route"),
	}}
	b := startPipeline(t, func(s *stagemesh.Settings, _ *tracing.Config) { s.NoLocalHops = false }, p, serves("one", echo()), serves("two", failing()))
	list, err := tensor.FromFP32([]int64{2}, []float32{1, 2})
	if err != nil {
		t.Fatal(err)
	}
	r := tracedRequest("")
	r.Inputs = []payload.Part{payload.OfTensor("x", list)}
	if _, err := b.Infer(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	const pieces, perPiece, blocks = 5, 5, 6 // publish, process, wait, run and reply
	spans := b.spans(r.Trace, 1+pieces*perPiece+blocks)
	for path, want := range map[string]string{
		"look": "infer", "look/a": "infer > look", "look/b": "infer > look", "route": "infer", "route/else": "infer > route", "route/else/each": "infer > route > route/else",
		"publish two": "infer > look > look/b",
	} {
		if got := strings.Join(above(spans, b.one(spans, path)), " > "); got != want {
			t.Errorf("%s is below %q, want %q:\n%s", path, got, want, testbed.Tree(spans))
		}
	}
	count := map[string]int{}
	for _, s := range spansNamed(spans, "publish one") {
		count[strings.Join(above(spans, s), " > ")]++
	}
	if count["infer"] != 1 || count["infer > look > look/a"] != 1 || count["infer > route > route/else > route/else/each"] != 2 {
		t.Errorf("the steps are below %v", count)
	}
	b.has(b.one(spans, "look"), map[string]any{"stagemesh.graph.block": "parallel", "stagemesh.graph.status": "done"})
	b.has(b.one(spans, "look/b"), map[string]any{"stagemesh.graph.status": "failed", "stagemesh.graph.why": fault.RunnerFailed, "error": true})
	b.has(b.one(spans, "route/else/each"), map[string]any{"stagemesh.graph.block": "map", "stagemesh.graph.items": 2, "stagemesh.graph.failed_items": 0})
	events := b.one(spans, "route").Events
	if len(events) != 1 || events[0] != "stagemesh.graph.skipped" {
		t.Errorf("the events of the switch are %v", events)
	}
}

// above returns the names of the spans above a span, the root's first.
func above(spans []testbed.JaegerSpan, s testbed.JaegerSpan) []string {
	for _, parent := range spans {
		if parent.ID == s.Parent {
			return append(above(spans, parent), parent.Name)
		}
	}
	return nil
}
