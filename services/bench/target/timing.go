package target

import (
	"strconv"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/services/bench/load"
)

// maxTimings bounds the entries of a header that are read.
const maxTimings = 4 * 64

// parseTiming reads a timeline as a gateway's Server-Timing tells it. What is no such
// entry is passed over.
func parseTiming(text string, into *load.Answer) {
	for range maxTimings {
		if text == "" {
			return
		}
		var entry string
		entry, text = nextEntry(text)
		timing(entry, into)
	}
}

// nextEntry cuts at the first comma that is not in quotes.
func nextEntry(text string) (entry, rest string) {
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

// timing takes one entry, such as decode-run;dur=0.046;desc="batch 1, idle".
func timing(entry string, into *load.Answer) {
	name, rest, _ := strings.Cut(strings.TrimSpace(entry), ";")
	took, desc := parameters(rest)
	if name == "total" {
		into.Total = took
		return
	}
	dash := strings.LastIndexByte(name, '-')
	if dash < 0 {
		return
	}
	step, what := name[:dash], name[dash+1:]
	if what == "queue" {
		// It is the first of a step's.
		into.Steps = append(into.Steps, load.Step{Name: strings.Clone(step), Queue: took})
		return
	}
	last := len(into.Steps) - 1
	if last < 0 || into.Steps[last].Name != step {
		return
	}
	switch what {
	case "batch":
		into.Steps[last].Batch = took
	case "run":
		into.Steps[last].Run = took
		into.Steps[last].BatchSize, into.Steps[last].Dispatch = described(desc)
	}
}

// parameters returns an entry's duration and description.
func parameters(text string) (took time.Duration, desc string) {
	for text != "" {
		var parameter string
		parameter, text, _ = strings.Cut(text, ";")
		if value, ok := strings.CutPrefix(parameter, "dur="); ok {
			if ms, err := strconv.ParseFloat(value, 64); err == nil {
				took = time.Duration(ms * float64(time.Millisecond))
			}
		}
		if value, ok := strings.CutPrefix(parameter, "desc="); ok {
			desc = strings.Trim(value, `"`)
		}
	}
	return took, desc
}

// described reads "batch 1, idle".
func described(text string) (size uint32, dispatch string) {
	count, reason, _ := strings.Cut(strings.TrimPrefix(text, "batch "), ", ")
	n, err := strconv.ParseUint(count, 10, 32)
	if err != nil {
		return 0, ""
	}
	return uint32(n), strings.Clone(reason)
}
