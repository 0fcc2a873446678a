package schema

import (
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// appendKey appends a key of a JSON value. Two values have the same key exactly if
// JSON Schema calls them equal. Numbers are compared by value.
func appendKey(dst []byte, v any) []byte {
	dst = append(dst, keyKind(v))
	switch v := v.(type) {
	case bool:
		return strconv.AppendBool(dst, v)
	case string:
		return appendText(dst, v)
	case json.Number:
		return appendDecimal(dst, v.String())
	case []any:
		for _, one := range v {
			dst = appendKey(dst, one)
		}
		return append(dst, ']')
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(v)) {
			dst = appendKey(appendText(dst, name), v[name])
		}
		return append(dst, '}')
	}
	return dst
}

// appendText appends text with its length before it, so that its end is unambiguous.
func appendText(dst []byte, text string) []byte {
	dst = strconv.AppendInt(dst, int64(len(text)), 10)
	return append(append(dst, ':'), text...)
}

// keyKind returns the first byte of a value's key. Each kind has a byte of its own.
func keyKind(v any) byte {
	switch v.(type) {
	case bool:
		return '?'
	case string:
		return '"'
	case json.Number:
		return '#'
	case []any:
		return '['
	case map[string]any:
		return '{'
	default:
		return '0'
	}
}

// typeOf returns the name of a value's type in JSON Schema; every number is "number".
func typeOf(v any) string {
	switch v.(type) {
	case bool:
		return "boolean"
	case string:
		return "string"
	case json.Number:
		return "number"
	case []any:
		return "array"
	case map[string]any:
		return "object"
	default:
		return "null"
	}
}

// appendDecimal appends a number in a normal form: 100, 1e2 and 100.0 are the same.
func appendDecimal(dst []byte, text string) []byte {
	digits, exponent := decimal(text)
	if digits == "" {
		return append(dst, "0;"...)
	}
	if text[0] == '-' {
		dst = append(dst, '-')
	}
	dst = append(append(dst, digits...), 'e')
	return append(strconv.AppendInt(dst, int64(exponent), 10), ';')
}

// decimal returns the digits of a JSON number without zeros at either end, and the power
// of ten to multiply them by. Zero has no digits.
func decimal(text string) (digits string, exponent int) {
	if at := strings.IndexAny(text, "eE"); at >= 0 {
		exponent, _ = strconv.Atoi(text[at+1:]) // bounded by decode
		text = text[:at]
	}
	whole, fraction, _ := strings.Cut(strings.TrimPrefix(text, "-"), ".")
	digits = strings.TrimLeft(whole+fraction, "0")
	short := strings.TrimRight(digits, "0")
	return short, exponent - len(fraction) + len(digits) - len(short)
}

func isWhole(text string) bool {
	digits, exponent := decimal(text)
	return digits == "" || exponent >= 0
}

// nesting returns how deep a document nests; a scalar has depth zero.
func nesting(v any) int {
	deepest := 0
	switch v := v.(type) {
	case []any:
		for _, one := range v {
			deepest = max(deepest, 1+nesting(one))
		}
	case map[string]any:
		for _, one := range v {
			deepest = max(deepest, 1+nesting(one))
		}
	}
	return deepest
}
