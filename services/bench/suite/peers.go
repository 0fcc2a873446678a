package suite

import "strconv"

// ceiling is how many items a second the worker of Batching can do: 32 in 11.4 ms.
const ceiling = 32 / 0.0114

// peer is another server, with the same work.
type peer struct {
	name string
	// batching and noop are what it came to, by callers.
	batching, noop map[int]figure
}

// figure is answers a second and latencies.
type figure struct{ perS, p50, p99 float64 }

// peers are what others came to with the same two workers. They were measured by the
// project, on another machine of two cores than the suite's results may be of: closed
// loop, one worker, each within some 15 %. So they are compared as shares of the ceiling,
// which sleeps and does not depend on the machine.
func peers() []peer {
	return []peer{
		{
			name: "MOSEC 0.6.4",
			batching: map[int]figure{
				1: {57, 17.2, 19.3}, 8: {423, 19.0, 19.9}, 32: {2250, 13.9, 22.5}, 64: {2341, 26.5, 40.5}, 128: {2508, 50.2, 57.1},
			},
			noop: map[int]figure{1: {370, 2.6, 0}, 32: {14_700, 1.8, 10.0}, 64: {13_300, 3.6, 19.1}},
		},
		{
			name: "kemingy/batching with ventu",
			batching: map[int]figure{
				1: {60, 16.5, 17.5}, 8: {424, 18.8, 21.4}, 32: {2260, 13.8, 18.5}, 64: {2441, 25.8, 30.7}, 128: {2432, 51.6, 65.9},
			},
		},
	}
}

// best returns the most that a peer came to with so many callers.
func best(callers int) (perS float64) {
	for _, p := range peers() {
		perS = max(perS, p.batching[callers].perS)
	}
	return perS
}

// cells returns a peer's answers a second, P50 and P99, for a table.
func (f figure) cells() []string {
	known := func(v float64, text string) string {
		if v == 0 {
			return ""
		}
		return text
	}
	return []string{
		known(f.perS, strconv.FormatFloat(f.perS, 'f', 0, 64)), known(f.p50, milliseconds(f.p50)), known(f.p99, milliseconds(f.p99)),
	}
}
