package pipeline_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func digits() *pipeline.Pipeline {
	return &pipeline.Pipeline{
		Name: "digits",
		Steps: []pipeline.Step{
			{Name: "decode", Stage: "imagedecode", Parameters: payload.Parameters{"size": payload.Int64(8)}},
			{Name: "classify", Stage: "onnx", Inputs: map[string]string{"x": "pixels"}, Model: payload.ModelRef{Model: "digits"}},
			{Name: "label", Stage: "topk"},
		},
		Timeout:    time.Second,
		Durability: pipeline.Memory,
		Keep:       []string{"image"},
	}
}

func steps(n int) []pipeline.Step {
	out := make([]pipeline.Step, n)
	for i := range out {
		out[i] = pipeline.Step{Name: pipeline.StepName(fmt.Sprintf("s%d", i)), Stage: "echo"}
	}
	return out
}

func manyNames(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprint(i)
	}
	return out
}

func TestBadPipelineIsRejectedByKey(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		spoil func(*pipeline.Pipeline)
		says  string // empty: it is accepted
	}{
		"nothing wrong":               {func(*pipeline.Pipeline) {}, ""},
		"only steps":                  {func(p *pipeline.Pipeline) { *p = pipeline.Pipeline{Name: "p", Steps: p.Steps} }, ""},
		"as many steps as may be":     {func(p *pipeline.Pipeline) { p.Steps = steps(pipeline.MaxSteps) }, ""},
		"one stage twice":             {func(p *pipeline.Pipeline) { p.Steps[2].Stage = "onnx" }, ""},
		"no name":                     {func(p *pipeline.Pipeline) { p.Name = "" }, `pipeline name ""`},
		"a name with an edge":         {func(p *pipeline.Pipeline) { p.Name = "_epoch" }, `pipeline name "_epoch"`},
		"an implicit one of no stage": {func(p *pipeline.Pipeline) { p.Name = "stage:" }, `stage name ""`},
		"no steps":                    {func(p *pipeline.Pipeline) { p.Steps = nil }, "pipeline digits: steps: a pipeline has at least one"},
		"no stage": {
			func(p *pipeline.Pipeline) {
				p.Keep = nil
				p.Steps = []pipeline.Step{{Name: "s", Block: pipeline.Block{Switch: []pipeline.Case{
					{When: &pipeline.Predicate{Part: "x", Exists: new(bool)}, Fail: &pipeline.Failure{Reason: fault.InvalidInput, Message: "m"}}, {Else: []pipeline.Step{}},
				}}}}
			}, "pipeline digits: steps: none of them has a stage",
		},
		"too many steps":            {func(p *pipeline.Pipeline) { p.Steps = steps(pipeline.MaxSteps + 1) }, "pipeline digits: steps: 65, at most 64"},
		"a negative timeout":        {func(p *pipeline.Pipeline) { p.Timeout = -1 }, "pipeline digits: timeout: -1ns is negative"},
		"no such durability":        {func(p *pipeline.Pipeline) { p.Durability = "disk" }, `pipeline digits: durability "disk": use memory or file`},
		"two steps of a name":       {func(p *pipeline.Pipeline) { p.Steps[2].Name = "decode" }, "pipeline digits: steps[2]: a step named decode is there already"},
		"a step without name":       {func(p *pipeline.Pipeline) { p.Steps[1].Name = "" }, `pipeline digits: steps[1]: step name ""`},
		"a step without stage":      {func(p *pipeline.Pipeline) { p.Steps[1].Stage = "" }, `pipeline digits: steps[1]: stage name ""`},
		"a part kept twice":         {func(p *pipeline.Pipeline) { p.Keep = []string{"image", "x", "image"} }, `pipeline digits: keep: "image" is there twice`},
		"more kept than may travel": {func(p *pipeline.Pipeline) { p.Keep = manyNames(payload.MaxParts + 1) }, "pipeline digits: keep: 257 names"},
		"a kept name no part can have": {
			func(p *pipeline.Pipeline) { p.Keep = []string{strings.Repeat("n", payload.MaxName+1)} }, "pipeline digits: keep: [0]: a name",
		},
		"too many parameters": {
			func(p *pipeline.Pipeline) { p.Steps[0].Parameters = manyParameters("p", payload.MaxParameters+1) },
			"pipeline digits: steps[0]: parameters: 257",
		},
		"a renamed part that cannot be": {
			func(p *pipeline.Pipeline) { p.Steps[0].Inputs = map[string]string{"x": "\xff"} }, "pipeline digits: steps[0]: inputs: a name",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := digits()
			test.spoil(p)
			err := p.Validate()
			switch {
			case test.says == "" && err != nil:
				t.Error(err)
			case test.says != "" && (err == nil || !strings.HasPrefix(err.Error(), test.says)):
				t.Errorf("got %v, want %q", err, test.says)
			}
		})
	}
}

func TestStageIsAPipelineOfOneStep(t *testing.T) {
	t.Parallel()
	p := pipeline.OfStage("echo")
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	if len(p.Steps) != 1 || p.Steps[0].Name != "echo" || p.Steps[0].Stage != "echo" {
		t.Errorf("got %v", p.Steps)
	}
	if stage, implicit := pipeline.StageOf(p.Name); stage != "echo" || !implicit {
		t.Errorf("%s is of stage %q, %t", p.Name, stage, implicit)
	}
	for _, name := range []pipeline.Name{"echo", "stage", "Stage:echo", ""} {
		if stage, implicit := pipeline.StageOf(name); implicit {
			t.Errorf("%q is the implicit pipeline of %q", name, stage)
		}
	}
}
