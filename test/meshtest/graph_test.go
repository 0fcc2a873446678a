package meshtest_test

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// numbers is a stage without rows that answers with one FP32 part made of its inputs.
func numbers(output string, answer func(map[string][]float32) ([]float32, error), inputs ...string) runner.Runner {
	part := func(name string) runner.PartSpec {
		return runner.PartSpec{Name: name, Datatype: tensor.FP32, Shape: []int64{-1}}
	}
	spec := runner.Spec{BatchAxis: runner.BatchNone, Outputs: []runner.PartSpec{part(output)}}
	for _, name := range inputs {
		spec.Inputs = append(spec.Inputs, part(name))
	}
	return inproc.Each(inproc.Settings{Spec: spec, Concurrency: 4}, func(_ context.Context, item runner.Item) ([]payload.Part, error) {
		in := map[string][]float32{}
		for _, p := range item.Inputs {
			values, err := p.Tensor.FP32Values()
			if err != nil {
				return nil, err
			}
			in[p.Name] = values
		}
		values, err := answer(in)
		if err != nil {
			return nil, err
		}
		return []payload.Part{vector(output, values...)}, nil
	})
}

func vector(name string, values ...float32) payload.Part {
	t, err := tensor.FromFP32([]int64{int64(len(values))}, values)
	if err != nil {
		panic(err)
	}
	return payload.OfTensor(name, t)
}

func valuesOf(t *testing.T, parts []payload.Part, name string) []float32 {
	t.Helper()
	part, is := payload.Find(parts, name)
	if !is || part.Tensor == nil {
		t.Fatalf("there is no tensor %s among %v", name, parts)
	}
	values, err := part.Tensor.FP32Values()
	if err != nil {
		t.Fatal(err)
	}
	return values
}

func step(name string, inputs ...string) pipeline.Step {
	out := pipeline.Step{Name: pipeline.StepName(name), Stage: pipeline.StageName(strings.Split(name, "-")[0])}
	for i := 0; i+1 < len(inputs); i += 2 {
		if out.Inputs == nil {
			out.Inputs = map[string]string{}
		}
		out.Inputs[inputs[i]] = inputs[i+1]
	}
	return out
}

func steps(all ...pipeline.Step) []pipeline.Step { return all }

func block(name string, b pipeline.Block) pipeline.Step {
	return pipeline.Step{Name: pipeline.StepName(name), Block: b}
}

// graphBed has the stages of the tests: add gives x plus one, double twice x, sum a plus b, fail fails
// for what is negative.
func graphBed(bed *meshtest.Bed) {
	each := func(f func(float32) float32) func(map[string][]float32) ([]float32, error) {
		return func(in map[string][]float32) ([]float32, error) {
			out := slices.Clone(in["x"])
			for i := range out {
				out[i] = f(out[i])
			}
			return out, nil
		}
	}
	bed.Host("add", numbers("y", each(func(x float32) float32 { return x + 1 }), "x"))
	bed.Host("double", numbers("z", each(func(x float32) float32 { return 2 * x }), "x"))
	bed.Host("sum", numbers("s", func(in map[string][]float32) ([]float32, error) {
		return []float32{in["a"][0] + in["b"][0]}, nil
	}, "a", "b"))
	bed.Host("fail", numbers("w", func(in map[string][]float32) ([]float32, error) {
		if in["x"][0] < 0 {
			return nil, fault.Newf(fault.RunnerFailed, "%v is negative", in["x"][0])
		}
		return in["x"], nil
	}, "x"))
}

// checkBranches checks the branches of a timeline.
func checkBranches(t *testing.T, a answer, want ...string) {
	t.Helper()
	var got []string
	for _, b := range a.response.Timeline.Branches {
		text := strings.Join(slices.DeleteFunc([]string{b.Path, b.Block, b.Status}, func(s string) bool { return s == "" }), " ")
		if b.Items > 0 {
			text += fmt.Sprintf(" %d of %d", b.Failed, b.Items)
		}
		if b.Why != "" {
			text += ": " + b.Why
		}
		got = append(got, text)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("the branches are %q, want %q", got, want)
	}
}

