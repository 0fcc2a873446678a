package meshfile

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// WritePipelines returns the pipelines as a file that ReadPipelines reads. It has no
// terminal control characters.
func WritePipelines(pipelines ...pipeline.Pipeline) []byte {
	w := &writer{}
	w.line(0, "pipelines:")
	for _, p := range pipelines {
		w.line(1, text(string(p.Name))+":")
		w.line(2, "steps:")
		for _, step := range p.Steps {
			w.step(step)
		}
		for _, k := range ownKeys(p) {
			w.line(2, k.name+": "+k.value)
		}
	}
	return []byte(w.out.String())
}

// writer writes YAML.
type writer struct{ out strings.Builder }

func (w *writer) line(depth int, line string) {
	w.out.WriteString(strings.Repeat("  ", depth) + line + "\n")
}

func (w *writer) step(s pipeline.Step) {
	mark := "- "
	for _, k := range stepKeys(s) {
		w.line(3, mark+k.name+": "+k.value)
		mark = "  "
	}
	for _, group := range groups(s) {
		if len(group.keys) == 0 {
			continue
		}
		w.line(4, group.name+":")
		for _, k := range group.keys {
			w.line(5, k.name+": "+k.value)
		}
	}
}

// key is a key of a file and its value, both as they are written.
type key struct{ name, value string }

// group are keys below one.
type group struct {
	name string
	keys []key
}

func stepKeys(s pipeline.Step) []key {
	out := []key{{"name", text(string(s.Name))}, {"stage", text(string(s.Stage))}}
	for _, k := range []key{{"model", s.Model.Model}, {"alias", s.Model.Alias}, {"version", s.Model.Version}} {
		if k.value != "" {
			out = append(out, key{k.name, text(k.value)})
		}
	}
	return out
}

func groups(s pipeline.Step) []group {
	parameters, inputs := group{name: "parameters"}, group{name: "inputs"}
	for _, name := range slices.Sorted(maps.Keys(s.Parameters)) {
		parameters.keys = append(parameters.keys, key{text(name), value(s.Parameters[name])})
	}
	for _, name := range slices.Sorted(maps.Keys(s.Inputs)) {
		inputs.keys = append(inputs.keys, key{text(name), text(s.Inputs[name])})
	}
	return []group{parameters, inputs}
}

// ownKeys returns the keys of a pipeline beside its steps, without the unset ones.
func ownKeys(p pipeline.Pipeline) []key {
	var out []key
	if p.Timeout != 0 {
		out = append(out, key{"timeout", p.Timeout.String()})
	}
	if p.Durability != pipeline.DurabilityUnset {
		out = append(out, key{"durability", string(p.Durability)})
	}
	if len(p.Keep) > 0 {
		names := make([]string, len(p.Keep))
		for i, name := range p.Keep {
			names[i] = text(name)
		}
		out = append(out, key{"keep", "[" + strings.Join(names, ", ") + "]"})
	}
	if p.MaxInFlight != 0 {
		out = append(out, key{"max_in_flight", strconv.Itoa(p.MaxInFlight)})
	}
	if p.WaitForCapacity {
		out = append(out, key{"wait_for_capacity", "true"})
	}
	return out
}

// value is a parameter's value as it is written.
func value(v payload.Value) string {
	switch v := v.Any().(type) {
	case string:
		return text(v)
	case float64:
		out := strconv.FormatFloat(v, 'g', -1, 64)
		if !strings.ContainsAny(out, ".eIN") {
			out += ".0"
		}
		return out
	default:
		return fmt.Sprint(v)
	}
}

// plain is text that means itself without quotes, unless it is one of the words.
var plain = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_./-]*$`)

// text is text as it is written: as it is, or in quotes.
func text(s string) string {
	switch strings.ToLower(s) {
	case "true", "false", "null", "yes", "no", "on", "off":
	default:
		if plain.MatchString(s) {
			return s
		}
	}
	return quoted(s)
}

// quoted is text in quotes, every character in it that does not print as an escape.
func quoted(s string) string {
	data, err := json.Marshal(s)
	if err != nil {
		return strconv.Quote(s)
	}
	var out strings.Builder
	for _, r := range string(data) {
		switch {
		case unicode.IsPrint(r):
			out.WriteRune(r)
		case r > 0xFFFF:
			fmt.Fprintf(&out, `\U%08X`, r)
		default:
			fmt.Fprintf(&out, `\u%04X`, r)
		}
	}
	return out.String()
}

// Difference is a key of a pipeline that two of them have differently, as it is
// written; "" is that one does not have it.
type Difference struct{ Key, Old, New string }

// Differences returns the keys in which two pipelines differ, in the order of a file.
func Differences(before, after pipeline.Pipeline) []Difference {
	a, b := flat(before), flat(after)
	var out []Difference
	for _, k := range slices.Concat(b, a) {
		d := Difference{Key: k.name, Old: find(a, k.name), New: find(b, k.name)}
		if d.Old != d.New && !slices.Contains(out, d) {
			out = append(out, d)
		}
	}
	return out
}

// flat are all keys of a pipeline, by their paths.
func flat(p pipeline.Pipeline) []key {
	var out []key
	for i, s := range p.Steps {
		at := fmt.Sprintf("steps[%d].", i)
		for _, k := range stepKeys(s) {
			out = append(out, key{at + k.name, k.value})
		}
		for _, group := range groups(s) {
			for _, k := range group.keys {
				out = append(out, key{at + group.name + "." + k.name, k.value})
			}
		}
	}
	return append(out, ownKeys(p)...)
}

func find(keys []key, name string) string {
	for _, k := range keys {
		if k.name == name {
			return k.value
		}
	}
	return ""
}
