package pipelines_test

import (
	"fmt"
	"slices"
	"testing"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func tensorOf(name, datatype string, shape ...int64) *stagev1.PartSpec {
	return &stagev1.PartSpec{Name: name, Body: &stagev1.PartSpec_Tensor{Tensor: &stagev1.TensorSpec{Datatype: datatype, Shape: shape}}}
}

func blobOf(name string, types ...string) *stagev1.PartSpec {
	return &stagev1.PartSpec{Name: name, Body: &stagev1.PartSpec_Blob{Blob: &stagev1.BlobSpec{ContentTypes: types}}}
}

func optional(s *stagev1.PartSpec) *stagev1.PartSpec {
	s.Optional = true
	return s
}

func parts(s ...*stagev1.PartSpec) []*stagev1.PartSpec { return s }

const (
	rows = stagev1.BatchAxis_BATCH_AXIS_ROWS
	none = stagev1.BatchAxis_BATCH_AXIS_NONE
)

func stage(axis stagev1.BatchAxis, inputs, outputs []*stagev1.PartSpec) pipelines.Stage {
	return pipelines.Stage{Served: true, Spec: &stagev1.Spec{Inputs: inputs, Outputs: outputs, BatchAxis: axis}}
}

func step(stage pipeline.StageName) pipeline.Step {
	return pipeline.Step{Name: pipeline.StepName(stage), Stage: stage}
}

func with(s pipeline.Step, name string, value payload.Value) pipeline.Step {
	s.Parameters = payload.Parameters{name: value}
	return s
}

// summaries returns problems as "severity field".
func summaries(problems []*adminv1.PipelineProblem) []string {
	out := make([]string, len(problems))
	for i, p := range problems {
		out[i] = fmt.Sprintf("%s %s", map[adminv1.PipelineSeverity]string{adminv1.PipelineSeverity_PIPELINE_SEVERITY_WARNING: "warning", adminv1.PipelineSeverity_PIPELINE_SEVERITY_ERROR: "error"}[p.GetSeverity()], p.GetField())
	}
	return out
}

func TestPipelineIsCheckedAgainstItsStages(t *testing.T) {
	t.Parallel()
	limited := stage(rows, parts(tensorOf("x", "FP32", -1, 64)), nil)
	limited.Limits = &stagev1.Limits{MaxBytes: 255}
	huge := stage(none, parts(tensorOf("x", "FP64", 1<<40, 1<<40), optional(tensorOf("y", "FP64", 1<<40))), nil)
	streaming := stage(none, parts(blobOf("text", "text/plain")), parts(blobOf("text", "text/plain")))
	streaming.Spec.Stream = true
	tunable := stage(none, nil, nil)
	tunable.Spec.Parameters = &stagev1.ParameterSpecs{Specs: []*stagev1.ParameterSpec{{Name: "k", Type: "int"}}}
	memoryOnly := stage(rows, nil, nil)
	memoryOnly.Durabilities = []pipeline.Durability{pipeline.Memory}
	fileOnly := stage(rows, nil, nil)
	fileOnly.Durabilities = []pipeline.Durability{pipeline.File}
	stages := map[pipeline.StageName]pipelines.Stage{
		"decode":   stage(rows, parts(blobOf("image", "image/*")), parts(tensorOf("pixels", "FP32", -1, 64), blobOf("thumb", "image/png"))),
		"classify": stage(rows, parts(tensorOf("pixels", "FP32", -1, 64)), parts(tensorOf("scores", "FP32", -1, 10))),
		"one":      stage(none, parts(tensorOf("vector", "FP32", 10)), parts(tensorOf("out", "FP32", 10))),
		"label":    stage(rows, parts(tensorOf("scores", "FP32", -1, -1)), parts(blobOf("labels", "application/json"))),
		"maybe":    stage(rows, parts(tensorOf("scores", "FP32", -1, 10)), parts(optional(tensorOf("pixels", "FP32", -1, 64)), tensorOf("other", "FP32", -1))),
		"flexible": stage(rows, parts(optional(tensorOf("hint", "INT64", -1)), tensorOf("scores", "FP32", -1, 10)), nil),
		"show":     stage(none, parts(blobOf("picture", "image/png", "image/jpeg"), tensorOf("scores", "FP32", -1, 10)), nil),
		"text":     stage(none, parts(blobOf("text", "text/plain")), parts(blobOf("text", "text/plain"))),
		"bytes":    stage(none, parts(blobOf("data")), parts(blobOf("data", "application/octet-stream"))),
		"any":      stage(none, nil, nil),
		"unknown":  {Served: true},
		"unserved": {Spec: &stagev1.Spec{}},
		"limited":  limited,
		"vector":   stage(none, parts(tensorOf("scores", "FP32", 10)), nil),
		"skip":     stage(none, parts(optional(blobOf("q")), optional(blobOf("r"))), parts(blobOf("y"))),
		"between":  stage(none, parts(blobOf("x")), parts(blobOf("y"))),
		"typed":    stage(none, parts(blobOf("a")), parts(blobOf("text", "Text/Plain; charset=utf-8"))),
		"four":     stage(none, nil, parts(tensorOf("x", "FP32", 4))),
		"five":     stage(none, nil, parts(optional(tensorOf("x", "FP32", 5)))),
		"takes4":   stage(none, parts(tensorOf("x", "FP32", 4), optional(blobOf("y"))), nil),
		"tunable":  tunable, "debug": stage(none, nil, parts(tensorOf("scores", "FP32", 4), optional(blobOf("debug")))),
		"only4":  stage(none, parts(tensorOf("other", "FP32", 4)), nil),
		"twice":  stage(none, parts(tensorOf("l", "FP32", 200_000), tensorOf("r", "FP32", 200_000)), nil),
		"huge":   huge,
		"packs":  stage(none, nil, parts(blobOf("order", "application/msgpack"))),
		"maps":   stage(none, nil, parts(blobOf("order", "application/geo+json"))),
		"prices": stage(none, parts(blobOf("order", "application/json")), nil),
		"memory": memoryOnly,
		"talk":   streaming,
		"file":   fileOnly,
	}
	renamed := func(s pipeline.Step, inputs map[string]string) pipeline.Step {
		s.Inputs = inputs
		return s
	}
	for name, test := range map[string]struct {
		steps      []pipeline.Step
		keep       []string
		durability pipeline.Durability
		want       []string
	}{
		"parameters":                              {steps: []pipeline.Step{with(step("tunable"), "k", payload.Int64(3)), with(step("any"), "x", payload.Bool(true))}},
		"a parameter that is not read":            {steps: []pipeline.Step{with(step("tunable"), "kk", payload.Int64(3))}, want: []string{"error steps[0].parameters.kk"}},
		"a parameter of another type":             {steps: []pipeline.Step{with(step("tunable"), "k", payload.Double(0.5))}, want: []string{"error steps[0].parameters.k"}},
		"by name":                                 {steps: []pipeline.Step{step("decode"), step("classify"), step("label")}},
		"an unknown stage":                        {steps: []pipeline.Step{step("decode"), step("nowhere"), step("label")}, want: []string{"error steps[1].stage"}},
		"no host":                                 {steps: []pipeline.Step{step("unserved")}, want: []string{"warning steps[0].stage"}},
		"no such queue":                           {steps: []pipeline.Step{step("memory")}, durability: pipeline.File, want: []string{"error steps[0].stage"}},
		"chunks from the last step":               {steps: []pipeline.Step{step("text"), step("talk")}},
		"chunks from another step":                {steps: []pipeline.Step{step("talk"), step("text")}, want: []string{"error steps[0].stage"}},
		"its only queue":                          {steps: []pipeline.Step{step("memory")}},
		"one part for one, by any name":           {steps: []pipeline.Step{step("classify"), step("one"), step("label")}},
		"one part of another shape":               {steps: []pipeline.Step{step("one"), step("classify")}, want: []string{"error steps[1].inputs.pixels"}},
		"a part that is not there":                {steps: []pipeline.Step{step("decode"), step("label")}, want: []string{"error steps[1].inputs.scores"}},
		"a tensor for a blob":                     {steps: []pipeline.Step{step("classify"), step("text")}, want: []string{"error steps[1].inputs.text"}},
		"another type":                            {steps: []pipeline.Step{step("label"), step("text")}, want: []string{"error steps[1].inputs.text"}},
		"bytes may be anything":                   {steps: []pipeline.Step{step("label"), step("bytes"), step("text")}},
		"renamed":                                 {steps: []pipeline.Step{step("decode"), renamed(step("bytes"), map[string]string{"data": "thumb"})}},
		"renamed from nothing":                    {steps: []pipeline.Step{step("decode"), renamed(step("bytes"), map[string]string{"data": "x"})}, want: []string{"error steps[1].inputs.data"}},
		"renamed to nothing":                      {steps: []pipeline.Step{renamed(step("classify"), map[string]string{"x": "pixels"})}, want: []string{"error steps[0].inputs.x"}},
		"kept":                                    {steps: []pipeline.Step{step("decode"), step("classify"), renamed(step("show"), map[string]string{"picture": "thumb"})}, keep: []string{"thumb"}},
		"not kept":                                {steps: []pipeline.Step{step("decode"), step("classify"), renamed(step("show"), map[string]string{"picture": "thumb"})}, want: []string{"error steps[2].inputs.picture"}},
		"kept, and it does not fit":               {steps: []pipeline.Step{step("decode"), step("classify"), renamed(step("show"), map[string]string{"picture": "pixels"})}, keep: []string{"pixels"}, want: []string{"error steps[2].inputs.picture"}},
		"kept of what callers may send":           {steps: []pipeline.Step{step("classify"), step("show")}, keep: []string{"picture"}},
		"an optional input that is none":          {steps: []pipeline.Step{step("classify"), step("flexible")}},
		"an output that may be left out":          {steps: []pipeline.Step{step("classify"), step("maybe"), step("classify")}, want: []string{"warning steps[2].inputs.pixels"}},
		"kept of rows, and taken as one":          {steps: []pipeline.Step{step("classify"), step("skip"), step("vector")}, keep: []string{"scores"}},
		"MessagePack for JSON":                    {steps: []pipeline.Step{step("packs"), step("prices")}},
		"a kind of JSON":                          {steps: []pipeline.Step{step("maps"), step("prices")}},
		"MessagePack for text":                    {steps: []pipeline.Step{step("packs"), step("text")}, want: []string{"error steps[1].inputs.text"}},
		"a type with parameters":                  {steps: []pipeline.Step{step("typed"), step("text")}},
		"kept, and perhaps by one who is unknown": {steps: []pipeline.Step{step("four"), step("unknown"), step("between"), step("text")}, keep: []string{"text", "x"}},
		"kept behind one that may be left out":    {steps: []pipeline.Step{step("four"), step("five"), step("takes4")}, keep: []string{"x"}},
		"what came under another name is kept":    {steps: []pipeline.Step{renamed(step("takes4"), map[string]string{"x": "z"}), step("between"), renamed(step("text"), map[string]string{"text": "x"})}, keep: []string{"x"}},
		"alone unless another is given too":       {steps: []pipeline.Step{step("debug"), step("only4")}},
		"no queue unless the request asks":        {steps: []pipeline.Step{step("file")}, want: []string{"warning steps[0].stage"}},
		"one part for two inputs":                 {steps: []pipeline.Step{renamed(step("twice"), map[string]string{"l": "s", "r": "s"})}},
		"two parts for two inputs":                {steps: []pipeline.Step{step("twice")}, want: []string{"error steps[0].stage"}},
		"stages that take anything":               {steps: []pipeline.Step{step("any"), step("unknown"), step("classify"), step("any"), step("text")}},
		"smaller than an item":                    {steps: []pipeline.Step{step("any"), step("limited")}, want: []string{"error steps[1].stage"}},
		"more than a request may be":              {steps: []pipeline.Step{step("huge")}, want: []string{"error steps[0].stage"}},
		"large, but not from a caller":            {steps: []pipeline.Step{step("any"), step("huge")}},
	} {
		p := pipeline.Pipeline{Name: "p", Steps: test.steps, Keep: test.keep, Durability: test.durability}
		got := pipelines.Check(p, stages, 1<<20)
		if !slices.Equal(summaries(got), test.want) {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
		for _, problem := range got {
			if problem.GetMessage() == "" {
				t.Errorf("%s: %s has no message", name, problem.GetField())
			}
		}
	}
}

// A condition reads parameters that no stage does.
func TestConditionsReadParameters(t *testing.T) {
	t.Parallel()
	inner := pipeline.Step{Name: "which", Block: pipeline.Block{Switch: []pipeline.Case{
		{When: &pipeline.Predicate{Parameter: "mode", Exists: new(true)}, Steps: []pipeline.Step{step("a")}}, {Else: []pipeline.Step{step("b")}},
	}}}
	p := pipeline.Pipeline{Name: "p", Steps: []pipeline.Step{{Name: "try", Block: pipeline.Block{Try: &pipeline.Try{Steps: []pipeline.Step{inner}, Else: []pipeline.Step{step("c")}}}}}}
	specs := map[string]*stagev1.Spec{}
	for _, name := range []string{"a", "b", "c"} {
		specs[name] = &stagev1.Spec{Parameters: &stagev1.ParameterSpecs{}}
	}
	for name, isRead := range map[string]bool{"mode": true, "other": false} {
		f := pipelines.CheckParameters(&p, pipeline.Options{Parameters: payload.Parameters{name: payload.Int64(1)}}, specs)
		if (f == nil) != isRead {
			t.Errorf("the parameter %s is %v", name, f)
		}
	}
}
