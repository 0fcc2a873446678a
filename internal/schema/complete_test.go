package schema_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/internal/schema"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

func list(parts ...runner.PartSpec) []runner.PartSpec { return parts }

func tensorSpec(name string, datatype tensor.Datatype, shape ...int64) runner.PartSpec {
	return runner.PartSpec{Name: name, Datatype: datatype, Shape: shape}
}

func TestConfiguredSpecAppliesWithoutRunnerSpec(t *testing.T) {
	t.Parallel()
	inputs, outputs := list(jsonSpec("order", `{}`)), list(tensorSpec("y", tensor.FP32, -1))
	got, err := schema.Complete(runner.Spec{BatchAxis: runner.BatchRows}, inputs, outputs)
	want := runner.Spec{BatchAxis: runner.BatchRows, Inputs: inputs, Outputs: outputs}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestConfiguredSpecNarrowsRunnerSpec(t *testing.T) {
	t.Parallel()
	optionalText := runner.PartSpec{Name: "note", Optional: true, ContentTypes: []string{"text/*"}, Description: "the runner's"}
	declared := runner.Spec{Stream: true, Inputs: list(tensorSpec("x", tensor.FP32, -1, -1), jsonSpec("order", ""), optionalText)}
	for name, test := range map[string]struct {
		add  runner.PartSpec
		at   int
		want runner.PartSpec
	}{
		"a shape":              {tensorSpec("x", tensor.FP32, -1, 64), 0, tensorSpec("x", tensor.FP32, -1, 64)},
		"the same shape":       {tensorSpec("x", tensor.FP32, -1, -1), 0, tensorSpec("x", tensor.FP32, -1, -1)},
		"a word for a person":  {runner.PartSpec{Name: "x", Description: "mine"}, 0, runner.PartSpec{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, -1}, Description: "mine"}},
		"a schema":             {jsonSpec("order", `{"type":"object"}`), 1, jsonSpec("order", `{"type":"object"}`)},
		"content types of any": {jsonSpec("order", "", "application/json"), 1, jsonSpec("order", "", "application/json")},
		"one of a family":      {runner.PartSpec{Name: "note", ContentTypes: []string{"text/plain"}}, 2, runner.PartSpec{Name: "note", Optional: true, ContentTypes: []string{"text/plain"}, Description: "the runner's"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := schema.Complete(declared, list(test.add), nil)
			if err != nil || !reflect.DeepEqual(got.Inputs[test.at], test.want) {
				t.Fatalf("got %+v, %v; want %+v", got.Inputs, err, test.want)
			}
			if len(got.Inputs) != 3 || !got.Stream || got.Outputs != nil {
				t.Errorf("the other fields became %+v", got)
			}
			if again, err := schema.Complete(got, list(test.add), nil); err != nil || !reflect.DeepEqual(again, got) {
				t.Errorf("the second Complete returns %+v, %v", again, err)
			}
			if declared.Inputs[0].Shape[1] != -1 || len(declared.Inputs[1].Schema) != 0 || declared.Inputs[2].ContentTypes[0] != "text/*" {
				t.Errorf("the runner's spec became %+v", declared)
			}
		})
	}
}

