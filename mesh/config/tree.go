package config

import (
	"strconv"
	"strings"
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
