package report

import (
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Range of what is measured: what is shorter is 0, and what is longer counts as the
// bound.
const (
	shortest = 16 * time.Nanosecond
	longest  = 10 * time.Minute
)

// Significant figures.
const (
	fine   = 3
	coarse = 2
)

func newHistogram(figures int) *hdrhistogram.Histogram {
	return hdrhistogram.New(int64(shortest), int64(longest), figures)
}

// record counts a duration; one below zero is what clocks that differ make of none.
func record(h *hdrhistogram.Histogram, d time.Duration) {
	// What is in the range fits.
	_ = h.RecordValue(int64(min(max(d, 0), longest)))
}

// merged adds up histograms, which are all there and alike, or nil.
func merged(all []*hdrhistogram.Histogram, figures int) *hdrhistogram.Histogram {
	out := newHistogram(figures)
	for _, h := range all {
		if h != nil {
			out.Merge(h)
		}
	}
	return out
}

func distribution(h *hdrhistogram.Histogram) Distribution {
	if h.TotalCount() == 0 {
		return Distribution{}
	}
	at := func(percentile float64) float64 { return milliseconds(time.Duration(h.ValueAtPercentile(percentile))) }
	out := Distribution{
		Count: h.TotalCount(), MeanMS: h.Mean() / float64(time.Millisecond), MinMS: milliseconds(time.Duration(h.Min())),
		P50MS: at(50), P90MS: at(90), P99MS: at(99), P999MS: at(99.9), MaxMS: milliseconds(time.Duration(h.Max())),
	}
	if out.MaxMS == 0 {
		// The histogram takes each for the middle of its shortest.
		out.MeanMS = 0
	}
	return out
}

// ticks are how many points of a curve halve the rest of the way to 100 %.
const ticks = 5

// curve returns the histogram as points, up to the longest.
func curve(h *hdrhistogram.Histogram) []Point {
	if h.TotalCount() == 0 {
		return []Point{}
	}
	brackets := h.CumulativeDistributionWithTicks(ticks)
	out := make([]Point, 0, len(brackets))
	for _, b := range brackets {
		out = append(out, Point{Percentile: b.Quantile, MS: milliseconds(time.Duration(b.ValueAt))})
	}
	return out
}

// milliseconds are rounded to a microsecond, which is more than is known.
func milliseconds(d time.Duration) float64 {
	return float64(d.Round(time.Microsecond)) / float64(time.Millisecond)
}
