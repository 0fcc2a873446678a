package wire

import (
	"bytes"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// What an element takes once google.golang.org/protobuf has decoded it, in bytes beside those
// of texts and payload: more for most, and at least a third.
const (
	// fieldSize is for each occurrence of a field: an element of a list, and the work. An unknown
	// field is only work.
	fieldSize, unknownSize = 16, 4
	// A message has a head, and a word or more for each of its fields. An entry of a map counts
	// as a message of two fields; the first one makes the map.
	messageSize, perField, mapSize = 48, 12, 320
	// Objects of JSON are messages or maps; a list is at most one.
	objectSize, stringSize, numberSize = 160, 24, 8
)

// DecodedSize returns about how many bytes the decoder allocates for the elements of a binary
// message, beside the bytes of its texts and payload: messages, entries of maps, elements of
// lists. It stops once they are more than the limit. It skips payload by its length, and
// ignores malformed data, which the decoder reports; depth is as deep as that one reads.
func DecodedSize(data []byte, d protoreflect.MessageDescriptor, depth int, limit int64) int64 {
	return decodedSize(data, d, depth, 0, limit)
}

func decodedSize(data []byte, d protoreflect.MessageDescriptor, depth int, size, limit int64) int64 {
	var lastMap protowire.Number
	// The decoder copies a list for each packed piece of it, and merges a message into the one
	// before it, whose lists go on. So a piece counts all numbers in this message once more, and a
	// message that is not the first of its field all that such fields have.
	var numbers, merged int64
	var seen uint64
	for len(data) > 0 && depth > 0 && size <= limit {
		number, kind, n := protowire.ConsumeTag(data)
		if n < 0 {
			break
		}
		length := protowire.ConsumeFieldValue(number, kind, data[n:])
		if length < 0 {
			break
		}
		value := data[n : n+length]
		data = data[n+length:]
		f := d.Fields().ByNumber(number)
		if f == nil {
			size += unknownSize
			continue
		}
		size += fieldSize
		if kind != protowire.BytesType {
			if f.IsList() {
				numbers += numberSize
			}
			continue
		}
		value, _ = protowire.ConsumeBytes(value)
		switch inner := f.Message(); {
		case inner != nil:
			if f.IsMap() && number != lastMap {
				lastMap, size = number, size+mapSize
			}
			before, bit := size, uint64(1)<<(number%64)
			size = decodedSize(value, inner, depth-1, size+messageSize+perField*int64(inner.Fields().Len()), limit)
			if f.Cardinality() != protoreflect.Repeated {
				if merged += size - before; seen&bit != 0 {
					size += merged
				}
				seen |= bit
			}
		case !f.IsList():
		case f.Kind() == protoreflect.BytesKind || f.Kind() == protoreflect.StringKind:
			size += fieldSize
		default:
			numbers += packedSize(value, f.Kind())
			size += numbers
		}
	}
	return size
}

// packedSize returns the size of the elements of a packed list.
func packedSize(packed []byte, kind protoreflect.Kind) int64 {
	element := int64(8)
	switch kind {
	case protoreflect.FloatKind, protoreflect.DoubleKind, protoreflect.Fixed32Kind, protoreflect.Fixed64Kind, protoreflect.Sfixed32Kind, protoreflect.Sfixed64Kind:
		return int64(len(packed))
	case protoreflect.BoolKind:
		element = 1
	case protoreflect.Int32Kind, protoreflect.Sint32Kind, protoreflect.Uint32Kind, protoreflect.EnumKind:
		element = 4
	}
	count := int64(0)
	for _, b := range packed {
		if b < 1<<7 {
			count++
		}
	}
	return count * element
}

// DecodedJSONSize is DecodedSize for a message in JSON. It counts objects, lists, texts and
// commas.
func DecodedJSONSize(data []byte, limit int64) (size int64) {
	for i := 0; i < len(data) && size <= limit; i++ {
		switch data[i] {
		case '"':
			size += stringSize
			i += 1 + quotedLength(data[i+1:])
		case '{', '[':
			size += objectSize
		case ',':
			size += numberSize
		}
	}
	return size
}

// quotedLength returns the number of bytes before the quote that ends a text.
func quotedLength(text []byte) int {
	for at := 0; ; at++ {
		next := bytes.IndexByte(text[at:], '"')
		if next < 0 {
			return len(text)
		}
		at += next
		if before := text[:at]; (len(before)-len(bytes.TrimRight(before, `\`)))%2 == 0 {
			return at
		}
	}
}
