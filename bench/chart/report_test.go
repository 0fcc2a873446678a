package chart_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/bench/chart"
	"github.com/stagemesh/stagemesh/internal/load"
)

// runOf is a run of a thousand answers, the longest of that time.
func runOf(callers int, longest time.Duration) load.Run {
	recorder := load.NewRecorder(0)
	for i := range 1000 {
		latency := longest * time.Duration(i+1) / 1000
		recorder.Record(load.Sample{Latency: latency, Answer: &load.Answer{
			Total: latency / 2, Steps: []load.StepTiming{{Name: "a<b", Queue: latency / 10, Run: latency / 10, BatchSize: 1}},
		}})
	}
	return recorder.Run(load.Settings{Concurrency: callers, Duration: time.Second}, load.Outcome{Elapsed: time.Second, Sent: 1000})
}

// sampledRun is a run that shares its process with the mesh, with a number of measured
// samples, and two of the warm-up.
func sampledRun(samples int, apart time.Duration) load.Run {
	run := runOf(8, time.Second)
	run.Generator.Shared = true
	step := float64(apart.Milliseconds())
	run.Load.WarmupMS = 2 * step
	for i := range samples + 2 {
		run.Process.Samples = append(run.Process.Samples, load.ProcessSample{AtMS: float64(i) * step, HeapMB: 12 + float64(i%3), Goroutines: int64(60 + i)})
	}
	return run
}

func report(runs ...load.Run) load.Report {
	return load.Report{Version: load.ReportVersion, Subject: load.Subject{Pipeline: "x&y", Place: load.InProcess}, Runs: runs}
}

func draw(t *testing.T, runs ...load.Run) picture {
	t.Helper()
	var out bytes.Buffer
	if err := chart.WriteReport(&out, report(runs...)); err != nil {
		t.Fatal(err)
	}
	return parse(t, out.String())
}

func TestEachRunHasCurveAndBar(t *testing.T) {
	t.Parallel()
	one := draw(t, runOf(1, time.Second))
	// A curve and its sample in the legend; the background, and a bar and a sample for five parts.
	if len(one.curves) != 2 || one.dots != 0 || one.areas != 1+2*5 {
		t.Errorf("got %d curves, %d dots and %d areas in\n%s", len(one.curves), one.dots, one.areas, one.svg)
	}
	three := draw(t, runOf(1, time.Second), runOf(8, time.Minute), runOf(64, 10*time.Microsecond))
	// Three by percentile, and P50, P99 and P99.9 by throughput, with a dot for each run.
	if len(three.curves) != 2*6 || three.dashed() != 2*2 || three.dots != 9 || three.areas != 1+3*5+5 {
		t.Errorf("got %d curves, %d dashed, %d dots and %d areas", len(three.curves), three.dashed(), three.dots, three.areas)
	}
	for _, want := range []string{">1 caller<", ">8 callers<", ">64 callers<", ">a&lt;b queue<", ">hops<", ">outside<", ">99.9 %<", ">50 %<", ">P99.9<", ">10 µs<", ">1 s<", "x&amp;y"} {
		if !strings.Contains(three.svg, want) {
			t.Errorf("there is no %s", want)
		}
	}
}

func TestReportsOfFewFiguresAreDrawn(t *testing.T) {
	t.Parallel()
	same := runOf(1, 0)
	for name, test := range map[string]struct {
		runs    []load.Run
		nothing bool
	}{
		"none": {nil, true}, "without answers": {[]load.Run{{}, {}}, true},
		"all alike": {[]load.Run{same, same}, false}, "one and none": {[]load.Run{runOf(1, time.Second), {}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := strings.Contains(draw(t, test.runs...).svg, "There is nothing to draw."); got != test.nothing {
				t.Errorf("the picture is empty: %v", got)
			}
		})
	}
}

func TestPicturesAreDeterministic(t *testing.T) {
	t.Parallel()
	runs := []load.Run{runOf(1, time.Second), runOf(8, time.Minute), sampledRun(20, time.Second)}
	if first, second := draw(t, runs...), draw(t, runs...); first.svg != second.svg {
		t.Errorf("got\n%s\nand then\n%s", first.svg, second.svg)
	}
}

func TestSharedProcessesAreDrawn(t *testing.T) {
	t.Parallel()
	apart := sampledRun(60, time.Second)
	apart.Generator.Shared = false
	for name, test := range map[string]struct {
		runs []load.Run
		// want are the curves of processes.
		want int
	}{
		"long enough":              {[]load.Run{sampledRun(10, time.Second)}, 2},
		"too short":                {[]load.Run{sampledRun(9, time.Second)}, 0},
		"of another process":       {[]load.Run{apart}, 0},
		"an older report's":        {[]load.Run{runOf(1, time.Second)}, 0},
		"two, and one that is not": {[]load.Run{sampledRun(20, time.Second), runOf(1, time.Second), sampledRun(60, time.Minute)}, 4},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := draw(t, test.runs...)
			for i := range test.runs {
				test.runs[i].Process.Samples = nil
			}
			without := draw(t, test.runs...)
			if n := len(got.curves) - len(without.curves); n != 2*test.want || strings.Contains(got.svg, "Goroutines of") != (test.want > 0) {
				t.Errorf("got %d curves in\n%s", n, got.svg)
			}
			if test.want == 0 && got.svg != without.svg {
				t.Error("it is another picture")
			}
		})
	}
}

func TestProcessTimeHasASuitableUnit(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		apart        time.Duration
		want, refuse string
	}{
		// There are eleven samples, ten of these apart.
		"seconds": {time.Second, ">10 s<", " min<"},
		"minutes": {2 * time.Minute, ">20 min<", " s<"},
		"hours":   {2 * time.Hour, ">20 h<", " min<"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run := sampledRun(11, test.apart)
			svg := draw(t, run).svg
			panel := svg[strings.Index(svg, "Heap of"):]
			if !strings.Contains(panel, test.want) || strings.Contains(panel, test.refuse) || !strings.Contains(panel, ">10 MB<") {
				t.Errorf("want%s, and no%s in\n%s", test.want, test.refuse, panel)
			}
		})
	}
}

func TestProcessOfZerosIsDrawn(t *testing.T) {
	t.Parallel()
	run := sampledRun(11, 0)
	for i := range run.Process.Samples {
		run.Process.Samples[i] = load.ProcessSample{}
	}
	if got := draw(t, run); len(got.curves) != 2*3 {
		t.Errorf("got %d curves in\n%s", len(got.curves), got.svg)
	}
}

func TestPlotDrawsAReport(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	out := filepath.Join(folder, "out.svg")
	plot := func(report string) error {
		path := filepath.Join(folder, "report.json")
		if err := os.WriteFile(path, []byte(report), 0o600); err != nil {
			t.Fatal(err)
		}
		cmd := chart.NewCommand()
		cmd.SetArgs([]string{path, out})
		return cmd.ExecuteContext(t.Context())
	}
	text, err := json.Marshal(report(runOf(8, time.Second)))
	if err != nil {
		t.Fatal(err)
	}
	if err := plot(string(text)); err != nil {
		t.Fatal(err)
	}
	svg, err := os.ReadFile(out)
	if err != nil || string(svg) != draw(t, runOf(8, time.Second)).svg {
		t.Errorf("got %s, %v", svg, err)
	}
	for report, want := range map[string]string{"{": "report.json", `{"items": []}`: "--json", `{"version": 2}`: "version 2"} {
		if err := plot(report); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", report, err, want)
		}
	}
}
