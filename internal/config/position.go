package config

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Path leads to a value of a file: the keys from the top, and for places in a
// list their index in brackets, "[0]".
type Path []string

// String returns the path as people write it: stages.decode.batch, steps[0].
func (p Path) String() string {
	var out strings.Builder
	for _, element := range p {
		if out.Len() > 0 && !strings.HasPrefix(element, "[") {
			out.WriteByte('.')
		}
		out.WriteString(element)
	}
	return out.String()
}

// with returns a longer path, in memory of its own.
func (p Path) with(more ...string) Path {
	return append(p[:len(p):len(p)], more...)
}

func index(i int) string { return "[" + strconv.Itoa(i) + "]" }

// PositionError is an error with its place in a file. Line and Column count
// from 1 and are 0 where the file has no such place; Key may be empty.
type PositionError struct {
	File         string
	Line, Column int
	Key          string
	Err          error

	// text is the error's without the part of it that is in the key.
	text string
}

// Error implements error.
func (e *PositionError) Error() string {
	out := e.File
	if e.Line > 0 {
		out = fmt.Sprintf("%s:%d:%d", out, e.Line, e.Column)
	}
	if e.Key != "" {
		out += ": " + e.Key
	}
	if e.text == "" {
		return out + ": " + e.Err.Error()
	}
	return out + ": " + e.text
}

// Unwrap returns the error without its place.
func (e *PositionError) Unwrap() error { return e.Err }

// At points an error at the value that the path leads to, or at the nearest
// above it that the file has. A nil error stays nil, and one that has a place
// already stays as it is; each of several joined ones gets a place of its own. An error
// about a key that could not be read becomes nil: it follows from that.
//
// By convention an error begins with the key that it is about and a colon,
// "batch.max_size: 0 is less than 1". Where the file has that key below the
// path, it is there that the error points.
func (d *Doc) At(path Path, err error) error {
	if err == nil {
		return nil
	}
	if _, placed := errors.AsType[*PositionError](err); placed {
		return err
	}
	if several := splitJoined(err); several != nil {
		placed := make([]error, len(several))
		for i, one := range several {
			placed[i] = d.At(path, one)
		}
		return errors.Join(placed...)
	}
	return d.at(path, err)
}

// splitJoined returns the errors that errors.Join made one of.
func splitJoined(err error) []error {
	several, ok := err.(interface{ Unwrap() []error })
	if !ok || errors.Join(several.Unwrap()...).Error() != err.Error() {
		return nil
	}
	return several.Unwrap()
}

// leadingKey matches the key that an error's text begins with.
var leadingKey = regexp.MustCompile(`^([a-z][a-z0-9_-]*(?:\.[a-z0-9_-]+|\[[0-9]+\])*): `)

func (d *Doc) at(path Path, err error) error {
	out := &PositionError{File: d.name, Err: err, text: err.Error()}
	if m := leadingKey.FindStringSubmatch(out.text); m != nil {
		key := elements(m[1])
		if _, has := d.find(path.with(key[0])); has {
			path, out.text = path.with(key...), out.text[len(m[0]):]
		}
	}
	out.Key = path.String()
	for ; len(path) > 0; path = path[:len(path)-1] {
		if place, ok := d.find(path); ok {
			out.Line, out.Column = place.line, place.column
			break
		}
	}
	if slices.ContainsFunc(d.unread, func(key string) bool { return isBelow(out.Key, key) }) {
		return nil
	}
	return out
}

// isBelow reports whether a key is the other or below it.
func isBelow(key, other string) bool {
	rest, ok := strings.CutPrefix(key, other)
	return ok && (other == "" || rest == "" || rest[0] == '.' || rest[0] == '[')
}

// elements splits a written key: a.b[0] has three.
func elements(key string) Path {
	return strings.Split(strings.ReplaceAll(key, "[", ".["), ".")
}

// find returns the place of what a path leads to: of the key itself, so that an
// editor lands at its name.
func (d *Doc) find(path Path) (at place, ok bool) {
	n := d.root
	for _, element := range path {
		if n == nil {
			return place{}, false
		}
		if at, n, ok = n.child(element); !ok {
			return place{}, false
		}
	}
	return at, ok
}

// InSection prefixes the key that each error begins with by the section.
func InSection(section string, err error) error {
	if err == nil {
		return nil
	}
	if several := splitJoined(err); several != nil {
		errs := make([]error, len(several))
		for i, one := range several {
			errs[i] = InSection(section, one)
		}
		return errors.Join(errs...)
	}
	return fmt.Errorf("%s.%w", section, err)
}
