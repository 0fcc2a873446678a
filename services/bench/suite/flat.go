package suite

import "github.com/stagemesh/stagemesh/services/bench/report"

// Room that a process may take later and still be flat, beside a tenth: what a heap is
// now and then greater by before it is collected, and a few goroutines.
const (
	growth     = 1.10
	roomMB     = 4.0
	roomOthers = 10.0
	// fewSamples are too few to say anything.
	fewSamples = 8
)

// stay is how a figure of a process was early, and late.
type stay struct{ early, late, room float64 }

func (s stay) flat() bool { return s.late <= s.early*growth+s.room }

// stays compares the medians of the second and of the last quarter of the samples; none
// where these are too few. The first quarter is left out, as pools and queues fill then.
func stays(samples []report.ProcessSample, figure func(report.ProcessSample) float64, room float64) (stay, bool) {
	n := len(samples)
	if n < fewSamples {
		return stay{}, false
	}
	quarter := func(from, to int) float64 {
		all := make([]float64, 0, to-from)
		for _, sample := range samples[from:to] {
			all = append(all, figure(sample))
		}
		return report.RatioOf(all).Median
	}
	return stay{early: quarter(n/4, n/2), late: quarter(n-n/4, n), room: room}, true
}

// kept is a figure of a process that is to stay as it is.
type kept struct {
	name string
	of   func(report.ProcessSample) float64
	// room is how much more it may be later, beside a tenth.
	room float64
	unit func(float64) string
}

func keptFlat() []kept {
	megabytes := func(v float64) string { return report.Rounded(v) + " MB" }
	return []kept{
		{"the heap", func(s report.ProcessSample) float64 { return s.HeapMB }, roomMB, megabytes},
		{"the process's memory", func(s report.ProcessSample) float64 { return s.RSSMB }, roomMB, megabytes},
		{"goroutines", func(s report.ProcessSample) float64 { return float64(s.Goroutines) }, roomOthers, report.Rounded},
	}
}
