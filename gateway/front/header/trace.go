package header

import (
	"net/http"
	"strings"
)

// Bounds of https://www.w3.org/TR/trace-context: version 00 of traceparent has
// 55 characters and later ones may have more; of tracestate at least 512 are
// to be carried.
const (
	minTraceParent = 55
	maxTraceParent = 128
	maxTraceState  = 512
)

// Trace returns the W3C trace context in h, under the names traceparent and
// tracestate, or nil where there is none.
func Trace(h http.Header) map[string]string {
	parents := h.Values(TraceParent)
	if len(parents) != 1 || len(parents[0]) < minTraceParent || len(parents[0]) > maxTraceParent || !printable(parents[0]) {
		return nil
	}
	out := map[string]string{"traceparent": parents[0]}
	state := strings.Join(h.Values(TraceState), ",")
	if state != "" && len(state) <= maxTraceState && printable(state) {
		out["tracestate"] = state
	}
	return out
}

// printable reports whether s is ASCII without controls, as both headers are.
func printable(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}
