// Package msgpack converts MessagePack into JSON and JSON into MessagePack, for bodies and blobs
// that arrive in the one and are needed in the other. The codec is github.com/tinylib/msgp.
//
//	text, err := msgpack.ToJSON(data, 16<<20)
//	data, err = msgpack.AppendJSON(nil, text)
//
// Conversion converts within a budget, and may leave values out. Next, Lookup, Elements, Text and
// Binary read a document without converting it.
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
// All functions are pure, and safe for concurrent use.
package msgpack

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/tinylib/msgp/msgp"
)

// Type is the content type of MessagePack.
const Type = "application/msgpack"

// types are the names that it goes by.
var types = []string{Type, "application/x-msgpack", "application/vnd.msgpack"}

// Is reports whether a content type, perhaps with parameters, is MessagePack's.
func Is(contentType string) bool {
	media, _, _ := strings.Cut(contentType, ";")
	return slices.Contains(types, strings.ToLower(strings.TrimSpace(media)))
}

// MaxDepth bounds the nesting of lists and maps.
const MaxDepth = 64

// ToJSON returns the one document that data is, as JSON of at most limit bytes. An
// error is an *Error.
func ToJSON(data []byte, limit int) ([]byte, error) {
	c := &Conversion{Limit: limit}
	if err := c.grow(min(2*len(data), limit)); err != nil {
		return nil, err
	}
	return c.JSON(data)
}

// Conversion is one conversion to JSON.
type Conversion struct {
	// Limit bounds the JSON, in bytes.
	Limit int
	// Reserve is called before memory is allocated, with its bytes, unless it is nil. Its error
	// ends the conversion.
	Reserve func(n int64) error
	// Skip, unless it is nil, is called for the members of maps, with the depth of the map: 0 for
	// the document itself. Where it returns true, the value is replaced by its offset in the
	// document.
	Skip func(depth int, key []byte) bool

	data, rest, out []byte
}

// JSON returns the one document that data is. An error is an *Error, or of Reserve.
func (c *Conversion) JSON(data []byte) ([]byte, error) {
	c.data, c.rest = data, data
	if err := c.value(0); err != nil {
		return nil, err
	}
	if len(c.out) > c.Limit {
		return nil, c.tooLong()
	}
	if err := checkEnd(c.rest); err != nil {
		return nil, err
	}
	return c.out, nil
}

func (c *Conversion) tooLong() error { return wrong("is more than %d bytes as JSON", c.Limit) }

// grow makes room for n more bytes.
func (c *Conversion) grow(n int) error {
	size := len(c.out) + n
	if size <= cap(c.out) {
		return nil
	}
	if size > c.Limit+slack {
		return c.tooLong()
	}
	size = min(max(size, 2*cap(c.out)), c.Limit+slack)
	if c.Reserve != nil {
		if err := c.Reserve(int64(size - cap(c.out))); err != nil {
			return err
		}
	}
	c.out = append(make([]byte, 0, size), c.out...)
	return nil
}

// slack is more than what surrounds text, or a number of 64 bits, takes as JSON: a key's quotes and
// an offset, and all brackets that may close after it.
const slack = 128

func (c *Conversion) value(depth int) error {
	if len(c.out) > c.Limit {
		return c.tooLong()
	}
	if depth > MaxDepth {
		return wrong("nests deeper than %d", MaxDepth)
	}
	if err := c.grow(slack); err != nil {
		return err
	}
	switch kind := msgp.NextType(c.rest); kind {
	case msgp.MapType, msgp.ArrayType:
		return c.entries(depth, kind == msgp.MapType)
	case msgp.StrType:
		text, rest, err := readText(c.rest)
		if err != nil {
			return err
		}
		c.rest = rest
		return c.text(text)
	default:
		var err error
		c.out, c.rest, err = appendScalar(c.out, c.rest, kind)
		return err
	}
}

// entries writes a list, or a map.
func (c *Conversion) entries(depth int, isMap bool) error {
	n, rest, err := readHeader(c.rest)
	if err != nil {
		return err
	}
	brackets := "[]"
	if isMap {
		brackets = "{}"
	}
	c.rest, c.out = rest, append(c.out, brackets[0])
	for i := range int(n) {
		if i > 0 {
			c.out = append(c.out, ',')
		}
		if isMap {
			err = c.member(depth)
		} else if err = c.value(depth + 1); err != nil {
			err = within(err, i)
		}
		if err != nil {
			return err
		}
	}
	c.out = append(c.out, brackets[1])
	return nil
}

func (c *Conversion) member(depth int) error {
	if len(c.rest) > 0 && msgp.NextType(c.rest) != msgp.StrType {
		return wrong("has a key that is not a string, which JSON cannot represent")
	}
	key, rest, err := readText(c.rest)
	if err != nil {
		return err
	}
	if err := c.text(key); err != nil {
		return err
	}
	c.rest, c.out = rest, append(c.out, ':')
	if c.Skip != nil && c.Skip(depth, key) {
		c.out = strconv.AppendInt(c.out, int64(len(c.data)-len(c.rest)), 10)
		c.rest, err = skip(c.rest, depth+1)
	} else {
		err = c.value(depth + 1)
	}
	if err != nil {
		return within(err, string(key))
	}
	return nil
}

