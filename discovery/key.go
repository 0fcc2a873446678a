package discovery

import (
	"fmt"
	"strconv"
	"strings"
)

// Key is a path in the table: escaped segments joined by "/".
type Key string

// KeyOf returns the key of segments.
func KeyOf(segments ...string) Key {
	out := make([]string, len(segments))
	for i, s := range segments {
		out[i] = escape(s)
	}
	return Key(strings.Join(out, "/"))
}

// Segments returns the unescaped segments of a key, or what is wrong with it.
func (k Key) Segments() ([]string, error) {
	if len(k) > MaxKey {
		return nil, fmt.Errorf("%w: a key of %d bytes, at most %d are possible", ErrInvalid, len(k), MaxKey)
	}
	parts := strings.Split(string(k), "/")
	for i, part := range parts {
		segment, err := unescape(part)
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

// Validate checks that the key is well formed.
func (k Key) Validate() error {
	_, err := k.Segments()
	return err
}

// ValidatePrefix checks a key that Observe may be called with: any key, or the empty
// one, which is above all.
func (k Key) ValidatePrefix() error {
	if k == "" {
		return nil
	}
	return k.Validate()
}

// escape writes a segment so that every store takes it.
func escape(segment string) string {
	var out strings.Builder
	for i := range len(segment) {
		if b := segment[i]; isPlain(b) {
			out.WriteByte(b)
		} else {
			fmt.Fprintf(&out, "=%02X", b)
		}
	}
	return out.String()
}

// unescape reverses escape. It rejects all other ways to write a segment.
func unescape(text string) (string, error) {
	var out strings.Builder
	for i := 0; i < len(text); i++ {
		b := text[i]
		if b == '=' {
			code, err := strconv.ParseUint(text[i+1:min(i+3, len(text))], 16, 8)
			if err != nil {
				return "", fmt.Errorf("%q escapes nothing", text[i:])
			}
			b = byte(code)
			i += 2
		}
		out.WriteByte(b)
	}
	if segment := out.String(); escape(segment) == text {
		return segment, nil
	}
	return "", fmt.Errorf("%q has bytes that have to be escaped, or escapes that do not", text)
}

func isPlain(b byte) bool {
	return b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9' || b == '-' || b == '_'
}
