package schema

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/mesh/fault"
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
func (c *Contract) Fit(parts, kept []payload.Part, rename map[string]string) (Fitted, error) {
	out := Fitted{Rows: 1}
	var err error
	if len(c.spec.Inputs) == 0 {
		out.Inputs, err = renameParts(parts, kept, rename)
	} else if out.Inputs, err = pick(c.spec, parts, kept, rename); err == nil {
		out.Lifted, err = checkInputs(c.spec, out.Inputs)
	}
	if err == nil && c.spec.BatchAxis == runner.BatchRows {
		out.Rows, err = countRows(out.Inputs)
	}
	if err == nil {
		err = checkEmpty(c.spec, out.Inputs)
	}
	if err != nil || c.inputs == nil {
		return out, err
	}
	for _, part := range out.Inputs {
		broken, err := c.inputs.check("inputs."+part.Name, part)
		if f, ok := errors.AsType[*fault.Fault](err); ok {
			return Fitted{}, f
		}
		if err != nil {
			return Fitted{}, violation(part.Name, err)
		}
		if len(broken) > 0 {
			return Fitted{}, violationFault(fault.SchemaViolation, fmt.Sprintf("input %q", part.Name), broken)
		}
	}
	return out, nil
}

// renameParts returns the parts for a runner without declared inputs: the parts under the
// names that the step gives them. A part that feeds inputs is present under those
// names only. A part with the name of a fed input is dropped.
func renameParts(parts, kept []payload.Part, rename map[string]string) ([]payload.Part, error) {
	if len(rename) == 0 {
		return parts, nil
	}
	inputs := slices.Sorted(maps.Keys(rename))
	out := make([]payload.Part, 0, len(parts)+len(inputs))
	feed := func(part payload.Part) (fed bool) {
		source := part.Name
		for _, input := range inputs {
			if rename[input] == source {
				part.Name, fed = input, true
				out = append(out, part)
			}
		}
		return fed
	}
	for _, part := range parts {
		if _, replaced := rename[part.Name]; !feed(part) && !replaced {
			out = append(out, part)
		}
	}
	for _, input := range inputs {
		if _, ok := payload.Find(out, input); ok {
			continue
		}
		part, ok := payload.Find(kept, rename[input])
		if !ok {
			return nil, missing(input, rename[input], parts)
		}
		part.Name = input
		out = append(out, part)
	}
	return out, nil
}

