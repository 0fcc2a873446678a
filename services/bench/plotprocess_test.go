package bench_test

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/services/bench"
)

// sampledRun is a run that shares its process with the mesh, with a number of measured
// samples, and two of the warm-up.
func sampledRun(samples int, apart time.Duration) bench.Run {
	run := runOf(8, time.Second)
	run.Generator.Shared = true
	step := float64(apart.Milliseconds())
	run.Load.WarmupMS = 2 * step
	for i := range samples + 2 {
		run.Process.Samples = append(run.Process.Samples, bench.ProcessSample{AtMS: float64(i) * step, HeapMB: 12 + float64(i%3), Goroutines: int64(60 + i)})
	}
	return run
}

func TestSharedProcessesAreDrawn(t *testing.T) {
	t.Parallel()
	apart := sampledRun(60, time.Second)
	apart.Generator.Shared = false
	for name, test := range map[string]struct {
		runs []bench.Run
		// want are the curves of processes.
		want int
	}{
		"long enough":              {[]bench.Run{sampledRun(10, time.Second)}, 2},
		"too short":                {[]bench.Run{sampledRun(9, time.Second)}, 0},
		"of another process":       {[]bench.Run{apart}, 0},
		"an older report's":        {[]bench.Run{runOf(1, time.Second)}, 0},
		"two, and one that is not": {[]bench.Run{sampledRun(20, time.Second), runOf(1, time.Second), sampledRun(60, time.Minute)}, 4},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			without := slices.Clone(test.runs)
			for i := range without {
				without[i].Process.Samples = nil
			}
			picture, before := draw(t, test.runs...), draw(t, without...)
			got, others := count(t, picture), count(t, before)
			if got["polyline"]-others["polyline"] != test.want || strings.Contains(picture, "Goroutines of") != (test.want > 0) {
				t.Errorf("got %v, and %v without", got, others)
			}
			if test.want == 0 && picture != before {
				t.Error("it is another picture")
			}
		})
	}
}

func TestProcessTimeHasASuitableUnit(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		apart time.Duration
		marks map[string]bool
	}{
		// There are eleven samples, ten of these apart.
		"seconds": {time.Second, map[string]bool{">0 s<": true, ">10 s<": true, ">12 s<": false, ">10 MB<": true}},
		"minutes": {2 * time.Minute, map[string]bool{">0 min<": true, ">20 min<": true, ">24 min<": false, ">1200 s<": false}},
		"hours":   {2 * time.Hour, map[string]bool{">0 h<": true, ">20 h<": true, ">24 h<": false}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			picture := draw(t, sampledRun(11, test.apart))
			for _, mark := range slices.Sorted(maps.Keys(test.marks)) {
				if strings.Contains(picture, mark) != test.marks[mark] {
					t.Errorf("%s: want %v in\n%s", mark, test.marks[mark], picture)
				}
			}
		})
	}
}

func TestProcessOfZerosIsDrawn(t *testing.T) {
	t.Parallel()
	run := sampledRun(11, 0)
	for i := range run.Process.Samples {
		run.Process.Samples[i] = bench.ProcessSample{}
	}
	picture := draw(t, run)
	if count(t, picture)["polyline"] != 3 || strings.Contains(picture, "NaN") || strings.Contains(picture, "Inf") {
		t.Errorf("got\n%s", picture)
	}
}
