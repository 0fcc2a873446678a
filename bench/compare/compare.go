// Package compare measures a mesh that it starts, alone or in pairs with the baseline or
// another server, and compares the two. Its command is `bench run`, which is `stagemesh bench` with more flags.
//
// Mesh and baseline alternate, one run right after the other, and the first of a pair
// alternates too, so that neither has the better position. A ratio is of one pair.
// A comparison has the median of the pairs' ratios, with the least and the greatest.
//
// # Bed
//
// A Bed is a mesh that runs for the time of a measurement: in this process, or as processes
// of this program. It has free ports of 127.0.0.1, and its own broker has a temporary
// store, so that it runs beside other meshes and leaves their data alone. A file with
// nats.url shares that broker, and stores durable requests there. A baseline can run beside
// it, on the same broker.
//
// With BedSettings.Program, broker and gateway are one process, and each host of a stage is
// one: that program with the command of NewPartCommand. A process reports its addresses on a
// line of JSON when it is ready. It ends at the end of its standard input, which is also
// when this process dies, so none is left behind. Its standard error is kept, bounded, for
// the error that reports its end.
package compare

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/stagemesh/stagemesh/internal/load"
)

// Report is the report of one measurement. With a baseline its runs are the mesh's of
// the median pairs.
type Report struct {
	load.Report
	// Baseline has the baseline's runs of the same pairs.
	Baseline []load.Run `json:"baseline,omitempty"`
	// Handler is true where a bare handler was in the baseline's place.
	Handler bool `json:"handler,omitempty"`
	// Peer is the command of the server that ran in the baseline's place, if one did.
	Peer string `json:"peer,omitempty"`
	// Comparisons are one per load, of all pairs.
	Comparisons []Comparison `json:"comparisons,omitempty"`
	// Values has the values of a measurement without runs, by name.
	Values map[string][]float64 `json:"values,omitempty"`
}

// other names what the mesh is compared with.
func (r Report) other() string {
	switch {
	case r.Peer != "":
		return "peer"
	case r.Handler:
		return "handler"
	}
	return "baseline"
}

// Comparison is one load on mesh and baseline. Its ratios are the mesh's figure over the
// baseline's.
type Comparison struct {
	Load load.Load `json:"load"`
	// Pairs are in the order of measurement.
	Pairs      []Pair `json:"pairs"`
	Throughput Ratio  `json:"throughput"`
	P50        Ratio  `json:"p50"`
	P99        Ratio  `json:"p99"`
}

// Pair is two runs, one right after the other.
type Pair struct {
	Mesh     Figures `json:"mesh"`
	Baseline Figures `json:"baseline"`
}

// Figures are the compared figures of a run.
type Figures struct {
	ThroughputPerS float64 `json:"throughput_per_s"`
	P50MS          float64 `json:"p50_ms"`
	P99MS          float64 `json:"p99_ms"`
	Answered       int64   `json:"answered"`
	Failed         int64   `json:"failed"`
}

// FiguresOf returns the figures of a run.
func FiguresOf(r load.Run) Figures {
	return Figures{ThroughputPerS: r.ThroughputPerS, P50MS: r.Latency.P50MS, P99MS: r.Latency.P99MS, Answered: r.Answered, Failed: r.Failed}
}

// Ratio is the median of several values, with the least, the greatest and the quartiles.
type Ratio struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	// Lower and Upper are the quartiles; 0 in a ratio that was read from JSON.
	Lower, Upper float64 `json:"-"`
}

// RatioOf returns the ratio of values, of which there may be none.
func RatioOf(all []float64) Ratio {
	if len(all) == 0 {
		return Ratio{}
	}
	sorted := slices.Sorted(slices.Values(all))
	last := len(sorted) - 1
	at := func(part float64) float64 {
		whole, rest := math.Modf(part * float64(last))
		i := int(whole)
		return sorted[i] + rest*(sorted[min(i+1, last)]-sorted[i])
	}
	return Ratio{Median: at(.5), Min: sorted[0], Max: sorted[last], Lower: at(.25), Upper: at(.75)} //nolint:mnd // quarters
}

