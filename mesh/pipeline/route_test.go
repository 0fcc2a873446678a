package pipeline_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func manyParameters(prefix string, n int) payload.Parameters {
	out := payload.Parameters{}
	for i := range n {
		out[fmt.Sprint(prefix, i)] = payload.Bool(true)
	}
	return out
}

func TestRequestOverridesStepParameters(t *testing.T) {
	t.Parallel()
	word := payload.String
	p := pipeline.Pipeline{Name: "p", Steps: []pipeline.Step{
		{Name: "one", Stage: "a", Parameters: payload.Parameters{"of": word("pipeline"), "own": word("pipeline"), "all": word("pipeline")}},
		{Name: "two", Stage: "a"},
	}}
	route, err := p.Route(pipeline.Options{
		Parameters: payload.Parameters{"all": word("request"), "own": word("request"), "new": word("request")},
		Steps:      map[pipeline.StepName]pipeline.StepOptions{"one": {Parameters: payload.Parameters{"own": word("step"), "extra": word("step")}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := payload.Parameters{"of": word("pipeline"), "all": word("request"), "new": word("request"), "own": word("step"), "extra": word("step")}
	if got := route[0].Parameters; !maps.Equal(got, want) {
		t.Errorf("step one has %v, want %v", got, want)
	}
	want = payload.Parameters{"all": word("request"), "own": word("request"), "new": word("request")}
	if got := route[1].Parameters; !maps.Equal(got, want) {
		t.Errorf("step two has %v, want %v", got, want)
	}
	if p.Steps[0].Parameters["own"] != word("pipeline") || len(p.Steps[0].Parameters) != 3 {
		t.Errorf("the pipeline has changed: %v", p.Steps[0].Parameters)
	}
}

func TestRoutesOfOnePipelineShareNoParameters(t *testing.T) {
	t.Parallel()
	p := digits()
	first, err := p.Route(pipeline.Options{})
	if err != nil {
		t.Fatal(err)
	}
	first[0].Parameters["size"] = payload.Int64(9)
	second, err := p.Route(pipeline.Options{})
	if err != nil || second[0].Parameters["size"] != payload.Int64(8) {
		t.Errorf("got %v, %v", second, err)
	}
}

func TestRouteHasEveryStepInOrder(t *testing.T) {
	t.Parallel()
	route, err := digits().Route(pipeline.Options{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, hop := range route {
		got = append(got, fmt.Sprintf("%s@%s %v", hop.Step, hop.Stage, hop.Inputs))
	}
	want := []string{"decode@imagedecode map[]", "classify@onnx map[x:pixels]", "label@topk map[]"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestRequestOverridesTheModel(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		option pipeline.StepOptions
		want   payload.ModelRef
	}{
		"nothing said":   {pipeline.StepOptions{}, payload.ModelRef{Model: "digits"}},
		"another model":  {pipeline.StepOptions{Model: payload.ModelRef{Model: "letters"}}, payload.ModelRef{Model: "letters"}},
		"an alias":       {pipeline.StepOptions{Model: payload.ModelRef{Alias: "prod"}}, payload.ModelRef{Alias: "prod"}},
		"just a version": {pipeline.StepOptions{Model: payload.ModelRef{Version: "2"}}, payload.ModelRef{Version: "2"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			route, err := digits().Route(pipeline.Options{Steps: map[pipeline.StepName]pipeline.StepOptions{"classify": test.option}})
			if err != nil || route[1].Model != test.want || route[0].Model != (payload.ModelRef{}) {
				t.Errorf("got %v, %v; want %v", route, err, test.want)
			}
		})
	}
}

func TestPartsAreKeptUntilTheLastStep(t *testing.T) {
	t.Parallel()
	route, err := digits().Route(pipeline.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range [][]string{{"image"}, {"image"}, nil} {
		if !slices.Equal(route[i].Keep, want) {
			t.Errorf("step %s keeps %v, want %v", route[i].Step, route[i].Keep, want)
		}
	}
}

func TestOptionsForUnknownStepAreAnError(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ step, says string }{
		"another name":   {"lable", "steps.lable: pipeline digits has no such step; it has decode, classify, label"},
		"a stage's name": {"onnx", "steps.onnx: pipeline digits has no such step"},
		"a long name":    {strings.Repeat("x", 1<<20), "steps.xxx"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			route, err := digits().Route(pipeline.Options{Steps: map[pipeline.StepName]pipeline.StepOptions{pipeline.StepName(test.step): {}}})
			if err == nil || route != nil || !strings.HasPrefix(err.Error(), test.says) || len(err.Error()) > 1<<10 {
				t.Errorf("got %v, %v; want %q", route, err, test.says)
			}
		})
	}
}

// The bounds hold for what a host will see, else its envelope would be refused
// there as malformed, where nobody can answer the caller.
func TestTooManyParametersAreAnError(t *testing.T) {
	t.Parallel()
	half := payload.MaxParameters / 2
	options := func(own int) pipeline.Options {
		return pipeline.Options{
			Parameters: manyParameters("a", half),
			Steps:      map[pipeline.StepName]pipeline.StepOptions{"label": {Parameters: manyParameters("b", own)}},
		}
	}
	if _, err := digits().Route(options(half)); err != nil {
		t.Error(err)
	}
	if _, err := digits().Route(options(half + 1)); err == nil || !strings.HasPrefix(err.Error(), "steps.label: 257 parameters") {
		t.Errorf("got %v", err)
	}
	if _, err := digits().Route(pipeline.Options{Parameters: payload.Parameters{"p": payload.String("\xff")}}); err == nil {
		t.Error("a parameter that cannot be sent is accepted")
	}
}
