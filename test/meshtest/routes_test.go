package meshtest_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// show answers with one text part of the name that lists all of its inputs and
// its parameter "p".
func show(output string, inputs ...string) runner.Runner {
	spec := runner.Spec{Outputs: []runner.PartSpec{{Name: output}}}
	for _, name := range inputs {
		spec.Inputs = append(spec.Inputs, runner.PartSpec{Name: name})
	}
	return inproc.Each(inproc.Settings{Spec: spec}, func(_ context.Context, item runner.Item) ([]payload.Part, error) {
		var shown []string
		for _, part := range item.Inputs {
			shown = append(shown, part.Name+"="+string(part.Blob.Data))
		}
		slices.Sort(shown)
		if p, ok := item.Parameters["p"]; ok {
			shown = append(shown, fmt.Sprintf("p=%v", p))
		}
		return []payload.Part{payload.OfBlob(output, "text/plain", []byte("("+strings.Join(shown, " ")+")"))}, nil
	})
}

func named(name, text string) payload.Part { return payload.OfBlob(name, "text/plain", []byte(text)) }

func TestStepsGetTheInputsOfThePipeline(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		bed.Host("one", show("o", "x"))
		bed.Host("two", show("t", "a", "b"))
		bed.Host("any", show("n"))
		g := bed.Gateway([]pipeline.Pipeline{
			testbed.Pipeline("single", "one", "any"),
			{Name: "keep", Keep: []string{"image"}, Steps: []pipeline.Step{
				{Name: "first", Stage: "one", Inputs: map[string]string{"x": "image"}},
				{Name: "second", Stage: "two", Inputs: map[string]string{"a": "image", "b": "o"}},
			}},
			{Name: "far", Keep: []string{"image", "o"}, Steps: []pipeline.Step{
				{Name: "first", Stage: "one", Inputs: map[string]string{"x": "image"}},
				{Name: "second", Stage: "any"},
				{Name: "third", Stage: "two", Inputs: map[string]string{"a": "image", "b": "o"}},
			}},
			{Name: "twice", Steps: []pipeline.Step{
				{Name: "first", Stage: "one", Parameters: payload.Parameters{"p": payload.String("own")}},
				{Name: "second", Stage: "one", Parameters: payload.Parameters{"p": payload.String("own")}},
			}},
			{Name: "lacks", Steps: []pipeline.Step{{Name: "first", Stage: "one"}, {Name: "second", Stage: "two"}}},
		})
		for _, test := range []struct {
			name    string
			request request.Request
			want    string
			reason  fault.Reason
		}{
			{"a single part whatever its name", request.Request{Pipeline: "single", Inputs: []payload.Part{named("", "1")}}, "(o=(x=1))", ""},
			{"another single part", request.Request{Pipeline: "single", Inputs: []payload.Part{named("y", "1")}}, "(o=(x=1))", ""},
			{"one that nobody takes", request.Request{Pipeline: "single", Inputs: []payload.Part{named("y", "1"), named("x", "2")}}, "", fault.InvalidInput},
			{"two by their names", request.Request{Pipeline: "stage:two", Inputs: []payload.Part{named("b", "1"), named("a", "2")}}, "(a=2 b=1)", ""},
			{"none of two", request.Request{Pipeline: "single", Inputs: []payload.Part{named("y", "1"), named("z", "2")}}, "", fault.InvalidInput},
			{"kept for the next step", request.Request{Pipeline: "keep", Inputs: []payload.Part{named("image", "1")}}, "(a=1 b=(x=1))", ""},
			{"kept over a step", request.Request{Pipeline: "far", Inputs: []payload.Part{named("image", "1")}}, "(a=1 b=(x=1))", ""},
			{"a missing input", request.Request{Pipeline: "lacks", Inputs: []payload.Part{named("x", "1")}}, "", fault.InvalidInput},
			{"the pipeline's parameters", request.Request{Pipeline: "twice", Inputs: []payload.Part{named("x", "1")}}, "(x=(x=1 p=own) p=own)", ""},
			{
				"the request's parameters",
				request.Request{Pipeline: "twice", Inputs: []payload.Part{named("x", "1")}, Parameters: payload.Parameters{"p": payload.String("all")}},
				"(x=(x=1 p=all) p=all)", "",
			},
			{
				"a step's parameters",
				request.Request{
					Pipeline: "twice", Inputs: []payload.Part{named("x", "1")}, Parameters: payload.Parameters{"p": payload.String("all")},
					Steps: map[pipeline.StepName]pipeline.StepOptions{"second": {Parameters: payload.Parameters{"p": payload.Int64(2)}}},
				},
				"(x=(x=1 p=all) p=2)", "",
			},
			{
				"an unknown step",
				request.Request{Pipeline: "twice", Inputs: []payload.Part{named("x", "1")}, Steps: map[pipeline.StepName]pipeline.StepOptions{"third": {}}},
				"", fault.InvalidRequest,
			},
		} {
			t.Run(test.name, func(t *testing.T) {
				a := infer(t.Context(), g, &test.request)
				if test.reason != "" {
					a.checkFault(t, test.reason)
					return
				}
				if got := a.checkOK(t).text(); got != test.want {
					t.Errorf("answered %s, want %s", got, test.want)
				}
				if steps := a.response.Timeline.Steps; len(steps) == 0 || steps[len(steps)-1].Host == "" {
					t.Errorf("the timeline is %+v", steps)
				}
			})
		}
	})
}

func TestTooLargeOutputFailsItsRequest(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t, func(o *server.Options) { o.MaxPayload = 64 << 10 })
	counts := &testbed.Counts{}
	bed.Host("grow", each(func(context.Context, runner.Item) ([]payload.Part, error) {
		return []payload.Part{payload.OfBlob("", payload.OctetStream, make([]byte, 128<<10))}, nil
	}), func(s *stagehost.Settings) { s.Meter = counts })
	bed.Host("after", each(unchanged))
	g := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("last", "grow"), testbed.Pipeline("middle", "grow", "after")}, unhurried)
	for _, name := range []string{"last", "middle"} {
		t.Run(name, func(t *testing.T) {
			if f := await(t, send(t.Context(), g, requestFor(name, "x"))).want(t, fault.OutputTooLarge); f.Stage != "grow" {
				t.Errorf("stage %q", f.Stage)
			}
			if n := counts.Of("stagemesh.stage.send_retries"); n > 0 {
				t.Errorf("the output is sent again %d times", n)
			}
		})
	}
	r := requestFor("last", strings.Repeat("x", 128<<10))
	infer(t.Context(), g, r).checkFault(t, fault.PayloadTooLarge)
}
