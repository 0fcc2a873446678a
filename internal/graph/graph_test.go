package graph_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/graph"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

var begin = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func vector(name string, values ...float32) payload.Part {
	t, err := tensor.FromFP32([]int64{int64(len(values))}, values)
	if err != nil {
		panic(err)
	}
	return payload.OfTensor(name, t)
}

func stage(name string) pipeline.Step {
	return pipeline.Step{Name: pipeline.StepName(name), Stage: pipeline.StageName(name)}
}

func block(name string, b pipeline.Block) pipeline.Step {
	return pipeline.Step{Name: pipeline.StepName(name), Block: b}
}

func unknown(pipeline.StageName) *stagev1.Spec { return nil }

// world runs a machine: it keeps what the machine has asked for, and checks each action against it.
type world struct {
	t       testing.TB
	m       *graph.Machine
	now     time.Time
	running map[int]graph.Start
	// paths are all that have been started.
	paths []string
}

func newWorld(t testing.TB, p *pipeline.Pipeline, inputs ...payload.Part) *world {
	t.Helper()
	return worldOf(t, p, graph.Request{Inputs: inputs})
}

// worldOf completes the request, and starts it.
func unknownDuration(pipeline.StepName) time.Duration { return 0 }

func worldOf(t testing.TB, p *pipeline.Pipeline, r graph.Request) *world {
	t.Helper()
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, now: begin, running: map[int]graph.Start{}}
	r.ID, r.Deadline, r.Spec, r.Parameters = "0190b0c0-0000-7000-8000-000000000001", begin.Add(time.Minute), unknown, payload.Parameters{"id": payload.Int64(1 << 53)}
	if r.StepDuration == nil {
		r.StepDuration = unknownDuration
	}
	w.m = graph.New(p, r)
	w.apply(w.m.Start(begin))
	return w
}

func (w *world) apply(do graph.Actions) {
	w.t.Helper()
	for _, id := range do.Cancel {
		if _, is := w.running[id]; !is {
			w.t.Fatalf("execution %d is cancelled, and does not run", id)
		}
		delete(w.running, id)
	}
	for _, s := range do.Start {
		if s.Deadline.After(begin.Add(time.Minute)) || len(s.Parts) == 0 {
			w.t.Fatalf("started is %+v", s)
		}
		if slices.Contains(w.paths, s.Path) {
			w.t.Fatalf("%s is started twice", s.Path)
		}
		w.running[s.ID] = s
		w.paths = append(w.paths, s.Path)
	}
	if w.m.Outcome() != nil && !w.m.Due().IsZero() {
		w.t.Fatal("the request has ended, and a part of it is due")
	}
	if w.m.Outcome() != nil && len(w.running) > 0 {
		w.t.Fatalf("the request has ended, and %d steps still run", len(w.running))
	}
	if w.m.Outcome() == nil && len(w.running) == 0 {
		w.t.Fatal("nothing runs, and the request has not ended")
	}
}

func (w *world) find(path string) int {
	w.t.Helper()
	for id, s := range w.running {
		if s.Path == path {
			return id
		}
	}
	w.t.Fatalf("%s does not run", path)
	return 0
}

func (w *world) answer(path string, outputs ...payload.Part) {
	w.t.Helper()
	id := w.find(path)
	delete(w.running, id)
	w.apply(w.m.Answered(id, outputs, w.now))
}

func (w *world) fail(path string, r fault.Reason) {
	w.t.Helper()
	id := w.find(path)
	delete(w.running, id)
	w.apply(w.m.Failed(id, fault.New(r, "as the test says"), w.now))
}

func (w *world) pass(d time.Duration) {
	w.t.Helper()
	w.now = w.now.Add(d)
	if at := w.m.Due(); !at.IsZero() && !at.After(w.now) {
		w.apply(w.m.Tick(w.now))
	}
	if at := w.m.Due(); !at.IsZero() && !at.After(w.now) {
		w.t.Fatalf("due at %s, after a tick at %s", at, w.now)
	}
}

