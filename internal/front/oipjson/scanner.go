package oipjson

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// MaxDepth bounds the nesting of arrays and objects. A tensor has at most
// tensor.MaxRank axes, three levels down.
const MaxDepth = 64

// scanner reads JSON text, strictly by RFC 8259, without building values: a million
// numbers must not become a million interfaces.
type scanner struct {
	data  []byte
	at    int
	depth int
	// packed is the document in MessagePack of which data was converted; nil if there is none. The
	// data of tensors is in it, at the offset that the text has in its place.
	packed []byte
}

// syntaxError means that text is not JSON, or not the expected JSON.
type syntaxError struct {
	at   int
	what string
}

func (e *syntaxError) Error() string { return fmt.Sprintf("%s at byte %d", e.what, e.at) }

// fail returns the error at the text that is next: it ends early, or is NaN or an infinity,
// or else what.
func (s *scanner) fail(what string) error {
	if s.at >= len(s.data) {
		what = "it ends early"
	} else if text := s.nonFinite(); text != "" {
		what = "JSON has no " + text + ", found"
	}
	return &syntaxError{at: s.at, what: what}
}

// nonFinite returns NaN or Infinity if that is next: some encoders write them.
func (s *scanner) nonFinite() string {
	for _, text := range []string{"NaN", "Infinity"} {
		if bytes.HasPrefix(s.data[s.at:], []byte(text)) {
			return text
		}
	}
	return ""
}

// next returns the first byte after white space, without reading it; 0 at the end.
func (s *scanner) next() byte {
	for s.at < len(s.data) {
		switch c := s.data[s.at]; c {
		case ' ', '\t', '\n', '\r':
			s.at++
		default:
			return c
		}
	}
	return 0
}

func (s *scanner) take(c byte) error {
	if s.next() != c {
		return s.fail("no " + string(c))
	}
	s.at++
	return nil
}

// end checks that nothing follows.
func (s *scanner) end() error {
	if s.next(); s.at < len(s.data) {
		return s.fail("something after the end")
	}
	return nil
}

func (s *scanner) enter(c byte) error {
	if s.depth++; s.depth > MaxDepth {
		return s.fail(fmt.Sprintf("nesting deeper than %d", MaxDepth))
	}
	return s.take(c)
}

// more reads the byte after an element: a comma, or the closing byte.
func (s *scanner) more(closing byte) (bool, error) {
	switch s.next() {
	case ',':
		s.at++
		return true, nil
	case closing:
		s.at++
		s.depth--
		return false, nil
	}
	return false, s.fail("no , or " + string(closing))
}

// object calls member for each of an object's members, with the scanner at the value.
// member reads the value.
func (s *scanner) object(member func(key string) error) error {
	if err := s.enter('{'); err != nil {
		return err
	}
	if s.next() == '}' {
		_, err := s.more('}')
		return err
	}
	for more := true; more; {
		key, err := s.text()
		if err != nil {
			return err
		}
		if err := s.take(':'); err != nil {
			return err
		}
		if err := member(string(key)); err != nil {
			return err
		}
		if more, err = s.more('}'); err != nil {
			return err
		}
	}
	return nil
}

// array calls element for each of an array's elements, with the scanner at the
// element. element reads it.
func (s *scanner) array(element func(i int) error) error {
	if err := s.enter('['); err != nil {
		return err
	}
	if s.next() == ']' {
		_, err := s.more(']')
		return err
	}
	for i, more := 0, true; more; i++ {
		err := element(i)
		if err != nil {
			return err
		}
		if more, err = s.more(']'); err != nil {
			return err
		}
	}
	return nil
}

// IsValid reports whether text is JSON, whose strings have a form in UTF-8: half a surrogate pair,
// which may only stand in an escape, has none.
func IsValid(text []byte) bool {
	return jsontext.Value(text).IsValid(jsontext.AllowDuplicateNames(true))
}

// Check returns INVALID_REQUEST, with the place, for text that is not JSON.
func Check(text []byte) error {
	if IsValid(text) {
		return nil
	}
	s := &scanner{data: text}
	err := s.skip()
	if err == nil {
		err = s.end()
	}
	if err == nil {
		err = errors.New("it is not UTF-8")
	}
	return fault.Newf(fault.InvalidRequest, "the body is not valid JSON: %w", err)
}

// skip reads a value of any kind.
func (s *scanner) skip() error {
	var err error
	switch c := s.next(); c {
	case '{':
		err = s.object(func(string) error { return s.skip() })
	case '[':
		err = s.array(func(int) error { return s.skip() })
	case '"':
		_, err = s.quoted()
	case 't':
		err = s.word("true")
	case 'f':
		err = s.word("false")
	case 'n':
		err = s.word("null")
	default:
		_, err = s.number()
	}
	return err
}

