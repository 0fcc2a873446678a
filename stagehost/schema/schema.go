package schema

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Fitted are inputs that fit a spec.
type Fitted struct {
	// Inputs are in the spec's order, or in the order of the parts if the spec names
	// none.
	Inputs []payload.Part
	// Rows is the extent of axis 0, and 1 without a batch axis.
	Rows int
	// Lifted is true if the inputs were single rows without axis 0.
	Lifted bool
}

// Fit picks the parts that feed the spec's inputs and checks them. parts are the
// outputs of the previous step, kept are the parts that the pipeline keeps, and rename
// maps an input to the name of the part that feeds it. If the spec and the step have
// exactly one part each, they match whatever their names are.
func Fit(spec runner.Spec, parts, kept []payload.Part, rename map[string]string) (Fitted, error) {
	if len(spec.Inputs) == 0 {
		inputs, err := renameParts(parts, kept, rename)
		if err != nil {
			return Fitted{}, err
		}
		return withRows(spec, Fitted{Inputs: inputs, Rows: 1})
	}
	inputs, err := pick(spec, parts, kept, rename)
	if err != nil {
		return Fitted{}, err
	}
	lifted, err := check(spec, inputs)
	if err != nil {
		return Fitted{}, err
	}
	return withRows(spec, Fitted{Inputs: inputs, Rows: 1, Lifted: lifted})
}

// renameParts returns the parts for a runner without declared inputs: the parts under the
// names that the step gives them. A part that feeds inputs is present under those
// names only. A part whose name is that of a fed input is dropped.
func renameParts(parts, kept []payload.Part, rename map[string]string) ([]payload.Part, error) {
	if len(rename) == 0 {
		return parts, nil
	}
	inputs := slices.Sorted(maps.Keys(rename))
	out := make([]payload.Part, 0, len(parts)+len(inputs))
	for _, part := range parts {
		fed := partsFedBy(part, inputs, rename)
		if _, replaced := rename[part.Name]; len(fed) == 0 && !replaced {
			fed = []payload.Part{part}
		}
		out = append(out, fed...)
	}
	for _, input := range inputs {
		source := rename[input]
		if _, came := payload.Find(parts, source); came {
			continue
		}
		part, ok := payload.Find(kept, source)
		if !ok {
			return nil, missing(input, source, parts)
		}
		part.Name = input
		out = append(out, part)
	}
	return out, nil
}

// partsFedBy returns the part once for every input that it feeds, under that name.
func partsFedBy(part payload.Part, inputs []string, rename map[string]string) []payload.Part {
	var out []payload.Part
	for _, input := range inputs {
		if rename[input] == part.Name {
			renamed := part
			renamed.Name = input
			out = append(out, renamed)
		}
	}
	return out
}

func pick(spec runner.Spec, parts, kept []payload.Part, rename map[string]string) ([]payload.Part, error) {
	for _, input := range slices.Sorted(maps.Keys(rename)) {
		if !takes(spec, input) {
			return nil, fault.Newf(fault.InvalidInput, "the step renames to input %q, which the stage does not have; it takes %s", input, names(spec))
		}
	}
	alone := len(spec.Inputs) == 1 && len(parts) == 1
	inputs := make([]payload.Part, 0, len(spec.Inputs))
	for _, want := range spec.Inputs {
		_, isRenamed := rename[want.Name]
		source := sourceOf(want.Name, rename)
		part, ok := find(source, parts, kept)
		if !ok && alone && !isRenamed {
			part, ok = parts[0], true
		}
		if !ok && want.Optional {
			continue
		}
		if !ok {
			return nil, missing(want.Name, source, parts)
		}
		part.Name = want.Name
		inputs = append(inputs, part)
	}
	return inputs, nil
}

// AllTaken checks that each part feeds an input of the spec, or that the pipeline
// keeps it. A spec that names no inputs takes every part.
func AllTaken(spec runner.Spec, parts []payload.Part, rename map[string]string, keep []string) error {
	if len(spec.Inputs) == 0 {
		return nil
	}
	sources := make([]string, len(spec.Inputs), len(spec.Inputs)+len(keep))
	for i, want := range spec.Inputs {
		sources[i] = sourceOf(want.Name, rename)
	}
	if _, isRenamed := rename[spec.Inputs[0].Name]; len(sources) == 1 && len(parts) == 1 && !isRenamed {
		return nil // it feeds the only input, whatever its name
	}
	sources = append(sources, keep...)
	for i, part := range parts {
		if slices.Contains(sources, part.Name) {
			continue
		}
		field := "inputs." + part.Name
		if part.Name == "" {
			field = fmt.Sprintf("inputs[%d]", i)
		}
		return fault.Newf(fault.InvalidInput, "input %q is not one that the stage takes; it takes %s", part.Name, names(spec)).
			WithViolation(field, "is not taken")
	}
	return nil
}

