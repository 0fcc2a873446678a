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
	var b strings.Builder
	for _, step := range t.Steps {
		writeStep(&b, step)
	}
	b.WriteString("total")
	writeDuration(&b, t.Total)
	return b.String()
}

func writeStep(b *strings.Builder, s call.StepTiming) {
	name := strings.Map(tokenRune, string(s.Step))
	b.WriteString(name + "-queue")
	writeDuration(b, s.QueueWait)
	b.WriteString(", " + name + "-batch")
	writeDuration(b, s.BatchWait)
	b.WriteString(", " + name + "-run")
	writeDuration(b, s.Run)
	b.WriteString(`;desc="batch ` + strconv.FormatUint(uint64(s.BatchSize), 10))
	if dispatch := strings.Map(tokenRune, s.Dispatch); dispatch != "" {
		b.WriteString(", " + dispatch)
	}
	b.WriteString(`", `)
}

func writeDuration(b *strings.Builder, d time.Duration) {
	var digits [32]byte
	b.WriteString(";dur=")
	b.Write(strconv.AppendFloat(digits[:0], Milliseconds(d), 'f', 3, 64))
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
