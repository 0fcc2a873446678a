package header

import (
	"iter"
	"mime"
	"strconv"
	"strings"
)

// Accepted yields what a caller lists in a header such as Accept, in lower case and in
// order, with how much it wants each, from 0 for not at all to 1. Entries that are none
// are left out.
func Accepted(values []string) iter.Seq2[string, float64] {
	return func(yield func(string, float64) bool) {
		for entry := range strings.SplitSeq(strings.Join(values, ","), ",") {
			name, params, err := mime.ParseMediaType(entry)
			if err == nil && !yield(name, quality(params["q"])) {
				return
			}
		}
	}
}

// quality is what a q says; one that is none is 1.
func quality(q string) float64 {
	if q == "" {
		return 1
	}
	out, err := strconv.ParseFloat(q, 64)
	if err != nil || !(out >= 0 && out <= 1) {
		return 1
	}
	return out
}
