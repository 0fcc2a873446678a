package procedure

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// What a message may have within it, before it is decoded: an empty message or entry of
// a map is two bytes on the wire and a hundred and more in memory, an empty text in a
// list a sixth of that. A message within the limit of bytes could take gigabytes.
const (
	// maxMessages is more than all inputs with all parameters that a request may have.
	maxMessages = 1 << 18
	// maxTexts bounds the texts in lists, where there is no message within.
	maxTexts = 4 * maxMessages

	costOfMessage, costOfText = maxTexts / maxMessages, 1
)

func errCrowd() error {
	return fmt.Errorf("there are more than %d messages, or %d texts, within it", maxMessages, maxTexts)
}

// crowd counts what is within a message before it is made.
type crowd struct{ left int }

func newCrowd() *crowd { return &crowd{left: maxTexts} }

func (c *crowd) take(cost int) bool {
	c.left -= cost
	return c.left >= 0
}

// wire takes what is within the binary form of a message, and reports whether it is not
// too much. It is indulgent: the decoder says what is wrong with the data.
func (c *crowd) wire(data []byte, d protoreflect.MessageDescriptor, depth int) bool {
	for len(data) > 0 && depth > 0 {
		number, kind, n := protowire.ConsumeTag(data)
		if n < 0 {
			return true
		}
		size := protowire.ConsumeFieldValue(number, kind, data[n:])
		if size < 0 {
			return true
		}
		value := data[n : n+size]
		data = data[n+size:]
		if f := d.Fields().ByNumber(number); kind == protowire.BytesType && f != nil && !c.field(value, f, depth) {
			return false
		}
	}
	return true
}

// field takes a value of that field, with its length before it.
func (c *crowd) field(value []byte, f protoreflect.FieldDescriptor, depth int) bool {
	switch {
	case f.Message() != nil:
		inner, _ := protowire.ConsumeBytes(value)
		return c.take(costOfMessage) && c.wire(inner, f.Message(), depth-1)
	case f.IsList() && (f.Kind() == protoreflect.BytesKind || f.Kind() == protoreflect.StringKind):
		return c.take(costOfText)
	}
	return true
}

// json takes the objects in JSON text, of which each is a message, or fields of a map.
func (c *crowd) json(data []byte) bool {
	quoted := false
	for i := 0; i < len(data); i++ {
		switch b := data[i]; {
		case b == '"':
			quoted = !quoted
		case quoted && b == '\\':
			i++
		case !quoted && b == '{':
			if !c.take(costOfMessage) {
				return false
			}
		}
	}
	return true
}