func TestBlocksAnswer(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		graphBed(bed)
		score := &pipeline.Predicate{Part: "x", Above: new(float64(0))}
		g := bed.Gateway([]pipeline.Pipeline{
			{Name: "parallel", Steps: steps(
				step("add"),
				block("both", pipeline.Block{Parallel: &pipeline.Parallel{Branches: map[string]pipeline.Branch{
					"left":  {Steps: steps(step("double", "x", "y"), step("add-2", "x", "z")), Give: map[string]string{"l": "y"}},
					"right": {Steps: steps(step("fail", "x", "x")), Missing: map[string]pipeline.Constant{"w": {Data: []payload.Value{payload.Double(-7)}}}},
				}}}),
				step("sum", "a", "l", "b", "w"),
			), Outputs: []string{"s", "l"}},
			{Name: "switch", Steps: steps(block("which", pipeline.Block{Switch: []pipeline.Case{
				{When: score, Steps: steps(step("add"))},
				{When: &pipeline.Predicate{Part: "x", Below: new(float64(-100))}, Fail: &pipeline.Failure{Reason: fault.InvalidInput, Message: "too small"}},
				{Else: steps(step("double"))},
			}}))},
			{Name: "try", Steps: steps(block("maybe", pipeline.Block{Try: &pipeline.Try{
				Steps: steps(step("fail")), On: []fault.Reason{fault.RunnerFailed}, Else: steps(step("double")),
			}}))},
			{Name: "map", Steps: steps(block("each", pipeline.Block{Map: &pipeline.Map{
				Over: map[string]string{"x": "list"}, MaxItems: 100, Steps: steps(step("add"), step("fail", "x", "y")), Give: map[string]string{"ws": "w"},
				OnItemError: pipeline.OmitItems, Indices: "which",
			}}))},
			{Name: "split", Steps: steps(block("either", pipeline.Block{Split: &pipeline.Split{Branches: map[string]pipeline.Branch{
				"a": {Weight: 30, Steps: steps(step("add"))}, "b": {Weight: 70, Steps: steps(step("add-2"))},
			}}}))},
		})
		ask := func(t *testing.T, name string, inputs ...payload.Part) answer {
			t.Helper()
			return infer(t.Context(), g, &request.Request{Pipeline: name, Inputs: inputs})
		}
		check := func(t *testing.T, got []float32, want ...float32) {
			t.Helper()
			if !slices.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		}
		t.Run("parallel", func(t *testing.T) {
			a := ask(t, "parallel", vector("x", 3)).checkOK(t)
			check(t, valuesOf(t, a.response.Outputs, "s"), 12)
			check(t, valuesOf(t, a.response.Outputs, "l"), 9)
			var paths []string
			for _, s := range a.response.Timeline.Steps {
				paths = append(paths, s.Path)
			}
			slices.Sort(paths)
			if want := []string{"add", "both/left/add-2", "both/left/double", "both/right/fail", "sum"}; !slices.Equal(paths, want) {
				t.Errorf("the timeline has %v, want %v", paths, want)
			}
			a = ask(t, "parallel", vector("x", -3)).checkOK(t)
			check(t, valuesOf(t, a.response.Outputs, "s"), -10)
			if got := a.response.Metadata[request.Partial]; got != "both/right" {
				t.Errorf("partial is %q, want both/right", got)
			}
			checkBranches(t, a, "both/left done", "both parallel done", "both/right failed: RUNNER_FAILED")
			infer(t.Context(), g, &request.Request{Pipeline: "parallel", Inputs: []payload.Part{vector("x", 3)}, IsComplete: true}).checkOK(t)
			infer(t.Context(), g, &request.Request{Pipeline: "parallel", Inputs: []payload.Part{vector("x", -3)}, IsComplete: true}).checkFault(t, fault.RunnerFailed)
		})
		t.Run("switch", func(t *testing.T) {
			check(t, valuesOf(t, ask(t, "switch", vector("x", 3)).checkOK(t).response.Outputs, "y"), 4)
			a := ask(t, "switch", vector("x", -3)).checkOK(t)
			check(t, valuesOf(t, a.response.Outputs, "z"), -6)
			checkBranches(t, a, "which switch done", "which/1 skipped: x is -3", "which/2 skipped: x is -3", "which/else done")
			ask(t, "switch", vector("x", -300)).checkFault(t, fault.InvalidInput)
			ask(t, "switch", vector("x", 1, 2)).checkFault(t, fault.InvalidInput)
		})
		t.Run("try", func(t *testing.T) {
			check(t, valuesOf(t, ask(t, "try", vector("x", 3)).checkOK(t).response.Outputs, "w"), 3)
			check(t, valuesOf(t, ask(t, "try", vector("x", -3)).checkOK(t).response.Outputs, "z"), -6)
		})
		t.Run("map", func(t *testing.T) {
			list := make([]float32, 100)
			for i := range list {
				list[i] = float32(i - 11)
			}
			in, err := tensor.FromFP32([]int64{100, 1}, list)
			if err != nil {
				t.Fatal(err)
			}
			a := ask(t, "map", payload.OfTensor("list", in)).checkOK(t)
			got := valuesOf(t, a.response.Outputs, "ws")
			want := make([]float32, 90)
			for i := range want {
				want[i] = float32(i)
			}
			check(t, got, want...)
			if part, _ := payload.Find(a.response.Outputs, "ws"); fmt.Sprint(part.Tensor.Shape) != "[90 1]" {
				t.Errorf("the shape is %v", part.Tensor.Shape)
			}
			if got := a.response.Metadata[request.Partial]; got != "each" {
				t.Errorf("partial is %q, want each", got)
			}
			checkBranches(t, a, "each map done 10 of 100")
			if factor := g.Service().FanFactors("map")["each"]; factor != 100 {
				t.Errorf("the fan factor is %v", factor)
			}
			infer(t.Context(), g, &request.Request{Pipeline: "map", Inputs: []payload.Part{payload.OfTensor("list", in)}, IsComplete: true}).checkFault(t, fault.RunnerFailed)
			empty, err := tensor.FromFP32([]int64{0, 1}, nil)
			if err != nil {
				t.Fatal(err)
			}
			ask(t, "map", payload.OfTensor("list", empty)).checkOK(t)
			long, err := tensor.FromFP32([]int64{101}, make([]float32, 101))
			if err != nil {
				t.Fatal(err)
			}
			ask(t, "map", payload.OfTensor("list", long)).checkFault(t, fault.InvalidInput)
		})
		t.Run("split", func(t *testing.T) {
			check(t, valuesOf(t, ask(t, "split", vector("x", 3)).checkOK(t).response.Outputs, "y"), 4)
		})
	})
}

