package suite_test

import (
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/internal/load"

	"github.com/stagemesh/stagemesh/bench/compare"
	"github.com/stagemesh/stagemesh/bench/suite"
)

// paired is a load of three pairs with these medians.
func paired(callers int, perS, bare, p50, bareP50 float64) suite.Series {
	l := load.Load{Kind: load.Closed, Concurrency: callers}
	run := func(perS, p50 float64) load.Run {
		return load.Run{Load: l, Answered: 100, ThroughputPerS: perS, Latency: load.Distribution{Count: 100, P50MS: p50, P99MS: 3 * p50}}
	}
	var ours, theirs []load.Run
	for _, by := range []float64{0.9, 1, 1.1} {
		ours, theirs = append(ours, run(perS*by, p50*by)), append(theirs, run(bare, bareP50))
	}
	c, median := compare.Compare(ours, theirs)
	return suite.Series{Load: l, Trials: []suite.Trial{{Figures: compare.FiguresOf(ours[median])}}, Comparison: &c}
}

// alone is a load of two runs.
func alone(l load.Load, trial suite.Trial) suite.Series {
	more := trial
	more.ThroughputPerS *= 1.1
	return suite.Series{Load: l, Trials: []suite.Trial{trial, more}}
}

func figures(perS, p50 float64) compare.Figures {
	return compare.Figures{ThroughputPerS: perS, P50MS: p50, P99MS: 2 * p50, Answered: 1000}
}

// refusing are figures of a load with 250 refused requests.
func refusing(f compare.Figures) compare.Figures {
	f.Failed = 250
	return f
}

func answer(name string, loads ...suite.Series) suite.Answer {
	return suite.Answer{Name: name, Line: "bin/bench run " + name + " --payload 1KiB", Loads: loads}
}

// three are pairs at 1, 64 and 256 in flight.
func three(ratio, slower float64) []suite.Series {
	return []suite.Series{paired(1, 500, 1000, 2*slower, 2), paired(64, 2000*ratio, 2000, 10, 8), paired(256, 2000*ratio, 2000, 10, 8)}
}

// samples are of a process whose heap grows at half of the time.
func samples(grows float64) []load.ProcessSample {
	out := make([]load.ProcessSample, 60)
	for i := range out {
		out[i] = load.ProcessSample{AtMS: float64(i) * 10_000, HeapMB: 100, RSSMB: 200, Goroutines: 300}
		if i >= 30 {
			out[i].HeapMB += grows
		}
	}
	return out
}

