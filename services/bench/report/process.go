package report

import (
	"fmt"
	"math"
)

// Process is what the generator's process was like while a run lasted.
type Process struct {
	// Samples are in their order, evenly over the run, and at most maxSamples.
	Samples []ProcessSample `json:"samples"`
}

// ProcessSample is what the process was like at one moment. A megabyte is a million
// bytes.
type ProcessSample struct {
	// AtMS is since the load began, with its warm-up.
	AtMS float64 `json:"at_ms"`
	// HeapMB is what the last collection found in use: it does not go up and down with
	// the collector, so that what grows is seen.
	HeapMB float64 `json:"heap_mb"`
	// RSSMB is the resident memory; 0 where the system does not say.
	RSSMB      float64 `json:"rss_mb"`
	Goroutines int64   `json:"goroutines"`
}

// Measured returns what the process was like since the warm-up was over.
func (r Run) Measured() []ProcessSample {
	for i, s := range r.Process.Samples {
		if s.AtMS >= r.Load.WarmupMS {
			return r.Process.Samples[i:]
		}
	}
	return nil
}

// processLine says between what the process was, where the mesh was in it; empty where
// it was not, or where nothing was measured.
func (r Run) processLine() string {
	samples := r.Measured()
	if !r.Generator.Shared || len(samples) == 0 {
		return ""
	}
	between := func(of func(ProcessSample) float64) string { return between(samples, of) }
	text := "heap " + between(func(s ProcessSample) float64 { return s.HeapMB }) + " MB, "
	if samples[0].RSSMB > 0 {
		text += "RSS " + between(func(s ProcessSample) float64 { return s.RSSMB }) + " MB, "
	}
	return text + between(func(s ProcessSample) float64 { return float64(s.Goroutines) }) + " goroutines"
}

// between tells the least and the greatest in whole numbers, or the one that both are.
func between(samples []ProcessSample, of func(ProcessSample) float64) string {
	least, greatest := math.Inf(1), math.Inf(-1)
	for _, s := range samples {
		least, greatest = math.Min(least, of(s)), math.Max(greatest, of(s))
	}
	from, to := fmt.Sprintf("%.0f", least), fmt.Sprintf("%.0f", greatest)
	if from == to {
		return to
	}
	return from + " to " + to
}
