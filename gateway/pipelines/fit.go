package pipelines

import (
	"fmt"
	"slices"
	"strings"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/mesh/msgpack"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

func names(specs []*stagev1.PartSpec) []string {
	out := make([]string, len(specs))
	for i, s := range specs {
		out[i] = s.GetName()
	}
	return out
}

func namesOf(outputs []output) []string {
	out := make([]string, len(outputs))
	for i, o := range outputs {
		out[i] = o.GetName()
	}
	return out
}

func isTensor(s *stagev1.PartSpec) bool { return s.GetTensor() != nil }

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

// fits reports whether the output of one stage may be the input of another. Single rows
// travel without the rows axis, so the shapes may differ by that axis if a stage has rows.
func fits(given output, want *stagev1.PartSpec, to stagev1.BatchAxis) bool {
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
	for _, a := range shapes(have.GetShape(), given.rowless) {
		for _, b := range shapes(need.GetShape(), to == stagev1.BatchAxis_BATCH_AXIS_ROWS) {
			if overlap(a, b) {
				return true
			}
		}
	}
	return false
}

// shapes returns the shapes that a tensor may travel with: its own and, if it has rows,
// that without the rows axis.
func shapes(shape []int64, rows bool) [][]int64 {
	if rows && len(shape) > 0 {
		return [][]int64{shape, shape[1:]}
	}
	return [][]int64{shape}
}

// overlap reports whether a shape can match both; -1 is any extent.
func overlap(a, b []int64) bool {
	return slices.EqualFunc(a, b, func(x, y int64) bool { return x == y || x < 0 || y < 0 })
}

// mediaFit reports whether a blob of a given type may have a wanted type; an empty list
// means any. A host converts MessagePack to JSON.
func mediaFit(given, want []string) bool {
	if len(given) == 0 || len(want) == 0 {
		return true
	}
	return slices.ContainsFunc(given, func(a string) bool {
		return slices.ContainsFunc(want, func(b string) bool {
			return payload.AcceptsType(b, a) || isRange(a) && payload.AcceptsType(a, b) ||
				payload.BareType(a) == payload.OctetStream || msgpack.Is(a) && payload.AcceptsType(b, payload.JSONType)
		})
	})
}

// isRange reports whether a media type is a pattern, such as image/*.
func isRange(mediaType string) bool { return strings.HasSuffix(payload.BareType(mediaType), "*") }

// leastBytes returns the size of the stage's smallest inputs: one row, no optional part,
// and 0 for extents that may be any. sent is the size of the parts for them, as one part
// may feed several inputs.
func (p stepCheck) leastBytes() (sum, sent uint64) {
	sources := map[string]uint64{}
	for _, input := range p.Spec.GetInputs() {
		t := input.GetTensor()
		if t == nil || input.GetOptional() {
			continue
		}
		size := tensorBytes(t, p.Spec.GetBatchAxis())
		sum += size
		source, _ := p.source(input.GetName())
		sources[source] = max(sources[source], size)
	}
	for _, size := range sources {
		sent += size
	}
	return sum, sent
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

// maxBytes caps sizes, so that they cannot overflow.
const maxBytes = 1 << 50

// describe returns a part as text.
func describe(s *stagev1.PartSpec) string {
	if t := s.GetTensor(); t != nil {
		return fmt.Sprintf("%s, a tensor %s%v", s.GetName(), t.GetDatatype(), t.GetShape())
	}
	if types := s.GetBlob().GetContentTypes(); len(types) > 0 {
		return fmt.Sprintf("%s, a blob of %s", s.GetName(), strings.Join(types, " or "))
	}
	return s.GetName() + ", a blob"
}