// text writes text that is UTF-8, in quotes.
func (c *Conversion) text(text []byte) error {
	size := len(text) + slack
	for _, b := range text {
		switch {
		case b == '"', b == '\\', b == '\n', b == '\r', b == '\t', b == '\b', b == '\f':
			size++
		case b < ' ':
			size += len(`\u0000`) - 1
		}
	}
	if err := c.grow(size); err != nil {
		return err
	}
	c.out, _ = jsontext.AppendQuote(c.out, text) // fails for what is not UTF-8
	return nil
}

// AppendScalar appends the number, boolean or nil that data is, as JSON.
func AppendScalar(dst, data []byte) ([]byte, error) {
	dst, rest, err := appendScalar(dst, data, msgp.NextType(data))
	if err != nil {
		return dst, err
	}
	return dst, checkEnd(rest)
}

func appendScalar(dst, data []byte, kind msgp.Type) (_, rest []byte, err error) {
	switch kind {
	case msgp.IntType:
		var n int64
		n, rest, err = msgp.ReadInt64Bytes(data)
		dst = strconv.AppendInt(dst, n, 10)
	case msgp.UintType:
		var n uint64
		n, rest, err = msgp.ReadUint64Bytes(data)
		dst = strconv.AppendUint(dst, n, 10)
	case msgp.Float32Type, msgp.Float64Type:
		var f float64
		if f, rest, err = msgp.ReadFloat64Bytes(data); err == nil {
			dst, err = appendFloat(dst, f)
			return dst, rest, err
		}
	case msgp.BoolType:
		var is bool
		is, rest, err = msgp.ReadBoolBytes(data)
		dst = strconv.AppendBool(dst, is)
	case msgp.NilType:
		rest, err = msgp.ReadNilBytes(data)
		dst = append(dst, "null"...)
	case msgp.BinType:
		return dst, data, wrong("is binary, which JSON cannot represent")
	case msgp.InvalidType:
		if err = errNotMessagePack; len(data) == 0 {
			err = msgp.ErrShortBytes
		}
	default:
		return dst, data, wrong("is an extension, which JSON cannot represent")
	}
	return dst, rest, readError(err)
}

func appendFloat(dst []byte, f float64) ([]byte, error) {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return dst, wrong("is NaN or infinite, which JSON cannot represent")
	}
	begin := len(dst)
	dst = strconv.AppendFloat(dst, f, 'g', -1, 64)
	if !bytes.ContainsAny(dst[begin:], ".e") {
		dst = append(dst, ".0"...)
	}
	return dst, nil
}

// AppendJSON appends the one document that text is, as MessagePack. A number that
// is whole and has 64 bits stays whole, every other becomes a float of 64 bits, as
// does -0, whose sign no whole number has; one beyond those is an error, as is text
// that is not JSON or nests deeper than MaxDepth.
func AppendJSON(dst, text []byte) ([]byte, error) {
	from := jsontext.NewDecoder(bytes.NewBuffer(text), jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))
	dst, err := appendNext(dst, from)
	if err != nil {
		return dst, err
	}
	if _, err = from.ReadToken(); !errors.Is(err, io.EOF) {
		return dst, errors.New("text goes on after the JSON")
	}
	return dst, nil
}

// Headers of lists and maps whose number of entries is not known before their end.
const (
	list32   = 0xdd
	map32    = 0xdf
	header32 = 5
)

func appendNext(dst []byte, from *jsontext.Decoder) ([]byte, error) {
	token, err := from.ReadToken()
	if err != nil {
		return dst, err
	}
	switch kind := token.Kind(); kind {
	case '"':
		return msgp.AppendString(dst, token.String()), nil
	case '0':
		return appendNumber(dst, token.String())
	case 't', 'f':
		return msgp.AppendBool(dst, kind == 't'), nil
	case 'n':
		return msgp.AppendNil(dst), nil
	}
	depth, begin := from.StackDepth(), len(dst)
	if depth > MaxDepth {
		return dst, fmt.Errorf("the JSON nests deeper than %d", MaxDepth)
	}
	dst = append(dst, list32, 0, 0, 0, 0)
	for kind := from.PeekKind(); kind != ']' && kind != '}'; kind = from.PeekKind() {
		if dst, err = appendNext(dst, from); err != nil {
			return dst, err
		}
	}
	kind, entries := from.StackIndex(depth)
	if kind == '{' {
		dst[begin], entries = map32, entries/2
	}
	binary.BigEndian.PutUint32(dst[begin+1:begin+header32], uint32(entries))
	_, err = from.ReadToken() // its end
	return dst, err
}

func appendNumber(dst []byte, text string) ([]byte, error) {
	if n, err := strconv.ParseInt(text, 10, 64); err == nil && text != "-0" {
		return msgp.AppendInt64(dst, n), nil
	}
	if n, err := strconv.ParseUint(text, 10, 64); err == nil {
		return msgp.AppendUint64(dst, n), nil
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return dst, fmt.Errorf("the number %.40s is beyond 64 bits", text)
	}
	return msgp.AppendFloat64(dst, f), nil
}