// sourceOf returns the name of the part that feeds an input.
func sourceOf(input string, rename map[string]string) string {
	if source, ok := rename[input]; ok {
		return source
	}
	return input
}

func find(name string, parts, kept []payload.Part) (payload.Part, bool) {
	if part, ok := payload.Find(parts, name); ok {
		return part, true
	}
	return payload.Find(kept, name)
}

// listed is how many part names a message lists.
const listed = 10

func missing(input, source string, parts []payload.Part) error {
	have := make([]string, 0, listed+1)
	for _, p := range parts[:min(len(parts), listed)] {
		have = append(have, strconv.Quote(p.Name))
	}
	if len(parts) > listed {
		have = append(have, fmt.Sprintf("and %d more", len(parts)-listed))
	}
	what := fmt.Sprintf("input %q is missing", input)
	if input != source {
		what = fmt.Sprintf("input %q, fed by %q, is missing", input, source)
	}
	return fault.Newf(fault.InvalidInput, "%s; got %s", what, orNone(strings.Join(have, ", "))).
		WithViolation("inputs."+input, "missing")
}

func orNone(s string) string {
	if s == "" {
		return "nothing"
	}
	return s
}

func takes(spec runner.Spec, input string) bool {
	for _, want := range spec.Inputs {
		if want.Name == input {
			return true
		}
	}
	return false
}

func names(spec runner.Spec) string {
	list := make([]string, len(spec.Inputs))
	for i, want := range spec.Inputs {
		list[i] = want.Name
	}
	return strings.Join(list, ", ")
}

// check validates each input against its spec, in place, and reports whether all
// tensors were single rows that it has lifted.
func check(spec runner.Spec, inputs []payload.Part) (lifted bool, err error) {
	tensors, lifts := 0, 0
	for i := range inputs {
		want, _ := specOf(spec, inputs[i].Name)
		up, err := checkOne(spec.BatchAxis, want, &inputs[i])
		if err != nil {
			return false, violation(want.Name, err)
		}
		if want.IsTensor() {
			tensors++
		}
		if up {
			lifts++
		}
	}
	return lifts > 0 && lifts == tensors, nil
}

func violation(input string, err error) error {
	field, what := "inputs."+input, err.Error()
	if at, ok := errors.AsType[*msgpack.Error](err); ok {
		field, what = at.At(field), at.Problem()
	}
	return fault.Newf(fault.InvalidInput, "input %q: %w", input, err).WithViolation(field, "%s", what)
}

func specOf(spec runner.Spec, name string) (runner.PartSpec, bool) {
	for _, want := range spec.Inputs {
		if want.Name == name {
			return want, true
		}
	}
	return runner.PartSpec{}, false
}

func checkOne(axis runner.BatchAxis, want runner.PartSpec, part *payload.Part) (lifted bool, err error) {
	if !want.IsTensor() {
		if err := checkBlob(want, *part); err != nil {
			return false, err
		}
		return false, convertToJSON(want, part)
	}
	if part.Tensor == nil {
		return false, fmt.Errorf("is a blob%s, wanted is a tensor %s%s", ofType(part.Blob.ContentType), want.Datatype, shape(want.Shape))
	}
	got := *part.Tensor
	if got.Datatype != want.Datatype {
		return false, fmt.Errorf("is %s, wanted is %s%s", got.Datatype, want.Datatype, shape(want.Shape))
	}
	if axis == runner.BatchRows && len(got.Shape)+1 == len(want.Shape) {
		got.Shape = append([]int64{1}, got.Shape...)
		lifted = true
	}
	if !matches(got.Shape, want.Shape) {
		return false, fmt.Errorf("has shape %s, wanted is %s", shape(part.Tensor.Shape), shape(want.Shape))
	}
	if lifted {
		part.Tensor = &got
	}
	return lifted, nil
}

func checkBlob(want runner.PartSpec, part payload.Part) error {
	if part.Tensor != nil {
		return fmt.Errorf("is a tensor %s%s, wanted is a blob%s", part.Tensor.Datatype, shape(part.Tensor.Shape), ofType(strings.Join(want.ContentTypes, " or ")))
	}
	if part.Blob.ContentType == "" || part.Blob.ContentType == payload.OctetStream || len(want.ContentTypes) == 0 {
		return nil
	}
	if takesType(want, part.Blob.ContentType) || msgpack.Is(part.Blob.ContentType) && (takesMessagePack(want) || takesType(want, jsonType)) {
		return nil
	}
	return fmt.Errorf("is %s, wanted is %s", part.Blob.ContentType, strings.Join(want.ContentTypes, " or "))
}

