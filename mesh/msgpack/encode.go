package msgpack

import "github.com/tinylib/msgp/msgp"

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
