package load_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

const ms = time.Millisecond

// answer is one of that latency, with two steps.
func answer(latency time.Duration) load.Sample {
	return load.Sample{Latency: latency, Late: latency / 10, Answer: &load.Answer{
		Total: latency / 2,
		Steps: []load.StepTiming{
			{Name: "decode", Queue: latency / 20, Batch: latency / 50, Run: latency / 10, BatchSize: 4, Dispatch: "full", Attempt: 1},
			{Name: "classify", Queue: latency / 20, Run: latency / 10, BatchSize: 1, Dispatch: "idle", Attempt: 2},
		},
	}}
}

var errFull = errors.New("QUEUE_FULL: stage decode has 4096 items in its queue, and at most\n4096 are allowed; try again in 120 ms, when its hosts will have served some of them")

// known is a report of 1,000 answers of 1 to 1,000 ms, and some failures.
func known() load.Report {
	settings := load.Settings{Rate: 100, Warmup: 2 * time.Second, Duration: 10 * time.Second, Seed: 1}
	recorder := load.NewRecorder(500 * ms)
	for i := range 1000 {
		recorder.Record(answer(time.Duration(i+1) * ms))
	}
	for range 20 {
		recorder.Record(load.Sample{Latency: 2 * ms, Err: &load.RequestError{Reason: "QUEUE_FULL", Refused: true, Err: errFull}})
	}
	recorder.Record(load.Sample{Latency: 300 * ms, Err: errors.New("reset by peer")})
	run := recorder.Run(settings, load.Outcome{
		Began: time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC), Elapsed: 10 * time.Second, Sent: 1021, NotSent: 9,
	})
	run.Generator.CPUMS, run.Generator.CPUShare = 17_000, 0.85
	run.Process.Samples = []load.ProcessSample{{AtMS: 2000, HeapMB: 3, RSSMB: 20, Goroutines: 9}}
	other := run
	other.Load = load.Load{Kind: load.Closed, Concurrency: 8}
	other.Failures, other.NotSent, other.Generator = nil, 0, load.Generator{CPUShare: 0.3, Shared: true}
	other.Load.WarmupMS = 2000
	other.Process.Samples = []load.ProcessSample{
		{AtMS: 0.1, HeapMB: 3.9, RSSMB: 31, Goroutines: 20},
		{AtMS: 2000.1, HeapMB: 12.2, RSSMB: 40.1, Goroutines: 64},
		{AtMS: 3000.1, HeapMB: 13.6, RSSMB: 40.3, Goroutines: 61},
	}
	return load.Report{
		Version: load.ReportVersion, Product: "v1.2.3", Began: run.Began,
		Machine: load.Machine{Cores: 2, OS: "linux", Arch: "amd64", Go: "go1.26"},
		Subject: load.Subject{Pipeline: "digits", Protocol: "grpc", Place: load.Elsewhere, Address: "http://127.0.0.1:8080", Payload: "a file of 201 bytes", Bytes: 201},
		Runs:    []load.Run{run, other},
	}
}

