package onnx_test

import (
	"cmp"
	"encoding/binary"
	"math"

	"google.golang.org/protobuf/encoding/protowire"
)

// file describes an ONNX file to be written by hand; the field numbers below
// come from onnx.proto3.
type file struct {
	nodes   []op
	inputs  []value
	outputs []value
	weights []weight
	// weightsAreInputs lists the weights among the inputs, as version 3 does.
	weightsAreInputs bool
	// version is of the format; 0 means 8.
	version uint64
	// opset is of the operators; 0 means 17.
	opset uint64
	// domain is of another set of operators; it may be empty.
	domain string
}

type op struct {
	name, kind, domain string
	in, out            []string
	attributes         map[string][]int64
	// then is a graph inside the node.
	then []op
	// value is the attribute of a Constant.
	value *weight
}

// value is an input or output. An extent of 0 is written as the name at the
// same place in axes.
type value struct {
	name    string
	element int
	shape   []int64
	axes    []string
	// shapeless leaves the shape out, opaque the whole type.
	shapeless, opaque bool
	// sequence is the element of a sequence of tensors; 0 means a tensor.
	sequence int
}

type weight struct {
	name   string
	shape  []int64
	values []float32
	// external is the file that has the values; empty means this one.
	external string
}

const (
	elementFloat  = 1
	elementUint16 = 4
	elementInt64  = 7
	elementBool   = 9
	elementFloat8 = 17
	elementString = 8
	elementHalf   = 10
	elementBrain  = 16
)

func (f file) bytes() []byte {
	var graph []byte
	for _, n := range f.nodes {
		graph = field(graph, 1, n.bytes())
	}
	graph = field(graph, 2, []byte("test"))
	for _, w := range f.weights {
		graph = field(graph, 5, w.bytes())
	}
	for _, v := range f.inputs {
		graph = field(graph, 11, v.bytes())
	}
	if f.weightsAreInputs {
		for _, w := range f.weights {
			graph = field(graph, 11, value{name: w.name, element: elementFloat, shape: w.shape}.bytes())
		}
	}
	for _, v := range f.outputs {
		graph = field(graph, 12, v.bytes())
	}
	model := number(nil, 1, cmp.Or(f.version, 8))                // ir_version
	model = field(model, 8, number(nil, 2, cmp.Or(f.opset, 17))) // opset_import
	if f.domain != "" {
		model = field(model, 8, number(field(nil, 1, []byte(f.domain)), 2, 1))
	}
	return field(model, 7, graph)
}

func (n op) bytes() []byte {
	var b []byte
	for _, s := range n.in {
		b = field(b, 1, []byte(s))
	}
	for _, s := range n.out {
		b = field(b, 2, []byte(s))
	}
	b = field(b, 3, []byte(n.name))
	b = field(b, 4, []byte(n.kind))
	for name, values := range n.attributes {
		b = field(b, 5, attribute(name, values))
	}
	if n.value != nil {
		b = field(b, 5, number(field(field(nil, 1, []byte("value")), 5, n.value.bytes()), 20, 4))
	}
	if n.then != nil {
		var graph []byte
		for _, inner := range n.then {
			graph = field(graph, 1, inner.bytes())
		}
		a := field(nil, 1, []byte("then_branch"))
		b = field(b, 5, number(field(a, 6, graph), 20, 5))
	}
	return field(b, 7, []byte(n.domain))
}

// attribute is an int where there is one value whose name says so, else ints.
func attribute(name string, values []int64) []byte {
	b := field(nil, 1, []byte(name))
	if name == "axis" || name == "to" {
		return number(number(b, 3, uint64(values[0])), 20, 2)
	}
	for _, v := range values {
		b = number(b, 8, uint64(v))
	}
	return number(b, 20, 7)
}

func (v value) bytes() []byte {
	b := field(nil, 1, []byte(v.name))
	if v.opaque {
		return b
	}
	if v.sequence != 0 {
		of := field(nil, 1, number(nil, 1, uint64(v.sequence)))
		return field(b, 2, field(nil, 4, field(nil, 1, of)))
	}
	tensor := number(nil, 1, uint64(v.element))
	if !v.shapeless {
		var shape []byte
		for i, n := range v.shape {
			switch {
			case n > 0:
				shape = field(shape, 1, number(nil, 1, uint64(n)))
			case v.axes != nil && v.axes[i] != "":
				shape = field(shape, 1, field(nil, 2, []byte(v.axes[i])))
			default:
				shape = field(shape, 1, nil)
			}
		}
		tensor = field(tensor, 2, shape)
	}
	return field(b, 2, field(nil, 1, tensor))
}

func (w weight) bytes() []byte {
	var b []byte
	for _, n := range w.shape {
		b = number(b, 1, uint64(n))
	}
	b = number(b, 2, elementFloat)
	b = field(b, 8, []byte(w.name))
	if w.external != "" {
		b = field(b, 13, field(field(nil, 1, []byte("location")), 2, []byte(w.external)))
		return number(b, 14, 1) // data_location
	}
	raw := make([]byte, 0, 4*len(w.values))
	for _, v := range w.values {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(v))
	}
	return field(b, 9, raw)
}

func field(b []byte, n protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, n, protowire.BytesType), value)
}

func number(b []byte, n protowire.Number, value uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, n, protowire.VarintType), value)
}
