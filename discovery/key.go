package discovery

import (
	"fmt"
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
		switch {
		case isPlain(b):
		case b == '=' && i+2 < len(text):
			high, low := hexValue(text[i+1]), hexValue(text[i+2])
			b = high<<4 | low
			if high > 15 || low > 15 || isPlain(b) {
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

func isPlain(b byte) bool {
	return b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9' || b == '-' || b == '_'
}

// hexValue returns the value of an upper-case hexadecimal digit, 16 for other bytes.
func hexValue(b byte) byte {
	switch {
	case b >= '0' && b <= '9':
		return b - '0'
	case b >= 'A' && b <= 'F':
		return b - 'A' + 10
	default:
		return 16
	}
}
