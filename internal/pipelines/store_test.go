package pipelines_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/pipelines"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func of(names ...string) []pipeline.Pipeline {
	out := make([]pipeline.Pipeline, len(names))
	for i, name := range names {
		out[i] = pipeline.Pipeline{Name: pipeline.Name(name), Steps: []pipeline.Step{{Name: "one", Stage: "echo"}}}
	}
	return out
}

// ofModel returns a pipeline whose step names a model.
func ofModel(ref payload.ModelRef) []pipeline.Pipeline {
	out := of("a")
	out[0].Steps[0].Model = ref
	return out
}

func serving(t testing.TB, names ...string) *pipelines.Store {
	t.Helper()
	c, err := pipelines.New(pipelines.Settings{Seeds: of(names...)})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestPipelinesAreFoundByName(t *testing.T) {
	t.Parallel()
	c := serving(t, "b", "a")
	p, f := c.Resolve("a")
	if f != nil || p.Name != "a" || len(p.Steps) != 1 {
		t.Errorf("got %v, %v", p, f)
	}
	if all := c.List(); len(all) != 2 || all[0].Pipeline.Name != "a" || all[1].Pipeline.Name != "b" {
		t.Errorf("lists %v", all)
	}
}

func TestEveryStageIsAPipeline(t *testing.T) {
	t.Parallel()
	p, f := serving(t).Resolve("stage:topk")
	if f != nil || p.Name != "stage:topk" || len(p.Steps) != 1 || p.Steps[0].Stage != "topk" {
		t.Errorf("got %v, %v", p, f)
	}
}

func TestUnknownNameListsTheKnownOnes(t *testing.T) {
	t.Parallel()
	many := make([]string, 12)
	for i := range many {
		many[i] = fmt.Sprintf("p%02d", i)
	}
	tests := map[string]struct {
		have []string
		name string
		want string
	}{
		"a typo":            {[]string{"digits", "faces"}, "digit", `there is no pipeline "digit"; there is digits, faces`},
		"other case":        {[]string{"digits"}, "Digits", `there is no pipeline "Digits"`},
		"nothing served":    {nil, "digits", "there is none"},
		"no name":           {[]string{"digits"}, "", `there is no pipeline ""`},
		"many served":       {many, "x", "p08, p09, and 2 more"},
		"no stage's name":   {nil, "stage:", `pipeline "stage:"`},
		"a bad stage":       {nil, "stage:a.b", `pipeline "stage:a.b": stage name "a.b"`},
		"a long name":       {nil, strings.Repeat("\x00", 1<<20), "there is no pipeline"},
		"a long stage name": {nil, "stage:" + strings.Repeat("x", 1<<20), `pipeline "stage:xxx`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, f := serving(t, test.have...).Resolve(test.name)
			if f == nil || f.Reason != fault.UnknownPipeline || !strings.Contains(f.Message, test.want) || p.Steps != nil {
				t.Errorf("got %v, %v; want %q", p, f, test.want)
			}
			if f != nil && len(f.Message) > 1<<10 {
				t.Errorf("the message has %d bytes", len(f.Message))
			}
		})
	}
}

func TestInvalidSeedsAreRejected(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		served []pipeline.Pipeline
		want   string
	}{
		"not valid":            {[]pipeline.Pipeline{{Name: "a"}}, "pipeline a: steps"},
		"two of a name":        {of("a", "b", "a"), "pipeline a: two pipelines"},
		"the prefix of stages": {of("stage:echo"), "pipeline stage:echo"},
		"a model by two names": {ofModel(payload.ModelRef{Model: "resnet", Alias: "prod"}), "pipeline a: steps[0]: model: names"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if c, err := pipelines.New(pipelines.Settings{Seeds: test.served}); err == nil || c != nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

// Callers can make up names, which must not become series of a metric.
func TestLabelsAreFew(t *testing.T) {
	t.Parallel()
	c := serving(t, "digits")
	for name, want := range map[string]string{
		"digits": "digits", "stage:echo": "stage:", "stage:" + strings.Repeat("x", 100): "stage:", "made-up": "unknown", "": "unknown",
	} {
		if got := c.Label(name); got != want {
			t.Errorf("label of %q is %q, want %q", name, got, want)
		}
	}
}
