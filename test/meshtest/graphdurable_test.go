package meshtest_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
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

// durableBed has stages that count what they run, and a stage "hold" that holds what is not negative
// until it is released.
type durableBed struct {
	*meshtest.Bed

	t       *testing.T
	started chan struct{}
	ended   chan struct{}
	release chan struct{}
	// bus is a connection of the test's own.
	bus *bus.Bus

	mu   sync.Mutex
	runs map[string]int
}

func newDurableBed(t *testing.T, edits ...func(*stagehost.Settings)) *durableBed {
	t.Helper()
	b := &durableBed{
		Bed: meshtest.New(t), t: t, runs: map[string]int{},
		started: make(chan struct{}, 100), ended: make(chan struct{}, 100), release: make(chan struct{}),
	}
	b.bus = b.Broker.Connect(meshtest.Mesh)
	patient := func(h *stagehost.Settings) { h.Queue.AckWait = time.Minute }
	host := func(name, output string, answer func(map[string][]float32) ([]float32, error), inputs ...string) {
		b.Host(pipeline.StageName(name), numbers(output, func(in map[string][]float32) ([]float32, error) {
			b.count(fmt.Sprint(name, in))
			return answer(in)
		}, inputs...), append(edits, patient)...)
	}
	host("add", "y", func(in map[string][]float32) ([]float32, error) { return []float32{in["x"][0] + 1}, nil }, "x")
	host("double", "z", func(in map[string][]float32) ([]float32, error) { return []float32{2 * in["x"][0]}, nil }, "x")
	host("sum", "s", func(in map[string][]float32) ([]float32, error) { return []float32{in["a"][0] + in["b"][0]}, nil }, "a", "b")
	host("fail", "w", func(map[string][]float32) ([]float32, error) {
		return nil, fault.New(fault.RunnerFailed, "it always does")
	}, "x")
	part := []runner.PartSpec{{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1}}}
	held := []runner.PartSpec{{Name: "h", Datatype: tensor.FP32, Shape: []int64{-1}}}
	b.Host("hold", inproc.Each(inproc.Settings{Concurrency: 16, Spec: runner.Spec{BatchAxis: runner.BatchNone, Inputs: part, Outputs: held}}, func(ctx context.Context, item runner.Item) ([]payload.Part, error) {
		values, err := item.Inputs[0].Tensor.FP32Values()
		if err != nil {
			return nil, err
		}
		b.count(fmt.Sprint("hold", values))
		if values[0] >= 0 {
			b.started <- struct{}{}
			select {
			case <-b.release:
			case <-ctx.Done():
				b.ended <- struct{}{}
				return nil, ctx.Err()
			}
		}
		return []payload.Part{vector("h", values...)}, nil
	}), append(edits, patient, func(h *stagehost.Settings) {
		h.Batch.MaxSize = 1 // else an item may wait behind one that is held
	})...)
	return b
}

func (b *durableBed) count(what string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.runs[what]++
}

// checkRanOnce checks that nothing ran twice, and which stages ran how often.
func (b *durableBed) checkRanOnce(stages map[string]int) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	got := map[string]int{}
	for what, n := range b.runs {
		if n != 1 {
			b.t.Errorf("%s ran %d times", what, n)
		}
		stage, _, _ := strings.Cut(what, "map")
		stage, _, _ = strings.Cut(stage, "[")
		got[stage]++
	}
	if fmt.Sprint(got) != fmt.Sprint(stages) {
		b.t.Errorf("the stages ran %v, want %v", got, stages)
	}
}

// linked returns a gateway's edit by which it reaches the broker over a link.
func (b *durableBed) linked() (*testbed.Link, func(*gateway.Settings)) {
	link := testbed.StartLink(b.t, strings.TrimPrefix(b.Broker.URL(), "nats://"))
	return link, func(s *gateway.Settings) { s.Bus.URL = "nats://" + link.Addr() }
}

