// Package msgpack converts MessagePack into JSON and JSON into MessagePack, for bodies and blobs
// that arrive in the one and are needed in the other.
//
//	text, err := msgpack.ToJSON(data, 16<<20)
//	data, err = msgpack.AppendJSON(nil, text)
//
// Members, Elements and Binary read a document without converting it, and the Append functions
// write one.
//
// # Unsupported values
//
// JSON has no binary strings, extensions and timestamps, maps with keys that are not strings,
// NaN, infinities, and strings that are not UTF-8. ToJSON rejects them with an *Error that names
// their place. Numbers keep their kind: a float is written with a point or an exponent even where
// it is whole, and whole numbers are exact up to 64 bits. The order of a map's keys is preserved.
//
// # Bounds
//
// No allocation depends on a length in a header: only bytes that are present count. A document
// nests at most MaxDepth deep, and ToJSON stops at its limit. The output of AppendJSON takes at
// most about five times the JSON: an empty list is two bytes of JSON, and five here.
//
// Everything is a pure function, safe for concurrent use.
package msgpack

import (
	"encoding/json"
	"math"
	"strconv"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"
)

// MaxDepth bounds the nesting of lists and maps.
const MaxDepth = 64

// ToJSON returns the one document that data is, as JSON of at most limit bytes. An
// error is an *Error.
func ToJSON(data []byte, limit int) ([]byte, error) {
	out, err := AppendAsJSON(make([]byte, 0, min(2*len(data), limit)), data, limit)
	if err != nil {
		return nil, err
	}
	return out, nil
}

// AppendAsJSON is ToJSON that appends; the limit is of all that dst has then.
func AppendAsJSON(dst, data []byte, limit int) ([]byte, error) {
	w := writer{left: data, out: dst, limit: limit}
	if err := w.value(0); err != nil {
		return dst, err
	}
	if len(w.out) > limit {
		return dst, w.long()
	}
	return w.out, ended(w.left)
}

// writer writes the rest of a document.
type writer struct {
	left, out []byte
	limit     int
}

func (w *writer) value(depth int) error {
	if len(w.out) > w.limit {
		return w.long()
	}
	if depth > MaxDepth {
		return wrong("nests deeper than %d", MaxDepth)
	}
	switch kind := msgp.NextType(w.left); kind {
	case msgp.MapType:
		return w.object(depth)
	case msgp.ArrayType:
		return w.list(depth)
	default:
		return w.scalar(kind)
	}
}

func (w *writer) long() error { return wrong("is more than %d bytes as JSON", w.limit) }

func (w *writer) scalar(kind msgp.Type) (err error) {
	switch kind {
	case msgp.StrType:
		return w.text()
	case msgp.IntType:
		var n int64
		n, w.left, err = msgp.ReadInt64Bytes(w.left)
		w.out = strconv.AppendInt(w.out, n, 10)
	case msgp.UintType:
		var n uint64
		n, w.left, err = msgp.ReadUint64Bytes(w.left)
		w.out = strconv.AppendUint(w.out, n, 10)
	case msgp.Float32Type:
		var f float32
		f, w.left, err = msgp.ReadFloat32Bytes(w.left)
		return w.float(float64(f), err)
	case msgp.Float64Type:
		var f float64
		f, w.left, err = msgp.ReadFloat64Bytes(w.left)
		return w.float(f, err)
	case msgp.BoolType:
		var is bool
		is, w.left, err = msgp.ReadBoolBytes(w.left)
		w.out = strconv.AppendBool(w.out, is)
	case msgp.NilType:
		w.left, err = msgp.ReadNilBytes(w.left)
		w.out = append(w.out, "null"...)
	default:
		return w.unsupported(kind)
	}
	if err != nil {
		return unread(err)
	}
	return nil
}

// unsupported returns the error of a value that JSON cannot represent.
func (w *writer) unsupported(kind msgp.Type) error {
	switch {
	case len(w.left) == 0:
		return unread(msgp.ErrShortBytes)
	case kind == msgp.BinType:
		return wrong("is binary, which JSON cannot represent")
	case kind == msgp.InvalidType:
		return unread(nil)
	default:
		return wrong("is an extension, which JSON cannot represent")
	}
}

func (w *writer) float(f float64, err error) error {
	if err != nil {
		return unread(err)
	}
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return wrong("is NaN or infinite, which JSON cannot represent")
	}
	begin := len(w.out)
	w.out = strconv.AppendFloat(w.out, f, 'g', -1, 64)
	for _, c := range w.out[begin:] {
		if c == '.' || c == 'e' {
			return nil
		}
	}
	w.out = append(w.out, ".0"...)
	return nil
}

func (w *writer) text() error {
	text, left, err := readText(w.left)
	if err != nil {
		return err
	}
	w.left, w.out = left, appendString(w.out, text)
	return nil
}

// readText reads a string, which shares the data.
func readText(data []byte) (text, left []byte, err error) {
	if text, left, err = msgp.ReadStringZC(data); err != nil {
		return nil, nil, unread(err)
	}
	if !utf8.Valid(text) {
		return nil, nil, wrong("is text that is not UTF-8")
	}
	return text, left, nil
}

// readKey reads a key, which is a string.
func readKey(data []byte) (key, left []byte, err error) {
	if len(data) > 0 && msgp.NextType(data) != msgp.StrType {
		return nil, nil, wrong("has a key that is not a string, which JSON cannot represent")
	}
	return readText(data)
}

func (w *writer) list(depth int) error {
	n, left, err := msgp.ReadArrayHeaderBytes(w.left)
	if err != nil {
		return unread(err)
	}
	w.left, w.out = left, append(w.out, '[')
	for i := range n {
		if i > 0 {
			w.out = append(w.out, ',')
		}
		if err := w.value(depth + 1); err != nil {
			return within(err, int(i))
		}
	}
	w.out = append(w.out, ']')
	return nil
}

func (w *writer) object(depth int) error {
	n, left, err := msgp.ReadMapHeaderBytes(w.left)
	if err != nil {
		return unread(err)
	}
	w.left, w.out = left, append(w.out, '{')
	for i := range n {
		if i > 0 {
			w.out = append(w.out, ',')
		}
		key, left, err := readKey(w.left)
		if err != nil {
			return err
		}
		w.left, w.out = left, append(appendString(w.out, key), ':')
		if err := w.value(depth + 1); err != nil {
			return within(err, string(key))
		}
	}
	w.out = append(w.out, '}')
	return nil
}

// appendString appends text that is UTF-8 as a JSON string.
func appendString(dst, text []byte) []byte {
	for _, c := range text {
		if c < ' ' || c == '"' || c == '\\' || c >= utf8.RuneSelf {
			// Of a string, Marshal has nothing to refuse.
			quoted, _ := json.Marshal(string(text))
			return append(dst, quoted...)
		}
	}
	dst = append(dst, '"')
	dst = append(dst, text...)
	return append(dst, '"')
}