// ended returns the names of the outputs, or the reason of the fault.
func (w *world) ended() string {
	w.t.Helper()
	o := w.m.Outcome()
	switch {
	case o == nil:
		return "not ended"
	case o.Fault != nil:
		return string(o.Fault.Reason)
	}
	var names []string
	for _, p := range o.Outputs {
		names = append(names, p.Name)
	}
	return fmt.Sprint(names)
}

func (w *world) check(want string) {
	w.t.Helper()
	if got := w.ended(); got != want {
		w.t.Errorf("ended as %s, wanted is %s", got, want)
	}
}

func twoBranches(edit func(*pipeline.Parallel)) *pipeline.Pipeline {
	b := &pipeline.Parallel{Branches: map[string]pipeline.Branch{"l": {Steps: []pipeline.Step{stage("a")}}, "r": {Steps: []pipeline.Step{stage("b")}}}}
	edit(b)
	return &pipeline.Pipeline{Name: "p", Steps: []pipeline.Step{block("both", pipeline.Block{Parallel: b})}}
}

func branch(b *pipeline.Parallel, name string, edit func(*pipeline.Branch)) {
	one := b.Branches[name]
	edit(&one)
	b.Branches[name] = one
}

func TestParallelJoins(t *testing.T) {
	t.Parallel()
	x := vector("x", 1)
	t.Run("all", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, twoBranches(func(*pipeline.Parallel) {}), x)
		w.answer("both/r/b", vector("rb", 1))
		w.check("not ended")
		w.answer("both/l/a", vector("la", 1))
		w.check("[la rb]")
	})
	t.Run("a branch fails", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, twoBranches(func(*pipeline.Parallel) {}), x)
		w.fail("both/r/b", fault.RunnerFailed)
		w.check("RUNNER_FAILED")
	})
	t.Run("an optional branch fails", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, twoBranches(func(b *pipeline.Parallel) { branch(b, "r", func(r *pipeline.Branch) { r.Optional = true }) }), x)
		w.fail("both/r/b", fault.RunnerFailed)
		w.answer("both/l/a", vector("la", 1))
		w.check("[la]")
		if got := w.m.Outcome().Partial; !slices.Equal(got, []string{"both/r"}) {
			t.Errorf("partial is %v", got)
		}
	})
	t.Run("late", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, twoBranches(func(b *pipeline.Parallel) {
			b.Within = time.Second
			branch(b, "r", func(r *pipeline.Branch) {
				r.Missing = map[string]pipeline.Constant{"rb": {Data: []payload.Value{payload.Double(7)}}}
			})
		}), x)
		w.answer("both/l/a", vector("la", 1))
		w.pass(999 * time.Millisecond)
		w.check("not ended")
		w.pass(time.Millisecond)
		w.check("[la rb]")
		if got := w.m.Branches(); got[1].Status != graph.Late {
			t.Errorf("the branches are %v", got)
		}
	})
	t.Run("late, and required", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, twoBranches(func(b *pipeline.Parallel) { b.Within = time.Second }), x)
		w.answer("both/l/a", vector("la", 1))
		w.pass(time.Second)
		w.check("DEADLINE_EXCEEDED")
	})
	t.Run("a quorum", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, twoBranches(func(b *pipeline.Parallel) { b.Quorum = 1 }), x)
		w.fail("both/l/a", fault.RunnerFailed)
		w.check("not ended")
		w.answer("both/r/b", vector("rb", 1))
		w.check("[rb]")
		if got := w.m.Outcome().Partial; !slices.Equal(got, []string{"both/l"}) {
			t.Errorf("partial is %v", got)
		}
	})
	t.Run("no quorum", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, twoBranches(func(b *pipeline.Parallel) { b.Quorum = 1 }), x)
		w.fail("both/l/a", fault.RunnerFailed)
		w.fail("both/r/b", fault.NoCapacity)
		w.check("NO_CAPACITY")
	})
	t.Run("a part that is given is absent", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, twoBranches(func(b *pipeline.Parallel) {
			branch(b, "r", func(r *pipeline.Branch) { r.Give = map[string]string{"text": "rb", "none": "absent"} })
		}), x)
		w.answer("both/r/b", vector("rb", 1))
		w.answer("both/l/a", vector("la", 1))
		w.check("[la text]")
	})
	t.Run("too many parts", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, twoBranches(func(*pipeline.Parallel) {}), x)
		for _, path := range []string{"both/l/a", "both/r/b"} {
			var many []payload.Part
			for i := range payload.MaxParts {
				many = append(many, vector(fmt.Sprintf("%s %d", path, i), 1))
			}
			w.answer(path, many...)
		}
		w.check("RUNNER_OUTPUT_INVALID")
	})
	t.Run("its items are late with it", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, twoBranches(func(b *pipeline.Parallel) {
			b.Within = time.Second
			branch(b, "r", func(r *pipeline.Branch) {
				r.Steps = []pipeline.Step{block("m", pipeline.Block{Map: &pipeline.Map{Over: map[string]string{"i": "x"}, Steps: []pipeline.Step{stage("b")}, OnItemError: pipeline.OmitItems}})}
				r.Missing = map[string]pipeline.Constant{"y": {Data: []payload.Value{payload.Double(7)}}}
			})
		}), x)
		w.answer("both/l/a", vector("la", 1))
		w.now = begin.Add(time.Second)
		w.fail("both/r/m[0]/b", fault.DeadlineExceeded)
		w.check("[la y]")
	})
	t.Run("it fails as its branch and the block are late", func(t *testing.T) {
		t.Parallel()
		p := twoBranches(func(b *pipeline.Parallel) {
			b.Within = 35 * time.Second
			branch(b, "r", func(r *pipeline.Branch) { r.Optional = true })
		})
		p.Steps = append(p.Steps, stage("c"))
		w := worldOf(t, p, graph.Request{Inputs: []payload.Part{x}, StepDuration: func(pipeline.StepName) time.Duration { return 20 * time.Second }})
		w.answer("both/l/a", vector("la", 1))
		w.now = begin.Add(40 * time.Second)
		w.fail("both/r/b", fault.RunnerFailed)
		w.answer("c", vector("y", 1))
		w.check("[y]")
	})
	t.Run("a part twice", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, twoBranches(func(*pipeline.Parallel) {}), x)
		w.answer("both/l/a", vector("y", 1))
		w.answer("both/r/b", vector("y", 1))
		w.check("RUNNER_OUTPUT_INVALID")
	})
}