// While a request runs its report names what runs, and afterwards how its branches ended.
func TestBlocksAreExplained(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		graphBed(bed)
		runs, ends := make(chan struct{}), make(chan struct{})
		bed.Host("wait", numbers("w", func(in map[string][]float32) ([]float32, error) {
			close(runs)
			<-ends
			return in["x"], nil
		}, "x"))
		g := bed.Gateway([]pipeline.Pipeline{{Name: "p", Steps: steps(
			block("which", pipeline.Block{Switch: []pipeline.Case{
				{When: &pipeline.Predicate{Part: "x", Above: new(float64(5))}, Steps: steps(step("add"))}, {Else: steps(step("double"))},
			}}),
			block("both", pipeline.Block{Parallel: &pipeline.Parallel{Branches: map[string]pipeline.Branch{
				"fast": {Steps: steps(step("add-2", "x", "x"))}, "slow": {Steps: steps(step("wait", "x", "x"))},
			}}}),
		)}}, withAdmin)
		answered := make(chan answer, 1)
		go func() {
			answered <- infer(context.WithoutCancel(t.Context()), g, &request.Request{Pipeline: "p", Inputs: []payload.Part{vector("x", 1)}})
		}()
		testbed.Receive(t, "a step runs", runs)
		id := ""
		testbed.Eventually(t, "the report says what runs", func() bool {
			requests, _ := g.Service().Requests(t.Context(), "", 100)
			for _, r := range requests {
				if len(r.GetStages()) > 1 {
					id = r.GetRequestId()
				}
			}
			text := strings.Join(mustExplain(t, g, id).GetSummary(), "\n")
			return regexp.MustCompile(`(?s)which took .*: 1 was skipped, since x is 1, else was done after .*both so far: fast was done after .*\nStep both/slow/wait has run for .*, as request [0-9a-f-]{36}\.`).MatchString(text)
		})
		close(ends)
		testbed.Receive(t, "an answer", answered).checkOK(t)
		text := strings.Join(mustExplain(t, g, id).GetSummary(), "\n")
		if !regexp.MustCompile(`(?s)which took .*: 1 was skipped, since x is 1, else was done after .*\nboth took .*: fast was done after .*, slow was done after`).MatchString(text) {
			t.Errorf("the report is\n%s", text)
		}
	})
}

