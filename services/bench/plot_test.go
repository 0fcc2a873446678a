package bench_test

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/services/bench"
)

// runOf is a run of a thousand answers, the longest of that time.
func runOf(callers int, longest time.Duration) bench.Run {
	recorder := bench.NewRecorder(0)
	for i := range 1000 {
		latency := longest * time.Duration(i+1) / 1000
		recorder.Record(bench.Sample{Latency: latency, Answer: &bench.Answer{
			Total: latency / 2, Steps: []bench.StepTiming{{Name: "a<b", Queue: latency / 10, Run: latency / 10, BatchSize: 1}},
		}})
	}
	return recorder.Run(bench.Settings{Concurrency: callers, Duration: time.Second}, bench.Outcome{Elapsed: time.Second, Sent: 1000})
}

func draw(t *testing.T, runs ...bench.Run) string {
	t.Helper()
	var out bytes.Buffer
	err := bench.WritePlot(&out, bench.Report{Version: bench.ReportVersion, Subject: bench.Subject{Pipeline: "x&y", Place: bench.InProcess}, Runs: runs})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// count counts the elements of a picture, which is well-formed.
func count(t *testing.T, picture string) map[string]int {
	t.Helper()
	out := map[string]int{}
	decoder := xml.NewDecoder(strings.NewReader(picture))
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, picture)
		}
		if begin, ok := token.(xml.StartElement); ok {
			out[begin.Name.Local]++
		}
	}
}

func TestEachRunHasCurveAndBar(t *testing.T) {
	t.Parallel()
	one := draw(t, runOf(1, time.Second))
	if got := count(t, one); got["polyline"] != 1 || got["circle"] != 0 || !strings.Contains(one, "<title>a&lt;b run 50.050 ms</title>") {
		t.Errorf("got %v in\n%s", got, one)
	}
	three := draw(t, runOf(1, time.Second), runOf(8, time.Minute), runOf(64, 10*time.Microsecond))
	// Three by percentile, and P50, P99 and P99.9 by throughput, with a dot for each run.
	if got := count(t, three); got["polyline"] != 6 || got["circle"] != 9 {
		t.Errorf("got %v", got)
	}
	for _, name := range []string{"1 caller", "8 callers", "64 callers", "a&lt;b queue", "hops", "outside", "99.9 %", "50 %", "x&amp;y"} {
		if !strings.Contains(three, ">"+name) && !strings.Contains(three, name) {
			t.Errorf("there is no %s", name)
		}
	}
}

func TestPicturesHaveOnlyFiniteNumbers(t *testing.T) {
	t.Parallel()
	same := runOf(1, 0)
	for name, runs := range map[string][]bench.Run{
		"none": {}, "without answers": {{}, {}}, "all alike": {same, same}, "one and none": {runOf(1, time.Second), {}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			picture := draw(t, runs...)
			count(t, picture)
			for _, bad := range []string{"NaN", "Inf", `width="-`, `height="-`} {
				if strings.Contains(picture, bad) {
					t.Errorf("there is a %s in\n%s", bad, picture)
				}
			}
		})
	}
	if !strings.Contains(draw(t), "There are no answers to draw.") {
		t.Error("the picture of no runs does not say so")
	}
}

func TestPicturesAreDeterministic(t *testing.T) {
	t.Parallel()
	runs := []bench.Run{runOf(1, time.Second), runOf(8, time.Minute)}
	first := draw(t, runs...)
	if again := draw(t, runs...); again != first {
		t.Errorf("got\n%s\nand then\n%s", first, again)
	}
}
