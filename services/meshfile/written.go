package meshfile

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// writtenPipeline is a Pipeline as it is written; what says nothing is left out.
type writtenPipeline struct {
	Steps       []writtenStep `yaml:"steps"`
	Timeout     string        `yaml:"timeout,omitempty"`
	Durability  string        `yaml:"durability,omitempty"`
	Keep        []string      `yaml:"keep,omitempty"`
	MaxInFlight int           `yaml:"max_in_flight,omitempty"`
	WaitForRoom bool          `yaml:"wait_for_room,omitempty"`
}

type writtenStep struct {
	Name       string            `yaml:"name"`
	Stage      string            `yaml:"stage"`
	Model      string            `yaml:"model,omitempty"`
	Alias      string            `yaml:"alias,omitempty"`
	Version    string            `yaml:"version,omitempty"`
	Parameters map[string]any    `yaml:"parameters,omitempty"`
	Inputs     map[string]string `yaml:"inputs,omitempty"`
}

// WritePipelines returns the pipelines as a file that ReadPipelines reads.
func WritePipelines(pipelines ...pipeline.Pipeline) ([]byte, error) {
	out := map[string]writtenPipeline{}
	for _, p := range pipelines {
		out[string(p.Name)] = written(p)
	}
	return yaml.MarshalWithOptions(map[string]any{"pipelines": out}, yaml.IndentSequence(true))
}

func written(p pipeline.Pipeline) writtenPipeline {
	out := writtenPipeline{Timeout: wait(p.Timeout), Durability: string(p.Durability), Keep: p.Keep, MaxInFlight: p.MaxInFlight, WaitForRoom: p.WaitForRoom}
	for _, s := range p.Steps {
		step := writtenStep{
			Name: string(s.Name), Stage: string(s.Stage), Model: s.Model.Model, Alias: s.Model.Alias, Version: s.Model.Version, Inputs: s.Inputs,
		}
		for name, value := range s.Parameters {
			if step.Parameters == nil {
				step.Parameters = map[string]any{}
			}
			step.Parameters[name] = value.Any()
		}
		out.Steps = append(out.Steps, step)
	}
	return out
}

// wait is a duration, "" for none.
func wait(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return d.String()
}

// Difference is a key of a pipeline that two of them have differently; "" is that one
// does not have it.
type Difference struct{ Key, Old, New string }

// Differences returns what tells two pipelines apart, in the order of a file.
func Differences(before, after pipeline.Pipeline) []Difference {
	a, b := keys(before), keys(after)
	var out []Difference
	for _, key := range append(slices.Clone(b.order), a.order...) {
		if a.values[key] != b.values[key] && !slices.ContainsFunc(out, func(d Difference) bool { return d.Key == key }) {
			out = append(out, Difference{Key: key, Old: a.values[key], New: b.values[key]})
		}
	}
	return out
}

// keyed are the keys of a pipeline that say something, and what.
type keyed struct {
	order  []string
	values map[string]string
}

func (k *keyed) add(key, value string) {
	if value != "" {
		k.order = append(k.order, key)
		k.values[key] = value
	}
}

func keys(p pipeline.Pipeline) *keyed {
	out := &keyed{values: map[string]string{}}
	w := written(p)
	for i, s := range w.Steps {
		at := fmt.Sprintf("steps[%d].", i)
		out.add(at+"name", s.Name)
		out.add(at+"stage", s.Stage)
		out.add(at+"model", s.Model)
		out.add(at+"alias", s.Alias)
		out.add(at+"version", s.Version)
		for _, name := range slices.Sorted(maps.Keys(p.Steps[i].Parameters)) {
			out.add(at+"parameters."+name, shown(p.Steps[i].Parameters[name]))
		}
		for _, input := range slices.Sorted(maps.Keys(s.Inputs)) {
			out.add(at+"inputs."+input, s.Inputs[input])
		}
	}
	out.add("timeout", w.Timeout)
	out.add("durability", w.Durability)
	out.add("keep", strings.Join(w.Keep, ", "))
	if w.MaxInFlight != 0 {
		out.add("max_in_flight", strconv.Itoa(w.MaxInFlight))
	}
	if w.WaitForRoom {
		out.add("wait_for_room", "true")
	}
	return out
}

// shown is a parameter's value in words: text is quoted, so that it is told from a
// number.
func shown(v payload.Value) string {
	if text, is := v.Any().(string); is {
		return strconv.Quote(text)
	}
	return v.String()
}