// skipUnchecked skips an array or object and only pairs the brackets outside of
// strings. The decoder of the value checks the rest.
func (s *scanner) skipUnchecked() error {
	if c := s.next(); c != '[' && c != '{' {
		return s.skip()
	}
	for depth, quoted := 0, false; s.at < len(s.data); s.at++ {
		switch c := s.data[s.at]; {
		case quoted && c == '\\':
			s.at++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '[' || c == '{':
			depth++
		case c == ']' || c == '}':
			if depth--; depth == 0 {
				s.at++
				return nil
			}
		}
	}
	s.at = len(s.data)
	return s.fail("an array without end")
}

func (s *scanner) word(w string) error {
	s.next()
	if len(s.data)-s.at < len(w) || string(s.data[s.at:s.at+len(w)]) != w {
		return s.fail("no value")
	}
	s.at += len(w)
	return nil
}

// number reads a number and returns its text.
func (s *scanner) number() ([]byte, error) {
	if c := s.next(); c != '-' && !digit(c) {
		return nil, s.fail("no value")
	}
	start := s.at
	s.optional('-')
	if zero := s.at < len(s.data) && s.data[s.at] == '0'; zero {
		s.at++
	} else if !s.digits() {
		return nil, s.fail("no digit")
	}
	if s.optional('.') && !s.digits() {
		return nil, s.fail("no digit")
	}
	if s.optional('e') || s.optional('E') {
		_ = s.optional('+') || s.optional('-')
		if !s.digits() {
			return nil, s.fail("no digit")
		}
	}
	return s.data[start:s.at], nil
}

func (s *scanner) optional(c byte) bool {
	if s.at < len(s.data) && s.data[s.at] == c {
		s.at++
		return true
	}
	return false
}

// digits reads digits and reports whether there were any.
func (s *scanner) digits() bool {
	start := s.at
	for s.at < len(s.data) && digit(s.data[s.at]) {
		s.at++
	}
	return s.at > start
}

func digit(c byte) bool { return '0' <= c && c <= '9' }

// quoted reads a string.
func (s *scanner) quoted() (rawText, error) {
	if err := s.take('"'); err != nil {
		return rawText{}, err
	}
	start, escaped := s.at-1, false
	for ; s.at < len(s.data) && s.data[s.at] != '"'; s.at++ {
		switch c := s.data[s.at]; {
		case c == '\\':
			escaped = true
			s.at++
		case c < ' ':
			return rawText{}, s.fail("a control character in a string")
		}
	}
	if s.at >= len(s.data) {
		s.at = len(s.data)
		return rawText{}, s.fail("a string without end")
	}
	s.at++
	raw := s.data[start:s.at]
	if !utf8.Valid(raw) {
		s.at = start
		return rawText{}, s.fail("a string that is not UTF-8")
	}
	if escaped && !IsValid(raw) {
		s.at = start
		return rawText{}, s.fail("a string with a bad escape, or half a surrogate pair")
	}
	return rawText{raw[1 : len(raw)-1], escaped}, nil
}

// text reads a string and returns its value, which shares the data unless it has escapes.
func (s *scanner) text() ([]byte, error) {
	raw, err := s.quoted()
	if err != nil || !raw.escaped {
		return raw.text, err
	}
	return raw.append(make([]byte, 0, len(raw.text))), nil
}

// rawText is a valid string without its quotes. It is measured before it is copied, so
// that it needs no memory that is not reserved.
type rawText struct {
	text    []byte
	escaped bool
}

// size returns the length of the value.
func (r rawText) size() (size int) {
	rest := r.text
	for at := r.escape(rest); at >= 0; at = r.escape(rest) {
		c, n := unescape(rest[at:])
		size += at + utf8.RuneLen(c)
		rest = rest[at+n:]
	}
	return size + len(rest)
}

// append appends the value.
func (r rawText) append(dst []byte) []byte {
	rest := r.text
	for at := r.escape(rest); at >= 0; at = r.escape(rest) {
		c, n := unescape(rest[at:])
		dst = utf8.AppendRune(append(dst, rest[:at]...), c)
		rest = rest[at+n:]
	}
	return append(dst, rest...)
}

// escape returns where the next escape is, or -1.
func (r rawText) escape(rest []byte) int {
	if !r.escaped {
		return -1
	}
	return bytes.IndexByte(rest, '\\')
}

// unescape returns the character of the valid escape that raw begins with, and its
// length.
func unescape(raw []byte) (c rune, n int) {
	const hexEscape = len(`\u0000`)
	if raw[1] != 'u' {
		if i := strings.IndexByte("bfnrt", raw[1]); i >= 0 {
			return rune("\b\f\n\r\t"[i]), 2
		}
		return rune(raw[1]), 2
	}
	first := hexadecimal(raw[2:hexEscape])
	if !utf16.IsSurrogate(first) {
		return first, hexEscape
	}
	return utf16.DecodeRune(first, hexadecimal(raw[hexEscape+2:2*hexEscape])), 2 * hexEscape
}

func hexadecimal(digits []byte) rune {
	n, _ := strconv.ParseUint(string(digits), 16, 16)
	return rune(n)
}
