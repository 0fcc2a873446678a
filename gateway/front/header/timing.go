package header

import (
	"strconv"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/gateway/call"
)

// Timing returns the timeline in the form of the Server-Timing header: for
// each step what it waited in the queue, what it waited for its batch, and the
// batch's run, then the total. Durations are milliseconds.
func Timing(t call.Timeline) string {
	out := make([]byte, 0, (len(t.Steps)+1)*stepSize)
	for _, step := range t.Steps {
		out = appendStep(out, step)
	}
	out = append(out, "total"...)
	return string(appendDuration(out, t.Total))
}

// stepSize is about how many bytes a step takes.
const stepSize = 128

func appendStep(out []byte, s call.StepTiming) []byte {
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

func appendDuration(out []byte, d time.Duration) []byte {
	return strconv.AppendFloat(append(out, ";dur="...), Milliseconds(d), 'f', 3, 64)
}

// Milliseconds returns d in milliseconds, with microseconds as its fraction.
func Milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// tokenRune keeps what may stand in an RFC 9110 token of ours. A dispatch
// reason lies inside a quoted string, where the same runes are safe.
func tokenRune(r rune) rune {
	switch {
	case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', r == '-', r == '_', r == '.':
		return r
	}
	return '_'
}