// A branch that hangs ends with the block, and what waited for it is cancelled.
func TestLateBranchIsLeft(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		graphBed(bed)
		hangs := make(chan struct{})
		ended := make(chan struct{})
		bed.Host("hang", inproc.Each(inproc.Settings{Spec: runner.Spec{BatchAxis: runner.BatchNone}}, func(ctx context.Context, _ runner.Item) ([]payload.Part, error) {
			close(hangs)
			<-ctx.Done()
			close(ended)
			return nil, ctx.Err()
		}))
		g := bed.Gateway([]pipeline.Pipeline{{Name: "late", Steps: steps(
			block("both", pipeline.Block{Parallel: &pipeline.Parallel{Within: 500 * time.Millisecond, Branches: map[string]pipeline.Branch{
				"fast": {Steps: steps(step("add"))},
				"slow": {Steps: steps(step("hang")), Optional: true},
			}}}),
		)}})
		a := infer(t.Context(), g, &request.Request{Pipeline: "late", Inputs: []payload.Part{vector("x", 1)}}).checkOK(t)
		if got := valuesOf(t, a.response.Outputs, "y"); got[0] != 2 {
			t.Errorf("got %v", got)
		}
		if got := a.response.Metadata[request.Partial]; got != "both/slow" {
			t.Errorf("partial is %q, want both/slow", got)
		}
		<-hangs
		select {
		case <-ended:
		case <-t.Context().Done():
		case <-time.After(20 * time.Second):
			t.Error("the late branch still runs")
		}
	})
}

