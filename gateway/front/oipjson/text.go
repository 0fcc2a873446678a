package oipjson

import (
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// text takes a string and returns its value.
func (s *scanner) text() (string, error) {
	var out strings.Builder
	err := s.string(func(piece []byte) { out.Write(piece) })
	return out.String(), err
}

// string takes a string and hands its value over piece by piece.
func (s *scanner) string(piece func([]byte)) error {
	raw, escaped, err := s.quoted()
	if err != nil {
		return err
	}
	if !utf8.Valid(raw) {
		return s.fail("a string that is not UTF-8")
	}
	raw = raw[1 : len(raw)-1]
	if !escaped {
		piece(raw)
		return nil
	}
	if !unescape(raw, piece) {
		return s.fail("a string with a bad escape")
	}
	return nil
}

// unescape hands over what stands between the quotes of a string, with its escapes
// replaced, and reports whether they are such as JSON has.
func unescape(raw []byte, piece func([]byte)) bool {
	plain := 0
	var r [utf8.UTFMax]byte
	for i := 0; i < len(raw); {
		if raw[i] != '\\' {
			i++
			continue
		}
		c, n := escape(raw[i:])
		if n == 0 {
			return false
		}
		piece(raw[plain:i])
		piece(utf8.AppendRune(r[:0], c))
		i += n
		plain = i
	}
	piece(raw[plain:])
	return true
}

// escape returns the character of the escape that raw begins with, and its length, 0
// where it is none. Half a surrogate pair is U+FFFD.
func escape(raw []byte) (c rune, n int) {
	if len(raw) < 2 {
		return 0, 0
	}
	switch e := raw[1]; e {
	case '"', '\\', '/':
		return rune(e), 2
	case 'b':
		return '\b', 2
	case 'f':
		return '\f', 2
	case 'n':
		return '\n', 2
	case 'r':
		return '\r', 2
	case 't':
		return '\t', 2
	}
	first, ok := hexadecimal(raw)
	if !ok {
		return 0, 0
	}
	if !utf16.IsSurrogate(first) {
		return first, hexEscape
	}
	if second, ok := hexadecimal(raw[hexEscape:]); ok {
		if c := utf16.DecodeRune(first, second); c != utf8.RuneError {
			return c, 2 * hexEscape
		}
	}
	return utf8.RuneError, hexEscape
}

// hexEscape is the length of \u and its four digits.
const hexEscape = 6

// hexadecimal returns the number of the \u that raw begins with.
func hexadecimal(raw []byte) (c rune, ok bool) {
	if len(raw) < hexEscape || raw[0] != '\\' || raw[1] != 'u' {
		return 0, false
	}
	n, err := strconv.ParseUint(string(raw[2:hexEscape]), 16, 16)
	return rune(n), err == nil
}
