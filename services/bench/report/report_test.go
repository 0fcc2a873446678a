package report_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/services/bench/load"
	"github.com/stagemesh/stagemesh/services/bench/report"
)

const ms = time.Millisecond

// answer is one that took so long, of which a step queued, waited and ran.
func answer(latency time.Duration) load.Sample {
	return load.Sample{Latency: latency, Late: latency / 10, Answer: &load.Answer{
		Total: latency / 2,
		Steps: []load.Step{
			{Name: "decode", Queue: latency / 20, Batch: latency / 50, Run: latency / 10, BatchSize: 4, Dispatch: "full", Attempt: 1},
			{Name: "classify", Queue: latency / 20, Run: latency / 10, BatchSize: 1, Dispatch: "idle", Attempt: 2},
		},
	}}
}

var errFull = errors.New("QUEUE_FULL: stage decode has 4096 items waiting, and may have\n4096; try again in 120 ms, when some of them will have been served by its hosts")

// known is the report of 1,000 answers of 1 to 1,000 ms, and some failures.
func known() report.Report {
	settings := load.Settings{Rate: 100, Warmup: 2 * time.Second, Duration: 10 * time.Second, Seed: 1}
	recorder := report.NewRecorder(500 * ms)
	for i := range 1000 {
		recorder.Record(i, answer(time.Duration(i+1)*ms))
	}
	for range 20 {
		recorder.Record(0, load.Sample{Latency: 2 * ms, Err: &load.Failure{Reason: "QUEUE_FULL", Refused: true, Err: errFull}})
	}
	recorder.Record(1, load.Sample{Latency: 300 * ms, Err: errors.New("reset by peer")})
	run := recorder.Run(settings, load.Outcome{
		Began: time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC), Elapsed: 10 * time.Second, Sent: 1021, NotSent: 9,
	})
	run.Generator.CPUMS, run.Generator.CPUShare = 17_000, 0.85
	run.Process.Samples = []report.ProcessSample{{AtMS: 2000, HeapMB: 3, RSSMB: 20, Goroutines: 9}}
	other := run
	other.Load = report.Load{Kind: report.Closed, Concurrency: 8}
	other.Failures, other.NotSent, other.Generator = nil, 0, report.Generator{CPUShare: 0.3, Shared: true}
	other.Load.WarmupMS = 2000
	other.Process.Samples = []report.ProcessSample{
		{AtMS: 0.1, HeapMB: 3.9, RSSMB: 31, Goroutines: 20},
		{AtMS: 2000.1, HeapMB: 12.2, RSSMB: 40.1, Goroutines: 64},
		{AtMS: 3000.1, HeapMB: 13.6, RSSMB: 40.3, Goroutines: 61},
	}
	return report.Report{
		Version: report.Version, Product: "v1.2.3", Began: run.Began,
		Machine: report.Machine{Cores: 2, OS: "linux", Arch: "amd64", Go: "go1.26"},
		Subject: report.Subject{Pipeline: "digits", Protocol: "grpc", Place: report.Elsewhere, Address: "http://127.0.0.1:8080", Payload: "a file of 201 bytes", Bytes: 201},
		Runs:    []report.Run{run, other},
	}
}

