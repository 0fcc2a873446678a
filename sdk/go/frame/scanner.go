package frame

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// scanner reads the JSON of a header, which is valid UTF-8. It is stricter than
// encoding/json, which takes keys in any case, null for everything and numbers of
// any size, and several times faster. Strings are pieces of the text.
//
// The first error stays, and everything after it reads as nothing.
type scanner struct {
	text      string
	at, depth int
	// path is where the error is.
	path string
	err  error
}

func (s *scanner) fail(format string, args ...any) {
	if s.err == nil {
		s.err = fmt.Errorf(format, args...)
		s.at = len(s.text)
	}
}

// within says that the error is in a value of this key or index.
func (s *scanner) within(step string) {
	if s.path != "" && s.path[0] != '[' {
		step += "."
	}
	s.path = step + s.path
}

// failure returns the error and where it is.
func (s *scanner) failure() error {
	if s.err != nil && s.path != "" {
		return fmt.Errorf("%s: %w", s.path, s.err)
	}
	return s.err
}

// peek skips spaces and returns the byte that comes, 0 at the end.
func (s *scanner) peek() byte {
	for ; s.at < len(s.text); s.at++ {
		switch c := s.text[s.at]; c {
		case ' ', '\t', '\n', '\r':
		default:
			return c
		}
	}
	return 0
}

// want says that something else comes than is due.
func (s *scanner) want(what string) {
	found := "something else"
	switch c := s.peek(); {
	case s.at == len(s.text):
		found = "the end"
	case c == '{':
		found = "an object"
	case c == '[':
		found = "a list"
	case c == '"':
		found = "a string"
	case c == '-' || c >= '0' && c <= '9':
		found = "a number"
	default:
		for _, word := range []string{"null", "true", "false"} {
			if strings.HasPrefix(s.text[s.at:], word) {
				found = word
			}
		}
	}
	s.fail("%s is due at byte %d, and %s comes", what, s.at, found)
}

// end checks that nothing follows.
func (s *scanner) end() {
	if s.peek(); s.at < len(s.text) {
		s.fail("there is more after the object, from byte %d", s.at)
	}
}

func (s *scanner) open(bracket byte, what string) bool {
	if s.peek() != bracket {
		s.want(what)
		return false
	}
	if s.depth++; s.depth > maxDepth {
		s.fail("it nests deeper than %d", maxDepth)
		return false
	}
	s.at++
	return true
}

// another reports whether a list or an object has another element, and ends it
// where it has none.
func (s *scanner) another(bracket byte, first bool) bool {
	c := s.peek()
	switch {
	case s.err != nil:
		return false
	case c == bracket:
		s.at++
		s.depth--
		return false
	case first:
		return true
	case c == ',':
		s.at++
		return true
	}
	s.want("a comma or the end of the list or object")
	return false
}

// name reads a key and its colon.
func (s *scanner) name() string {
	name := s.string()
	if s.peek() != ':' {
		s.want("a colon")
		return ""
	}
	s.at++
	return name
}

// list reads a list; an empty one is nil.
func list[T any](s *scanner, read func(*T, *scanner)) []T {
	if !s.open('[', "a list") {
		return nil
	}
	var out []T
	for s.another(']', len(out) == 0) {
		if len(out) == cap(out) {
			// append would grow a long list by a quarter, again and again.
			out = slices.Grow(out, max(4, len(out)))
		}
		out = out[:len(out)+1]
		if read(&out[len(out)-1], s); s.err != nil {
			s.within("[" + strconv.Itoa(len(out)-1) + "]")
			return nil
		}
	}
	return out
}

func (s *scanner) strings() []string {
	return list(s, func(to *string, s *scanner) { *to = s.string() })
}

// table reads an object that has any keys, each once.
func table[T any](s *scanner, read func(*scanner) T) map[string]T {
	if !s.open('{', "an object") {
		return nil
	}
	var out map[string]T
	for s.another('}', out == nil) {
		if out == nil {
			out = make(map[string]T, 1)
		}
		name := s.name()
		value := read(s)
		if _, twice := out[name]; twice {
			s.fail("it is there twice")
		}
		if s.err != nil {
			s.within(clip(name))
			return nil
		}
		out[name] = value
	}
	return out
}

// clip bounds a peer's words in an error.
func clip(text string) string {
	if len(text) <= 40 {
		return text
	}
	return text[:40] + "..."
}

func (s *scanner) string() string {
	if s.peek() != '"' {
		s.want("a string")
		return ""
	}
	start := s.at + 1
	for i := start; i < len(s.text); i++ {
		switch c := s.text[i]; {
		case c == '"':
			s.at = i + 1
			return s.text[start:i]
		case c == '\\':
			return s.escaped(start, i)
		case c < ' ':
			s.fail("a control character in a string at byte %d", i)
			return ""
		}
	}
	s.fail("a string has no end")
	return ""
}