// What is true of every request is true of one with blocks: it is cancelled by its ID, its key means
// one run, it is refused at once where a stage that it needs has no host.
func TestRequestsWithBlocksAreRequests(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		graphBed(bed)
		started, ended := make(chan struct{}, 8), make(chan struct{}, 8)
		bed.Host("hang", inproc.Each(inproc.Settings{Concurrency: 4, Spec: runner.Spec{BatchAxis: runner.BatchNone}}, func(ctx context.Context, _ runner.Item) ([]payload.Part, error) {
			started <- struct{}{}
			<-ctx.Done()
			ended <- struct{}{}
			return nil, ctx.Err()
		}))
		bed.Host("slow", inproc.Each(inproc.Settings{}, func(_ context.Context, item runner.Item) ([]payload.Part, error) {
			<-time.After(time.Second) // the try's deadline allows another second on a busy machine
			return item.Inputs, nil
		}))
		two := func(first, second pipeline.Step, edit func(*pipeline.Branch)) pipeline.Block {
			b := pipeline.Branch{Steps: steps(second)}
			edit(&b)
			return pipeline.Block{Parallel: &pipeline.Parallel{Branches: map[string]pipeline.Branch{"a": {Steps: steps(first)}, "b": b}}}
		}
		same := func(*pipeline.Branch) {}
		optional := func(b *pipeline.Branch) { b.Optional = true }
		g := bed.Gateway([]pipeline.Pipeline{
			{Name: "hangs", Steps: steps(block("both", two(step("hang-1"), step("hang-2"), same)))},
			{Name: "hangs-alone", Steps: steps(step("add"), block("which", pipeline.Block{Switch: []pipeline.Case{{When: &pipeline.Predicate{Part: "y", Below: new(float64(0))}, Steps: steps(step("double"))}, {Else: steps(step("hang"))}}}))},
			{Name: "answers", Steps: steps(block("both", two(step("add"), step("double"), same)))},
			{Name: "lacks", Steps: steps(block("both", two(step("add"), step("nowhere"), same)))},
			{Name: "spares", Steps: steps(block("both", two(step("add"), step("nowhere"), optional)))},
			{Name: "tries", Steps: steps(block("maybe", pipeline.Block{Try: &pipeline.Try{
				Steps: steps(step("fail"), step("hang")), On: []fault.Reason{fault.RunnerFailed, fault.DeadlineExceeded}, Else: steps(step("slow")),
			}}))},
		})
		ask := func(r request.Request) answer {
			r.Inputs = []payload.Part{vector("x", 1)}
			return infer(t.Context(), g, &r)
		}
		t.Run("cancel", func(t *testing.T) {
			const id = "0190b0c0-0000-7000-8000-00000000000a"
			cancelled := make(chan answer, 1)
			go func() { cancelled <- ask(request.Request{Pipeline: "hangs", ID: id, IdempotencyKey: "c"}) }()
			testbed.Receive(t, "a step runs", started)
			testbed.Receive(t, "the other runs", started)
			if err := g.Service().Cancel(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			a := testbed.Receive(t, "the caller's answer", cancelled)
			a.checkFault(t, fault.Cancelled)
			testbed.Receive(t, "a step is cancelled", ended)
			testbed.Receive(t, "the other is cancelled", ended)
			if _, err := g.Service().Result(t.Context(), id, 0); meshtest.FaultOf(err) == nil || meshtest.FaultOf(err).Reason != fault.Cancelled {
				t.Errorf("stored is %v", err)
			}
		})
		t.Run("cancel of a step that runs alone", func(t *testing.T) {
			const id = "0190b0c0-0000-7000-8000-00000000000b"
			r := &request.Request{Pipeline: "hangs-alone", Inputs: []payload.Part{vector("x", 1)}}
			try := func(ctx context.Context, end func()) {
				t.Helper()
				answered := make(chan answer, 1)
				go func() { answered <- infer(ctx, g, r) }()
				testbed.Receive(t, "the step runs", started)
				end()
				a := testbed.Receive(t, "the caller's answer", answered)
				a.checkFault(t, fault.Cancelled)
				testbed.Receive(t, "the step is cancelled", ended)
			}
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			try(ctx, leave)
			r.ID = id
			try(t.Context(), func() {
				if err := g.Service().Cancel(t.Context(), id); err != nil {
					t.Error(err)
				}
			})
		})
		t.Run("deadline", func(t *testing.T) {
			for _, name := range []string{"hangs", "hangs-alone"} {
				a := ask(request.Request{Pipeline: name, Timeout: 300 * time.Millisecond})
				a.checkFault(t, fault.DeadlineExceeded)
			}
		})
		t.Run("deadline of a try", func(t *testing.T) {
			try := func(x float32) {
				t.Helper()
				a := infer(t.Context(), g, &request.Request{Pipeline: "tries", Inputs: []payload.Part{vector("x", x)}, Timeout: 6 * time.Second})
				a.checkOK(t)
			}
			try(-1) // fails, and shows how long else takes
			try(1)  // hangs, and leaves time for else
		})
		t.Run("key", func(t *testing.T) {
			first := ask(request.Request{Pipeline: "answers", IdempotencyKey: "k"})
			first.checkOK(t)
			again := ask(request.Request{Pipeline: "answers", IdempotencyKey: "k"})
			again.checkOK(t)
			if a, b := first.response.RequestID, again.response.RequestID; a != b {
				t.Errorf("one key has the requests %s and %s", a, b)
			}
			stored, err := g.Service().Result(t.Context(), first.response.RequestID, 0)
			if err != nil || len(stored.Outputs) != 2 {
				t.Errorf("stored is %+v, %v", stored, err)
			}
		})
		t.Run("no host", func(t *testing.T) {
			a := ask(request.Request{Pipeline: "lacks"})
			a.checkFault(t, fault.NoCapacity)
		})
		t.Run("no host for what may be absent", func(t *testing.T) {
			a := ask(request.Request{Pipeline: "spares"})
			a.checkOK(t)
			if got := a.response.Metadata[request.Partial]; got != "both/b" {
				t.Errorf("partial is %q, want both/b", got)
			}
		})
		t.Run("outputs", func(t *testing.T) {
			a := ask(request.Request{Pipeline: "answers", Outputs: []string{"z"}})
			a.checkOK(t)
			if len(a.response.Outputs) != 1 || a.response.Outputs[0].Name != "z" {
				t.Errorf("the outputs are %v", a.response.Outputs)
			}
			a = ask(request.Request{Pipeline: "answers", Outputs: []string{"q"}})
			a.checkFault(t, fault.InvalidRequest)
		})
	})
}

