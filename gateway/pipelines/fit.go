package pipelines

import (
	"fmt"
	"slices"
	"strings"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

func find(specs []*stagev1.PartSpec, name string) *stagev1.PartSpec {
	for _, s := range specs {
		if s.GetName() == name {
			return s
		}
	}
	return nil
}

func names(specs []*stagev1.PartSpec) []string {
	out := make([]string, len(specs))
	for i, s := range specs {
		out[i] = s.GetName()
	}
	return out
}

// maxListed is how many names a message lists.
const maxListed = 10

func listed[S ~string](names []S) string {
	if len(names) == 0 {
		return "none"
	}
	out := make([]string, 0, maxListed+1)
	for _, name := range names[:min(len(names), maxListed)] {
		out = append(out, string(name))
	}
	if more := len(names) - maxListed; more > 0 {
		out = append(out, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(out, ", ")
}

// fits reports whether what one stage gives may be what another takes. Single rows
// travel without their axis, so the shapes may differ by one where a stage has rows.
func fits(given *stagev1.PartSpec, from stagev1.BatchAxis, want *stagev1.PartSpec, to stagev1.BatchAxis) bool {
	have, need := given.GetTensor(), want.GetTensor()
	if (have == nil) != (need == nil) {
		return false
	}
	if have == nil {
		return mediaFit(given.GetBlob().GetContentTypes(), want.GetBlob().GetContentTypes())
	}
	if have.GetDatatype() != need.GetDatatype() {
		return false
	}
	for _, a := range shapes(have.GetShape(), from) {
		for _, b := range shapes(need.GetShape(), to) {
			if meet(a, b) {
				return true
			}
		}
	}
	return false
}

// shapes are those that a tensor may have on its way: its own, and without rows.
func shapes(shape []int64, axis stagev1.BatchAxis) [][]int64 {
	if axis == stagev1.BatchAxis_BATCH_AXIS_ROWS && len(shape) > 0 {
		return [][]int64{shape, shape[1:]}
	}
	return [][]int64{shape}
}

// meet reports whether some shape is one of both; -1 is any extent.
func meet(a, b []int64) bool {
	return slices.EqualFunc(a, b, func(x, y int64) bool { return x == y || x < 0 || y < 0 })
}

// mediaFit reports whether a blob of one of the types given may be one of those
// wanted; none is any.
func mediaFit(given, want []string) bool {
	if len(given) == 0 || len(want) == 0 {
		return true
	}
	return slices.ContainsFunc(given, func(a string) bool {
		return slices.ContainsFunc(want, func(b string) bool { return covers(a, b) || covers(b, a) || a == payload.OctetStream })
	})
}

// covers reports whether a pattern such as image/* means what another does.
func covers(pattern, other string) bool {
	pattern, other = strings.ToLower(pattern), strings.ToLower(other)
	if family, ok := strings.CutSuffix(pattern, "*"); ok {
		return family == "*/" || strings.HasPrefix(other, family)
	}
	return pattern == other
}

// leastBytes is how large the smallest inputs are: one row, no optional part, no
// extent that may be any.
func leastBytes(spec *stagev1.Spec) (sum uint64) {
	for _, input := range spec.GetInputs() {
		if t := input.GetTensor(); t != nil && !input.GetOptional() {
			sum += tensorBytes(t, spec.GetBatchAxis())
		}
	}
	return sum
}

func tensorBytes(t *stagev1.TensorSpec, axis stagev1.BatchAxis) uint64 {
	size := max(0, tensor.Datatype(t.GetDatatype()).Size())
	out := uint64(size)
	for i, extent := range t.GetShape() {
		switch {
		case i == 0 && axis == stagev1.BatchAxis_BATCH_AXIS_ROWS:
		case extent < 0:
			return 0
		case extent > 0 && out > maxBytes/uint64(extent):
			return maxBytes
		default:
			out *= uint64(extent)
		}
	}
	return out
}

// maxBytes is where sizes end that are more than anything takes.
const maxBytes = 1 << 50

// describe is a part in words.
func describe(s *stagev1.PartSpec) string {
	if t := s.GetTensor(); t != nil {
		return fmt.Sprintf("%s, a tensor %s%v", s.GetName(), t.GetDatatype(), t.GetShape())
	}
	if types := s.GetBlob().GetContentTypes(); len(types) > 0 {
		return fmt.Sprintf("%s, a blob of %s", s.GetName(), strings.Join(types, " or "))
	}
	return s.GetName() + ", a blob"
}