func text(t *testing.T, r report.Report) string {
	t.Helper()
	var out bytes.Buffer
	if err := report.WriteText(&out, r); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// Where the text is meant to change: UPDATE=1 go test ./services/bench/report.
func TestTheTextOfKnownSamplesIsKnown(t *testing.T) {
	t.Parallel()
	const golden = "testdata/known.txt"
	got := text(t, known())
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	for line := range strings.Lines(got) {
		if len([]rune(strings.TrimSuffix(line, "\n"))) > report.Width {
			t.Errorf("this line is too long: %s", line)
		}
	}
}

func TestFiguresAreThoseOfTheSamples(t *testing.T) {
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
	if run.Answered != 1000 || run.Failed != 21 || run.Failures[0].Reason != "QUEUE_FULL" || run.Failures[1].Reason != report.Unnamed {
		t.Errorf("got %+v", run)
	}
}

// What is sent late is the generator's, and not among the parts.
func TestThePartsAddUpToTheTimeOfARequest(t *testing.T) {
	t.Parallel()
	var parts float64
	for _, p := range known().Runs[0].Parts() {
		parts += p.Mean()
	}
	if want := 500.5 * 0.9; math.Abs(parts-want) > want*0.01 {
		t.Errorf("got %v, want %v", parts, want)
	}
}

func TestAReportIsTheSameAfterJSON(t *testing.T) {
	t.Parallel()
	want := known()
	var file bytes.Buffer
	if err := report.WriteJSON(&file, want); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{`"version": 1`, `"p999_ms"`, `"batch_sizes"`, `"throughput_per_s"`, `"cpu_share"`, `"heap_mb": 13.6`, `"at_ms": 2000.1`, `"not_sent": 9`} {
		if !strings.Contains(file.String(), name) {
			t.Errorf("there is no %s", name)
		}
	}
	got, err := report.ReadJSON(&file)
	if err != nil || text(t, got) != text(t, want) {
		t.Errorf("got %v, %v", got, err)
	}
	want.Runs[1].Failures = nil
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestAReportOfAnotherVersionIsRefused(t *testing.T) {
	t.Parallel()
	if _, err := report.ReadJSON(strings.NewReader(`{"version": 2}`)); !errors.Is(err, report.ErrVersion) || !strings.Contains(err.Error(), "it says 2, and this program reads 1") {
		t.Errorf("got %v", err)
	}
	if _, err := report.ReadJSON(strings.NewReader(`no`)); err == nil || !strings.HasPrefix(err.Error(), "this is no report: ") {
		t.Errorf("got %v", err)
	}
}

func TestChunksAreMeasuredFromWhatWasPlanned(t *testing.T) {
	t.Parallel()
	recorder := report.NewRecorder(0)
	for range 10 {
		recorder.Record(3, load.Sample{Latency: 100 * ms, Late: 5 * ms, Answer: &load.Answer{Chunks: []time.Duration{20 * ms, 30 * ms, 50 * ms}}})
	}
	s := recorder.Run(load.Settings{Concurrency: 1}, load.Outcome{Elapsed: time.Second, Sent: 10}).Stream
	if s == nil || s.Chunks != 30 || s.ChunksPerS != 30 || s.FirstChunk.Count != 10 || math.Abs(s.FirstChunk.P50MS-25) > 0.1 || math.Abs(s.Gap.MeanMS-15) > 0.3 {
		t.Errorf("got %+v", s)
	}
}

func TestAReaderIsToldWhatIsWrongWithARun(t *testing.T) {
	t.Parallel()
	r := known()
	for name, test := range map[string]struct {
		change func(*report.Run)
		want   string
	}{
		"not sent":     {func(r *report.Run) { r.NotSent = 5 }, "5 of 1026 arrivals were not sent"},
		"a busy one":   {func(r *report.Run) { r.Generator.CPUShare = 0.81 }, "the generator itself took 81 % of the 2 cores"},
		"shared":       {func(r *report.Run) { r.Generator = report.Generator{CPUShare: 0.5, Shared: true} }, "generator and mesh share a process, which took 50 %"},
		"late":         {func(r *report.Run) { r.Load.Kind, r.Generator.Late.P99MS = report.Open, 7 }, "one request in a hundred was sent 7.00 ms or more after its time"},
		"few":          {func(r *report.Run) { r.Latency.Count = 12 }, "12 answers are too few for P99.9"},
		"no timelines": {func(r *report.Run) { r.Steps = nil }, "the answers have no timelines"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run := r.Runs[1]
			run.Generator = report.Generator{}
			if notes := report.Notes(r, run); len(notes) != 0 {
				t.Fatalf("there was nothing to tell, and got %q", notes)
			}
			test.change(&run)
			notes := report.Notes(r, run)
			if len(notes) != 1 || !strings.HasPrefix(notes[0], test.want) {
				t.Errorf("got %q", notes)
			}
		})
	}
}

func TestWhatIsTooVariousIsAddedUp(t *testing.T) {
	t.Parallel()
	recorder := report.NewRecorder(0)
	for i := range 5000 {
		recorder.Record(0, load.Sample{Err: &load.Failure{Reason: fmt.Sprint("R", i), Err: errFull}})
		recorder.Record(0, load.Sample{Answer: &load.Answer{Steps: []load.Step{{Name: "a", BatchSize: uint32(i + 1), Dispatch: fmt.Sprint(i)}, {Name: fmt.Sprint(i)}}}})
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

func TestASampleCostsNoAllocation(t *testing.T) {
	recorder, sample := report.NewRecorder(10*ms), answer(5*ms)
	recorder.Record(0, sample)
	if n := testing.AllocsPerRun(1000, func() { recorder.Record(0, sample) }); n != 0 {
		t.Errorf("got %v", n)
	}
}

// BenchmarkRecord is what recording costs a request of two steps.
func BenchmarkRecord(b *testing.B) {
	recorder, sample := report.NewRecorder(10*ms), answer(5*ms)
	b.ReportAllocs()
	for b.Loop() {
		recorder.Record(0, sample)
	}
}
