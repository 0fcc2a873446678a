package pipelines_test

import (
	"fmt"
	"strings"
	"testing"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func renames(s pipeline.Step, input, source string) pipeline.Step {
	s.Inputs = map[string]string{input: source}
	return s
}

func list(s ...pipeline.Step) []pipeline.Step { return s }

func block(b pipeline.Block) pipeline.Step { return pipeline.Step{Name: "block", Block: b} }

func TestInputsAreWhatNoStepGives(t *testing.T) {
	t.Parallel()
	image, pixels, note := blobOf("image", "image/png"), tensorOf("pixels", "FP32", -1, 4), blobOf("note", "text/plain")
	stages := map[pipeline.StageName]pipelines.Stage{
		"decode":   stage(none, parts(image), parts(pixels)),
		"classify": stage(rows, parts(pixels), parts(tensorOf("scores", "FP32", -1, 10))),
		"show":     stage(none, parts(tensorOf("scores", "FP32", -1, 10), note), parts(blobOf("page", "text/html"))),
		"say":      stage(none, parts(note, optional(blobOf("voice", "audio/wav"))), parts(note)),
		"any":      stage(none, nil, nil),
		"vector":   stage(rows, parts(tensorOf("x", "FP32", -1, 2)), parts(tensorOf("y", "FP32", -1, 2))),
		"box":      stage(none, parts(tensorOf("x", "FP32", 2), note), parts(tensorOf("y", "FP32", 2))),
	}
	branch := func(s ...pipeline.Step) pipeline.Branch { return pipeline.Branch{Steps: s} }
	when := func(part string, s ...pipeline.Step) pipeline.Case {
		return pipeline.Case{When: &pipeline.Predicate{Part: part}, Steps: s}
	}
	otherwise := func(s ...pipeline.Step) pipeline.Case { return pipeline.Case{Else: s} }
	for name, test := range map[string]struct {
		pipeline pipeline.Pipeline
		// want are the inputs; "?" marks optional ones, "rows" those of rows.
		want string
	}{
		"one stage":              {pipeline.Pipeline{Steps: list(step("decode"), step("classify"))}, "image image/png"},
		"rows":                   {pipeline.Pipeline{Steps: list(step("classify"))}, "pixels FP32[-1 4] rows"},
		"a renamed input":        {pipeline.Pipeline{Steps: list(renames(step("decode"), "image", "picture"), step("classify"))}, "picture image/png"},
		"kept for a later step":  {pipeline.Pipeline{Steps: list(step("decode"), step("classify"), step("show")), Keep: []string{"note"}}, "image image/png, note text/plain"},
		"not kept":               {pipeline.Pipeline{Steps: list(step("decode"), step("classify"), step("show"))}, "image image/png"},
		"read twice":             {pipeline.Pipeline{Steps: list(step("say"), renames(step("say"), "voice", "note")), Keep: []string{"note"}}, "note text/plain, voice? audio/wav"},
		"an unknown stage":       {pipeline.Pipeline{Steps: list(step("elsewhere"), step("classify"))}, "open"},
		"a stage that takes any": {pipeline.Pipeline{Steps: list(step("any"), step("classify"))}, "open"},
		"a parallel block":       {pipeline.Pipeline{Steps: list(block(pipeline.Block{Parallel: &pipeline.Parallel{Branches: map[string]pipeline.Branch{"a": branch(step("decode")), "b": branch(step("say"))}}}), step("classify"))}, "image image/png, note text/plain, voice? audio/wav"},
		"a parallel block that is open": {
			pipeline.Pipeline{Steps: list(block(pipeline.Block{Parallel: &pipeline.Parallel{Branches: map[string]pipeline.Branch{"a": branch(step("decode")), "b": branch(step("any"))}}}))},
			"open",
		},
		"a switch": {
			pipeline.Pipeline{Steps: list(step("decode"), block(pipeline.Block{Switch: []pipeline.Case{when("mode", step("say")), otherwise(step("classify"))}}))},
			"image image/png, mode? any, note? text/plain, voice? audio/wav",
		},
		"a switch whose cases agree": {
			pipeline.Pipeline{Steps: list(step("decode"), block(pipeline.Block{Switch: []pipeline.Case{when("pixels", step("say")), otherwise(step("say"))}}))},
			"image image/png, note text/plain, voice? audio/wav",
		},
		"a try": {
			pipeline.Pipeline{Steps: list(block(pipeline.Block{Try: &pipeline.Try{Steps: list(step("decode")), Else: list(step("say"))}}))},
			"image image/png, note? text/plain, voice? audio/wav",
		},
		"a map of a caller's part": {
			pipeline.Pipeline{Steps: list(block(pipeline.Block{Map: &pipeline.Map{Over: map[string]string{"x": "points"}, Steps: list(step("box"))}}))},
			"points FP32[-1 2], note text/plain",
		},
		"a map of rows": {
			pipeline.Pipeline{Steps: list(block(pipeline.Block{Map: &pipeline.Map{Over: map[string]string{"point": "points"}, Steps: list(step("vector"))}}))},
			"points FP32[-1 2]",
		},
		"a map of what a step gives": {
			pipeline.Pipeline{Steps: list(step("vector"), block(pipeline.Block{Map: &pipeline.Map{Over: map[string]string{"x": "y"}, Steps: list(step("box"))}}))},
			"x FP32[-1 2] rows, note text/plain",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := "open"
			if inputs := pipelines.Inputs(test.pipeline, stages); inputs != nil {
				got = describeInputs(inputs)
			}
			if got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
			if again := pipelines.Inputs(test.pipeline, stages); (again == nil) != (got == "open") || again != nil && describeInputs(again) != got {
				t.Errorf("asked again: %s", describeInputs(again))
			}
		})
	}
}

func describeInputs(inputs []pipelines.Input) string {
	var out []string
	for _, in := range inputs {
		text := in.GetName()
		if in.GetOptional() {
			text += "?"
		}
		switch body := in.GetBody().(type) {
		case *stagev1.PartSpec_Tensor:
			text += fmt.Sprintf(" %s%v", body.Tensor.GetDatatype(), body.Tensor.GetShape())
		case *stagev1.PartSpec_Blob:
			text += " " + strings.Join(body.Blob.GetContentTypes(), " or ")
		default:
			text += " any"
		}
		if in.Rows {
			text += " rows"
		}
		out = append(out, text)
	}
	return strings.Join(out, ", ")
}

func TestTreeNamesWhatBlocksGive(t *testing.T) {
	t.Parallel()
	when := &pipeline.Predicate{Part: "mode"}
	got := pipelines.Tree(pipeline.Pipeline{Name: "p", Steps: list(block(pipeline.Block{Switch: []pipeline.Case{
		{When: when, Fail: &pipeline.Failure{Reason: "INVALID_INPUT", Message: "none"}},
		{When: when, Steps: list(step("unknown")), Give: map[string]string{"b": "x", "a": "y"}},
		{Else: []pipeline.Step{}},
	}}))}, nil)
	const want = `p
└─ block  switch on mode -> unknown parts
   ├─ 1  fails with INVALID_INPUT
   ├─ 2  -> a, b
   │  └─ unknown  unknown -> unknown parts
   └─ else  -> nothing
`
	if got != want {
		t.Errorf("got\n%s", got)
	}
}
