package schema

import (
	"fmt"
	"strconv"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

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
	varies := variableShape(spec, part.Name)
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

// variableShape returns the spec's shape of an input whose negative extents may differ
// within a batch, or nil if none may differ.
func variableShape(spec runner.Spec, input string) []int64 {
	for _, p := range spec.Inputs {
		if p.Name == input && p.Variable {
			return p.Shape
		}
	}
	return nil
}
