package transport

import (
	"iter"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/tracing"
)

// Names of the headers that callers and gateway send, in canonical form.
const (
	// HeaderRequestID is on every response to a request that was assigned an ID.
	HeaderRequestID = "Stagemesh-Request-Id"
	// HeaderComplete is true or false: whether an answer that lacks parts of a branch is a failure.
	HeaderComplete = "Stagemesh-Complete"
	// HeaderPartial names the branches whose parts an answer lacks, or has constants for.
	HeaderPartial = "Stagemesh-Partial"
	// HeaderActivating names the stages for whose first host the request has waited.
	HeaderActivating = "Stagemesh-Activating"
	// HeaderServerTiming is the W3C header that browsers show in their network panel.
	HeaderServerTiming = "Server-Timing"
	// HeaderTimeout shortens the pipeline's timeout: a Go duration or milliseconds.
	HeaderTimeout = "Stagemesh-Timeout"
	// HeaderPriority is a whole number; above 0 is served first.
	HeaderPriority = "Stagemesh-Priority"
	// HeaderDurability is memory or file.
	HeaderDurability = "Stagemesh-Durability"
	// HeaderWaitForCapacity is true or false: whether the request waits where a stage's
	// queue is full.
	HeaderWaitForCapacity = "Stagemesh-Wait-For-Capacity"
	// HeaderIdempotencyKey is the request's key, as the IETF draft names it.
	HeaderIdempotencyKey = "Idempotency-Key"

	// HeaderJSONLength is the Open Inference Protocol's: how many bytes of a body are JSON,
	// before its tensors' bytes.
	HeaderJSONLength = "Inference-Header-Content-Length"

	// HeaderTraceParent and HeaderTraceState are the W3C trace context.
	HeaderTraceParent = "Traceparent"
	HeaderTraceState  = "Tracestate"
)

// RequestIDKey is the key of the request's ID in the metadata of a fault, where one was
// assigned before the request failed.
const RequestIDKey = "request_id"

// AcceptedValues yields the entries of a header such as Accept, in lower case and in order,
// with their quality from 0 (not acceptable) to 1. It leaves out malformed entries.
func AcceptedValues(values []string) iter.Seq2[string, float64] {
	return func(yield func(string, float64) bool) {
		for entry := range strings.SplitSeq(strings.Join(values, ","), ",") {
			name, params, err := mime.ParseMediaType(entry)
			if err == nil && !yield(name, quality(params["q"])) {
				return
			}
		}
	}
}

// quality parses a q parameter; a missing or malformed one is 1.
func quality(q string) float64 {
	out, err := strconv.ParseFloat(q, 64)
	if err != nil || !(out >= 0 && out <= 1) {
		return 1
	}
	return out
}

// Bounds of https://www.w3.org/TR/trace-context: a traceparent of version 00 has 55
// characters and later versions may have more; at least 512 of tracestate are carried.
const (
	minTraceParent = 55
	maxTraceParent = 128
	maxTraceState  = 512
)

// TraceContext returns the W3C trace context in h, or a zero one where there is none. As W3C
// asks, it drops a malformed one.
func TraceContext(h http.Header) envelope.Trace {
	return traceContext(h[HeaderTraceParent], h[HeaderTraceState])
}

func traceContext(parents, states []string) (out envelope.Trace) {
	if len(parents) != 1 || len(parents[0]) < minTraceParent || len(parents[0]) > maxTraceParent || !isPrintable(parents[0]) {
		return out
	}
	out.Parent = parents[0]
	if state := strings.Join(states, ","); len(state) <= maxTraceState && isPrintable(state) {
		out.State = state
	}
	return out
}

// HTTPOrigin returns how a request of plain HTTP came; its route has variable parts in braces.
func HTTPOrigin(r *http.Request, route string) tracing.Origin {
	return tracing.Origin{Protocol: tracing.ProtocolHTTP, Method: r.Method, Route: route, Path: r.URL.Path, Server: r.Host, Client: r.RemoteAddr}
}

// isPrintable reports whether s is ASCII without control characters.
func isPrintable(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// timingSize is how many bytes Server-Timing takes where it needs no memory but its text.
const timingSize = 512

// maxTiming is from which size on Server-Timing has no more steps and branches.
const maxTiming = 2 << 10

// ServerTiming returns a timeline as a Server-Timing header: for each step the queue wait,
// the batch wait and the run time, for each block and branch how it ended, then the total. Durations are
// in milliseconds. Steps and branches beyond about 2 KiB are left out: clients of gRPC and proxies bound headers.
func ServerTiming(total time.Duration, steps []envelope.StepTiming, branches []envelope.Branch) string {
	var buf [timingSize]byte
	out := buf[:0]
	for i := 0; i < len(steps) && len(out) < maxTiming; i++ {
		out = appendStepTiming(out, steps[i])
	}
	for i := 0; i < len(branches) && len(out) < maxTiming; i++ {
		out = appendBranch(out, &branches[i])
	}
	out = append(out, "total"...)
	return string(appendDuration(out, total))
}

func appendStepTiming(out []byte, s envelope.StepTiming) []byte {
	name := strings.Map(tokenRune, string(s.Step))
	out = append(append(out, name...), "-queue"...)
	out = appendDuration(out, s.QueueWait)
	out = append(append(append(out, ", "...), name...), "-batch"...)
	out = appendDuration(out, s.BatchWait)
	out = append(append(append(out, ", "...), name...), "-run"...)
	out = appendDuration(out, s.Run)
	out = append(out, `;desc="batch `...)
	out = strconv.AppendUint(out, uint64(s.BatchSize), 10)
	if dispatch := strings.Map(tokenRune, s.Dispatch); dispatch != "" {
		out = append(append(out, ", "...), dispatch...)
	}
	return append(out, `", `...)
}

func appendBranch(out []byte, b *envelope.Branch) []byte {
	out = append(out, strings.Map(tokenRune, b.Path)...)
	if b.Took > 0 {
		out = appendDuration(out, b.Took)
	}
	why := strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' || r == '"' || r == '\\' {
			return '_'
		}
		return r
	}, b.Why)
	out = append(append(out, `;desc="`...), b.Status...)
	if why != "" {
		out = append(append(out, ": "...), why...)
	}
	return append(out, `", `...)
}

func appendDuration(out []byte, d time.Duration) []byte {
	return strconv.AppendFloat(append(out, ";dur="...), Milliseconds(d), 'f', 3, 64)
}

// Milliseconds returns d in milliseconds, with microseconds as its fraction.
func Milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// tokenRune replaces runes that an RFC 9110 token may not have. Dispatch reasons are inside a
// quoted string, where the same runes are safe.
func tokenRune(r rune) rune {
	switch {
	case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', r == '-', r == '_', r == '.':
		return r
	}
	return '_'
}

// SetNotes sets the headers that repeat metadata of an answer: request.Partial and request.Activated.
func SetNotes(metadata map[string]string, set func(name, value string)) {
	for _, note := range [...]struct{ key, header string }{{"partial", HeaderPartial}, {"activating", HeaderActivating}} {
		if value := metadata[note.key]; value != "" {
			set(note.header, value)
		}
	}
}
