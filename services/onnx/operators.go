package onnx

import (
	"fmt"
	"slices"
	"strings"

	onnxgomlx "github.com/gomlx/onnx-gomlx/onnx"
	"google.golang.org/protobuf/encoding/protowire"
)

// UnsupportedError lists the nodes of a model that cannot be run here.
type UnsupportedError struct{ Nodes []Node }

// Node is one node of a model's graph.
type Node struct {
	// Name is the node's own, or that of its first output where it has none.
	Name string
	// Operator includes the domain unless that is ONNX's own.
	Operator string
}

// Error implements error.
func (e *UnsupportedError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d nodes need operators that are not supported here:", len(e.Nodes))
	for _, n := range e.Nodes {
		fmt.Fprintf(&b, "\n  node %q: %s", n.Name, n.Operator)
	}
	return b.String()
}

// checkOperators refuses a model with nodes that the library cannot convert.
func checkOperators(file *onnxgomlx.Model) error {
	if n := len(file.Proto.GetGraph().GetSparseInitializer()); n > 0 {
		return fmt.Errorf("%d weights are sparse tensors, which are not supported here", n)
	}
	known := map[string]bool{}
	var missing []Node
	walk(file, func(n Node) {
		supported, seen := known[n.Operator]
		if !seen {
			supported = converts(n.Operator)
			known[n.Operator] = supported
		}
		if !supported {
			missing = append(missing, n)
		}
	})
	if len(missing) > 0 {
		return &UnsupportedError{Nodes: missing}
	}
	return nil
}

// walk visits the nodes of the graph and of the graphs inside them.
func walk(file *onnxgomlx.Model, visit func(Node)) {
	for todo := slices.Clone(file.Proto.GetGraph().GetNode()); len(todo) > 0; {
		n := todo[0]
		todo = todo[1:]
		visit(nodeOf(n))
		for _, a := range n.GetAttribute() {
			todo = append(todo, a.GetG().GetNode()...)
			for _, g := range a.GetGraphs() {
				todo = append(todo, g.GetNode()...)
			}
		}
	}
}

// node is what this package reads of the library's own type.
type node interface {
	GetName() string
	GetDomain() string
	GetOpType() string
	GetOutput() []string
}

func nodeOf(n node) Node {
	out := Node{Name: n.GetName(), Operator: n.GetOpType()}
	if out.Name == "" && len(n.GetOutput()) > 0 {
		out.Name = n.GetOutput()[0]
	}
	if d := n.GetDomain(); d != "" && d != "ai.onnx" {
		out.Operator = d + "." + out.Operator
	}
	return out
}

// converts reports whether the library knows the operator. It keeps no list
// that could be asked, so a graph of that one node is converted: a known
// operator fails for want of inputs, an unknown one by name.
func converts(operator string) bool {
	if strings.Contains(operator, ".") {
		return false // Of another domain: what it means is not ONNX's to say.
	}
	err := guard(func() error {
		probe, err := onnxgomlx.Parse(singleNode(operator))
		if err != nil {
			return err
		}
		probe.CallGraph(nil, nil, nil, probeOutput)
		return nil
	})
	return err == nil || !strings.Contains(err.Error(), "unimplemented ONNX op")
}

const probeOutput = "y"

// singleNode returns a serialised ModelProto whose graph is one node without
// inputs. The field numbers are those of onnx.proto3.
func singleNode(operator string) []byte {
	const graphOfModel, nodeOfGraph, outputOfNode, operatorOfNode = 7, 1, 2, 4
	field := func(b []byte, number protowire.Number, value string) []byte {
		return protowire.AppendString(protowire.AppendTag(b, number, protowire.BytesType), value)
	}
	n := field(field(nil, outputOfNode, probeOutput), operatorOfNode, operator)
	return field(nil, graphOfModel, string(field(nil, nodeOfGraph, string(n))))
}

// ConversionError is a node whose operator is known but not with these inputs
// or attributes.
type ConversionError struct {
	Node  Node
	Cause error
}

// Error implements error.
func (e *ConversionError) Error() string {
	return fmt.Sprintf("node %q: %s: %v", e.Node.Name, e.Node.Operator, e.Cause)
}

// Unwrap returns the cause.
func (e *ConversionError) Unwrap() error { return e.Cause }
