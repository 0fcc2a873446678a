package onnx

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	onnxgomlx "github.com/gomlx/onnx-gomlx/onnx"
)

// operator says which nodes of an operator the library computes as ONNX specifies them.
type operator struct {
	// since is the first operator set whose specification that is.
	since int64
	// attributes are those that a node may have, with spaces between: "axis" takes any value,
	// "alpha=1" that one only, and "strides!" must be there, as the library has another default.
	attributes string
}

// latestOpset is the newest operator set that the table was compared with, and latestVersion the version
// of the format that came with it.
const (
	latestOpset   = 24
	latestVersion = 12
)

// operators lists what passes the tests of the package onnx. Others of the library
// are missing on purpose: Gather and ScatterND read negative indices wrongly, as Slice does steps,
// GlobalAveragePool drops axes, ReduceMean of integers is 0, Sign of NaN too, and for LSTM,
// LayerNormalization and Pad no test loads.
var operators = map[string]operator{
	"Abs": {since: 6}, "Ceil": {since: 6}, "Cos": {since: 7}, "Erf": {since: 9}, "Exp": {since: 6}, "Floor": {since: 6},
	"Identity": {since: 1}, "Log": {since: 6}, "Neg": {since: 6}, "Not": {since: 1}, "Relu": {since: 6},
	"Sin": {since: 7}, "Sqrt": {since: 6}, "Tanh": {since: 6},

	"Add": {since: 7}, "And": {since: 7}, "Div": {since: 7}, "Equal": {since: 7}, "Greater": {since: 7}, "GreaterOrEqual": {since: 12},
	"Less": {since: 7}, "LessOrEqual": {since: 12}, "MatMul": {since: 1}, "Max": {since: 8}, "Min": {since: 8}, "Mul": {since: 7},
	"Or": {since: 7}, "Pow": {since: 7}, "Sub": {since: 7}, "Xor": {since: 7},
	"Clip": {since: 11}, "Where": {since: 9},

	"AveragePool":        {since: 7, attributes: "auto_pad=NOTSET ceil_mode=0 count_include_pad=0 dilations=1 kernel_shape! pads strides!"},
	"BatchNormalization": {since: 9, attributes: "epsilon momentum=0.9 training_mode=0"},
	"Cast":               {since: 6, attributes: "to!"},
	"Concat":             {since: 4, attributes: "axis!"},
	"Constant":           {since: 1, attributes: "value!"},
	"Conv":               {since: 1, attributes: "auto_pad=NOTSET dilations group kernel_shape! pads strides!"},
	"Expand":             {since: 8},
	"Flatten":            {since: 1, attributes: "axis"},
	"Gemm":               {since: 7, attributes: "alpha=1 beta=1 transA transB"},
	"MaxPool":            {since: 1, attributes: "auto_pad=NOTSET ceil_mode=0 kernel_shape! pads storage_order=0 strides!"},
	"Reshape":            {since: 5, attributes: "allowzero=0"},
	"Shape":              {since: 1},
	"Softmax":            {since: 13, attributes: "axis"},
	"Split":              {since: 13, attributes: "axis num_outputs"},
	"Squeeze":            {since: 1, attributes: "axes"},
	"Tile":               {since: 6},
	"Transpose":          {since: 1, attributes: "perm"},
	"Unsqueeze":          {since: 1, attributes: "axes"},
}

// errElsewhere is what helps against a model that the engine refuses.
var errElsewhere = errors.New("the engine in Go does not run it; the runner onnx with engine: onnxruntime may")

// checkOperators refuses a model with nodes that operators does not have. Graphs inside nodes
// belong to operators that it does not have.
func checkOperators(file *onnxgomlx.Model) error {
	graph, opset := file.Proto.GetGraph(), opsetOf(file)
	if n := len(graph.GetSparseInitializer()); n > 0 {
		return fmt.Errorf("%d weights are sparse tensors: %w", n, errElsewhere)
	}
	var refused []string
	for _, n := range graph.GetNode() {
		given := map[string]string{}
		for _, a := range n.GetAttribute() {
			given[a.GetName()] = valueText(a.GetS(), a.GetInts(), float32(a.GetI())+a.GetF())
		}
		domain, known := n.GetDomain(), operators[n.GetOpType()]
		why := known.reject(given)
		switch {
		case domain != "" && domain != "ai.onnx":
			why = "is of domain " + domain
		case known.since == 0:
			why = "is not supported"
		case opset < known.since || opset > latestOpset:
			why = fmt.Sprintf("is supported from opset %d to %d", known.since, latestOpset)
		case slices.Contains(n.GetInput(), ""):
			why = "has an empty input"
		case len(n.GetOutput()) != 1 && n.GetOpType() != "Split":
			why = fmt.Sprintf("has %d outputs, of which 1 is supported", len(n.GetOutput()))
		}
		if why != "" {
			refused = append(refused, fmt.Sprintf("\n  node %q: %s of opset %d %s", nameOf(n), n.GetOpType(), opset, why))
		}
	}
	if len(refused) == 0 {
		return nil
	}
	return fmt.Errorf("%w. It has %d nodes that are not supported:%s", errElsewhere, len(refused), strings.Join(refused, ""))
}

// opsetOf returns the version of ONNX's own operators that a file uses: 1 where it has none.
func opsetOf(file *onnxgomlx.Model) int64 {
	for _, set := range file.Proto.GetOpsetImport() {
		if set.GetDomain() == "" || set.GetDomain() == "ai.onnx" {
			return set.GetVersion()
		}
	}
	return 1
}

// nameOf returns the name of a node, or of its first output if it has none.
func nameOf(n interface {
	GetName() string
	GetOutput() []string
},
) string {
	return cmp.Or(append([]string{n.GetName()}, n.GetOutput()...)...)
}

// valueText returns an attribute of one number, of numbers or of a text; equal numbers are as one.
func valueText(text []byte, numbers []int64, number float32) string {
	switch {
	case len(text) > 0:
		return string(text)
	case len(numbers) > 0:
		return strings.Trim(fmt.Sprint(slices.Compact(slices.Clone(numbers))), "[]")
	}
	return fmt.Sprint(number)
}

// reject returns why the operator does not support the attributes of a node; empty if it does.
func (o operator) reject(given map[string]string) string {
	supported := map[string]bool{}
	for rule := range strings.FieldsSeq(o.attributes) {
		name, only, isFixed := strings.Cut(rule, "=")
		name, isNeeded := strings.CutSuffix(name, "!")
		value, isGiven := given[name]
		switch {
		case isNeeded && !isGiven:
			return "is supported with the attribute " + name
		case isFixed && isGiven && value != only:
			return fmt.Sprintf("is supported with %s %s, and has %s", name, only, value)
		}
		supported[name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		if !supported[name] {
			return "is not supported with the attribute " + name
		}
	}
	return ""
}
