package plot

import (
	"fmt"
	"math"
	"strconv"
)

// panel is a plot's place on the canvas.
type panel struct{ left, top, right, bottom float64 }

// scale puts values between two pixels.
type scale struct {
	from, to  float64
	low, high float64
	log       bool
}

func (s scale) at(v float64) float64 {
	from, to := s.from, s.to
	if s.log {
		v, from, to = math.Log10(math.Max(v, s.from)), math.Log10(from), math.Log10(to)
	}
	if to == from {
		return s.low
	}
	return s.low + (s.high-s.low)*(v-from)/(to-from)
}

// marks returns where an axis has a line: of a logarithmic one 1, 2 and 5 of each
// power, or 1 alone where these are many.
func (s scale) marks() []float64 {
	if !s.log {
		return linear(s.from, s.to)
	}
	begin, end := int(math.Floor(math.Log10(s.from))), int(math.Ceil(math.Log10(s.to)))
	multiples := []float64{1, 2, 5}
	if end-begin > 3 {
		multiples = multiples[:1]
	}
	var out []float64
	for power := begin; power <= end; power++ {
		for _, m := range multiples {
			if v := m * math.Pow10(power); v >= s.from*0.999 && v <= s.to*1.001 {
				out = append(out, v)
			}
		}
	}
	return out
}

// linear returns some five round values.
func linear(from, to float64) []float64 {
	if to <= from {
		return []float64{from}
	}
	step := math.Pow10(int(math.Floor(math.Log10((to - from) / 5))))
	for _, m := range []float64{1, 2, 5, 10} {
		if (to-from)/(step*m) <= 6 {
			step *= m
			break
		}
	}
	var out []float64
	for i := 0; from+float64(i)*step <= to*1.0001; i++ {
		out = append(out, from+float64(i)*step)
	}
	return out
}

// around returns a logarithmic scale that has room for the values, from a mark to a
// mark.
func around(low, high float64) (from, to float64) {
	if low <= 0 || math.IsInf(low, 0) {
		low = 0.001
	}
	return rounded(low, math.Floor), rounded(math.Max(high, low*1.1), math.Ceil)
}

// rounded returns the 1, 2 or 5 of a power beside a value.
func rounded(v float64, to func(float64) float64) float64 {
	power := math.Pow10(int(math.Floor(math.Log10(v))))
	marks := []float64{1, 2, 5, 10}
	if to(0.5) == 0 {
		for i := len(marks) - 1; i >= 0; i-- {
			if marks[i]*power <= v*1.0001 {
				return marks[i] * power
			}
		}
	}
	for _, m := range marks {
		if m*power >= v*0.9999 {
			return m * power
		}
	}
	return v
}

// milliseconds names a mark.
func milliseconds(ms float64) string {
	switch {
	case ms == 0:
		return "0"
	case ms < 1:
		return plain(ms*1000) + " µs"
	case ms < 1000:
		return plain(ms) + " ms"
	}
	return plain(ms/1000) + " s"
}

func plain(v float64) string { return strconv.FormatFloat(float64(float32(v)), 'g', 4, 32) }

// thousands names a mark of an axis of counts.
func thousands(v float64) string {
	if v >= 10_000 {
		return plain(v/1000) + "k"
	}
	return fmt.Sprintf("%.4g", v)
}

// latencyAxis draws the axis of latencies, to the left.
func (c *canvas) latencyAxis(p panel, y scale) {
	for _, mark := range y.marks() {
		at := y.at(mark)
		c.rule(p.left, at, p.right, at)
		c.text(p.left-8, at+4, small, ends, faint, milliseconds(mark))
	}
}