func pick(spec runner.Spec, parts, kept []payload.Part, rename map[string]string) ([]payload.Part, error) {
	for _, input := range slices.Sorted(maps.Keys(rename)) {
		if !slices.ContainsFunc(spec.Inputs, func(s runner.PartSpec) bool { return s.Name == input }) {
			return nil, fault.Newf(fault.InvalidInput, "the step renames to input %q, which the stage does not have; it takes %s", input, namesOf(spec.Inputs))
		}
	}
	alone := len(spec.Inputs) == 1 && len(parts) == 1
	inputs := make([]payload.Part, 0, len(spec.Inputs))
	for _, want := range spec.Inputs {
		_, isRenamed := rename[want.Name]
		source := sourceOf(want.Name, rename)
		part, ok := payload.Find(parts, source)
		if !ok {
			part, ok = payload.Find(kept, source)
		}
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
		return fault.Newf(fault.InvalidInput, "unknown input %q; the stage has %s", part.Name, namesOf(spec.Inputs)).
			WithViolation(payload.Path("inputs", i, part.Name), "is not accepted")
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

func missing(input, source string, parts []payload.Part) error {
	const listed = 10
	have := make([]string, 0, listed+1)
	for _, p := range parts[:min(len(parts), listed)] {
		have = append(have, strconv.Quote(p.Name))
	}
	if len(parts) > listed {
		have = append(have, fmt.Sprintf("and %d more", len(parts)-listed))
	}
	if len(parts) == 0 {
		have = append(have, "nothing")
	}
	what := fmt.Sprintf("input %q is missing", input)
	if input != source {
		what = fmt.Sprintf("input %q, fed by %q, is missing", input, source)
	}
	return fault.Newf(fault.InvalidInput, "%s; got %s", what, strings.Join(have, ", ")).
		WithViolation("inputs."+input, "missing")
}

// checkInputs validates each input against its spec, in place, and reports whether all
// tensors were single rows that it has lifted.
func checkInputs(spec runner.Spec, inputs []payload.Part) (lifted bool, err error) {
	tensors, lifts := 0, 0
	for i := range inputs {
		at := slices.IndexFunc(spec.Inputs, func(s runner.PartSpec) bool { return s.Name == inputs[i].Name })
		want := spec.Inputs[at]
		up, err := checkInput(spec.BatchAxis, want, &inputs[i])
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

// contentTypeError means that the stage does not take the content type of an input.
type contentTypeError struct{ error }

func violation(input string, err error) error {
	reason, field, what := fault.InvalidInput, "inputs."+input, err.Error()
	if _, ok := errors.AsType[contentTypeError](err); ok {
		reason = fault.UnsupportedMedia
	}
	if at, ok := errors.AsType[*msgpack.Error](err); ok {
		field, what = at.At(field), at.Problem()
	}
	return fault.Newf(reason, "input %q: %w", input, err).WithViolation(field, "%s", what)
}

// checkInput validates an input, in place. A blob without a type gets the one that the spec has.
func checkInput(axis runner.BatchAxis, want runner.PartSpec, part *payload.Part) (lifted bool, err error) {
	if !want.IsTensor() {
		if err := checkBlob(want, *part); err != nil {
			return false, err
		}
		if types := want.ContentTypes; part.Blob.ContentType == "" && len(types) == 1 && !strings.Contains(types[0], "*") {
			part.Blob.ContentType = types[0]
		}
		return false, convertToJSON(want, part)
	}
	if part.Tensor == nil {
		err := fmt.Errorf("is a blob%s, expected a tensor %s%s", ofType(part.Blob.ContentType), want.Datatype, shape(want.Shape))
		if kind := part.Blob.ContentType; kind == "" || kind == payload.OctetStream || payload.IsJSON(kind) || msgpack.Is(kind) {
			return false, err // tensors come under these types, too
		}
		return false, contentTypeError{err}
	}
	got := *part.Tensor
	if got.Datatype != want.Datatype {
		return false, fmt.Errorf("is %s, expected %s%s", got.Datatype, want.Datatype, shape(want.Shape))
	}
	if axis == runner.BatchRows && len(got.Shape)+1 == len(want.Shape) {
		got.Shape = append([]int64{1}, got.Shape...)
		lifted = true
	}
	if !matches(got.Shape, want.Shape) {
		return false, fmt.Errorf("has shape %s, expected %s", shape(part.Tensor.Shape), shape(want.Shape))
	}
	if lifted {
		part.Tensor = &got
	}
	return lifted, nil
}

func checkBlob(want runner.PartSpec, part payload.Part) error {
	if part.Tensor != nil {
		return fmt.Errorf("is a tensor %s%s, expected a blob%s", part.Tensor.Datatype, shape(part.Tensor.Shape), ofType(strings.Join(want.ContentTypes, " or ")))
	}
	if part.Blob.ContentType == "" || part.Blob.ContentType == payload.OctetStream || len(want.ContentTypes) == 0 {
		if len(want.ContentTypes) == 0 || slices.ContainsFunc(want.ContentTypes, func(t string) bool { return !payload.IsJSON(t) }) {
			return nil
		}
		if at, number := payload.LargeNumber(part.Blob.Data); number != nil { // the gateway checked JSON that has its type
			return fmt.Errorf("the number %.40s at byte %d is beyond FP64", number, at)
		}
		return nil
	}
	if takesType(want, part.Blob.ContentType) || msgpack.Is(part.Blob.ContentType) && (takesMessagePack(want) || takesType(want, jsonType)) {
		return nil
	}
	return contentTypeError{fmt.Errorf("is %s, expected %s", part.Blob.ContentType, strings.Join(want.ContentTypes, " or "))}
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

// countRows counts the rows of inputs; all tensors must agree.
func countRows(inputs []payload.Part) (int, error) {
	first, out := "", 1
	for _, p := range inputs {
		if p.Tensor == nil {
			continue
		}
		rows := p.Tensor.Rows()
		switch {
		case len(p.Tensor.Shape) == 0:
			return 0, violation(p.Name, errors.New("is a scalar, expected rows on axis 0"))
		case rows == 0:
			return 0, violation(p.Name, fmt.Errorf("has no rows: shape %s", shape(p.Tensor.Shape)))
		case first == "":
			first, out = p.Name, int(rows)
		case int(rows) != out:
			return 0, violation(p.Name, fmt.Errorf("has %d rows, input %q has %d", rows, first, out))
		}
	}
	return out, nil
}

// maxEmptyExtents bounds the product of the extents of a tensor without elements: they take
// no bytes, but runners make lists of them.
const maxEmptyExtents = 1 << 20

// checkEmpty checks the extents of tensors without elements, as far as the spec leaves them
// to the caller.
func checkEmpty(spec runner.Spec, inputs []payload.Part) error {
	for _, part := range inputs {
		if part.Tensor == nil || len(part.Tensor.Raw) > 0 {
			continue
		}
		at, product := slices.IndexFunc(spec.Inputs, func(p runner.PartSpec) bool { return p.Name == part.Name }), int64(1)
		for axis, extent := range part.Tensor.Shape {
			if at >= 0 && spec.Inputs[at].Shape[axis] >= 0 || extent == 0 {
				continue
			}
			if product *= min(extent, maxEmptyExtents+1); product > maxEmptyExtents {
				return violation(part.Name, fmt.Errorf("has no elements but shape %s; without elements, extents multiply to at most %d", shape(part.Tensor.Shape), maxEmptyExtents))
			}
		}
	}
	return nil
}

// jsonType is the content type of converted MessagePack.
const jsonType = payload.JSONType

// takesType reports whether one of the part's content types matches this one.
func takesType(want runner.PartSpec, contentType string) bool {
	return slices.ContainsFunc(want.ContentTypes, func(pattern string) bool { return payload.AcceptsType(pattern, contentType) })
}

// takesMessagePack reports whether a blob may be MessagePack, under any of its names.
func takesMessagePack(want runner.PartSpec) bool {
	return takesType(want, msgpack.Type) || slices.ContainsFunc(want.ContentTypes, msgpack.Is)
}

// convertToJSON converts a blob of MessagePack to JSON, in place, if the part accepts JSON and
// not MessagePack.
func convertToJSON(want runner.PartSpec, part *payload.Part) error {
	convert := takesType(want, jsonType) && !takesMessagePack(want)
	if len(want.ContentTypes) == 0 {
		convert = len(want.Schema) > 0
	}
	if !convert || !msgpack.Is(part.Blob.ContentType) {
		return nil
	}
	text, err := msgpack.ToJSON(part.Blob.Data, maxConverted)
	if err != nil {
		return err
	}
	part.Blob = payload.Blob{ContentType: jsonType, Data: text}
	return nil
}

// Key returns a string that is equal for items that may share a batch: the same model,
// inputs of the same names, datatypes and trailing shapes or content types, and the
// same values of the named parameters. Extents that may vary within a batch by the
// spec do not count.
func Key(spec runner.Spec, model payload.ModelRef, f Fitted, p payload.Parameters, batchBy []string) string {
	b := make([]byte, 0, 64)
	if model != (payload.ModelRef{}) {
		b = fmt.Appendf(b, "%q %q %q", model.Model, model.Alias, model.Version)
	}
	for _, part := range f.Inputs {
		b = appendSized(append(b, '|'), part.Name)
		if part.Tensor == nil {
			b = appendSized(b, part.Blob.ContentType)
			continue
		}
		b = append(b, part.Tensor.Datatype...)
		b = appendTrailing(b, spec, part)
	}
	return string(append(b, p.Key(batchBy)...))
}

// appendSized appends a text with its length before it, so that its end is
// unambiguous. No datatype begins in the same way.
func appendSized(b []byte, s string) []byte {
	b = strconv.AppendInt(b, int64(len(s)), 10)
	return append(append(b, ':'), s...)
}

func appendTrailing(b []byte, spec runner.Spec, part payload.Part) []byte {
	var varies []int64
	if at := slices.IndexFunc(spec.Inputs, func(p runner.PartSpec) bool { return p.Name == part.Name && p.Variable }); at >= 0 {
		varies = spec.Inputs[at].Shape
	}
	for axis, n := range part.Tensor.Shape {
		b = append(b, ',')
		switch {
		case axis == 0 && spec.BatchAxis == runner.BatchRows:
		case axis < len(varies) && varies[axis] < 0:
			b = append(b, '*')
		default:
			b = strconv.AppendInt(b, n, 10)
		}
	}
	return b
}
