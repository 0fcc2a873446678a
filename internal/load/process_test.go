package load_test

import (
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagemesh/stagemesh/internal/load"
)

// samplesOf returns a run whose meter ran during a function.
func samplesOf(t *testing.T, shared bool, does func()) load.Run {
	t.Helper()
	var run load.Run
	synctest.Test(t, func(*testing.T) {
		meter := load.StartMeter(shared)
		defer meter.Stop()
		does()
		run = load.NewRecorder(0).Run(load.Settings{Concurrency: 1, Requests: 1}, load.Outcome{})
		meter.Into(&run)
	})
	return run
}

func TestMeterSamplesEverySecond(t *testing.T) {
	t.Parallel()
	run := samplesOf(t, true, func() { <-time.After(10*time.Second + ms) })
	if len(run.Process.Samples) != 11 || !run.Generator.Shared {
		t.Fatalf("got %+v", run)
	}
	for i, s := range run.Process.Samples {
		if s.AtMS != float64(i)*1000 || s.HeapMB <= 0 || s.Goroutines < 2 || (s.RSSMB > 0) != (runtime.GOOS == "linux") {
			t.Errorf("sample %d: got %+v", i, s)
		}
	}
}

func TestLongRunsHaveBoundedSamples(t *testing.T) {
	t.Parallel()
	samples := samplesOf(t, true, func() { <-time.After(24*time.Hour + ms) }).Process.Samples
	if len(samples) < 30 || len(samples) > 60 {
		t.Fatalf("there are %d", len(samples))
	}
	every := samples[1].AtMS
	for i, s := range samples {
		if s.AtMS != float64(i)*every {
			t.Errorf("sample %d is of %v ms, and one is due every %v", i, s.AtMS, every)
		}
	}
	if last := samples[len(samples)-1].AtMS; last+every < float64((24 * time.Hour).Milliseconds()) {
		t.Errorf("the last is of %v ms", last)
	}
}

func TestSamplesShowHeapAndGoroutines(t *testing.T) {
	t.Parallel()
	const retained, blocked = 64 << 20, 1000
	samples := samplesOf(t, true, func() {
		<-time.After(ms)
		memory := make([]byte, retained)
		over := make(chan struct{})
		var waits sync.WaitGroup
		for range blocked {
			waits.Go(func() { <-over })
		}
		runtime.GC()
		<-time.After(time.Second)
		close(over)
		waits.Wait()
		runtime.KeepAlive(memory)
	}).Process.Samples
	// Other tests run at the same time, with goroutines of their own.
	if more := samples[1].HeapMB - samples[0].HeapMB; more < 50 {
		t.Errorf("it retains 67 MB, and the heap grew by %v", more)
	}
	if more := samples[1].Goroutines - samples[0].Goroutines; more < blocked/2 {
		t.Errorf("%d are blocked, and there are %d more", blocked, more)
	}
}

func TestMeterMayStopTwice(t *testing.T) {
	t.Parallel()
	meter := load.StartMeter(false)
	meter.Stop()
	meter.Stop()
	var run load.Run
	meter.Into(&run)
	if len(run.Process.Samples) == 0 || run.Generator.Shared {
		t.Errorf("got %+v", run)
	}
}

func TestTextDescribesASharedProcess(t *testing.T) {
	t.Parallel()
	r := known()
	r.Runs = r.Runs[1:]
	for name, test := range map[string]struct {
		change func(*load.Run)
		want   string
	}{
		"in it":     {func(*load.Run) {}, "process: heap 12 to 14 MB, RSS 40 MB, 61 to 64 goroutines\n"},
		"beside it": {func(r *load.Run) { r.Generator.Shared = false }, ""},
		"without RSS": {func(r *load.Run) {
			r.Process.Samples = []load.ProcessSample{{AtMS: 2001, HeapMB: 7, Goroutines: 5}}
		}, "process: heap 7 MB, 5 goroutines\n"},
		"of a warm-up":       {func(r *load.Run) { r.Load.WarmupMS = 9000 }, ""},
		"of an older report": {func(r *load.Run) { r.Process.Samples = nil }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			one := r
			one.Runs = []load.Run{r.Runs[0]}
			test.change(&one.Runs[0])
			got := text(t, one)
			if test.want == "" && strings.Contains(got, "process:") || !strings.Contains(got, test.want) {
				t.Errorf("got\n%s", got)
			}
		})
	}
}
