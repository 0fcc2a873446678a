package inproc_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func settings(slots int) inproc.Settings {
	return inproc.Settings{Spec: runnertest.Spec(), Concurrency: slots}
}

func TestStreamIsARunner(t *testing.T) {
	t.Parallel()
	runnertest.TestStream(t, func(_ *testing.T, slots int) runner.Runner {
		return inproc.Stream(inproc.Settings{Spec: runnertest.StreamSpec(), Concurrency: slots}, runnertest.AnswerStream)
	})
}

func TestNewIsARunner(t *testing.T) {
	t.Parallel()
	runnertest.Test(t, func(_ *testing.T, slots int) runner.Runner {
		return inproc.New(settings(slots), func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
			for i, item := range batch.Items {
				parts, err := runnertest.AnswerItem(ctx, item)
				if err != nil {
					return err
				}
				if err := sink.SetOutcome(i, runner.Output(parts...)); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

func TestEachIsARunner(t *testing.T) {
	t.Parallel()
	runnertest.Test(t, func(_ *testing.T, slots int) runner.Runner {
		return inproc.Each(settings(slots), runnertest.AnswerItem)
	})
}

func TestRowsIsARunner(t *testing.T) {
	t.Parallel()
	runnertest.Test(t, func(_ *testing.T, slots int) runner.Runner {
		return inproc.Rows(settings(slots), func(ctx context.Context, in map[string]tensor.Tensor) (map[string]tensor.Tensor, error) {
			out, err := runnertest.AnswerTensor(ctx, in["x"])
			return map[string]tensor.Tensor{"y": out}, err
		})
	})
}

// sink collects outcomes.
type sink struct {
	mu       sync.Mutex
	outcomes map[int]runner.Outcome
}

func (s *sink) Chunk(int, []payload.Part) error { return runner.ErrCancelled }

func (s *sink) SetOutcome(i int, o runner.Outcome) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.outcomes[i]; ok {
		return runner.ErrOutcomeSet
	}
	s.outcomes[i] = o
	return nil
}

// do runs the items as one batch.
func do(t testing.TB, r runner.Runner, items ...runner.Item) (map[int]runner.Outcome, error) {
	t.Helper()
	slot, err := r.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s := &sink{outcomes: map[int]runner.Outcome{}}
	err = slot.Do(t.Context(), runner.Batch{Items: items}, s)
	return s.outcomes, err
}

func textItem(text string) runner.Item {
	return runner.Item{Rows: 1, Inputs: []payload.Part{payload.OfBlob("text", "text/plain", []byte(text))}}
}

func textOf(item runner.Item) string { return string(item.Inputs[0].Blob.Data) }

func TestPanicIsBatchError(t *testing.T) {
	t.Parallel()
	r := inproc.New(inproc.Settings{}, func(_ context.Context, _ runner.Batch, sink runner.Sink) error {
		if err := sink.SetOutcome(0, runner.Output()); err != nil {
			return err
		}
		panic("boom")
	})
	outcomes, err := do(t, r, textItem("a"), textItem("b"))
	p, ok := errors.AsType[*inproc.PanicError](err)
	if !ok || p.Cause != "boom" || err.Error() != "panic: boom" || !strings.Contains(string(p.Stack), "inproc_test.go") {
		t.Errorf("got %v", err)
	}
	if len(outcomes) != 1 {
		t.Errorf("%d items have an outcome; the first had one", len(outcomes))
	}
}

func TestItemFailureReachesItsCaller(t *testing.T) {
	t.Parallel()
	chosen := fault.New(fault.InvalidInput, "not an image").WithViolation("inputs.image", "is text")
	tests := map[string]struct {
		answer   inproc.EachFunc
		reason   fault.Reason
		wantText string
	}{
		"a fault":         {func(context.Context, runner.Item) ([]payload.Part, error) { return nil, chosen }, fault.InvalidInput, "not an image"},
		"an error":        {func(context.Context, runner.Item) ([]payload.Part, error) { return nil, errors.New("no such file") }, fault.RunnerFailed, "no such file"},
		"out of memory":   {func(context.Context, runner.Item) ([]payload.Part, error) { return nil, runner.ErrOutOfMemory }, fault.RunnerOutOfMemory, "out of memory"},
		"a bad output":    {func(context.Context, runner.Item) ([]payload.Part, error) { return nil, runner.ErrBadOutput }, fault.RunnerOutputInvalid, "invalid output"},
		"a panic":         {func(context.Context, runner.Item) ([]payload.Part, error) { panic("boom") }, fault.RunnerFailed, "panic: boom"},
		"a panic of none": {func(context.Context, runner.Item) ([]payload.Part, error) { panic(nil) }, fault.RunnerFailed, "panic"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := inproc.Each(inproc.Settings{}, func(ctx context.Context, item runner.Item) ([]payload.Part, error) {
				if textOf(item) == "bad" {
					return test.answer(ctx, item)
				}
				return item.Inputs, nil
			})
			outcomes, err := do(t, r, textItem("good"), textItem("bad"), textItem("fine"))
			if err != nil || len(outcomes) != 3 || outcomes[0].Fault != nil || outcomes[2].Fault != nil {
				t.Fatalf("got %v, %v", outcomes, err)
			}
			if f := outcomes[1].Fault; f == nil || f.Reason != test.reason || !strings.Contains(f.Message, test.wantText) {
				t.Errorf("got %v, want %s with %q", f, test.reason, test.wantText)
			}
		})
	}
}

func TestCancelledItemDoesNotRun(t *testing.T) {
	t.Parallel()
	gone := make(chan struct{})
	close(gone)
	var ran []string
	r := inproc.Each(inproc.Settings{}, func(_ context.Context, item runner.Item) ([]payload.Part, error) {
		ran = append(ran, textOf(item))
		return nil, nil
	})
	cancelled := textItem("cancelled")
	cancelled.Cancelled = gone
	waits := textItem("waits")
	waits.Cancelled = make(chan struct{})
	outcomes, err := do(t, r, cancelled, waits, textItem("cannot be cancelled"))
	if err != nil || !slices.Equal(ran, []string{"waits", "cannot be cancelled"}) {
		t.Errorf("ran %q, %v", ran, err)
	}
	if f := outcomes[0].Fault; f == nil || f.Reason != fault.Cancelled {
		t.Errorf("the item that nobody waits for got %v", f)
	}
}

// What the items before it take may be more than an item has.
func TestLateItemDoesNotRun(t *testing.T) {
	t.Parallel()
	batchCtx, end := context.WithCancel(t.Context())
	defer end()
	ran := 0
	r := inproc.Each(inproc.Settings{}, func(_ context.Context, item runner.Item) ([]payload.Part, error) {
		if ran++; textOf(item) == "last" {
			end()
		}
		return item.Inputs, nil
	})
	passed, later := textItem("passed"), textItem("later")
	passed.Deadline, later.Deadline = time.Now(), time.Now().Add(time.Hour)
	items := []runner.Item{passed, later, textItem("without"), textItem("last"), textItem("after")}
	slot, err := r.Acquire(batchCtx)
	if err != nil {
		t.Fatal(err)
	}
	s := &sink{outcomes: map[int]runner.Outcome{}}
	if err := slot.Do(batchCtx, runner.Batch{Items: items}, s); err != nil || ran != 3 {
		t.Errorf("%d items ran, %v", ran, err)
	}
	for i, want := range []fault.Reason{fault.DeadlineExceeded, "", "", "", fault.Cancelled} {
		if f := s.outcomes[i].Fault; (f == nil) != (want == "") || f != nil && f.Reason != want {
			t.Errorf("item %s got %v, want %q", textOf(items[i]), f, want)
		}
	}
}

// refusing is a sink for a batch that its host has given up.
type refusing struct{ sink }

func (*refusing) SetOutcome(int, runner.Outcome) error { return runner.ErrOutcomeSet }

func TestItemsStopWhenSinkRefuses(t *testing.T) {
	t.Parallel()
	var ran atomic.Int64
	r := inproc.Each(inproc.Settings{}, func(context.Context, runner.Item) ([]payload.Part, error) {
		ran.Add(1)
		return nil, nil
	})
	slot, err := r.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = slot.Do(t.Context(), runner.Batch{Items: []runner.Item{textItem("a"), textItem("b")}}, &refusing{})
	if !errors.Is(err, runner.ErrOutcomeSet) || ran.Load() != 1 {
		t.Errorf("%d items ran, %v", ran.Load(), err)
	}
}

func TestAPartOfAnAnswerIsNoWholeOne(t *testing.T) {
	t.Parallel()
	gone := make(chan struct{})
	for name, test := range map[string]struct {
		cancelled chan struct{}
		end       func(endContext func(), send func(...payload.Part) error)
	}{
		"its context ends":        {nil, func(endContext func(), _ func(...payload.Part) error) { endContext() }},
		"nobody waits for it":     {gone, func(func(), func(...payload.Part) error) { close(gone) }},
		"nobody takes its chunks": {nil, func(_ func(), send func(...payload.Part) error) { _ = send() }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			batchCtx, endContext := context.WithCancel(t.Context())
			defer endContext()
			r := inproc.Stream(inproc.Settings{}, func(ctx context.Context, item runner.Item, send func(...payload.Part) error) ([]payload.Part, error) {
				test.end(endContext, send)
				<-ctx.Done()
				return item.Inputs, nil
			})
			slot, err := r.Acquire(batchCtx)
			if err != nil {
				t.Fatal(err)
			}
			item, s := textItem("a half"), &sink{outcomes: map[int]runner.Outcome{}}
			item.Cancelled = test.cancelled
			if err := slot.Do(batchCtx, runner.Batch{Items: []runner.Item{item}}, s); err != nil {
				t.Fatal(err)
			}
			if o := s.outcomes[0]; o.Fault == nil || o.Fault.Reason != fault.Cancelled || len(o.Parts) > 0 {
				t.Errorf("got %+v", o)
			}
		})
	}
}

func TestTeardownFollowsSuccessfulSetup(t *testing.T) {
	t.Parallel()
	bad := errors.New("bad")
	tests := map[string]struct {
		start           bool
		setup, teardown error
		startErr        error
		stopErr         error
		torn            int
	}{
		"never started":       {},
		"started":             {start: true, torn: 1},
		"setup failed":        {start: true, setup: bad, startErr: bad},
		"teardown failed too": {start: true, teardown: bad, stopErr: bad, torn: 1},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			torn := 0
			r := inproc.Each(inproc.Settings{
				Setup:    func(context.Context) error { return test.setup },
				Teardown: func() error { torn++; return test.teardown },
			}, nil)
			if test.start {
				if err := r.Start(t.Context()); !errors.Is(err, test.startErr) {
					t.Errorf("Start: %v", err)
				}
			}
			if err := r.Stop(t.Context()); !errors.Is(err, test.stopErr) {
				t.Errorf("Stop: %v", err)
			}
			if err := r.Stop(t.Context()); err != nil {
				t.Errorf("a second Stop: %v", err)
			}
			if torn != test.torn {
				t.Errorf("torn down %d times, want %d", torn, test.torn)
			}
		})
	}
}

func TestSetupGetsStartContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	r := inproc.Each(inproc.Settings{Setup: func(ctx context.Context) error {
		cancel()
		<-ctx.Done()
		return ctx.Err()
	}}, nil)
	if err := r.Start(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestStoppedRunnerReturnsErrStopped(t *testing.T) {
	t.Parallel()
	r := inproc.Each(inproc.Settings{}, nil)
	if err := errors.Join(r.Start(t.Context()), r.Stop(t.Context())); err != nil {
		t.Fatal(err)
	}
	for range 10 { // although a slot is idle, and whatever select picks
		if slot, err := r.Acquire(t.Context()); !errors.Is(err, inproc.ErrStopped) || slot != nil {
			t.Fatalf("got %v, %v", slot, err)
		}
	}
}

func TestDefaultConcurrencyIsOne(t *testing.T) {
	t.Parallel()
	for _, n := range []int{-1, 0, 1} {
		if got := inproc.Each(inproc.Settings{Concurrency: n}, nil).Concurrency(); got != 1 {
			t.Errorf("concurrency %d means %d", n, got)
		}
	}
}

func BenchmarkEach32Items(b *testing.B) {
	r := inproc.Each(inproc.Settings{}, func(_ context.Context, item runner.Item) ([]payload.Part, error) { return item.Inputs, nil })
	items := make([]runner.Item, 32)
	for i := range items {
		items[i] = textItem("text")
		items[i].Deadline = time.Now().Add(time.Hour)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := do(b, r, items...); err != nil {
			b.Fatal(err)
		}
	}
}