// Compare compares the runs of one load, which are pairs in order. It also returns the
// index of the pair with the median ratio of throughput, the lower of two; -1 without
// pairs.
func Compare(mesh, baseline []load.Run) (c Comparison, median int) {
	n := min(len(mesh), len(baseline))
	if n == 0 {
		return c, -1
	}
	c.Load = mesh[0].Load
	order := make([]int, n)
	for i := range n {
		c.Pairs, order[i] = append(c.Pairs, Pair{FiguresOf(mesh[i]), FiguresOf(baseline[i])}), i
	}
	ratio := func(figure func(Figures) float64) Ratio {
		return c.over(func(p Pair) float64 { return p.ratio(figure) })
	}
	c.Throughput, c.P50, c.P99 = ratio(throughput), ratio(p50), ratio(func(f Figures) float64 { return f.P99MS })
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Compare(c.Pairs[a].ratio(throughput), c.Pairs[b].ratio(throughput))
	})
	return c, order[(n-1)/2]
}

func throughput(f Figures) float64 { return f.ThroughputPerS }
func p50(f Figures) float64        { return f.P50MS }

// ratio returns the ratio of one figure, 0 if the baseline has none.
func (p Pair) ratio(figure func(Figures) float64) float64 {
	if figure(p.Baseline) == 0 {
		return 0
	}
	return figure(p.Mesh) / figure(p.Baseline)
}

func (c Comparison) over(of func(Pair) float64) Ratio {
	all := make([]float64, len(c.Pairs))
	for i, p := range c.Pairs {
		all[i] = of(p)
	}
	return RatioOf(all)
}

// ErrVersion means that a report has a version that this program does not read.
var ErrVersion = errors.New("the report has another version")

// ReadJSON reads a report that was written as JSON. It ignores unknown members, which a
// later program may have added.
func ReadJSON(in io.Reader) (Report, error) {
	var out Report
	if err := json.NewDecoder(in).Decode(&out); err != nil {
		return Report{}, fmt.Errorf("not a report: %w", err)
	}
	if out.Version != load.ReportVersion {
		return Report{}, fmt.Errorf("%w: it is %d, and this program reads %d", ErrVersion, out.Version, load.ReportVersion)
	}
	return out, nil
}

// WriteText writes a report as text.
func WriteText(out io.Writer, r Report) error {
	if err := load.WriteText(out, r.Report); err != nil || len(r.Comparisons) == 0 {
		return err
	}
	rows := [][]string{{"MESH / " + strings.ToUpper(r.other()), "ANSWERS/S", "RATIO", "FROM-TO", "P50", "RATIO", "FROM-TO"}}
	for _, c := range r.Comparisons {
		// pair returns the medians of both figures.
		pair := func(figure func(Figures) float64, format func(float64) string) string {
			mesh := c.over(func(p Pair) float64 { return figure(p.Mesh) })
			baseline := c.over(func(p Pair) float64 { return figure(p.Baseline) })
			return format(mesh.Median) + " / " + format(baseline.Median)
		}
		rows = append(rows, []string{
			c.Load.Name(),
			pair(throughput, load.Rounded), fmt.Sprintf("%.2fx", c.Throughput.Median), spread(c.Throughput),
			pair(p50, load.FormatMS), fmt.Sprintf("%.2fx", c.P50.Median), spread(c.P50),
		})
	}
	text := load.NewText(out)
	text.Table(rows)
	text.Wrap("", "")
	pairs := "1 pair"
	if n := len(r.Comparisons[0].Pairs); n > 1 {
		pairs = fmt.Sprintf("%d pairs", n)
	}
	text.Wrap("", "Figures and ratios are medians of "+pairs+"; the two runs of a pair alternate.")
	for _, c := range r.Comparisons {
		var mesh, other int64
		for _, p := range c.Pairs {
			mesh, other = mesh+p.Mesh.Failed, other+p.Baseline.Failed
		}
		if mesh+other > 0 {
			text.Wrap("", fmt.Sprintf("%s: %d requests to the mesh and %d to the %s failed.", c.Load.Name(), mesh, other, r.other()))
		}
	}
	return text.Err
}

func spread(r Ratio) string { return fmt.Sprintf("%.2f-%.2f", r.Min, r.Max) }