func text(t *testing.T, r load.Report) string {
	t.Helper()
	var out bytes.Buffer
	if err := load.WriteText(&out, r); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// To update the text: UPDATE=1 go test ./internal/load.
func TestTextMatchesGoldenFile(t *testing.T) {
	t.Parallel()
	const golden = "testdata/known.txt"
	got := text(t, known())
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := testbed.ReadFile(t, golden)
	if got != string(want) {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	for line := range strings.Lines(got) {
		if len([]rune(strings.TrimSuffix(line, "\n"))) > load.Width {
			t.Errorf("this line is too long: %s", line)
		}
	}
}

func TestFiguresMatchSamples(t *testing.T) {
	t.Parallel()
	run := known().Runs[0]
	near := func(what string, got, want float64) {
		t.Helper()
		if math.Abs(got-want) > want*0.02 {
			t.Errorf("%s: got %v, want %v", what, got, want)
		}
	}
	near("P50", run.Latency.P50MS, 500)
	near("P99", run.Latency.P99MS, 990)
	near("P99.9", run.Latency.P999MS, 999)
	near("the longest", run.Latency.MaxMS, 1000)
	near("the mean", run.Latency.MeanMS, 500.5)
	near("throughput", run.ThroughputPerS, 100)
	near("refusals", run.Refusals.P99MS, 2)
	near("redelivered", float64(run.Steps[1].Redelivered), 1000)
	near("mean batch", run.Steps[0].MeanBatch(), 4)
	near("hops", run.Hops.MeanMS, 500.5*(0.5-0.05-0.02-0.1-0.05-0.1))
	near("outside", run.Outside.MeanMS, 500.5*0.4)
	if g := run.Goodput; g.Answers != 500 || math.Abs(g.Share-500.0/1030) > 1e-9 {
		t.Errorf("goodput: %+v", g)
	}
	if run.Answered != 1000 || run.Failed != 21 || run.Failures[0].Reason != "QUEUE_FULL" || run.Failures[1].Reason != load.ReasonUnknown {
		t.Errorf("got %+v", run)
	}
}

// The parts exclude the time before a request is sent.
func TestPartsAddUpToLatency(t *testing.T) {
	t.Parallel()
	var parts float64
	for _, p := range known().Runs[0].Parts() {
		parts += p.Mean()
	}
	if want := 500.5 * 0.9; math.Abs(parts-want) > want*0.01 {
		t.Errorf("got %v, want %v", parts, want)
	}
}

func TestReportSurvivesJSON(t *testing.T) {
	t.Parallel()
	want := known()
	var file bytes.Buffer
	if err := load.WriteJSON(&file, want); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{`"version": 1`, `"p999_ms"`, `"batch_sizes"`, `"throughput_per_s"`, `"cpu_share"`, `"heap_mb": 13.6`, `"at_ms": 2000.1`, `"not_sent": 9`} {
		if !strings.Contains(file.String(), name) {
			t.Errorf("there is no %s", name)
		}
	}
	var got load.Report
	if err := json.Unmarshal(file.Bytes(), &got); err != nil || text(t, got) != text(t, want) {
		t.Errorf("got %v, %v", got, err)
	}
	want.Runs[1].Failures = nil
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestChunksCountFromPlannedTime(t *testing.T) {
	t.Parallel()
	recorder := load.NewRecorder(0)
	for range 10 {
		recorder.Record(load.Sample{Latency: 100 * ms, Late: 5 * ms, Answer: &load.Answer{Chunks: []time.Duration{20 * ms, 30 * ms, 50 * ms}}})
	}
	s := recorder.Run(load.Settings{Concurrency: 1}, load.Outcome{Elapsed: time.Second, Sent: 10}).Stream
	if s == nil || s.Chunks != 30 || s.ChunksPerS != 30 || s.FirstChunk.Count != 10 || math.Abs(s.FirstChunk.P50MS-25) > 0.1 || math.Abs(s.Gap.MeanMS-15) > 0.3 {
		t.Errorf("got %+v", s)
	}
}

func TestNotesNameDoubtfulFigures(t *testing.T) {
	t.Parallel()
	r := known()
	for name, test := range map[string]struct {
		change func(*load.Run)
		want   string
	}{
		"not sent":     {func(r *load.Run) { r.NotSent = 5 }, "5 of 1026 arrivals were not sent"},
		"a busy one":   {func(r *load.Run) { r.Generator.CPUShare = 0.81 }, "the generator used 81 % of the 2 cores"},
		"shared":       {func(r *load.Run) { r.Generator = load.Generator{CPUShare: 0.5, Shared: true} }, "generator and mesh share a process, which used 50 %"},
		"late":         {func(r *load.Run) { r.Load.Kind, r.Generator.Late.P99MS = load.Open, 7 }, "one request in a hundred was sent 7.00 ms or more after its planned time"},
		"slow":         {func(r *load.Run) { r.Latency.MeanMS = 0.2 * r.ElapsedMS }, "a request takes 20 % of the run"},
		"few":          {func(r *load.Run) { r.Latency.Count = 12 }, "12 answers are too few for P99.9"},
		"no timelines": {func(r *load.Run) { r.Steps = nil }, "the answers have no timelines"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run := r.Runs[1]
			run.Generator, run.Latency.Count = load.Generator{}, 10_000
			if notes := load.Notes(r, run); len(notes) != 0 {
				t.Fatalf("got %q before the change", notes)
			}
			test.change(&run)
			notes := load.Notes(r, run)
			if len(notes) != 1 || !strings.HasPrefix(notes[0], test.want) {
				t.Errorf("got %q", notes)
			}
		})
	}
}

func TestDistinctValuesAreBounded(t *testing.T) {
	t.Parallel()
	recorder := load.NewRecorder(0)
	for i := range 5000 {
		recorder.Record(load.Sample{Err: &load.RequestError{Reason: fmt.Sprint("R", i), Err: errFull}})
		recorder.Record(load.Sample{Answer: &load.Answer{Steps: []load.StepTiming{{Name: "a", BatchSize: uint32(i + 1), Dispatch: fmt.Sprint(i)}, {Name: fmt.Sprint(i)}}}})
	}
	run := recorder.Run(load.Settings{Concurrency: 1}, load.Outcome{Elapsed: time.Second})
	if len(run.Failures) > 33 || len(run.Steps) > 64 || len(run.Steps[0].BatchSizes) > 1100 || len(run.Steps[0].Dispatches) > 17 || run.Failed != 5000 {
		t.Errorf("%d reasons, %d steps, %d sizes, %d dispatches", len(run.Failures), len(run.Steps), len(run.Steps[0].BatchSizes), len(run.Steps[0].Dispatches))
	}
	var items int64
	for _, n := range run.Steps[0].BatchSizes {
		items += n
	}
	if items != 5000 {
		t.Errorf("%d items", items)
	}
}

func TestRecordingDoesNotAllocate(t *testing.T) {
	recorder, sample := load.NewRecorder(10*ms), answer(5*ms)
	recorder.Record(sample)
	if n := testing.AllocsPerRun(1000, func() { recorder.Record(sample) }); n != 0 {
		t.Errorf("got %v", n)
	}
}

// BenchmarkRecord measures the cost of recording a request of two steps, by all processors.
func BenchmarkRecord(b *testing.B) {
	recorder, sample := load.NewRecorder(10*ms), answer(5*ms)
	b.ReportAllocs()
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			recorder.Record(sample)
		}
	})
}