func TestTryFallsBack(t *testing.T) {
	t.Parallel()
	p := &pipeline.Pipeline{Name: "p", Steps: []pipeline.Step{block("t", pipeline.Block{Try: &pipeline.Try{
		Steps: []pipeline.Step{stage("a")}, Within: time.Second, Else: []pipeline.Step{stage("b")},
	}})}}
	x := vector("x", 1)
	w := newWorld(t, p, x)
	w.answer("t/try/a", vector("ay", 1))
	w.check("[ay]")
	w = newWorld(t, p, x)
	w.pass(time.Second)
	w.answer("t/else/b", vector("by", 1))
	w.check("[by]")
	w = newWorld(t, p, x)
	w.fail("t/try/a", fault.InvalidInput)
	w.check("INVALID_INPUT")
	w = newWorld(t, p, x)
	w.fail("t/try/a", fault.NoCapacity)
	w.fail("t/else/b", fault.NoCapacity)
	w.check("NO_CAPACITY")
}

func TestBlocksLeaveTimeForWhatFollows(t *testing.T) {
	t.Parallel()
	try := func(within time.Duration, on []fault.Reason, otherwise string, steps ...pipeline.Step) pipeline.Step {
		return block("try-"+string(steps[0].Name), pipeline.Block{Try: &pipeline.Try{Steps: steps, Within: within, On: on, Else: []pipeline.Step{stage(otherwise)}}})
	}
	both := func(b pipeline.Branch) pipeline.Step {
		b.Steps = []pipeline.Step{stage("a")}
		return block("both", pipeline.Block{Parallel: &pipeline.Parallel{Branches: map[string]pipeline.Branch{"l": b, "r": {Steps: []pipeline.Step{stage("z")}}}}})
	}
	durations := map[pipeline.StepName]time.Duration{"a": time.Second, "b": 5 * time.Second, "c": 2500 * time.Millisecond, "d": 1500 * time.Millisecond, "slow": time.Hour}
	durationOf := func(s pipeline.StepName) time.Duration { return durations[s] }
	for name, row := range map[string]struct {
		steps      []pipeline.Step
		isComplete bool
		want       time.Duration
	}{
		"else and a later step":     {[]pipeline.Step{try(0, nil, "b", stage("a")), stage("c")}, false, 45 * time.Second},
		"within":                    {[]pipeline.Step{try(20*time.Second, nil, "b", stage("a")), stage("c")}, false, 20 * time.Second},
		"a within that is too long": {[]pipeline.Step{try(50*time.Second, nil, "b", stage("a")), stage("c")}, false, 45 * time.Second},
		"half of the time":          {[]pipeline.Step{try(0, nil, "slow", stage("a"))}, false, 30 * time.Second},
		"another reason":            {[]pipeline.Step{try(0, []fault.Reason{fault.NoCapacity}, "b", stage("a")), stage("c")}, false, time.Minute},
		"never ran":                 {[]pipeline.Step{try(0, nil, "e", stage("a"))}, false, time.Minute},
		"an optional branch":        {[]pipeline.Step{both(pipeline.Branch{Optional: true}), stage("c")}, false, 55 * time.Second},
		"a complete answer":         {[]pipeline.Step{both(pipeline.Branch{Optional: true}), stage("c")}, true, time.Minute},
		"a branch that is needed":   {[]pipeline.Step{both(pipeline.Branch{}), stage("c")}, false, time.Minute},
		"in a branch": {[]pipeline.Step{
			block("s", pipeline.Block{Split: &pipeline.Split{Branches: map[string]pipeline.Branch{
				"l": {Weight: 100, Steps: []pipeline.Step{try(0, nil, "b", stage("a"))}}, "r": {Steps: []pipeline.Step{stage("z")}},
			}}}), stage("c"),
		}, false, 45 * time.Second},
		"in a block with within": {[]pipeline.Step{
			block("both", pipeline.Block{Parallel: &pipeline.Parallel{Within: 4 * time.Second, Branches: map[string]pipeline.Branch{"l": {Steps: []pipeline.Step{try(0, nil, "e", stage("a"))}}}}}), stage("c"),
		}, false, 4 * time.Second},
		"in another":    {[]pipeline.Step{try(0, nil, "d", try(0, nil, "b", stage("a")), stage("c"))}, false, 42 * time.Second},
		"before blocks": {[]pipeline.Step{try(0, nil, "d", stage("a")), try(0, nil, "slow", stage("b")), stage("c")}, false, 42 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := worldOf(t, &pipeline.Pipeline{Name: "p", Steps: row.steps}, graph.Request{Inputs: []payload.Part{vector("x", 1)}, StepDuration: durationOf, IsComplete: row.isComplete})
			for _, s := range w.running {
				switch got := s.Deadline.Sub(begin); {
				case s.Step.Name == "a" && got != row.want:
					t.Errorf("the step may take %s, wanted is %s", got, row.want)
				case s.Step.Name == "z" && got != time.Minute:
					t.Errorf("the branch that is needed may take %s", got)
				}
			}
		})
	}
	w := worldOf(t, &pipeline.Pipeline{Name: "p", Steps: []pipeline.Step{try(0, nil, "b", stage("a"))}}, graph.Request{Inputs: []payload.Part{vector("x", 1)}, StepDuration: durationOf})
	w.pass(50 * time.Second)
	w.pass(4 * time.Second)
	w.answer("try-a/else/b", vector("y", 1))
	w.check("[y]")
	if took := w.m.StepDurations(); len(took) != 1 || took["b"] != 4*time.Second {
		t.Errorf("the steps took %v", took)
	}
}