// known are complete results. Ratio compares throughput, slower P50, goodput
// that at five times the peak of 1000, and grows the growth of the heap.
func known(ratio, slower, goodput, grows float64) suite.Results {
	items := [][]suite.Answer{
		{answer("all", three(ratio, slower)...)},
		{answer("all", three(ratio, slower)...)},
		{},
		{answer("1", paired(64, 2000, 2500, 10, 8)), answer("2", paired(64, 2000, 2500, 10, 8))},
		{answer("all")},
		{answer("all", alone(callers(1), suite.Trial{Figures: figures(300, 3), BatchSize: 1}))},
		{
			answer("peak", alone(callers(64), suite.Trial{Figures: figures(1000, 100), Goodput: 1000})),
			answer("2", alone(load.Load{Kind: load.Open, RatePerS: 2000}, suite.Trial{Figures: refusing(figures(990, 100)), Goodput: 990, Refused: 250, RefusalP50MS: 1, RefusalP99MS: 16})),
			answer("5", alone(load.Load{Kind: load.Open, RatePerS: 5000}, suite.Trial{Figures: refusing(figures(goodput, 100)), Goodput: goodput, Refused: 250, RefusalP50MS: 1, RefusalP99MS: 4})),
		},
		{answer("1KiB", paired(8, 1000, 1500, 5, 4)), answer("1MiB", paired(8, 100, 110, 50, 40))},
		{answer("memory", paired(8, 1000, 1500, 5, 4)), answer("file", paired(8, 200, 250, 40, 30))},
		{
			answer("peak", alone(callers(64), suite.Trial{Figures: figures(2000, 30)})),
			answer("soak", suite.Series{Trials: []suite.Trial{{Figures: figures(1000, 3), Samples: samples(grows)}}}),
		},
		{
			answer("without", alone(callers(1), suite.Trial{Figures: figures(100, 5)}), alone(callers(64), suite.Trial{Figures: figures(1000, 5)})),
			answer("context carried", alone(callers(64), suite.Trial{Figures: figures(900, 6)})),
			answer("1 % traced", alone(callers(1), suite.Trial{Figures: figures(100, 5)}), alone(callers(64), suite.Trial{Figures: figures(1000, 5)})),
			answer("all traced", alone(callers(64), suite.Trial{Figures: figures(900, 6)})),
		},
	}
	// A stage costs 0.5 ms of latency and 0.1 ms of the machine; 0.25 ms and 0.05 ms in
	// the baseline.
	for _, n := range []float64{1, 2, 4, 8} {
		items[2] = append(items[2], answer(fmt.Sprint(n),
			paired(1, 500, 800, 1+0.5*n, 0.5+0.25*n), paired(64, 1000/(0.2+0.1*n), 1000/(0.2+0.05*n), 10, 8)))
	}
	// In one process it costs 0.02 ms.
	for _, n := range []float64{1, 8} {
		items[2] = append(items[2], answer(fmt.Sprint(n, ", in one process"), paired(64, 1000/(0.2+0.02*n), 1000/(0.2+0.01*n), 10, 8)))
	}
	items = append(items, []suite.Answer{
		answer("grpc, three stages", paired(1, 1000, 2000, 0.5*slower, 0.33)),
		answer("http", paired(64, 8000*ratio, 10000, 8, 6)), answer("connect", paired(64, 10000*ratio, 10000, 8, 6)),
	})
	servers := []suite.Answer{answer("MOSEC 0.9.8"), answer("BentoML 1.4.39"), answer("Ray Serve 2.60.0"), answer("MOSEC 0.9.8, mesh in processes")}
	for i := range servers {
		for _, n := range []int{1, 8, 32, 64, 128} {
			servers[i].Loads = append(servers[i].Loads, paired(n, 1000*ratio, 1000, 6*slower, 6))
		}
	}
	items = append(items, servers, servers, []suite.Answer{
		{Name: "registered", Line: "bin/bench models registered", Values: map[string][]float64{"register": {4, 5, 19}, "host": {700}, "gateway": {1025}}},
		{Name: "loaded", Values: map[string][]float64{"few": {0.9, 0.98, 1}, "plain": {0.949}, "plain P50": {1.1}}},
		{Name: "cold", Values: map[string][]float64{"P50": {10}, "P99": {51}}},
		{Name: "hits", Values: map[string][]float64{"below LRU": {-0.1}}},
		{Name: "loads", Values: map[string][]float64{"loads": {1.5}}},
		{Name: "unload", Values: map[string][]float64{"unload": {12}}},
		{Name: "burst", Values: map[string][]float64{"queue": {1.2}}},
		{Name: "drain", Values: map[string][]float64{"drain": {1.21}}},
		{Name: "kill", Values: map[string][]float64{"elsewhere": {0}, "last answer": {2.5}}},
	}, []suite.Answer{
		{Name: "submit", Line: "bin/bench jobs submit", Values: map[string][]float64{"submit": {1.7}}},
		{Name: "drained", Values: map[string][]float64{"drain": {0.5, 0.59, 0.7}}},
		{Name: "waited", Values: map[string][]float64{"P50": {3}}},
		{Name: "queued", Values: map[string][]float64{"bytes": {257}}},
		{Name: "bulk", Values: map[string][]float64{"bulk": {0.29}}},
		{Name: "beside", Values: map[string][]float64{"P99": {1.4}, "busy": {89}}},
		{Name: "opened", Values: map[string][]float64{"first send": {250}}},
		{Name: "batch", Values: map[string][]float64{"batch": {1.3}}},
	}, []suite.Answer{
		answer("nap", alone(callers(1), suite.Trial{Figures: figures(48, 21)})), answer("five", alone(callers(1), suite.Trial{Figures: figures(47, 21.1)})),
		answer("late", alone(callers(8), suite.Trial{Figures: figures(300, 21)})),
		answer("classify", alone(callers(40), suite.Trial{Figures: figures(1000, 40)}), alone(callers(320), suite.Trial{Figures: figures(5000, 64)})),
		answer("unbatched", alone(callers(40), suite.Trial{Figures: figures(196, 200)})), answer("mapped", alone(callers(40), suite.Trial{Figures: figures(600, 66)})),
		answer("plain", alone(callers(1), suite.Trial{Figures: figures(9000, 0.1)})), answer("switched", alone(callers(1), suite.Trial{Figures: figures(8000, 0.15)})),
		answer("list", alone(callers(8), suite.Trial{Figures: figures(1000, 8)})), answer("blocks", alone(callers(8), suite.Trial{Figures: figures(250, 32)})),
	})
	for _, n := range []int{1, 8, 32, 64, 128} {
		items[4][0].Loads = append(items[4][0].Loads, alone(callers(n), suite.Trial{Figures: figures(float64(min(100*n, 2400)), 6), BatchSize: float64(n) / 2}))
	}
	out := suite.Results{
		Version: suite.Version, Machine: suite.Machine{Cores: 2, CPU: "Some <CPU>", OS: "linux", Arch: "amd64"},
		Versions: suite.Versions{Stagemesh: "v1.2.3", Go: "go1.26.8", NATSServer: "v2.15.2", NATSClient: "v1.55.0", Python: "3.11.7"},
	}
	for i, commands := range items {
		out.Items = append(out.Items, suite.Measured{
			Number: suite.Number(i + 1), Began: time.Date(2026, 11, 21+i/10, 10, 0, 0, 0, time.UTC), Commit: "0a1b2c3d", Commands: commands,
		})
	}
	return out
}
