package runners_test

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// sink collects outcomes, and counts chunks.
type sink struct {
	outcomes map[int]runner.Outcome
	chunks   map[int]int
}

func (s *sink) Chunk(i int, _ []payload.Part) error {
	s.chunks[i]++
	return nil
}

func (s *sink) SetOutcome(i int, o runner.Outcome) error {
	if _, ok := s.outcomes[i]; ok {
		return runner.ErrOutcomeSet
	}
	s.outcomes[i] = o
	return nil
}

func doItems(ctx context.Context, t *testing.T, r runner.Runner, items ...runner.Item) (map[int]runner.Outcome, error) {
	t.Helper()
	s, err := sunk(ctx, t, r, items...)
	return s.outcomes, err
}

func sunk(ctx context.Context, t *testing.T, r runner.Runner, items ...runner.Item) (*sink, error) {
	t.Helper()
	slot, err := r.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s := &sink{outcomes: map[int]runner.Outcome{}, chunks: map[int]int{}}
	return s, slot.Do(ctx, runner.Batch{Items: items, Rows: len(items)}, s)
}

func items(n int) []runner.Item {
	out := make([]runner.Item, n)
	for i := range out {
		out[i] = runner.Item{Rows: 1, Inputs: []payload.Part{
			payload.OfBlob("text", "text/plain", []byte{byte(i)}),
			payload.OfTensor("x", tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{1}, Raw: []byte{byte(i)}}),
		}}
	}
	return out
}

// must takes what a constructor returns.
func must(t *testing.T) func(*inproc.Runner, error) *inproc.Runner {
	return func(r *inproc.Runner, err error) *inproc.Runner {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
}

func TestEveryItemGetsItsInputsBack(t *testing.T) {
	t.Parallel()
	for name, r := range map[string]*inproc.Runner{
		"echo":   must(t)(runners.NewEcho(runners.EchoSettings{Concurrency: 3})),
		"sleep":  must(t)(runners.NewSleep(runners.SleepSettings{Concurrency: 3})),
		"burn":   must(t)(runners.NewBurn(runners.BurnSettings{Iterations: 25_000, Concurrency: 3})),
		"stream": must(t)(runners.NewStream(runners.StreamSettings{Chunks: 2, Concurrency: 3})),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			batch := items(5)
			out, err := doItems(t.Context(), t, r, batch...)
			if err != nil || len(out) != len(batch) {
				t.Fatalf("got %v, %v", out, err)
			}
			for i, item := range batch {
				if out[i].Fault != nil || !reflect.DeepEqual(out[i].Parts, item.Inputs) {
					t.Errorf("item %d: got %v, want %v", i, out[i], item.Inputs)
				}
			}
			if spec := r.Spec(); len(spec.Inputs) != 0 || spec.BatchAxis != runner.BatchNone {
				t.Errorf("the spec %v does not take everything", spec)
			}
			if got := r.Concurrency(); got != 3 {
				t.Errorf("got concurrency %d, want 3", got)
			}
		})
	}
}

func TestSleepTakesBaseAndPerItem(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]time.Duration{1: 5500 * time.Microsecond, 8: 9 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			r := must(t)(runners.NewSleep(runners.SleepSettings{Base: 5 * time.Millisecond, PerItem: 500 * time.Microsecond}))
			start := time.Now()
			if _, err := doItems(t.Context(), t, r, items(n)...); err != nil {
				t.Fatal(err)
			}
			if got := time.Since(start); got != want {
				t.Errorf("%d items took %v, want %v", n, got, want)
			}
		})
	}
}

func TestSleepEndsWithItsContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := must(t)(runners.NewSleep(runners.SleepSettings{Base: time.Hour}))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		out, err := doItems(ctx, t, r, items(2)...)
		if !errors.Is(err, context.DeadlineExceeded) || len(out) != 0 {
			t.Errorf("got %v, %v", out, err)
		}
		if got := time.Since(start); got != time.Second {
			t.Errorf("it took %v", got)
		}
	})
}

func TestStreamSendsChunksOneAfterTheOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := must(t)(runners.NewStream(runners.StreamSettings{Chunks: 5, Every: 50 * time.Millisecond}))
		if !r.Spec().Stream {
			t.Error("the runner does not say that it streams")
		}
		start := time.Now()
		s, err := sunk(t.Context(), t, r, items(1)...)
		if err != nil || s.chunks[0] != 5 || s.outcomes[0].Fault != nil {
			t.Errorf("got %d chunks, %v, %v", s.chunks[0], s.outcomes, err)
		}
		if got := time.Since(start); got != 250*time.Millisecond {
			t.Errorf("it took %v", got)
		}
	})
}

func TestStreamEndsWithItsContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := must(t)(runners.NewStream(runners.StreamSettings{Chunks: 5, Every: time.Second}))
		ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
		defer cancel()
		s, err := sunk(ctx, t, r, items(1)...)
		if err != nil || s.chunks[0] != 2 || s.outcomes[0].Fault == nil {
			t.Errorf("got %d chunks, %v, %v", s.chunks[0], s.outcomes, err)
		}
	})
}

func TestBurnTakesAtLeastItsDuration(t *testing.T) {
	t.Parallel()
	const each = 3 * time.Millisecond
	r := must(t)(runners.NewBurn(runners.BurnSettings{Duration: each}))
	start := time.Now()
	if _, err := doItems(t.Context(), t, r, items(2)...); err != nil {
		t.Fatal(err)
	}
	if got := time.Since(start); got < 2*each {
		t.Errorf("two items took %v, want at least %v", got, 2*each)
	}
}

func TestBurnEndsEarly(t *testing.T) {
	t.Parallel()
	r := must(t)(runners.NewBurn(runners.BurnSettings{Duration: time.Hour}))
	gone := items(1)[0]
	closed := make(chan struct{})
	time.AfterFunc(time.Millisecond, func() { close(closed) })
	gone.Cancelled = closed
	expires, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	for want, try := range map[fault.Reason]struct {
		ctx  context.Context
		item runner.Item
	}{
		fault.Cancelled:        {t.Context(), gone},
		fault.DeadlineExceeded: {expires, items(1)[0]},
	} {
		out, err := doItems(try.ctx, t, r, try.item)
		if err != nil || out[0].Fault == nil || out[0].Fault.Reason != want {
			t.Errorf("got %v, %v, want %v", out, err, want)
		}
	}
}

func TestSyntheticSettingsAreChecked(t *testing.T) {
	t.Parallel()
	echo := func(s runners.EchoSettings) error { _, err := runners.NewEcho(s); return err }
	echoModels := func(s runners.EchoSettings) error { _, err := runners.NewEchoModels(s); return err }
	sleep := func(s runners.SleepSettings) error { _, err := runners.NewSleep(s); return err }
	burn := func(s runners.BurnSettings) error { _, err := runners.NewBurn(s); return err }
	stream := func(s runners.StreamSettings) error { _, err := runners.NewStream(s); return err }
	for name, row := range map[string]struct {
		err  error
		want string
	}{
		"echo":               {echo(runners.EchoSettings{Concurrency: -1}), "concurrency: -1 "},
		"echo models":        {echoModels(runners.EchoSettings{Concurrency: -1}), "concurrency: -1 "},
		"sleep base":         {sleep(runners.SleepSettings{Base: -time.Second}), "base: -1s "},
		"sleep per item":     {sleep(runners.SleepSettings{PerItem: -time.Second}), "per_item: -1s "},
		"sleep concurrency":  {sleep(runners.SleepSettings{Concurrency: -1}), "concurrency: -1 "},
		"burn nothing":       {burn(runners.BurnSettings{}), "duration: is missing"},
		"burn duration":      {burn(runners.BurnSettings{Duration: -time.Second}), "duration: -1s "},
		"burn iterations":    {burn(runners.BurnSettings{Iterations: -1}), "iterations: -1 "},
		"burn concurrency":   {burn(runners.BurnSettings{Iterations: 1, Concurrency: -1}), "concurrency: -1 "},
		"stream chunks":      {stream(runners.StreamSettings{Chunks: -1}), "chunks: -1 "},
		"stream every":       {stream(runners.StreamSettings{Every: -time.Second}), "every: -1s "},
		"stream concurrency": {stream(runners.StreamSettings{Concurrency: -1}), "concurrency: -1 "},
	} {
		if row.err == nil || !strings.HasPrefix(row.err.Error(), row.want) {
			t.Errorf("%s: got %v, want %q", name, row.err, row.want)
		}
	}
}

func TestModelTakesItsTimesToLoadAndUnload(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, err := runners.NewEchoModels(runners.EchoSettings{})
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		loaded, err := r.Load(t.Context(), model.Model{ID: "m", Size: model.Size{Host: 7}, Options: model.NewOptions(map[string]string{"load": "20ms", "unload": "2s"})})
		if got := time.Since(start); err != nil || loaded.Size.Host != 7 || got != 20*time.Millisecond {
			t.Errorf("the load took %v: %+v, %v", got, loaded, err)
		}
		start = time.Now()
		err = r.Unload(t.Context(), "m")
		if got := time.Since(start); err != nil || got != 2*time.Second {
			t.Errorf("the unload took %v: %v", got, err)
		}
		if _, err := r.Load(t.Context(), model.Model{ID: "n", Options: model.NewOptions(map[string]string{"load": "soon"})}); !errors.Is(err, runner.ErrInvalidModel) {
			t.Errorf("a load time that is none: %v", err)
		}
	})
}