// awaitStored waits until so many results and records are stored.
func (b *durableBed) awaitStored(n uint64) {
	b.t.Helper()
	testbed.Eventually(b.t, "nothing else is stored", func() bool {
		info, err := b.bus.JetStream().Stream(b.t.Context(), b.bus.ResultStream())
		return err == nil && info.CachedInfo().State.Msgs == n
	})
}

func listOf(t *testing.T, values ...float32) payload.Part {
	t.Helper()
	out, err := tensor.FromFP32([]int64{int64(len(values)), 1}, values)
	if err != nil {
		t.Fatal(err)
	}
	return payload.OfTensor("list", out)
}

func branch(all ...pipeline.Step) pipeline.Branch { return pipeline.Branch{Steps: all} }

func parallel(branches map[string]pipeline.Branch) pipeline.Block {
	return pipeline.Block{Parallel: &pipeline.Parallel{Branches: branches}}
}

// A gateway is cut off in the middle of a request, with some branches that have ended and one that runs.
// Another one goes on, runs nothing again that was sent, and both answer the same.
func TestDurableBlocksOutliveTheirGateway(t *testing.T) {
	t.Parallel()
	sum := step("sum", "a", "y", "b", "h")
	above := &pipeline.Predicate{Part: "y", Above: new(float64(0))}
	for name, test := range map[string]struct {
		steps  []pipeline.Step
		inputs []payload.Part
		// held is how many items wait in "hold".
		held   int
		output string
		want   []float32
		runs   map[string]int
	}{
		"parallel": {
			steps:  steps(block("both", parallel(map[string]pipeline.Branch{"l": branch(step("add")), "r": branch(step("hold"))})), sum),
			inputs: []payload.Part{vector("x", 3)}, held: 1, output: "s", want: []float32{7},
			runs: map[string]int{"add": 1, "hold": 1, "sum": 1},
		},
		"map": {
			steps: steps(block("each", pipeline.Block{Map: &pipeline.Map{
				Over: map[string]string{"x": "list"}, Steps: steps(step("hold", "x", "x"), step("add", "x", "h")),
			}})),
			inputs: []payload.Part{listOf(t, -5, 4, -6, 7)}, held: 2, output: "y", want: []float32{-4, 5, -5, 8},
			runs: map[string]int{"hold": 4, "add": 4},
		},
		"switch": {
			steps: steps(step("add"), block("which", pipeline.Block{Switch: []pipeline.Case{
				{When: above, Steps: steps(step("hold", "x", "y"), step("double", "x", "h"))}, {Else: steps(step("fail"))},
			}})),
			inputs: []payload.Part{vector("x", 3)}, held: 1, output: "z", want: []float32{8},
			runs: map[string]int{"add": 1, "hold": 1, "double": 1},
		},
		"try": {
			steps: steps(block("maybe", pipeline.Block{Try: &pipeline.Try{
				Steps: steps(step("add"), step("fail", "x", "y")), On: []fault.Reason{fault.RunnerFailed}, Else: steps(step("hold"), step("double", "x", "h")),
			}})),
			inputs: []payload.Part{vector("x", 3)}, held: 1, output: "z", want: []float32{6},
			runs: map[string]int{"add": 1, "fail": 1, "hold": 1, "double": 1},
		},
		"a late branch": {
			steps: steps(block("both", pipeline.Block{Parallel: &pipeline.Parallel{Within: time.Second, Branches: map[string]pipeline.Branch{
				"l": branch(step("add")), "r": {Steps: steps(step("hold")), Missing: map[string]pipeline.Constant{"h": {Datatype: tensor.FP32, Data: []payload.Value{payload.Double(-1)}}}},
			}}}), step("hold-2", "x", "y"), step("sum", "a", "y", "b", "h")),
			inputs: []payload.Part{vector("x", 3)}, held: 2, output: "s", want: []float32{8},
			runs: map[string]int{"add": 1, "hold": 2, "sum": 1},
		},
		"nested": {
			steps: steps(block("both", parallel(map[string]pipeline.Branch{
				"l": branch(block("each", pipeline.Block{Map: &pipeline.Map{Over: map[string]string{"x": "list"}, Steps: steps(step("double", "x", "x"))}})),
				"r": branch(block("share", pipeline.Block{Split: &pipeline.Split{Branches: map[string]pipeline.Branch{
					"a": {Weight: 50, Steps: steps(step("add", "x", "x"), step("hold", "x", "y"))},
					"b": {Weight: 50, Steps: steps(step("add-2", "x", "x"), step("hold-2", "x", "y"))},
				}}})),
			}))),
			inputs: []payload.Part{vector("x", 3), listOf(t, 1, 2)}, held: 1, output: "h", want: []float32{4},
			runs: map[string]int{"double": 2, "add": 1, "hold": 1},
		},
	} {
		for _, isJob := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", of a job: ", isJob), func(t *testing.T) {
				t.Parallel()
				bed := newDurableBed(t)
				link, cutOff := bed.linked()
				resumed := &testbed.Counts{}
				pipelines := []pipeline.Pipeline{{Name: "p", Timeout: time.Minute, Steps: test.steps}}
				first := bed.Gateway(pipelines, cutOff)
				second := bed.Gateway(pipelines, func(s *gateway.Settings) { s.Call.Meter = resumed })
				r := &request.Request{Pipeline: "p", ID: pipeline.RequestID(uuid.NewString()), Inputs: test.inputs, Durability: pipeline.File}
				if isJob {
					r.Durability, r.StoreResult = pipeline.Memory, true
				}
				asked := send(t.Context(), first, r)
				for range test.held {
					testbed.Receive(t, "a step is held", bed.started)
				}
				link.Cut()
				testbed.Eventually(t, "the other gateway takes over", func() bool { return resumed.Of("stagemesh.graph.resumed p") == 1 })
				close(bed.release)
				stored, err := second.Service().Result(t.Context(), string(r.ID), testbed.Patience)
				if err != nil {
					t.Fatal(err)
				}
				if got := valuesOf(t, stored.Outputs, test.output); !slices.Equal(got, test.want) {
					t.Errorf("stored is %v, want %v", got, test.want)
				}
				link.Mend()
				a := await(t, asked).checkOK(t)
				if got := valuesOf(t, a.response.Outputs, test.output); !slices.Equal(got, test.want) {
					t.Errorf("the caller's answer is %v, want %v", got, test.want)
				}
				bed.checkRanOnce(test.runs)
				bed.awaitStored(1)
			})
		}
	}
}

