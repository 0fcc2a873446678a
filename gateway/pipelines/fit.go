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

func namesOf(offers []offer) []string {
	out := make([]string, len(offers))
	for i, o := range offers {
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

// fits reports whether what one stage gives may be what another takes. Single rows
// travel without their axis, so the shapes may differ by one where a stage has rows.
func fits(given offer, want *stagev1.PartSpec, to stagev1.BatchAxis) bool {
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
	for _, a := range shapes(have.GetShape(), given.lowered) {
		for _, b := range shapes(need.GetShape(), to == stagev1.BatchAxis_BATCH_AXIS_ROWS) {
			if meet(a, b) {
				return true
			}
		}
	}
	return false
}

// shapes are those that a tensor may have on its way: its own and, where it has rows,
// without them.
func shapes(shape []int64, rows bool) [][]int64 {
	if rows && len(shape) > 0 {
		return [][]int64{shape, shape[1:]}
	}
	return [][]int64{shape}
}

// meet reports whether some shape is one of both; -1 is any extent.
func meet(a, b []int64) bool {
	return slices.EqualFunc(a, b, func(x, y int64) bool { return x == y || x < 0 || y < 0 })
}

// mediaFit reports whether a blob of one of the types given may be one of those
// wanted; none is any. A host turns MessagePack into JSON.
func mediaFit(given, want []string) bool {
	if len(given) == 0 || len(want) == 0 {
		return true
	}
	return slices.ContainsFunc(given, func(a string) bool {
		return slices.ContainsFunc(want, func(b string) bool {
			return payload.AcceptsType(b, a) || ranges(a) && payload.AcceptsType(a, b) ||
				payload.BareType(a) == payload.OctetStream || msgpack.Is(a) && payload.AcceptsType(b, payload.JSONType)
		})
	})
}

// ranges reports whether a media type is a pattern, such as image/*.
func ranges(mediaType string) bool { return strings.HasSuffix(payload.BareType(mediaType), "*") }

// leastBytes is how large the smallest inputs of the stage are: one row, no optional
// part, no extent that may be any; and how large what is sent for them is, as one part
// may feed several.
func (p place) leastBytes() (sum, sent uint64) {
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