func TestSpecContradictingRunnerIsRejectedByKey(t *testing.T) {
	t.Parallel()
	declared := runner.Spec{Inputs: list(tensorSpec("x", tensor.FP32, -1, 64), jsonSpec("order", `{"type":"object"}`, "application/json", "image/*"))}
	for name, test := range map[string]struct {
		add      runner.PartSpec
		wantText string
	}{
		"another name":       {tensorSpec("z", tensor.FP32, 1), `inputs[0].name: the runner has no "z"; it has x, order`},
		"another datatype":   {tensorSpec("x", tensor.Int8, -1, 64), "inputs[0].datatype: INT8, the runner declares FP32"},
		"another extent":     {tensorSpec("x", tensor.FP32, -1, 63), "inputs[0].shape: [-1, 63] is not one of the runner's [-1, 64]"},
		"another rank":       {tensorSpec("x", tensor.FP32, 64), "inputs[0].shape: "},
		"wider":              {tensorSpec("x", tensor.FP32, -1, -1), "inputs[0].shape: "},
		"a blob":             {jsonSpec("x", "", "image/png"), "inputs[0].content_types: the runner declares that it is a tensor FP32[-1, 64]"},
		"JSON":               {jsonSpec("x", "{}"), "inputs[0].schema: the runner declares that it is a tensor"},
		"a tensor":           {tensorSpec("order", tensor.FP32, 1), "inputs[0].datatype: FP32, the runner declares that it is a blob of type application/json or image/*"},
		"another type":       {jsonSpec("order", "", "image/png", "text/plain"), "inputs[0].content_types: text/plain is not one of the runner's application/json, image/*"},
		"another schema":     {jsonSpec("order", `{"type":"array"}`), "inputs[0].schema: the runner has one of its own"},
		"what is not needed": {runner.PartSpec{Name: "order", Optional: true}, "inputs[0].optional: the runner wants it"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := schema.Complete(declared, list(test.add), nil)
			if err == nil || !strings.HasPrefix(err.Error(), test.wantText) {
				t.Errorf("got %v; want %s", err, test.wantText)
			}
			if _, err := schema.Complete(runner.Spec{Outputs: declared.Inputs}, nil, list(test.add)); err == nil || !strings.HasPrefix(err.Error(), "outputs[0].") {
				t.Errorf("as an output: %v", err)
			}
		})
	}
	if got, err := schema.Complete(declared, list(jsonSpec("order", `{ "type" : "object" }`)), nil); err != nil || len(got.Inputs) != 2 {
		t.Errorf("the same schema in another format: %v", err)
	}
}

func TestInvalidPartsAreRejectedByKey(t *testing.T) {
	t.Parallel()
	typed := tensorSpec("x", tensor.FP32, 1)
	typed.ContentTypes = []string{"image/png"}
	schemed := tensorSpec("x", tensor.FP32, 1)
	schemed.Schema = json.RawMessage("{}")
	for name, test := range map[string]struct {
		parts    []runner.PartSpec
		wantText string
	}{
		"no name":                  {list(jsonSpec("", "")), "inputs[0].name: "},
		"a long name":              {list(jsonSpec(strings.Repeat("x", 300), "")), "inputs[0].name: "},
		"a name twice":             {list(jsonSpec("x", ""), jsonSpec("x", "")), `inputs[1].name: "x" is there twice`},
		"no datatype":              {list(tensorSpec("x", "FLOAT", 1)), `inputs[0].datatype: unknown "FLOAT"`},
		"a shape of no tensor":     {list(tensorSpec("x", "", 1)), "inputs[0].shape: without a datatype"},
		"a negative extent":        {list(tensorSpec("x", tensor.FP32, -2)), "inputs[0].shape: an extent of -2"},
		"too many axes":            {list(tensorSpec("x", tensor.FP32, make([]int64, 17)...)), "inputs[0].shape: 17 axes"},
		"a tensor with types":      {list(typed), "inputs[0].content_types: a tensor has none"},
		"a tensor with schema":     {list(schemed), "inputs[0].schema: it is for the JSON of a blob"},
		"what is not a media type": {list(jsonSpec("x", "", "json")), `inputs[0].content_types: "json" is not a media type`},
		"a schema that is none":    {list(jsonSpec("x", `{"type":1}`)), `inputs[0].schema: of "x": it is not a JSON Schema: schema.type: `},
		"too many":                 {make([]runner.PartSpec, 1000), "inputs: 1000, at most"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := schema.ValidParts("inputs", test.parts); err == nil || !strings.HasPrefix(err.Error(), test.wantText) {
				t.Errorf("got %v; want %s", err, test.wantText)
			}
		})
	}
	if err := schema.ValidParts("inputs", list(jsonSpec("a", `{}`, "application/json; v=1", "image/*", "*/*"), tensorSpec("b", tensor.Bytes))); err != nil {
		t.Errorf("valid parts are rejected: %v", err)
	}
}
