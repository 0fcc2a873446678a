package report

import (
	"cmp"
	"slices"
)

// Comparison is one load that the mesh and the baseline were asked in turns.
type Comparison struct {
	Load Load `json:"load"`
	// Pairs are in the order they were measured.
	Pairs []Pair `json:"pairs"`
	// Throughput, P50 and P99 are those of the mesh over those of the baseline, pair by
	// pair.
	Throughput Ratio `json:"throughput"`
	P50        Ratio `json:"p50"`
	P99        Ratio `json:"p99"`
}

// Pair is two runs, one right after the other.
type Pair struct {
	Mesh     Figures `json:"mesh"`
	Baseline Figures `json:"baseline"`
}

// Figures are those of a run that are compared.
type Figures struct {
	ThroughputPerS float64 `json:"throughput_per_s"`
	P50MS          float64 `json:"p50_ms"`
	P99MS          float64 `json:"p99_ms"`
	Answered       int64   `json:"answered"`
	Failed         int64   `json:"failed"`
}

// Figures returns those of the run.
func (r Run) Figures() Figures {
	return Figures{ThroughputPerS: r.ThroughputPerS, P50MS: r.Latency.P50MS, P99MS: r.Latency.P99MS, Answered: r.Answered, Failed: r.Failed}
}

// Ratio is the median of several, and the least and greatest of them.
type Ratio struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// Compare returns what the runs of one load come to, which are pairs in their order, and
// the place of the pair whose ratio of throughput is the median, the lower of two.
// Without pairs the place is -1.
func Compare(mesh, baseline []Run) (c Comparison, median int) {
	n := min(len(mesh), len(baseline))
	if n == 0 {
		return c, -1
	}
	c.Load = mesh[0].Load
	for i := range n {
		c.Pairs = append(c.Pairs, Pair{mesh[i].Figures(), baseline[i].Figures()})
	}
	c.Throughput = c.ratio(throughput)
	c.P50 = c.ratio(p50)
	c.P99 = c.ratio(func(f Figures) float64 { return f.P99MS })
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Compare(c.Pairs[a].of(throughput), c.Pairs[b].of(throughput))
	})
	return c, order[(n-1)/2]
}

func throughput(f Figures) float64 { return f.ThroughputPerS }
func p50(f Figures) float64        { return f.P50MS }

// of returns the ratio of one figure, 0 where the baseline has none.
func (p Pair) of(figure func(Figures) float64) float64 {
	if figure(p.Baseline) == 0 {
		return 0
	}
	return figure(p.Mesh) / figure(p.Baseline)
}

func (c Comparison) ratio(figure func(Figures) float64) Ratio {
	return c.over(func(p Pair) float64 { return p.of(figure) })
}

// medians returns the medians of the mesh's figure and of the baseline's.
func (c Comparison) medians(figure func(Figures) float64) (mesh, baseline float64) {
	mesh = c.over(func(p Pair) float64 { return figure(p.Mesh) }).Median
	return mesh, c.over(func(p Pair) float64 { return figure(p.Baseline) }).Median
}

func (c Comparison) over(of func(Pair) float64) Ratio {
	all := make([]float64, len(c.Pairs))
	for i, p := range c.Pairs {
		all[i] = of(p)
	}
	return RatioOf(all)
}

// RatioOf returns the median, least and greatest of ratios; without any all is 0.
func RatioOf(all []float64) Ratio {
	if len(all) == 0 {
		return Ratio{}
	}
	sorted := slices.Sorted(slices.Values(all))
	middle := len(sorted) / 2
	median := sorted[middle]
	if len(sorted)%2 == 0 {
		median = (sorted[middle-1] + sorted[middle]) / 2
	}
	return Ratio{Median: median, Min: sorted[0], Max: sorted[len(sorted)-1]}
}