// What is absent in the steps of a try is not absent in the answer of its else.
func TestTryForgetsWhatItsStepsLack(t *testing.T) {
	t.Parallel()
	optional := twoBranches(func(b *pipeline.Parallel) { branch(b, "r", func(r *pipeline.Branch) { r.Optional = true }) })
	w := newWorld(t, &pipeline.Pipeline{Name: "p", Steps: []pipeline.Step{block("t", pipeline.Block{Try: &pipeline.Try{
		Steps: append(optional.Steps, stage("c")), Else: []pipeline.Step{stage("d")},
	}})}}, vector("x", 1))
	w.fail("t/try/both/r/b", fault.RunnerFailed)
	w.answer("t/try/both/l/a", vector("la", 1))
	w.fail("t/try/c", fault.NoCapacity)
	w.answer("t/else/d", vector("y", 1))
	w.check("[y]")
	if got := w.m.Outcome().Partial; len(got) > 0 {
		t.Errorf("partial is %v", got)
	}
}

func TestConditions(t *testing.T) {
	t.Parallel()
	integers, err := tensor.FromInt64([]int64{2, 2}, []int64{1, -2, 3, 4})
	if err != nil {
		t.Fatal(err)
	}
	texts, err := tensor.FromBytes([]int64{1}, [][]byte{[]byte("document")})
	if err != nil {
		t.Fatal(err)
	}
	inputs := []payload.Part{vector("x", 0.5), payload.OfTensor("n", integers), payload.OfTensor("scene", texts), payload.OfBlob("mode", "text/plain", []byte("fast")), vector("picture", make([]float32, 1<<17)...)}
	number, value := func(f float64) *float64 { return &f }, func(v payload.Value) *payload.Value { return &v }
	for name, test := range map[string]struct {
		when pipeline.Predicate
		want string
	}{
		"above":              {pipeline.Predicate{Part: "x", Above: number(0.4)}, "[yes]"},
		"not above":          {pipeline.Predicate{Part: "x", Above: number(0.5)}, "[no]"},
		"between":            {pipeline.Predicate{Part: "x", Above: number(0.4), Below: number(0.6)}, "[yes]"},
		"text of a tensor":   {pipeline.Predicate{Part: "scene", Equals: value(payload.String("document"))}, "[yes]"},
		"text of a blob":     {pipeline.Predicate{Part: "mode", Matches: "fa.*"}, "[yes]"},
		"the whole text":     {pipeline.Predicate{Part: "mode", Matches: "fa"}, "[no]"},
		"one of":             {pipeline.Predicate{Part: "x", In: []payload.Value{payload.Int64(3), payload.Double(0.5)}}, "[yes]"},
		"several elements":   {pipeline.Predicate{Part: "n", Above: number(0)}, "INVALID_INPUT"},
		"any":                {pipeline.Predicate{Part: "n", Below: number(0), Any: true}, "[yes]"},
		"all":                {pipeline.Predicate{Part: "n", Above: number(0), All: true}, "[no]"},
		"an index":           {pipeline.Predicate{Part: "n", Equals: value(payload.Int64(-2)), Index: new(int64(1))}, "[yes]"},
		"a large number":     {pipeline.Predicate{Parameter: "id", Equals: value(payload.Int64(1<<53 + 1))}, "[no]"},
		"an index too large": {pipeline.Predicate{Part: "n", Equals: value(payload.Int64(-2)), Index: new(int64(4))}, "INVALID_INPUT"},
		"absent":             {pipeline.Predicate{Part: "nothing", Equals: value(payload.Int64(1))}, "[no]"},
		"exists":             {pipeline.Predicate{Part: "x", Exists: new(true)}, "[yes]"},
		"a picture exists":   {pipeline.Predicate{Part: "picture", Exists: new(true)}, "[yes]"},
		"exists not":         {pipeline.Predicate{Part: "nothing", Exists: new(false)}, "[yes]"},
		"a parameter":        {pipeline.Predicate{Parameter: "k", Equals: value(payload.Int64(1))}, "[no]"},
		"metadata":           {pipeline.Predicate{Metadata: "user", Exists: new(false)}, "[yes]"},
		"the tenant":         {pipeline.Predicate{Tenant: true, Equals: value(payload.String(""))}, "[yes]"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := &pipeline.Pipeline{Name: "p", Steps: []pipeline.Step{block("s", pipeline.Block{Switch: []pipeline.Case{
				{When: &test.when, Steps: []pipeline.Step{stage("a")}}, {Else: []pipeline.Step{stage("b")}},
			}})}}
			w := newWorld(t, p, inputs...)
			if w.m.Outcome() == nil {
				for id := range w.running {
					if w.running[id].Path == "s/1/a" {
						w.answer("s/1/a", vector("yes", 1))
					} else {
						w.answer("s/else/b", vector("no", 1))
					}
				}
			}
			w.check(test.want)
		})
	}
}