func ofType(contentType string) string {
	if contentType == "" {
		return ""
	}
	return " of type " + contentType
}

// matches reports whether a shape has the wanted extents; -1 matches any extent.
func matches(got, want []int64) bool {
	if len(got) != len(want) {
		return false
	}
	for i := range got {
		if want[i] >= 0 && got[i] != want[i] {
			return false
		}
	}
	return true
}

func shape(extents []int64) string {
	text := make([]string, len(extents))
	for i, n := range extents {
		text[i] = strconv.FormatInt(n, 10)
	}
	return "[" + strings.Join(text, ", ") + "]"
}

// withRows counts the rows of fitted inputs; all tensors must agree.
func withRows(spec runner.Spec, f Fitted) (Fitted, error) {
	if spec.BatchAxis != runner.BatchRows {
		return f, nil
	}
	first := ""
	for _, p := range f.Inputs {
		if p.Tensor == nil {
			continue
		}
		rows := p.Tensor.Rows()
		switch {
		case len(p.Tensor.Shape) == 0:
			return Fitted{}, violation(p.Name, errors.New("is a scalar, wanted are rows on axis 0"))
		case rows == 0:
			return Fitted{}, violation(p.Name, fmt.Errorf("has no rows: shape %s", shape(p.Tensor.Shape)))
		case first == "":
			first, f.Rows = p.Name, int(rows)
		case int(rows) != f.Rows:
			return Fitted{}, violation(p.Name, fmt.Errorf("has %d rows, input %q has %d", rows, first, f.Rows))
		}
	}
	return f, nil
}

// Outputs validates a runner's outputs for one item, and returns them in the rank of
// the inputs.
func Outputs(spec runner.Spec, parts []payload.Part, f Fitted) ([]payload.Part, error) {
	if err := Travels(parts); err != nil {
		return nil, err
	}
	for _, want := range spec.Outputs {
		if err := checkOutput(spec.BatchAxis, want, parts, f.Rows); err != nil {
			return nil, err
		}
	}
	if !f.Lifted {
		return parts, nil
	}
	return dropRowAxis(parts), nil
}

// Travels checks that receivers can read the outputs, or a chunk of them. The stage
// can still report the error here; a receiver cannot.
func Travels(parts []payload.Part) error {
	if err := payload.Validate("outputs", parts); err != nil {
		return badOutput("%s", fault.From(err).Message)
	}
	return nil
}

func badOutput(format string, args ...any) *fault.Fault {
	return fault.Newf(fault.RunnerOutputInvalid, format, args...)
}

func checkOutput(axis runner.BatchAxis, want runner.PartSpec, parts []payload.Part, rows int) error {
	got, ok := payload.Find(parts, want.Name)
	switch {
	case !ok && want.Optional:
		return nil
	case !ok:
		return badOutput("output %q is missing", want.Name)
	}
	if err := checkOutputPart(want, got); err != nil {
		return err
	}
	if want.IsTensor() && axis == runner.BatchRows && got.Tensor.Rows() != int64(rows) {
		return badOutput("output %q has %d rows for an item of %d", want.Name, got.Tensor.Rows(), rows)
	}
	return nil
}

// checkOutputPart validates an output against its spec, except the number of its rows.
func checkOutputPart(want runner.PartSpec, got payload.Part) error {
	if err := checkKind(want, got); err != nil {
		return err
	}
	if want.IsTensor() && !matches(got.Tensor.Shape, want.Shape) {
		return badOutput("output %q has shape %s, the stage says %s", want.Name, shape(got.Tensor.Shape), shape(want.Shape))
	}
	return nil
}

// checkKind validates the kind and the datatype of an output.
func checkKind(want runner.PartSpec, got payload.Part) error {
	switch {
	case want.IsTensor() != (got.Tensor != nil):
		return badOutput("output %q is not of the kind that the stage says", want.Name)
	case want.IsTensor() && got.Tensor.Datatype != want.Datatype:
		return badOutput("output %q is %s, the stage says %s", want.Name, got.Tensor.Datatype, want.Datatype)
	}
	return nil
}

// dropRowAxis removes axis 0 from tensors of one row.
func dropRowAxis(parts []payload.Part) []payload.Part {
	out := append([]payload.Part(nil), parts...)
	for i, p := range out {
		if p.Tensor == nil || len(p.Tensor.Shape) == 0 || p.Tensor.Shape[0] != 1 {
			continue
		}
		row := tensor.Tensor{Datatype: p.Tensor.Datatype, Shape: p.Tensor.Shape[1:], Raw: p.Tensor.Raw}
		out[i].Tensor = &row
	}
	return out
}
