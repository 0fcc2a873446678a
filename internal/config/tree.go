package config

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/token"
)

// node is a value of a file. It is not changed once it is built, so an alias
// shares the node of its anchor.
type node struct {
	place
	kind kind
	// text of a scalar, without quotes.
	text  string
	items []*node
	// entries of a table, and where among them each key is.
	entries []entry
	index   map[string]int
	// size counts the values in it, those behind aliases each time.
	size int
}

// entry is a key with its value.
type entry struct {
	place
	key   string
	value *node
}

// place in a file; both count from 1.
type place struct{ line, column int }

// kind is what a value is.
type kind uint8

const (
	null kind = iota
	boolean
	number // what YAML 1.2 takes for a decimal number
	text
	list
	table
)

// String returns what a person would call it.
func (n *node) String() string {
	switch n.kind {
	case null:
		return "nothing"
	case list:
		return "a list"
	case table:
		return "a set of keys"
	default:
		return quote(n.text)
	}
}

// maxQuoted bounds what a message repeats of a file, in bytes.
const maxQuoted = 80

func quote(s string) string {
	if len(s) > maxQuoted {
		s = strings.ToValidUTF8(s[:maxQuoted], "") + "..."
	}
	return strconv.Quote(s)
}

// child returns what an element of a path leads to, and its place.
func (n *node) child(element string) (place, *node, bool) {
	if n.kind == list {
		i, err := strconv.Atoi(strings.Trim(element, "[]"))
		if err != nil || i < 0 || i >= len(n.items) {
			return place{}, nil, false
		}
		return n.items[i].place, n.items[i], true
	}
	if i, ok := n.index[element]; ok {
		return n.entries[i].place, n.entries[i].value, true
	}
	return place{}, nil, false
}

// add adds an entry to a table, unless its key is there: then it returns the
// place of that.
func (n *node) add(e entry) (place, bool) {
	if i, ok := n.index[e.key]; ok {
		return n.entries[i].place, false
	}
	n.index[e.key] = len(n.entries)
	n.entries = append(n.entries, e)
	return e.place, true
}

// builder makes nodes of what the parser found: it follows aliases, merges what
// is to be merged, and refuses duplicates.
type builder struct {
	name    string
	anchors map[string]*node
}

// maxValues bounds the values of a file, those behind aliases counted each
// time.
const maxValues = 50_000

var errLarge = fmt.Errorf("with all that its aliases stand for, this is more than %d values", maxValues)

// file returns the document's values, or nil where it has none.
func (b *builder) file(f *ast.File) (*node, error) {
	for _, doc := range f.Docs {
		if doc.Body != nil {
			return b.node(doc.Body, 0)
		}
	}
	return nil, nil
}

func (b *builder) node(in ast.Node, depth int) (*node, error) {
	if depth > maxDepth {
		return nil, b.fail(in.GetToken(), errDeep)
	}
	switch in := in.(type) {
	case *ast.AnchorNode:
		return b.anchor(in, depth)
	case *ast.AliasNode:
		return b.alias(in)
	case *ast.SequenceNode:
		return b.list(in, depth)
	case *ast.MappingNode:
		return b.table(in, in.Values, depth)
	case *ast.MappingValueNode:
		return b.table(in, []*ast.MappingValueNode{in}, depth)
	case *ast.LiteralNode:
		return &node{place: placeOf(in.Start), kind: text, text: in.Value.Value, size: 1}, nil
	case ast.ScalarNode:
		return scalar(in), nil
	}
	return nil, b.fail(in.GetToken(), errors.New("this is not expected here"))
}

func (b *builder) fail(t *token.Token, err error) error { return tokenError(b.name, t, err) }

func placeOf(t *token.Token) place { return place{t.Position.Line, t.Position.Column} }

func scalar(in ast.ScalarNode) *node {
	t := in.GetToken()
	out := &node{place: placeOf(t), kind: text, text: t.Value, size: 1}
	switch t.Type {
	case token.SingleQuoteType, token.DoubleQuoteType:
	case token.ImplicitNullType:
		out.kind = null
	default:
		out.kind = kindOf(t.Value)
	}
	return out
}

func (b *builder) anchor(in *ast.AnchorNode, depth int) (*node, error) {
	value, err := b.node(in.Value, depth+1)
	if err != nil {
		return nil, err
	}
	b.anchors[in.Name.GetToken().Value] = value
	return value, nil
}

// alias returns what the anchor marks. The anchor is known only after all of
// its value, so nothing contains itself.
func (b *builder) alias(in *ast.AliasNode) (*node, error) {
	name := in.Value.GetToken().Value
	if value, ok := b.anchors[name]; ok {
		return value, nil
	}
	return nil, b.fail(in.GetToken(), fmt.Errorf("there is no anchor &%s before this", name))
}

func (b *builder) list(in *ast.SequenceNode, depth int) (*node, error) {
	out := &node{place: placeOf(in.GetToken()), kind: list, size: 1}
	for _, value := range in.Values {
		item, err := b.node(value, depth+1)
		if err != nil {
			return nil, err
		}
		out.items = append(out.items, item)
		if out.size += item.size; out.size > maxValues {
			return nil, b.fail(value.GetToken(), errLarge)
		}
	}
	return out, nil
}

func (b *builder) table(in ast.Node, values []*ast.MappingValueNode, depth int) (*node, error) {
	out := &node{place: placeOf(in.GetToken()), kind: table, size: 1, index: make(map[string]int, len(values))}
	var merged []*node
	for _, value := range values {
		below, err := b.node(value.Value, depth+1)
		if err != nil {
			return nil, err
		}
		if out.size += below.size; out.size > maxValues {
			return nil, b.fail(value.Key.GetToken(), errLarge)
		}
		if value.Key.IsMergeKey() {
			merged = append(merged, below)
			continue
		}
		if err := b.add(out, value.Key, below); err != nil {
			return nil, err
		}
	}
	if len(out.entries) > 0 && in.GetToken().Type != token.MappingStartType {
		// Otherwise its place is the first colon's.
		out.place = out.entries[0].place
	}
	return out, b.merge(out, merged)
}

func (b *builder) add(out *node, key ast.MapKeyNode, value *node) error {
	word, ok := key.(ast.ScalarNode)
	if !ok {
		return b.fail(key.GetToken(), errors.New("a key is a word"))
	}
	name := word.GetToken().Value
	if first, ok := out.add(entry{place: placeOf(key.GetToken()), key: name, value: value}); !ok {
		return b.fail(key.GetToken(), fmt.Errorf("%s is there twice, first on line %d", quote(name), first.line))
	}
	return nil
}

// merge adds the keys of what stands behind <<. A table's own keys go first,
// then the tables' keys in their order.
func (b *builder) merge(out *node, from []*node) error {
	for _, n := range from {
		switch n.kind {
		case list:
			if err := b.merge(out, n.items); err != nil {
				return err
			}
		case table:
			for _, e := range n.entries {
				out.add(e)
			}
		default:
			return &PositionError{File: b.name, Line: n.line, Column: n.column, Err: fmt.Errorf("%s cannot be merged; << takes a set of keys", n)}
		}
	}
	return nil
}