// Weights hold within one point over 10,000 requests, and a key takes the same branch always.
func TestSplitKeepsItsWeights(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"", "user"} {
		p := &pipeline.Pipeline{Name: "p", Steps: []pipeline.Step{block("s", pipeline.Block{Split: &pipeline.Split{ByMetadata: key, Branches: map[string]pipeline.Branch{
			"a": {Weight: 5, Steps: []pipeline.Step{stage("a")}}, "b": {Weight: 95, Steps: []pipeline.Step{stage("b")}},
		}}})}}
		chosen := func(i int) string {
			m := graph.New(p, graph.Request{
				ID: pipeline.RequestID(fmt.Sprintf("0190b0c0-0000-7000-8000-%012d", i)), Metadata: map[string]string{"user": fmt.Sprint("user-", i)},
				Inputs: []payload.Part{vector("x", 1)}, Deadline: begin.Add(time.Minute), Spec: unknown,
			})
			return m.Start(begin).Start[0].Path
		}
		const requests = 10_000
		n := 0
		for i := range requests {
			if chosen(i) == "s/a/a" {
				n++
			}
		}
		if n < requests*4/100 || n > requests*6/100 {
			t.Errorf("by %q %d of %d requests take 5 %%", key, n, requests)
		}
		if first, again := chosen(7), chosen(7); first != again {
			t.Errorf("one request takes %s and %s", first, again)
		}
	}
}

