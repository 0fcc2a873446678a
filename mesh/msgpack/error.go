package msgpack

import (
	"errors"
	"fmt"

	"github.com/tinylib/msgp/msgp"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Error says what is wrong with a document, and where in it.
type Error struct {
	// places lead to it, the innermost first: a key or the index of an element.
	places []any
	what   string
}

// Error implements error.
func (e *Error) Error() string {
	if at := e.At(""); at != "" {
		return at + " " + e.what
	}
	return e.what
}

// What says what is wrong, without the place: "is binary, which JSON cannot say".
func (e *Error) What() string { return e.what }

// maxPlaces bounds the elements of a path.
const maxPlaces = 16

// At is the place as a path below that of the document; of a deep one it has the
// outer part.
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

func wrong(format string, args ...any) error { return &Error{what: fmt.Sprintf(format, args...)} }

// within says that an error is about a member or an element.
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
	return wrong("is no MessagePack")
}
