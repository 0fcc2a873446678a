package schema_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

func gives(axis runner.BatchAxis, outputs ...runner.PartSpec) runner.Spec {
	return runner.Spec{BatchAxis: axis, Outputs: outputs}
}

func TestValidOutputsAreReturned(t *testing.T) {
	t.Parallel()
	scores := gives(runner.BatchRows, vector("scores"))
	tests := map[string]struct {
		spec  runner.Spec
		item  schema.Fitted
		parts []payload.Part
		want  []string
	}{
		"rows for rows":            {scores, schema.Fitted{Rows: 3}, []payload.Part{fp32("scores", 3, 64)}, []string{"scores=[3 64]"}},
		"a row of a batch of one":  {scores, schema.Fitted{Rows: 1}, []payload.Part{fp32("scores", 1, 64)}, []string{"scores=[1 64]"}},
		"a row for a row":          {scores, schema.Fitted{Rows: 1, Lifted: true}, []payload.Part{fp32("scores", 1, 64)}, []string{"scores=[64]"}},
		"a blob beside it":         {scores, schema.Fitted{Rows: 1, Lifted: true}, []payload.Part{text("note", "n"), fp32("scores", 1, 64)}, []string{"note=n", "scores=[64]"}},
		"no spec":                  {runner.Spec{}, schema.Fitted{Rows: 1}, []payload.Part{text("a", "a"), fp32("b", 7)}, []string{"a=a", "b=[7]"}},
		"nothing at all":           {runner.Spec{}, schema.Fitted{Rows: 1}, nil, []string{}},
		"without the optional one": {gives(runner.BatchRows, optional(vector("scores"))), schema.Fitted{Rows: 1}, nil, []string{}},
		"a blob of any type":       {gives(runner.BatchNone, blobSpec("b", "image/png")), schema.Fitted{Rows: 1}, []payload.Part{text("b", "t")}, []string{"b=t"}},
		"lists of any length":      {gives(runner.BatchNone, vector("scores")), schema.Fitted{Rows: 1}, []payload.Part{fp32("scores", 5, 64)}, []string{"scores=[5 64]"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			before := partTexts(test.parts)
			got, err := contract(t, test.spec).Outputs(test.parts, test.item)
			if err != nil || !slices.Equal(partTexts(got), test.want) {
				t.Errorf("got %q, %v; want %q", partTexts(got), err, test.want)
			}
			for _, p := range got {
				if p.Tensor != nil && p.Tensor.Validate() != nil {
					t.Errorf("output %s: %v", p.Name, p.Tensor.Validate())
				}
			}
			if !slices.Equal(partTexts(test.parts), before) {
				t.Errorf("the runner's own parts became %q", partTexts(test.parts))
			}
		})
	}
}

func TestMismatchedOutputsAreRunnerFaults(t *testing.T) {
	t.Parallel()
	scores := gives(runner.BatchRows, vector("scores"))
	tests := map[string]struct {
		spec     runner.Spec
		rows     int
		parts    []payload.Part
		wantText string
	}{
		"missing":            {scores, 1, []payload.Part{fp32("other", 1, 64)}, `output "scores" is missing`},
		"a blob":             {scores, 1, []payload.Part{text("scores", "")}, `output "scores" is not of the kind`},
		"a tensor":           {gives(runner.BatchNone, blobSpec("b")), 1, []payload.Part{fp32("b", 1)}, `output "b" is not of the kind`},
		"another datatype":   {scores, 1, []payload.Part{filled("scores", tensor.FP64, 0, 1, 64)}, "is FP64, the stage declares FP32"},
		"another shape":      {scores, 1, []payload.Part{fp32("scores", 1, 63)}, "has shape [1, 63], the stage declares [-1, 64]"},
		"without axis 0":     {scores, 1, []payload.Part{fp32("scores", 64)}, "has shape [64], the stage declares [-1, 64]"},
		"fewer rows":         {scores, 3, []payload.Part{fp32("scores", 2, 64)}, "has 2 rows for an item of 3"},
		"no rows":            {scores, 1, []payload.Part{fp32("scores", 0, 64)}, "has 0 rows for an item of 1"},
		"bytes are missing":  {scores, 1, []payload.Part{payload.OfTensor("scores", tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{1, 64}})}, "outputs.scores: shape [1 64]"},
		"two of a name":      {runner.Spec{}, 1, []payload.Part{text("a", ""), text("a", "")}, `two outputs are named "a"`},
		"a name of bytes":    {runner.Spec{}, 1, []payload.Part{text("\xff", "")}, "outputs[0]: a name is valid UTF-8"},
		"a type of bytes":    {runner.Spec{}, 1, []payload.Part{payload.OfBlob("a", "\xff", nil)}, "outputs.a: a content type"},
		"more than may be":   {runner.Spec{}, 1, make([]payload.Part, payload.MaxParts+1), "257 outputs"},
		"a broken extra one": {gives(runner.BatchNone, blobSpec("b")), 1, []payload.Part{text("b", ""), payload.OfTensor("x", tensor.Tensor{})}, "outputs.x: unknown datatype"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := contract(t, test.spec).Outputs(test.parts, schema.Fitted{Rows: test.rows})
			if err == nil || got != nil {
				t.Fatalf("got %q, %v", partTexts(got), err)
			}
			if f := fault.From(err); f.Reason != fault.RunnerOutputInvalid || !strings.Contains(f.Message, test.wantText) || len(f.Violations) != 0 {
				t.Errorf("got %v, want %q", f, test.wantText)
			}
		})
	}
}