func TestMapKeepsOrderAndBounds(t *testing.T) {
	t.Parallel()
	items := make([]float32, 200)
	for i := range items {
		items[i] = float32(i)
	}
	mapped := func(edit func(*pipeline.Map)) *pipeline.Pipeline {
		m := &pipeline.Map{Over: map[string]string{"item": "list"}, MaxItems: 200, Steps: []pipeline.Step{stage("a")}}
		edit(m)
		return &pipeline.Pipeline{Name: "p", Steps: []pipeline.Step{block("m", pipeline.Block{Map: m})}}
	}
	t.Run("order", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, mapped(func(*pipeline.Map) {}), vector("list", items...))
		most := 0
		for w.m.Outcome() == nil {
			most = max(most, len(w.running))
			ids := slices.Sorted(maps.Keys(w.running))
			s := w.running[ids[len(ids)-1]] // the latest first
			item, _ := payload.Find(s.Parts, "item")
			values, err := item.Tensor.FP32Values()
			if err != nil || len(item.Tensor.Shape) != 0 {
				t.Fatalf("an item is %v, %v", item, err)
			}
			w.answer(s.Path, vector("y", 2*values[0]))
		}
		y := w.m.Outcome().Outputs[0]
		got, err := y.Tensor.FP32Values()
		if err != nil || fmt.Sprint(y.Tensor.Shape) != "[200 1]" {
			t.Fatalf("the shape is %v, %v", y.Tensor.Shape, err)
		}
		for i, v := range got {
			if v != 2*float32(i) {
				t.Fatalf("item %d is %v", i, v)
			}
		}
		if most != 64 {
			t.Errorf("%d items ran at a time, 64 may", most)
		}
	})
	t.Run("too many", func(t *testing.T) {
		t.Parallel()
		newWorld(t, mapped(func(m *pipeline.Map) { m.MaxItems = 199 }), vector("list", items...)).check("INVALID_INPUT")
	})
	t.Run("no list", func(t *testing.T) {
		t.Parallel()
		newWorld(t, mapped(func(*pipeline.Map) {}), payload.OfBlob("list", "text/plain", nil)).check("INVALID_INPUT")
	})
	t.Run("unequal lists", func(t *testing.T) {
		t.Parallel()
		newWorld(t, mapped(func(m *pipeline.Map) { m.Over["other"] = "other" }), vector("list", 1, 2), vector("other", 1)).check("INVALID_INPUT")
	})
	t.Run("an item fails", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, mapped(func(*pipeline.Map) {}), vector("list", 1, 2, 3))
		w.fail("m[1]/a", fault.RunnerFailed)
		w.check("RUNNER_FAILED")
	})
	t.Run("omit", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, mapped(func(m *pipeline.Map) { m.OnItemError, m.Indices = pipeline.OmitItems, "which" }), vector("list", 1, 2, 3))
		w.answer("m[0]/a", vector("y", 1))
		w.fail("m[1]/a", fault.RunnerFailed)
		w.answer("m[2]/a", vector("y", 3, 3)) // not the form of the first
		w.check("[y which]")
		which, err := w.m.Outcome().Outputs[1].Tensor.Int64Values()
		if err != nil || !slices.Equal(which, []int64{0}) {
			t.Errorf("the indices are %v, %v", which, err)
		}
	})
	t.Run("no items", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, mapped(func(m *pipeline.Map) { m.Indices = "which" }), vector("list"))
		w.check("[which]")
		if got := w.m.Outcome().Outputs[0].Tensor; fmt.Sprint(got.Datatype, got.Shape) != "INT64[0]" {
			t.Errorf("the indices are %v", got)
		}
	})
	t.Run("fill with scalars", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, mapped(func(m *pipeline.Map) {
			m.OnItemError, m.Fill = pipeline.FillItems, map[string]pipeline.Constant{"y": {Data: []payload.Value{payload.Double(-1)}}}
		}), vector("list", 1, 2))
		w.fail("m[0]/a", fault.RunnerFailed)
		scalar := vector("y", 2)
		scalar.Tensor.Shape = nil
		w.answer("m[1]/a", scalar)
		w.check("[y]")
		if got := w.m.Outcome().Outputs[0].Tensor.Shape; fmt.Sprint(got) != "[2]" {
			t.Errorf("the shape is %v", got)
		}
	})
	t.Run("fill in the runner's order", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, mapped(func(m *pipeline.Map) {
			m.OnItemError, m.Fill = pipeline.FillItems, map[string]pipeline.Constant{"y": {Data: []payload.Value{payload.Double(-1)}}, "z": {Data: []payload.Value{payload.Double(-1)}}}
		}), vector("list", 1, 2, 3))
		w.fail("m[0]/a", fault.RunnerFailed)
		w.answer("m[1]/a", vector("z", 2), vector("y", 3))
		w.answer("m[2]/a", vector("y", 4), vector("z", 5))
		w.check("[z y]")
	})
	t.Run("fill", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, mapped(func(m *pipeline.Map) {
			m.OnItemError, m.Fill = pipeline.FillItems, map[string]pipeline.Constant{"y": {Data: []payload.Value{payload.Double(-1)}}}
		}), vector("list", 1, 2))
		w.fail("m[0]/a", fault.RunnerFailed)
		w.answer("m[1]/a", vector("y", 2))
		got, err := w.m.Outcome().Outputs[0].Tensor.FP32Values()
		if err != nil || !slices.Equal(got, []float32{-1, 2}) {
			t.Errorf("got %v, %v", got, err)
		}
	})
}

