package onnx

import (
	"github.com/gomlx/gomlx/pkg/core/dtypes"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// datatypeOf returns the mesh's name for an element type; ok is false where it
// has none.
func datatypeOf(d dtypes.DType) (name tensor.Datatype, ok bool) {
	switch d {
	case dtypes.Bool:
		return tensor.Bool, true
	case dtypes.Uint8:
		return tensor.Uint8, true
	case dtypes.Uint16:
		return tensor.Uint16, true
	case dtypes.Uint32:
		return tensor.Uint32, true
	case dtypes.Uint64:
		return tensor.Uint64, true
	case dtypes.Int8:
		return tensor.Int8, true
	case dtypes.Int16:
		return tensor.Int16, true
	case dtypes.Int32:
		return tensor.Int32, true
	case dtypes.Int64:
		return tensor.Int64, true
	case dtypes.Float32:
		return tensor.FP32, true
	case dtypes.Float64:
		return tensor.FP64, true
	default:
		return "", false
	}
}