// held starts a durable request that is held after its first step, by a gateway.
func (b *durableBed) held(ctx context.Context, g meshtest.Gateway, timeout time.Duration) (id string, asked <-chan answer) {
	b.t.Helper()
	r := &request.Request{Pipeline: "p", ID: pipeline.RequestID(uuid.NewString()), Inputs: []payload.Part{vector("x", 3)}, Durability: pipeline.File, Timeout: timeout}
	asked = send(ctx, g, r)
	testbed.Receive(b.t, "a step is held", b.started)
	return string(r.ID), asked
}

// simple is add, then hold beside double, then sum.
func simple() []pipeline.Pipeline {
	return []pipeline.Pipeline{{Name: "p", Timeout: time.Minute, Steps: steps(
		step("add"), block("both", parallel(map[string]pipeline.Branch{"l": branch(step("double", "x", "y")), "r": branch(step("hold", "x", "y"))})), step("sum", "a", "z", "b", "h"),
	)}}
}

func TestDurableBlocksOutliveTheirCaller(t *testing.T) {
	t.Parallel()
	bed := newDurableBed(t)
	g := bed.Gateway(simple())
	ctx, leave := context.WithCancel(t.Context())
	id, asked := bed.held(ctx, g, 0)
	leave()
	await(t, asked).checkFault(t, fault.Cancelled)
	close(bed.release)
	stored, err := g.Service().Result(t.Context(), id, testbed.Patience)
	if err != nil {
		t.Fatal(err)
	}
	if got := valuesOf(t, stored.Outputs, "s"); got[0] != 12 {
		t.Errorf("stored is %v", got)
	}
	bed.checkRanOnce(map[string]int{"add": 1, "double": 1, "hold": 1, "sum": 1})
	bed.awaitStored(1)
}