// escaped reads on in a string that began at start and has an escape at i.
func (s *scanner) escaped(start, i int) string {
	out := append(make([]byte, 0, i-start+32), s.text[start:i]...)
	for i < len(s.text) {
		switch c := s.text[i]; {
		case c == '"':
			s.at = i + 1
			return string(out)
		case c == '\\':
			var ok bool
			if out, i, ok = s.escape(out, i+1); !ok {
				s.fail("an escape that is none at byte %d", i)
				return ""
			}
		case c < ' ':
			s.fail("a control character in a string at byte %d", i)
			return ""
		default:
			out = append(out, c)
			i++
		}
	}
	s.fail("a string has no end")
	return ""
}

// escape appends what the escape at i, after its backslash, stands for, and
// returns where the string goes on.
func (s *scanner) escape(out []byte, i int) ([]byte, int, bool) {
	const short, stand = `"\/bfnrt`, "\"\\/\b\f\n\r\t"
	if i == len(s.text) {
		return nil, i, false
	}
	if n := strings.IndexByte(short, s.text[i]); n >= 0 {
		return append(out, stand[n]), i + 1, true
	}
	r, ok := s.codeUnit(i)
	if !ok {
		return nil, i, false
	}
	i += len("u0000")
	if !utf16.IsSurrogate(r) {
		return utf8.AppendRune(out, r), i, true
	}
	if i < len(s.text) && s.text[i] == '\\' {
		if low, ok := s.codeUnit(i + 1); ok {
			if both := utf16.DecodeRune(r, low); both != utf8.RuneError {
				return utf8.AppendRune(out, both), i + len(`\u0000`), true
			}
		}
	}
	return utf8.AppendRune(out, utf8.RuneError), i, true
}

// codeUnit reads u and four hexadecimal digits at i.
func (s *scanner) codeUnit(i int) (rune, bool) {
	if len(s.text)-i < len("u0000") || s.text[i] != 'u' {
		return 0, false
	}
	var r rune
	for _, c := range []byte(s.text[i+1 : i+5]) {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		case c >= 'A' && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

// number reads a number as it is written.
func (s *scanner) number() string {
	s.peek()
	start := s.at
	i := s.after(start, "-")
	whole := i
	if i = s.digits(i); i == whole {
		if whole > start {
			s.fail("a number has no digit after its sign at byte %d", start)
		}
		s.want("a number")
		return ""
	}
	if s.text[whole] == '0' && i > whole+1 {
		s.fail("a number begins with 0 at byte %d", start)
		return ""
	}
	if point := s.after(i, "."); point > i {
		if i = s.digits(point); i == point {
			s.fail("a number has no digit after its point")
			return ""
		}
	}
	if e := s.after(i, "eE"); e > i {
		sign := s.after(e, "+-")
		if i = s.digits(sign); i == sign {
			s.fail("a number has no digit in its exponent")
			return ""
		}
	}
	s.at = i
	return s.text[start:i]
}

// after returns the place behind one of these characters at i, or i.
func (s *scanner) after(i int, characters string) int {
	if i < len(s.text) && strings.IndexByte(characters, s.text[i]) >= 0 {
		return i + 1
	}
	return i
}

func (s *scanner) digits(i int) int {
	for i < len(s.text) && s.text[i] >= '0' && s.text[i] <= '9' {
		i++
	}
	return i
}

// whole reads a whole number between low and most.
func (s *scanner) whole(low, most int64) int64 {
	text := s.number()
	if s.err != nil {
		return 0
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < low || n > most {
		s.fail("%s is no whole number between %d and %d", clip(text), low, most)
		return 0
	}
	return n
}

func (s *scanner) count(low int) int { return int(s.whole(int64(low), maxCount)) }
func (s *scanner) index() int        { return int(s.whole(0, MaxItems-1)) }
func (s *scanner) batch() uint64     { return uint64(s.whole(0, maxNumber)) }

func (s *scanner) bool() bool {
	s.peek()
	switch rest := s.text[s.at:]; {
	case strings.HasPrefix(rest, "true"):
		s.at += len("true")
		return true
	case strings.HasPrefix(rest, "false"):
		s.at += len("false")
	default:
		s.want("true or false")
	}
	return false
}

// skip reads any value and returns how it is written.
func (s *scanner) skip() string {
	c := s.peek()
	start := s.at
	switch c {
	case '{':
		s.open('{', "an object")
		for first := true; s.another('}', first); first = false {
			s.name()
			s.skip()
		}
	case '[':
		s.open('[', "a list")
		for first := true; s.another(']', first); first = false {
			s.skip()
		}
	case '"':
		s.string()
	case 't', 'f':
		s.bool()
	case 'n':
		if !strings.HasPrefix(s.text[s.at:], "null") {
			s.want("a value")
			break
		}
		s.at += len("null")
	default:
		s.number()
	}
	if s.err != nil {
		return ""
	}
	return s.text[start:s.at]
}

// anObject reads any object and returns how it is written.
func (s *scanner) anObject() string {
	if s.peek() != '{' {
		s.want("an object")
		return ""
	}
	return s.skip()
}
