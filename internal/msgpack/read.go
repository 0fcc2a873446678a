package msgpack

import (
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Elements hands each element of the list that data is to visit. Whatever visit
// returns ends it.
func Elements(data []byte, visit func(i int, value []byte) error) error {
	if !IsList(data) {
		return wrong("must be a list")
	}
	n, rest, err := readHeader(data)
	if err != nil {
		return err
	}
	for i := range int(n) {
		var value []byte
		if value, rest, err = Next(rest); err != nil {
			return err
		}
		if err := visit(i, value); err != nil {
			return err
		}
	}
	return checkEnd(rest)
}

// Lookup returns the value at a path of keys and indexes, where there is one: the first, if a key
// comes twice. It passes over keys that are no strings.
func Lookup(data []byte, path ...any) (value []byte, ok bool) {
	for _, place := range path {
		key, isKey := place.(string)
		if isKey != IsMap(data) || !isKey && !IsList(data) {
			return nil, false
		}
		n, rest, err := readHeader(data)
		found := false
		for i := 0; i < int(n) && !found && err == nil; i++ {
			found = i == place
			if isKey {
				var name []byte
				if name, rest, err = Next(rest); err != nil {
					break
				}
				text, textErr := Text(name)
				found = textErr == nil && string(text) == key
			}
			data, rest, err = Next(rest)
		}
		if err != nil || !found {
			return nil, false
		}
	}
	return data, true
}

// Next returns the document that data begins with, and what follows it.
func Next(data []byte) (value, rest []byte, err error) {
	rest, err = skip(data, 0)
	return data[:len(data)-len(rest)], rest, err
}

// readHeader reads the number of elements of a list, or of members of a map.
func readHeader(data []byte) (n uint32, rest []byte, err error) {
	if IsMap(data) {
		n, rest, err = msgp.ReadMapHeaderBytes(data)
	} else {
		n, rest, err = msgp.ReadArrayHeaderBytes(data)
	}
	return n, rest, readError(err)
}

// IsMap reports whether data begins with a map.
func IsMap(data []byte) bool { return msgp.NextType(data) == msgp.MapType }

// IsList reports whether data begins with a list.
func IsList(data []byte) bool { return msgp.NextType(data) == msgp.ArrayType }

// IsText reports whether data begins with a string of text.
func IsText(data []byte) bool { return msgp.NextType(data) == msgp.StrType }

// Text returns the text of the one string that data is, which it shares.
func Text(data []byte) ([]byte, error) {
	text, rest, err := readText(data)
	if err != nil {
		return nil, err
	}
	return text, checkEnd(rest)
}

func readText(data []byte) (text, rest []byte, err error) {
	if text, rest, err = msgp.ReadStringZC(data); err != nil {
		return nil, nil, readError(err)
	}
	if !utf8.Valid(text) {
		return nil, nil, wrong("is text that is not UTF-8")
	}
	return text, rest, nil
}

// Binary returns the bytes of the binary string that data is, which it shares.
func Binary(data []byte) (raw []byte, ok bool) {
	raw, rest, err := msgp.ReadBytesZC(data)
	return raw, err == nil && len(rest) == 0
}

// Check makes sure that data is one document of MessagePack, of anything that it
// can represent. An error is an *Error.
func Check(data []byte) error {
	rest, err := skip(data, 0)
	if err != nil {
		return err
	}
	return checkEnd(rest)
}

func checkEnd(rest []byte) error {
	if len(rest) > 0 {
		return wrong("goes on after its end, for %d bytes", len(rest))
	}
	return nil
}

// skip returns what comes after the document that data begins with.
func skip(data []byte, depth int) ([]byte, error) {
	if depth > MaxDepth {
		return nil, wrong("nests deeper than %d", MaxDepth)
	}
	isMap := IsMap(data)
	if !isMap && !IsList(data) {
		rest, err := msgp.Skip(data)
		return rest, readError(err)
	}
	n, rest, err := readHeader(data)
	for range n {
		if rest, err = skip(rest, depth+1); err == nil && isMap {
			rest, err = skip(rest, depth+1)
		}
		if err != nil {
			return nil, err
		}
	}
	return rest, err
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

var errNotMessagePack = errors.New("not MessagePack")

// readError returns an error of the reader as one of a document.
func readError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, msgp.ErrShortBytes):
		return wrong("is cut off")
	}
	return wrong("is not MessagePack")
}