// TestEveryScheduleEnds runs random graphs with random events: each request ends once, nothing runs
// after that or is started twice, and something runs before. world checks each step.
func TestEveryScheduleEnds(t *testing.T) {
	t.Parallel()
	const graphs = 20_000
	for seed := range uint64(graphs) {
		random := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // a repeatable test
		g := maker{Rand: random}
		p := &pipeline.Pipeline{Name: "p", Steps: g.steps(0)}
		if !p.HasBlocks() {
			continue
		}
		w := worldOf(t, p, graph.Request{
			Inputs:       []payload.Part{vector("x", 1, 2, 3)},
			StepDuration: func(pipeline.StepName) time.Duration { return time.Duration(seed%3) * 10 * time.Second },
		})
		late := map[int]bool{}
		for events := 0; w.m.Outcome() == nil; events++ {
			if events > 10_000 {
				t.Fatalf("seed %d does not end", seed)
			}
			ids := slices.Sorted(maps.Keys(w.running))
			s := w.running[ids[random.IntN(len(ids))]]
			late[s.ID] = true
			switch random.IntN(6) {
			case 0:
				if random.IntN(2) == 0 { // timers are late
					w.now = w.now.Add(time.Second)
				}
				reasons := []fault.Reason{fault.RunnerFailed, fault.NoCapacity, fault.DeadlineExceeded}
				w.fail(s.Path, reasons[random.IntN(len(reasons))])
			case 1:
				w.pass(time.Duration(random.IntN(2000)) * time.Millisecond)
			case 2: // a duplicate, or an answer to what was cancelled
				for id := range late {
					if _, runs := w.running[id]; !runs {
						w.apply(w.m.Answered(id, nil, w.now))
						break
					}
				}
			default:
				w.answer(s.Path, vector(fmt.Sprint("o", s.ID), make([]float32, random.IntN(4))...))
			}
		}
		before := w.ended()
		for id := range late {
			w.apply(w.m.Answered(id, nil, w.now))
		}
		w.pass(time.Hour)
		w.check(before)
	}
}