// Items that wait for places take all that become free, while the first of them still runs.
func TestItemsOfAMapTakeFreePlaces(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	started, ends := make(chan struct{}, 32), make(chan struct{})
	bed.Host("hold", inproc.Each(inproc.Settings{Concurrency: 32, Spec: runner.Spec{BatchAxis: runner.BatchNone}}, func(ctx context.Context, item runner.Item) ([]payload.Part, error) {
		started <- struct{}{}
		select {
		case <-ends:
		case <-ctx.Done():
		}
		return item.Inputs, ctx.Err()
	}), func(h *stagehost.Settings) { h.Batch.MaxSize = 1 })
	const places = 8
	g := bed.Gateway([]pipeline.Pipeline{{Name: "p", Timeout: time.Minute, Steps: steps(block("each", pipeline.Block{Map: &pipeline.Map{
		Over: map[string]string{"x": "list"}, Steps: steps(step("hold", "x", "x")),
	}}))}}, withAdmin, func(s *gateway.Settings) { s.MaxInFlight = places / 4 })
	ask := func(ctx context.Context, id pipeline.RequestID) <-chan answer {
		out := make(chan answer, 1)
		go func() {
			out <- infer(ctx, g, &request.Request{Pipeline: "p", ID: id, Inputs: []payload.Part{listOf(t, make([]float32, places)...)}})
		}()
		return out
	}
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	first := ask(ctx, "")
	for range places {
		testbed.Receive(t, "an item of the first runs", started)
	}
	const id = "0190b0c0-0000-7000-8000-00000000000c"
	second := ask(t.Context(), id)
	testbed.Eventually(t, "the items of the second wait", func() bool {
		all := mustExplain(t, g, id).GetBranches()
		return len(all) == places && !slices.ContainsFunc(all, func(b *inferencev1.BranchTiming) bool { return b.GetStatus() != "waiting" })
	})
	leave()
	for range places {
		testbed.Receive(t, "an item of the second runs", started)
	}
	close(ends)
	a := testbed.Receive(t, "the second's answer", second)
	a.checkOK(t)
	a = testbed.Receive(t, "the first's answer", first)
	a.checkFault(t, fault.Cancelled)
}

