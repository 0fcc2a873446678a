package report

import (
	"fmt"
	"math"
	"strconv"
)

// duration tells milliseconds in three figures or more, in the unit that suits them.
func duration(ms float64) string {
	switch {
	case ms == 0:
		return "0"
	case ms < 1:
		return Rounded(ms*1000) + " us"
	case ms < 10_000:
		return Rounded(ms) + " ms"
	}
	return Rounded(ms/1000) + " s"
}

// seconds tells how long a run was.
func seconds(ms float64) string { return strconv.FormatFloat(ms/1000, 'f', 1, 64) + " s" }

// Rounded tells a number in three figures, or all before the point.
func Rounded(v float64) string {
	switch {
	case v < 10:
		return strconv.FormatFloat(v, 'f', 2, 64)
	case v < 100:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 0, 64)
}

// number tells a rate: as few figures as say it.
func number(v float64) string {
	if v == math.Trunc(v) && v < 1e15 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return Rounded(v)
}

func share(v float64) string {
	switch {
	case v > 0 && v < 0.0005:
		return "< 0.1 %"
	case v < 0.1 && v > 0 || v > 0.9995 && v < 1 || v > 0.9 && v < 1:
		return strconv.FormatFloat(math.Floor(v*1000)/10, 'f', 1, 64) + " %"
	}
	return strconv.FormatFloat(v*100, 'f', 0, 64) + " %"
}

func count(n int64, of string) string {
	if n == 1 {
		return "1 " + of
	}
	return fmt.Sprintf("%d %ss", n, of)
}
