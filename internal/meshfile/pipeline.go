package meshfile

import (
	"cmp"
	"encoding/json"
	"errors"
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

// Routes returns the pipelines, sorted by name: those without errors.
func (f *File) Routes() ([]pipeline.Pipeline, error) {
	var out []pipeline.Pipeline
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(f.Pipelines)) {
		p, err := f.route(name)
		if err != nil {
			errs = append(errs, f.At(err, "pipelines", name))
			continue
		}
		out = append(out, p)
	}
	return out, errors.Join(errs...)
}

func (f *File) route(name string) (pipeline.Pipeline, error) {
	out := f.Pipelines[name]
	out.Name = pipeline.Name(name)
	var errs []error
	f.checkStages(out.Steps, "steps", cmp.Or(out.Durability, pipeline.Memory), func(err error) { errs = append(errs, err) })
	if len(errs) > 0 {
		return out, errors.Join(errs...)
	}
	return out, validateRoute(out)
}

// checkStages checks the stages of a list of steps, those in blocks too. The field is the list's.
func (f *File) checkStages(steps []pipeline.Step, field string, d pipeline.Durability, report func(error)) {
	for i := range steps {
		at := fmt.Sprintf("%s[%d]", field, i)
		if !steps[i].IsBlock() {
			if err := f.checkStage(steps[i].Stage, d); err != nil {
				report(fmt.Errorf("%s.stage: %w", at, err))
			}
			continue
		}
		f.checkMetadata(&steps[i], at, report)
		for _, list := range steps[i].Lists() {
			f.checkStages(list.Steps, at+"."+list.StepsField(), d, report)
		}
	}
}

// checkMetadata reports keys that a block reads and no request may have.
func (f *File) checkMetadata(block *pipeline.Step, at string, report func(error)) {
	check := func(field, key string) {
		if key != "" && !f.pipelinesOnly && !slices.Contains(f.Gateway.Metadata, key) {
			report(fmt.Errorf("%s.%s: no request has the key %s, because it is not in gateway.metadata; add it there", at, field, key))
		}
	}
	for i, c := range block.Switch {
		if c.When != nil {
			check(fmt.Sprintf("switch[%d].when.metadata", i), c.When.Metadata)
		}
	}
	if block.Split != nil {
		check("split.by_metadata", block.Split.ByMetadata)
	}
}

// validateRoute checks the pipeline; its name is in the path of the message.
func validateRoute(p pipeline.Pipeline) error {
	if err := pipeline.ValidPipelineName(string(p.Name)); err != nil {
		return err
	}
	if _, err := pipeline.ParseDurability(string(p.Durability)); err != nil {
		return fmt.Errorf("durability: %w", err)
	}
	if err := p.Validate(); err != nil {
		if inner := errors.Unwrap(err); inner != nil {
			return inner
		}
		return err
	}
	return nil
}

// checkStage returns an error if the file has not that stage with a queue of that durability, and no
// other process may have it.
func (f *File) checkStage(name pipeline.StageName, d pipeline.Durability) error {
	stage, here := f.Stages[string(name)]
	if !here && !f.pipelinesOnly && !f.Joinable() {
		return fmt.Errorf("there is no stage %q; there are %s, and without nats.url or nats.listen no other process can add one",
			name, strings.Join(f.StageNames(), ", "))
	}
	if _, err := pipeline.ParseDurability(string(d)); err != nil || has(stage.Queue.Durabilities, d) || f.pipelinesOnly {
		return nil //nolint:nilerr // a bad durability is an error of its own key
	}
	return fmt.Errorf("the pipeline's durability is %s, and the stage %s has no such queue; change durability, or the stage's queue.durabilities", d, name)
}

// WritePipelines returns the pipelines as a file that ReadPipelines reads. It has no
// terminal control characters.
func WritePipelines(pipelines ...pipeline.Pipeline) []byte {
	var out strings.Builder
	out.WriteString("pipelines:\n")
	for _, p := range pipelines {
		fmt.Fprintf(&out, "  %s:\n    steps:\n", text(string(p.Name)))
		above := ""
		for _, k := range keysOf(p) {
			if k.above != above && k.above != "" {
				fmt.Fprintf(&out, "        %s:\n", k.above)
			}
			above = k.above
			fmt.Fprintf(&out, "%s%s: %s\n", k.indent, k.name, k.value)
		}
	}
	return []byte(out.String())
}

// key is a key of a pipeline and its value, as they are written.
type key struct {
	// path names the key in the pipeline.
	path string
	// indent precedes the name in a file; above is the key above it in a step, if any.
	indent, above string
	name, value   string
	// block is what the value writes, of a block.
	block any
}

// keysOf returns the keys of a pipeline in the order of a file, without the unset ones.
func keysOf(p pipeline.Pipeline) (out []key) {
	add := func(path, indent, above, name, value string) {
		if above != "" {
			path += above + "."
		}
		out = append(out, key{path: path + name, indent: indent, above: above, name: name, value: value})
	}
	optional := func(path, indent, name, value string) {
		if value != "" {
			add(path, indent, "", name, value)
		}
	}
	named := func(s string) string {
		if s == "" {
			return ""
		}
		return text(s)
	}
	for i, s := range p.Steps {
		path := fmt.Sprintf("steps[%d].", i)
		add(path, "      - ", "", "name", text(string(s.Name)))
		const indent = "        "
		for _, b := range blocksOf(s) {
			out = append(out, key{path: path + b.name, indent: indent, name: b.name, value: Flow(b.block), block: b.block})
		}
		optional(path, indent, "stage", named(string(s.Stage)))
		optional(path, indent, "model", named(s.Model.Model))
		optional(path, indent, "alias", named(s.Model.Alias))
		optional(path, indent, "version", named(s.Model.Version))
		for _, name := range slices.Sorted(maps.Keys(s.Parameters)) {
			add(path, indent+"  ", "parameters", text(name), value(s.Parameters[name]))
		}
		if s.Locked {
			add(path, indent, "", "locked", "true")
		}
		for _, name := range slices.Sorted(maps.Keys(s.Inputs)) {
			add(path, indent+"  ", "inputs", text(name), text(s.Inputs[name]))
		}
	}
	const indent = "    "
	if p.Timeout != 0 {
		add("", indent, "", "timeout", p.Timeout.String())
	}
	optional("", indent, "durability", string(p.Durability))
	if len(p.Keep) > 0 {
		add("", indent, "", "keep", Flow(p.Keep))
	}
	if len(p.Outputs) > 0 {
		add("", indent, "", "outputs", Flow(p.Outputs))
	}
	if p.MaxInFlight != 0 {
		add("", indent, "", "max_in_flight", strconv.Itoa(p.MaxInFlight))
	}
	if p.WaitForCapacity {
		add("", indent, "", "wait_for_capacity", "true")
	}
	optional("", indent, "queue", string(p.Queue))
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
	return quote(s)
}

// quote is text in quotes, every character in it that does not print as an escape.
func quote(s string) string {
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
	a, b := values(before), values(after)
	var out []Difference
	for _, k := range slices.Concat(leavesOf(after), leavesOf(before)) {
		d := Difference{Key: k.path, Old: a[k.path], New: b[k.path]}
		if d.Old != d.New && !slices.Contains(out, d) {
			out = append(out, d)
		}
	}
	return out
}

// values returns the keys of a pipeline with their values.
func values(p pipeline.Pipeline) map[string]string {
	out := map[string]string{}
	for _, k := range leavesOf(p) {
		out[k.path] = k.value
	}
	return out
}
