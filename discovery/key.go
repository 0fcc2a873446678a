package discovery

import (
	"fmt"
	"strings"
)

// Key is a path in the table, its segments escaped and joined by "/".
type Key string

// KeyOf returns the key of segments.
func KeyOf(segments ...string) Key {
	out := make([]string, len(segments))
	for i, s := range segments {
		out[i] = Escape(s)
	}
	return Key(strings.Join(out, "/"))
}

// Segments returns the segments of a key, or what is wrong with it.
func (k Key) Segments() ([]string, error) {
	if len(k) > MaxKey {
		return nil, fmt.Errorf("%w: a key of %d bytes, at most %d are possible", ErrInvalid, len(k), MaxKey)
	}
	parts := strings.Split(string(k), "/")
	for i, part := range parts {
		segment, err := Unescape(part)
		if err != nil {
			return nil, fmt.Errorf("%w: key %q: %w", ErrInvalid, k, err)
		}
		if len(segment) == 0 || len(segment) > MaxSegment {
			return nil, fmt.Errorf("%w: key %q: a segment of %d bytes, 1 to %d are possible", ErrInvalid, k, len(segment), MaxSegment)
		}
		parts[i] = segment
	}
	return parts, nil
}

// Below reports whether the key is below another one; an empty one is above all.
func (k Key) Below(above Key) bool {
	return above == "" && k != "" || strings.HasPrefix(string(k), string(above)+"/")
}

// Escape writes a segment so that every store takes it.
func Escape(segment string) string {
	var out strings.Builder
	for i := range len(segment) {
		if b := segment[i]; plain(b) {
			out.WriteByte(b)
		} else {
			fmt.Fprintf(&out, "=%02X", b)
		}
	}
	return out.String()
}

// Unescape returns the segment that Escape has written. There is one way to write
// each.
func Unescape(text string) (string, error) {
	var out strings.Builder
	for i := 0; i < len(text); i++ {
		b := text[i]
		switch {
		case plain(b):
		case b == '=' && i+2 < len(text):
			high, low := digit(text[i+1]), digit(text[i+2])
			b = high<<4 | low
			if high > 15 || low > 15 || plain(b) {
				return "", fmt.Errorf("%q escapes nothing", text[i:i+3])
			}
			i += 2
		default:
			return "", fmt.Errorf("byte %q has to be escaped", b)
		}
		out.WriteByte(b)
	}
	return out.String(), nil
}

func plain(b byte) bool {
	return b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9' || b == '-' || b == '_'
}

// digit returns the value of a hexadecimal digit, 16 for what is none.
func digit(b byte) byte {
	switch {
	case b >= '0' && b <= '9':
		return b - '0'
	case b >= 'A' && b <= 'F':
		return b - 'A' + 10
	default:
		return 16
	}
}
