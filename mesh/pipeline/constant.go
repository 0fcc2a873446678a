package pipeline

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// Constant is a tensor as a file has it: its elements in row-major order.
type Constant struct {
	Datatype tensor.Datatype `yaml:"datatype"`
	// Shape is [len(Data)] where it is nil, and a scalar's where it is empty.
	Shape []int64         `yaml:"shape"`
	Data  []payload.Value `yaml:"data"`
}

func (c Constant) shape() []int64 {
	if c.Shape == nil {
		return []int64{int64(len(c.Data))}
	}
	return c.Shape
}

// maxConstant bounds the elements of a constant.
const maxConstant = 4096

// Part returns the tensor under a name. Errors begin with the key at fault.
func (c Constant) Part(name string) (payload.Part, error) {
	if len(c.Data) > maxConstant {
		return payload.Part{}, fmt.Errorf("data: %d elements, at most %d are allowed", len(c.Data), maxConstant)
	}
	t := tensor.Tensor{Datatype: cmp.Or(c.Datatype, tensor.FP32), Shape: c.shape()}
	for i, value := range c.Data {
		var err error
		if t.Raw, err = appendElement(t.Raw, t.Datatype, value); err != nil {
			return payload.Part{}, fmt.Errorf("data[%d]: %w", i, err)
		}
	}
	if err := t.Validate(); err != nil {
		return payload.Part{}, fmt.Errorf("shape: %w", err)
	}
	return payload.OfTensor(name, t), nil
}

// appendElement appends an element of a datatype.
func appendElement(out []byte, d tensor.Datatype, v payload.Value) ([]byte, error) {
	if d == tensor.Bytes {
		text, is := v.Any().(string)
		if !is {
			return nil, fmt.Errorf("%s is not text, and the datatype is BYTES", v)
		}
		return append(binary.LittleEndian.AppendUint32(out, uint32(len(text))), text...), nil
	}
	float, isNumber := v.Float()
	if b, is := v.Any().(bool); is {
		isNumber = true
		if float = 0; b {
			float = 1
		}
	}
	if !isNumber || math.IsNaN(float) || math.IsInf(float, 0) {
		return nil, fmt.Errorf("%s is not a finite number, and the datatype is %s", v, d)
	}
	switch d {
	case tensor.FP64:
		return binary.LittleEndian.AppendUint64(out, math.Float64bits(float)), nil
	case tensor.FP32:
		if math.IsInf(float64(float32(float)), 0) {
			return nil, fmt.Errorf("%s is not a value of datatype %s", v, d)
		}
		return binary.LittleEndian.AppendUint32(out, math.Float32bits(float32(float))), nil
	}
	least, most, isWhole := rangeOf(d)
	if !isWhole {
		return nil, fmt.Errorf("constants of datatype %s are not supported; use FP32, FP64, BOOL, BYTES or whole numbers", d)
	}
	bits, isUnsigned := v.Any().(uint64)
	if whole, is := v.Int(); is {
		bits = uint64(whole)
	} else if isUnsigned = isUnsigned && d == tensor.Uint64; !isUnsigned {
		bits = uint64(int64(float))
		if float != 0 && float != 1 || d != tensor.Bool {
			return nil, fmt.Errorf("%s is not a value of datatype %s", v, d)
		}
	}
	if float < least || float > most {
		return nil, fmt.Errorf("%s is not a value of datatype %s", v, d)
	}
	var all [8]byte
	binary.LittleEndian.PutUint64(all[:], bits)
	return append(out, all[:d.Size()]...), nil
}

// rangeOf returns the least and the greatest value of a datatype of whole numbers.
func rangeOf(d tensor.Datatype) (least, most float64, isWhole bool) {
	bits := float64(8 * d.Size())
	switch d {
	case tensor.Bool:
		return 0, 1, true
	case tensor.Uint8, tensor.Uint16, tensor.Uint32, tensor.Uint64:
		return 0, math.Exp2(bits) - 1, true
	case tensor.Int8, tensor.Int16, tensor.Int32, tensor.Int64:
		return -math.Exp2(bits - 1), math.Exp2(bits-1) - 1, true
	}
	return 0, 0, false
}
