package batch

import (
	"math"
	"time"
)

const (
	// recent is about how many batches an estimate remembers.
	recent = 50
	// fade is what one more batch leaves of the weight of those before it; the
	// weights then sum up to recent.
	fade = 1 - 1.0/recent
	// level is the spread below which the sizes seen say nothing of a slope.
	level = 1e-6
)

// estimate learns how long a batch of n rows runs, as a + b*n by least squares
// with fading weights. The moments are kept about their means, which is stable
// however long it runs. Times are in seconds.
type estimate struct {
	weight float64
	// rows and took are the means.
	rows, took float64
	// spread and joint are the weighted sums of squares of rows, and of
	// products of rows and took.
	spread, joint float64
	// miss is the fading mean of how far off the line was.
	miss float64
}

func (e *estimate) known() bool { return e.weight > 0 }

func (e *estimate) learn(rows int, took time.Duration) {
	x, y := float64(rows), took.Seconds()
	if e.known() && (e.spread > level || math.Abs(x-e.rows) < 0.5) { // a level line foretells one size alone
		e.miss += (math.Abs(y-e.at(x)) - e.miss) / recent
	}
	e.weight = fade*e.weight + 1
	dx, dy := x-e.rows, y-e.took
	e.rows += dx / e.weight
	e.took += dy / e.weight
	if math.Abs(dx) >= 0.5 { // batches of one size do not make the slope less certain
		e.spread, e.joint = fade*e.spread, fade*e.joint
	}
	e.spread += dx * (x - e.rows)
	e.joint += dx * (y - e.took)
}

// of returns how long a batch of that many rows is likely to run.
func (e *estimate) of(rows int) time.Duration { return seconds(e.at(float64(rows))) }

// bound returns how long a batch of that many rows may well run.
func (e *estimate) bound(rows int) time.Duration {
	return seconds(e.at(float64(rows)) + 2*e.miss)
}

// perRow returns the mean time of a batch for each of its rows.
func (e *estimate) perRow() float64 { return e.took / e.rows }

func (e *estimate) at(rows float64) float64 {
	start, slope := e.line()
	return start + slope*rows
}

// line returns the parts of the line, neither of them negative. Where all batches had
// one size it is level.
func (e *estimate) line() (start, slope float64) {
	slope = e.slope(0)
	if start = e.took - slope*e.rows; start < 0 {
		return 0, e.perRow()
	}
	return start, slope
}

// cautious returns the parts of the line, with the slope one standard error less.
func (e *estimate) cautious() (start, slope float64) {
	slope = e.slope(1)
	return max(0, e.took-slope*e.rows), slope
}

// slope returns the slope, less so many of its standard errors.
func (e *estimate) slope(errors float64) float64 {
	if e.spread <= level {
		return 0
	}
	deviation := e.miss * math.Sqrt(math.Pi/2) // of normal errors with this mean size
	return max(0, e.joint/e.spread-errors*deviation/math.Sqrt(e.spread))
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
