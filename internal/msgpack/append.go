package msgpack

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/tinylib/msgp/msgp"
)

// AppendJSON appends the one document that text is, as MessagePack. A number that
// is whole and has 64 bits stays whole, every other becomes a float of 64 bits, as
// does -0, whose sign no whole number has; one beyond those is an error, as is text
// that is not JSON or nests deeper than MaxDepth.
func AppendJSON(dst, text []byte) ([]byte, error) {
	from := json.NewDecoder(bytes.NewReader(text))
	from.UseNumber()
	dst, err := appendNext(dst, from, 0)
	if err != nil {
		return dst, err
	}
	return dst, atEnd(from)
}

// atEnd makes sure that nothing follows the document: no other, and no bracket.
func atEnd(from *json.Decoder) error {
	switch _, err := from.Token(); {
	case err == nil:
		return errors.New("text goes on after the JSON")
	case errors.Is(err, io.EOF):
		return nil
	default:
		return err
	}
}

func appendNext(dst []byte, from *json.Decoder, depth int) ([]byte, error) {
	if depth > MaxDepth {
		return dst, fmt.Errorf("the JSON nests deeper than %d", MaxDepth)
	}
	token, err := from.Token()
	if err != nil {
		return dst, err
	}
	switch token := token.(type) {
	case json.Delim:
		return appendAll(dst, from, token, depth+1)
	case string:
		return msgp.AppendString(dst, token), nil
	case json.Number:
		return appendNumber(dst, token.String())
	case bool:
		return msgp.AppendBool(dst, token), nil
	default:
		return msgp.AppendNil(dst), nil
	}
}

// Headers of lists and maps whose number of entries is not known before their end.
const (
	list32   = 0xdd
	map32    = 0xdf
	header32 = 5
)

// appendAll appends a list or a map up to its end.
func appendAll(dst []byte, from *json.Decoder, open json.Delim, depth int) (_ []byte, err error) {
	begin, entries := len(dst), uint32(0)
	dst = append(dst, list32, 0, 0, 0, 0)
	for ; from.More(); entries++ {
		if open == '{' {
			if dst, err = appendNext(dst, from, depth); err != nil {
				return dst, err
			}
		}
		if dst, err = appendNext(dst, from, depth); err != nil {
			return dst, err
		}
	}
	if open == '{' {
		dst[begin] = map32
	}
	binary.BigEndian.PutUint32(dst[begin+1:begin+header32], entries)
	_, err = from.Token() // its end
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

// AppendMap appends the head of a map of so many members: a key and a value each.
func AppendMap(dst []byte, members int) []byte { return msgp.AppendMapHeader(dst, uint32(members)) }

// AppendList appends the head of a list of so many elements.
func AppendList(dst []byte, elements int) []byte {
	return msgp.AppendArrayHeader(dst, uint32(elements))
}

// AppendString appends text.
func AppendString(dst []byte, text string) []byte { return msgp.AppendString(dst, text) }

// AppendBinary appends bytes.
func AppendBinary(dst, data []byte) []byte { return msgp.AppendBytes(dst, data) }

// AppendInt appends a whole number.
func AppendInt(dst []byte, n int64) []byte { return msgp.AppendInt64(dst, n) }

// AppendScalar appends a bool, int64, uint64, float64 or string, and nil for all
// else.
func AppendScalar(dst []byte, value any) []byte {
	switch v := value.(type) {
	case bool:
		return msgp.AppendBool(dst, v)
	case int64:
		return msgp.AppendInt64(dst, v)
	case uint64:
		return msgp.AppendUint64(dst, v)
	case float64:
		return msgp.AppendFloat64(dst, v)
	case string:
		return msgp.AppendString(dst, v)
	default:
		return msgp.AppendNil(dst)
	}
}

// Type is the content type of MessagePack.
const Type = "application/msgpack"

// types are the names that it goes by.
var types = []string{Type, "application/x-msgpack", "application/vnd.msgpack"}

// Is reports whether a content type, perhaps with parameters, is MessagePack's.
func Is(contentType string) bool {
	media, _, _ := strings.Cut(contentType, ";")
	return slices.Contains(types, strings.ToLower(strings.TrimSpace(media)))
}