// maker makes random graphs.
type maker struct {
	*rand.Rand
	names int
}

func (g *maker) name() string {
	g.names++
	return fmt.Sprint("s", g.names)
}

func (g *maker) steps(depth int) (out []pipeline.Step) {
	for range 1 + g.IntN(2) {
		if depth >= 3 || g.IntN(3) == 0 {
			out = append(out, stage(g.name()))
			continue
		}
		out = append(out, block(g.name(), g.block(depth+1)))
	}
	return out
}

func (g *maker) block(depth int) pipeline.Block {
	within := []time.Duration{0, time.Second}[g.IntN(2)]
	branches := map[string]pipeline.Branch{}
	for i := range 1 + g.IntN(3) {
		branches[fmt.Sprint("b", i)] = pipeline.Branch{Steps: g.steps(depth), Optional: g.IntN(2) == 0}
	}
	switch g.IntN(5) {
	case 0:
		return pipeline.Block{Parallel: &pipeline.Parallel{Branches: branches, Within: within, Quorum: g.IntN(len(branches) + 1)}}
	case 1:
		return pipeline.Block{Map: &pipeline.Map{Over: map[string]string{g.name(): "x"}, MaxItems: 4, Steps: g.steps(depth), OnItemError: []pipeline.ItemError{"", pipeline.OmitItems}[g.IntN(2)]}}
	case 2:
		return pipeline.Block{Switch: []pipeline.Case{
			{When: &pipeline.Predicate{Part: "x", Above: new(float64(1)), Any: g.IntN(2) == 0, All: false, Index: nil}, Steps: g.steps(depth)},
			{Else: slices.Clone(g.steps(depth)[:0:0])},
		}}
	case 3:
		return pipeline.Block{Split: &pipeline.Split{Branches: map[string]pipeline.Branch{"a": {Weight: 50, Steps: g.steps(depth)}, "b": {Weight: 50, Steps: g.steps(depth)}}}}
	default:
		return pipeline.Block{Try: &pipeline.Try{Steps: g.steps(depth), Within: within, Else: g.steps(depth)}}
	}
}
