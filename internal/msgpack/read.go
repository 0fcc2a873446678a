package msgpack

import (
	"errors"
	"fmt"

	"github.com/tinylib/msgp/msgp"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Members hands each member of the map that data is to visit, whose value is one
// document. Whatever visit returns ends it.
func Members(data []byte, visit func(key string, value []byte) error) error {
	if !IsMap(data) {
		return wrong("must be a map")
	}
	return entries(data, func(_ int, key, value []byte) error {
		text, _, err := readKey(key)
		if err != nil {
			return err
		}
		return visit(string(text), value)
	})
}

// Elements hands each element of the list that data is to visit. Whatever visit
// returns ends it.
func Elements(data []byte, visit func(i int, value []byte) error) error {
	if !IsList(data) {
		return wrong("must be a list")
	}
	return entries(data, func(i int, _, value []byte) error { return visit(i, value) })
}

var errFound = errors.New("found")

// Find returns the value of the first member of that key, where data is a map that has
// one. It passes over keys that are no strings.
func Find(data []byte, key string) (value []byte, ok bool) {
	if !IsMap(data) {
		return nil, false
	}
	err := entries(data, func(_ int, name, one []byte) error {
		if text, err := Text(name); err == nil && string(text) == key {
			value = one
			return errFound
		}
		return nil
	})
	return value, errors.Is(err, errFound)
}

// First returns the first element, where data is a list that has one.
func First(data []byte) (value []byte, ok bool) {
	err := Elements(data, func(_ int, one []byte) error {
		value = one
		return errFound
	})
	return value, errors.Is(err, errFound)
}

// entries visits the elements of the list that data is, or its members if it is a map.
func entries(data []byte, visit func(i int, key, value []byte) error) error {
	n, each, left, err := readHeader(data)
	if err != nil {
		return err
	}
	for i := range int(n) {
		var key, value []byte
		if each == 2 {
			if key, left, err = next(left); err != nil {
				return err
			}
		}
		if value, left, err = next(left); err != nil {
			return err
		}
		if err := visit(i, key, value); err != nil {
			return err
		}
	}
	return ended(left)
}

// next returns the document that data begins with, and what follows it.
func next(data []byte) (value, left []byte, err error) {
	left, err = skip(data, 0)
	return data[:len(data)-len(left)], left, err
}

// readHeader reads the number of entries of a list or a map, each of which is so many
// documents. Any other document is read as a whole and has no entries.
func readHeader(data []byte) (n uint32, each int, left []byte, err error) {
	switch msgp.NextType(data) {
	case msgp.MapType:
		each = 2
		n, left, err = msgp.ReadMapHeaderBytes(data)
	case msgp.ArrayType:
		each = 1
		n, left, err = msgp.ReadArrayHeaderBytes(data)
	default:
		left, err = msgp.Skip(data)
	}
	if err != nil {
		return 0, 0, nil, unread(err)
	}
	return n, each, left, nil
}

// IsMap reports whether data begins with a map.
func IsMap(data []byte) bool { return msgp.NextType(data) == msgp.MapType }

// IsList reports whether data begins with a list.
func IsList(data []byte) bool { return msgp.NextType(data) == msgp.ArrayType }

// IsText reports whether data begins with a string of text.
func IsText(data []byte) bool { return msgp.NextType(data) == msgp.StrType }

// Text returns the text of the one string that data is, which it shares.
func Text(data []byte) ([]byte, error) {
	text, left, err := readText(data)
	if err != nil {
		return nil, err
	}
	return text, ended(left)
}

// Binary returns the bytes of the binary string that data is, which it shares.
func Binary(data []byte) (raw []byte, ok bool) {
	if msgp.NextType(data) != msgp.BinType {
		return nil, false
	}
	raw, left, err := msgp.ReadBytesZC(data)
	return raw, err == nil && len(left) == 0
}

// Check makes sure that data is one document of MessagePack, of anything that it
// can represent. An error is an *Error.
func Check(data []byte) error {
	left, err := skip(data, 0)
	if err != nil {
		return err
	}
	return ended(left)
}

// ended makes sure that nothing is left after a document.
func ended(left []byte) error {
	if len(left) > 0 {
		return wrong("goes on after its end, for %d bytes", len(left))
	}
	return nil
}

// skip returns what comes after the document that data begins with.
func skip(data []byte, depth int) ([]byte, error) {
	if depth > MaxDepth {
		return nil, wrong("nests deeper than %d", MaxDepth)
	}
	n, each, left, err := readHeader(data)
	for range n {
		for range each {
			if left, err = skip(left, depth+1); err != nil {
				return nil, err
			}
		}
	}
	return left, err
}

// Error is why a document is not valid or cannot be converted, and the place in it.
type Error struct {
	// places lead to it, the innermost first: a key or the index of an element.
	places  []any
	problem string
}

// Error implements error.
func (e *Error) Error() string {
	if at := e.At(""); at != "" {
		return at + " " + e.problem
	}
	return e.problem
}

// Problem is the error without its place: "is binary, which JSON cannot represent".
func (e *Error) Problem() string { return e.problem }

// maxPlaces bounds the elements of a path.
const maxPlaces = 16

// At returns the place as a path below the document's, and only the outer part of a deep
// one.
func (e *Error) At(path string) string {
	for i := len(e.places) - 1; i >= max(0, len(e.places)-maxPlaces); i-- {
		switch place := e.places[i].(type) {
		case string:
			path = fault.Member(path, place)
		case int:
			path = fault.Element(path, place)
		}
	}
	return path
}

func wrong(format string, args ...any) error { return &Error{problem: fmt.Sprintf(format, args...)} }

// within adds the member or element that an error is about.
func within(err error, place any) error {
	if e, ok := errors.AsType[*Error](err); ok {
		e.places = append(e.places, place)
	}
	return err
}

// unread returns an error of the reader as one of a document.
func unread(err error) error {
	if errors.Is(err, msgp.ErrShortBytes) {
		return wrong("is cut off")
	}
	return wrong("is not MessagePack")
}