func TestDurableBlocksOutliveTheBroker(t *testing.T) {
	t.Parallel()
	bed := newDurableBed(t)
	g := bed.Gateway(simple())
	_, asked := bed.held(t.Context(), g, 0)
	bed.Broker.Stop()
	bed.Broker.Restore()
	close(bed.release)
	a := await(t, asked).checkOK(t)
	if got := valuesOf(t, a.response.Outputs, "s"); got[0] != 12 {
		t.Errorf("answered with %v", got)
	}
	bed.checkRanOnce(map[string]int{"add": 1, "double": 1, "hold": 1, "sum": 1})
	bed.awaitStored(1)
}

func TestCancelReachesDurableBlocks(t *testing.T) {
	t.Parallel()
	bed := newDurableBed(t)
	first, second := bed.Gateway(simple()), bed.Gateway(nil)
	id, asked := bed.held(t.Context(), first, 0)
	if err := second.Service().Cancel(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	await(t, asked).checkFault(t, fault.Cancelled)
	testbed.Receive(t, "the step is cancelled", bed.ended)
	if _, err := second.Service().Result(t.Context(), id, testbed.Patience); meshtest.FaultOf(err) == nil || meshtest.FaultOf(err).Reason != fault.Cancelled {
		t.Errorf("stored is %v", err)
	}
	testbed.Eventually(t, "there is no record", func() bool {
		all, err := store.NewResults(bed.bus, store.Settings{}).Graphs(t.Context())
		return err == nil && len(all) == 0
	})
}

func TestDeadlinePassesWithoutAGateway(t *testing.T) {
	t.Parallel()
	bed := newDurableBed(t)
	link, cutOff := bed.linked()
	first := bed.Gateway(simple(), cutOff)
	id, asked := bed.held(t.Context(), first, 10*time.Second)
	link.Cut()
	await(t, asked).checkFault(t, fault.DeadlineExceeded)
	second := bed.Gateway(nil)
	if _, err := second.Service().Result(t.Context(), id, testbed.Patience); meshtest.FaultOf(err) == nil || meshtest.FaultOf(err).Reason != fault.DeadlineExceeded {
		t.Errorf("stored is %v", err)
	}
	link.Mend()
}

// What cannot be stored is refused before anything runs.
func TestFullStoreRejectsDurableBlocks(t *testing.T) {
	t.Parallel()
	settings := store.Settings{MaxBytes: 128 << 10}
	bed := newDurableBed(t, func(h *stagehost.Settings) { h.Results = settings })
	g := bed.Gateway(simple(), func(s *gateway.Settings) { s.Call.Results = settings })
	results := store.NewResults(bed.bus, settings)
	if err := results.Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	other := pipeline.RequestID(uuid.NewString())
	if _, err := bed.bus.JetStream().Publish(t.Context(), bed.bus.Result(other), make([]byte, 120<<10)); err != nil {
		t.Fatal(err)
	}
	ask := func(x float32) answer {
		return infer(t.Context(), g, &request.Request{Pipeline: "p", Inputs: []payload.Part{vector("x", x)}, Durability: pipeline.File})
	}
	ask(-9).checkFault(t, fault.Overloaded)
	bed.checkRanOnce(map[string]int{})
	results.Delete(other)
	testbed.Eventually(t, "there is space", func() bool { return ask(-9).fault == nil })
}
