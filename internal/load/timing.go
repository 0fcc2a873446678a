package load

import (
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"
)

// maxTimings bounds the entries of a header that are read.
const maxTimings = 4 * 64

// parseTiming reads a timeline from a gateway's Server-Timing header, such as
// decode-queue;dur=0.1, decode-run;dur=0.046;desc="batch 1, idle". It skips other
// entries.
func parseTiming(text string, into *Answer) {
	for range maxTimings {
		if text == "" {
			return
		}
		var entry string
		entry, text = cutEntry(text)
		parseEntry(entry, into)
	}
}

// cutEntry cuts at the first comma that is not in quotes.
func cutEntry(text string) (entry, rest string) {
	quoted := false
	for i := range len(text) {
		switch {
		case text[i] == '"':
			quoted = !quoted
		case text[i] == ',' && !quoted:
			return text[:i], text[i+1:]
		}
	}
	return text, ""
}

func parseEntry(entry string, into *Answer) {
	name, rest, _ := strings.Cut(strings.TrimSpace(entry), ";")
	var took time.Duration
	var description string
	for parameter := range strings.SplitSeq(rest, ";") {
		key, value, _ := strings.Cut(parameter, "=")
		switch key {
		case "dur":
			if ms, err := strconv.ParseFloat(value, 64); err == nil {
				took = time.Duration(ms * float64(time.Millisecond))
			}
		case "desc":
			description = strings.Trim(value, `"`)
		}
	}
	if name == "total" {
		into.Total = took
		return
	}
	dash := strings.LastIndexByte(name, '-')
	if dash < 0 {
		return
	}
	step, part := name[:dash], name[dash+1:]
	if part == "queue" { // the first entry of a step
		into.Steps = append(into.Steps, StepTiming{Name: strings.Clone(step), Queue: took})
		return
	}
	last := len(into.Steps) - 1
	if last < 0 || into.Steps[last].Name != step {
		return
	}
	switch part {
	case "batch":
		into.Steps[last].Batch = took
	case "run":
		into.Steps[last].Run = took
		size, reason, _ := strings.Cut(strings.TrimPrefix(description, "batch "), ", ")
		if n, err := strconv.ParseUint(size, 10, 32); err == nil {
			into.Steps[last].BatchSize, into.Steps[last].Dispatch = uint32(n), strings.Clone(reason)
		}
	}
}

// traceParent returns a W3C traceparent of a new, sampled trace: version 00, new ids of
// 16 and of 8 bytes, and the flag 01.
//
// The ids need only differ, so Go's own random numbers do, which take no lock. The text
// is the one allocation. Safe for concurrent use.
func traceParent() string {
	var ids [24]byte
	for at := 0; at < len(ids); at += 8 {
		// An id of zeros is invalid.
		binary.BigEndian.PutUint64(ids[at:], max(1, rand.Uint64()))
	}
	var buffer [55]byte
	text := append(buffer[:0], "00-"...)
	text = hex.AppendEncode(text, ids[:16])
	text = append(text, '-')
	text = hex.AppendEncode(text, ids[16:])
	return string(append(text, "-01"...))
}
