package testbed

import (
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Metric returns a metric from a page of Prometheus, summed over the series that have the
// labels, each written as name="value". A counter that does not exist yet is 0.
func Metric(t testing.TB, page, metric string, labels ...string) int {
	t.Helper()
	sum := 0.0
	for line := range strings.Lines(page) {
		series, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		name, _, _ := strings.Cut(series, "{")
		if name != metric || slices.ContainsFunc(labels, func(label string) bool { return !strings.Contains(series, label) }) {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		sum += v
	}
	return int(sum)
}