// Each item of a map has the whole parts that its steps read in a message of its own, and all of them
// count in the request's memory.
func TestMapCountsWhatItSends(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	bed.Host("hang", inproc.Each(inproc.Settings{Spec: runner.Spec{BatchAxis: runner.BatchNone}}, func(ctx context.Context, _ runner.Item) ([]payload.Part, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}))
	const size = 512 << 10
	g := bed.Gateway([]pipeline.Pipeline{{Name: "p", Timeout: 5 * time.Second, Steps: steps(block("each", pipeline.Block{Map: &pipeline.Map{
		Over: map[string]string{"x": "list"}, Steps: steps(step("hang", "picture", "picture")),
	}}))}}, func(s *gateway.Settings) { s.MaxPayload, s.MaxInFlightBytes = size+1024, 8*size })
	a := infer(t.Context(), g, &request.Request{Pipeline: "p", Inputs: []payload.Part{vector("list", make([]float32, 32)...), payload.OfBlob("picture", payload.OctetStream, make([]byte, size))}})
	a.checkFault(t, fault.PayloadTooLarge)
}

// Items are one path in what an answer says that it lacks, and an answer that cannot be stored is a
// fault that can.
func TestManyItemsAreOneAnswer(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t, func(o *server.Options) { o.MaxPayload = 256 << 10 })
	graphBed(bed)
	bed.Host("large", numbers("y", func(map[string][]float32) ([]float32, error) { return make([]float32, 16<<10), nil }, "x"))
	g := bed.Gateway([]pipeline.Pipeline{
		{Name: "lacks", Steps: steps(block("each", pipeline.Block{Map: &pipeline.Map{Over: map[string]string{"x": "list"}, Steps: steps(
			block("both", pipeline.Block{Parallel: &pipeline.Parallel{Branches: map[string]pipeline.Branch{
				"a": {Steps: steps(step("add"))}, "b": {Steps: steps(step("fail")), Optional: true},
			}}}),
		)}}))},
		{Name: "large", Steps: steps(block("each", pipeline.Block{Map: &pipeline.Map{Over: map[string]string{"x": "list"}, Steps: steps(step("large"))}}))},
	})
	list, err := tensor.FromFP32([]int64{8, 1}, []float32{-1, -2, -3, -4, -5, -6, -7, -8})
	if err != nil {
		t.Fatal(err)
	}
	ask := func(name string) answer {
		return infer(t.Context(), g, &request.Request{Pipeline: name, IdempotencyKey: name, Inputs: []payload.Part{payload.OfTensor("list", list)}})
	}
	for range 2 { // the second is stored
		if got := ask("lacks").checkOK(t).response.Metadata[request.Partial]; got != "each/both/b" {
			t.Errorf("partial is %q", got)
		}
		ask("large").checkFault(t, fault.OutputTooLarge)
	}
}

// A request is refused where the items that its map usually has would take longer than it has.
func TestItemsOfAMapCountAsWorkAhead(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	var ran atomic.Int64
	bed.Host("slow", inproc.Each(inproc.Settings{Spec: runner.Spec{BatchAxis: runner.BatchNone}}, func(_ context.Context, item runner.Item) ([]payload.Part, error) {
		ran.Add(1)
		<-time.After(10 * time.Millisecond)
		return item.Inputs, nil
	}))
	g := bed.Gateway([]pipeline.Pipeline{{Name: "map", Steps: steps(block("each", pipeline.Block{Map: &pipeline.Map{
		Over: map[string]string{"x": "list"}, MaxItems: 100, Steps: steps(step("slow")),
	}}))}})
	ask := func(timeout time.Duration) answer {
		return infer(t.Context(), g, &request.Request{Pipeline: "map", Inputs: []payload.Part{vector("list", make([]float32, 100)...)}, Timeout: timeout})
	}
	testbed.Eventually(t, "a request is refused for its items", func() bool {
		ask(time.Minute).checkOK(t) // takes a second, and shows how many items there are, and what they cost
		before := ran.Load()
		a := ask(200 * time.Millisecond)
		if a.fault == nil || a.fault.Reason != fault.Overloaded {
			return false
		}
		if a.fault.Stage != "slow" || a.fault.RetryAfter <= 0 || ran.Load() != before {
			t.Errorf("%v at %q, to be repeated after %s; %d items ran", a.fault, a.fault.Stage, a.fault.RetryAfter, ran.Load()-before)
		}
		return true
	})
}
