package worker

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/stagemesh/stagemesh/sdk/go/frame"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// specOf returns a worker's spec. Its examples share the bytes of the body.
func specOf(s *frame.Spec, body []byte) (runner.Spec, error) {
	out := runner.Spec{BatchAxis: runner.BatchRows}
	if s.BatchAxis == frame.None {
		out.BatchAxis = runner.BatchNone
	}
	var err error
	if out.Inputs, err = partSpecsOf("inputs", s.Inputs); err != nil {
		return runner.Spec{}, err
	}
	if out.Outputs, err = partSpecsOf("outputs", s.Outputs); err != nil {
		return runner.Spec{}, err
	}
	for i, e := range s.Examples {
		example := runner.Example{Name: e.Name, Inputs: make([]payload.Part, len(e.Inputs))}
		for j, p := range e.Inputs {
			if example.Inputs[j], err = partOf(p, body); err != nil {
				return runner.Spec{}, fmt.Errorf("examples[%d].inputs[%d]: %w", i, j, err)
			}
		}
		if err := payload.Validate("inputs", example.Inputs); err != nil {
			return runner.Spec{}, fmt.Errorf("examples[%d]: %w", i, err)
		}
		out.Examples = append(out.Examples, example)
	}
	return out, nil
}

func partSpecsOf(key string, specs []frame.PartSpec) ([]runner.PartSpec, error) {
	var out []runner.PartSpec
	seen := map[string]bool{}
	for i, s := range specs {
		if err := payload.ValidName(s.Name); err != nil {
			return nil, fmt.Errorf("%s[%d]: %w", key, i, err)
		}
		if seen[s.Name] {
			return nil, fmt.Errorf("%s[%d]: %q is there twice", key, i, s.Name)
		}
		seen[s.Name] = true
		out = append(out, runner.PartSpec{
			Name: s.Name, Datatype: s.Datatype, Shape: s.Shape, ContentTypes: s.ContentTypes,
			Schema:   s.Schema,
			Variable: s.Variable == frame.List || s.Variable == frame.Pad, Optional: s.Optional, Description: s.Description,
		})
	}
	return out, nil
}

// differ says what two specs disagree on; empty where they do not. Examples may
// be drawn anew each time.
func differ(old, now runner.Spec) string {
	var out []string
	if old.BatchAxis != now.BatchAxis {
		out = append(out, fmt.Sprintf("batch_axis was %s and is %s", old.BatchAxis, now.BatchAxis))
	}
	if old.Stream != now.Stream {
		out = append(out, fmt.Sprintf("that it answers in chunks was %t and is %t", old.Stream, now.Stream))
	}
	if !reflect.DeepEqual(old.Inputs, now.Inputs) {
		out = append(out, fmt.Sprintf("inputs were %s and are %s", describe(old.Inputs), describe(now.Inputs)))
	}
	if !reflect.DeepEqual(old.Outputs, now.Outputs) {
		out = append(out, fmt.Sprintf("outputs were %s and are %s", describe(old.Outputs), describe(now.Outputs)))
	}
	return strings.Join(out, "; ")
}

func describe(specs []runner.PartSpec) string {
	out := make([]string, len(specs))
	for i, s := range specs {
		what := string(s.Datatype) + fmt.Sprint(s.Shape)
		if !s.IsTensor() {
			what = "blob" + fmt.Sprint(s.ContentTypes)
		}
		if s.Optional {
			what += "?"
		}
		out[i] = s.Name + " " + what
	}
	return "(" + strings.Join(out, ", ") + ")"
}
