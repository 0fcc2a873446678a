package suite

import (
	"fmt"
	"strconv"

	"github.com/stagemesh/stagemesh/services/bench/report"
)

// milliseconds tells a duration of that many.
func milliseconds(ms float64) string {
	if ms > 0 && ms < 1 {
		return strconv.FormatFloat(ms*1000, 'f', 0, 64) + " us"
	}
	return report.Rounded(ms) + " ms"
}

func times(v float64) string { return strconv.FormatFloat(v, 'f', 2, 64) + "x" }

// precisely is for what is held to a bound, so that rounding does not hide on which side
// of it a ratio is.
func precisely(v float64) string { return strconv.FormatFloat(v, 'f', 3, 64) + "x" }

func percent(v float64) string { return strconv.FormatFloat(v*100, 'f', 0, 64) + " %" }

// share tells a share to a tenth of a hundredth.
func share(v float64) string { return strconv.FormatFloat(v*100, 'f', 1, 64) + " %" }

// told is a median with its spread, where that can be seen.
func told(s spread, as func(float64) string) string {
	median, low, high := as(s.Median), as(s.Min), as(s.Max)
	if low == high {
		return median
	}
	return fmt.Sprintf("%s (%s-%s)", median, low, high)
}
