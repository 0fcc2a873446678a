// Package wire reads and writes protobuf's wire format for the messages of every
// hop, without generated messages in between: directly from a message's bytes into
// the mesh's own values, and back. To read or write one envelope,
// google.golang.org/protobuf and the conversion take 1.5 to 4.5 us and 27 to 80
// allocations more than this package. With vtprotobuf it is up to 1.5 us and 20 to
// 35 allocations more, texts share the message's memory, and nothing checks UTF-8.
// A request pays that six to eight times, of some 150 us.
//
// One function declares the fields of a message, for both directions:
//
//	func pointFields(c *wire.Coder, p *Point) {
//		c.Text(1, &p.Name)
//		wire.Varint(c, 2, &p.X)
//		for m := c.Message(3, 0); m.More(); {
//			colorFields(c, &p.Color)
//		}
//	}
//
// To read, call it for each field; to write, call it once:
//
//	c := wire.Reader(data)                c := wire.Writer(size)
//	for c.Next() {                        pointFields(&c, p)
//		pointFields(&c, p)                return c.Done()
//	}
//	return c.Err()
//
// Reading is as in protobuf: a field that is not declared is skipped, and so is one
// with another wire type; the last of a repeated scalar counts; a message in parts
// is merged. The first error ends it. Writing leaves out zero values, as proto3
// does.
//
// Bytes that are read share the memory of the message, without spare capacity, so
// the caller must not change the message afterwards. Text is copied, the texts of
// one message into few pieces of memory: a short one keeps up to half a KiB of its
// neighbours alive; strings.Clone copies it out.
//
// A Coder is for one goroutine, and must not be copied once it is used.
package wire

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// Coder reads or writes one message.
type Coder struct {
	// tag is of the field that is read, with its wire type; 0 while writing.
	tag uint32
	// data[at:end] is the rest of the message that is read.
	data    []byte
	at, end int
	number  uint64 // of a field of type varint or fixed64
	bytes   []byte // of a field of type bytes
	texts   texts
	out     []byte
	err     error
}

const (
	varint    = uint32(protowire.VarintType)
	fixed64   = uint32(protowire.Fixed64Type)
	bytesType = uint32(protowire.BytesType)

	numberShift = 3
	typeMask    = 1<<numberShift - 1
)

// Reader returns a coder that reads a message.
func Reader(data []byte) Coder {
	return Coder{data: data, end: len(data), texts: texts{piece: min(len(data), pieceSize)}}
}

// Writer returns a coder that writes a message of about size bytes: of one that is
// larger, the buffer is moved once or more.
func Writer(size int) Coder { return Coder{out: make([]byte, 0, size)} }

// Writing reports whether the coder writes.
func (c *Coder) Writing() bool { return c.tag == 0 }

// Number returns the number of the field that is read.
func (c *Coder) Number() uint32 { return c.tag >> numberShift }

// IsMessage reports whether field n is read and holds a message, text or bytes.
func (c *Coder) IsMessage(n uint32) bool { return c.tag == n<<numberShift|bytesType }

// Done returns the message that is written, or what of it cannot be.
func (c *Coder) Done() ([]byte, error) {
	if c.err != nil {
		return nil, c.err
	}
	return c.out, nil
}

// Err returns what ended the reading early.
func (c *Coder) Err() error { return c.err }

// Stop ends the reading or writing for the error; nil does nothing.
func (c *Coder) Stop(err error) {
	if c.err == nil {
		c.err = err
	}
}

// fail is Stop for what is wrong with a field.
func (c *Coder) fail(tag uint32, err error) {
	if err != nil && c.err == nil {
		c.err = fmt.Errorf("field %d: %w", tag>>numberShift, err)
	}
}

// Next goes to the next field to read, and returns false where there is none or the
// message is malformed.
func (c *Coder) Next() bool {
	if c.err != nil || c.at == c.end {
		return false
	}
	rest := c.data[c.at:c.end]
	tag, n := consumeVarint(rest)
	if n < 0 {
		c.Stop(protowire.ParseError(n))
		return false
	}
	if number := tag >> numberShift; number < uint64(protowire.MinValidNumber) || number > uint64(protowire.MaxValidNumber) {
		c.Stop(errors.New("a field's number is out of range"))
		return false
	}
	c.tag, c.at, rest = uint32(tag), c.at+n, rest[n:]
	switch c.tag & typeMask {
	case varint:
		c.number, n = consumeVarint(rest)
	case fixed64:
		c.number, n = protowire.ConsumeFixed64(rest)
	case bytesType:
		var size uint64
		if size, n = consumeVarint(rest); n > 0 && size <= uint64(len(rest)-n) {
			c.bytes = rest[n : n+int(size)]
			n += int(size)
		} else {
			c.bytes, n = protowire.ConsumeBytes(rest)
		}
	default:
		n = protowire.ConsumeFieldValue(protowire.Number(c.Number()), protowire.Type(c.tag&typeMask), rest)
	}
	if n < 0 {
		c.fail(c.tag, protowire.ParseError(n))
		return false
	}
	c.at += n
	return true
}

// consumeVarint is protowire's, for numbers of one byte without the call.
func consumeVarint(b []byte) (uint64, int) {
	if len(b) > 0 && b[0] < 1<<7 {
		return uint64(b[0]), 1
	}
	return protowire.ConsumeVarint(b)
}

// appendVarint is protowire's, for numbers of one byte without the call.
func appendVarint(b []byte, n uint64) []byte {
	if n < 1<<7 {
		return append(b, byte(n))
	}
	return protowire.AppendVarint(b, n)
}

// Nested is a message within the message, see Coder.Message.
type Nested struct {
	coder *Coder
	// begun is true while it is written, tag not 0 while it is read.
	begun bool
	tag   uint32
	// at is where reading goes on after it, up to end.
	at, end int
	// start is where it is written; room is what was left for its length before it.
	start, room int
}

// Message codes field n as a message. The loop's body codes its fields:
//
//	for m := c.Message(n, atLeast); m.More(); {
//
// It is written in place. A bound that is close, for one that holds a payload, saves
// moving the payload to make room for the length.
func (c *Coder) Message(n uint32, atLeast int) Nested {
	if c.tag == n<<numberShift|bytesType || c.tag == 0 {
		return c.begin(n, atLeast)
	}
	return Nested{}
}

func (c *Coder) begin(n uint32, atLeast int) Nested {
	tag := n<<numberShift | bytesType
	if c.tag != 0 {
		m := Nested{coder: c, tag: tag, at: c.at, end: c.end}
		c.at, c.end = c.at-len(c.bytes), c.at
		return m
	}
	room := protowire.SizeVarint(uint64(atLeast))
	c.out = append(appendVarint(c.out, uint64(tag)), make([]byte, room)...)
	return Nested{coder: c, start: len(c.out), room: room}
}

// More reports whether to code the next field of the message, or all fields where it
// is written.
func (m *Nested) More() bool {
	return m.coder != nil && m.more()
}

func (m *Nested) more() bool {
	c := m.coder
	switch {
	case m.tag != 0:
		if c.Next() {
			return true
		}
		if c.err != nil {
			c.err = fmt.Errorf("field %d: %w", m.tag>>numberShift, c.err)
		}
		c.tag, c.at, c.end = m.tag, m.at, m.end
		return false
	case !m.begun:
		m.begun = true
		return true
	}
	size := len(c.out) - m.start
	if by := protowire.SizeVarint(uint64(size)) - m.room; by != 0 {
		c.out = append(c.out, make([]byte, max(0, by))...)
		copy(c.out[m.start+by:], c.out[m.start:m.start+size])
		c.out = c.out[:m.start+by+size]
	}
	appendVarint(c.out[:m.start-m.room], uint64(size))
	return false
}

// Elements codes field n as a list of messages, from i up to end:
//
//	for i, end := wire.Elements(c, n, &list, most); i < end; i++ {
//		for m := c.Message(n, 0); m.More(); {
//			elementFields(c, &list[i])
//
// It reads one element more than most, and skips those after it: a longer list is
// for the caller to reject.
func Elements[E any](c *Coder, n uint32, list *[]E, most int) (i, end int) {
	if c.tag == 0 {
		return 0, len(*list)
	}
	if c.tag != n<<numberShift|bytesType || len(*list) > most {
		return 0, 0
	}
	return appendElement(c, list, most)
}

func appendElement[E any](c *Coder, list *[]E, most int) (i, end int) {
	if *list == nil {
		*list = make([]E, 0, c.run(most))
	}
	var zero E
	*list = append(*list, zero)
	return len(*list) - 1, len(*list)
}

// run returns how many fields with this one's tag are here in a row, this one
// included, and most where they are more.
func (c *Coder) run(most int) int {
	n := 1
	for ahead := (Coder{data: c.data, at: c.at, end: c.end}); n < most && ahead.Next() && ahead.tag == c.tag; {
		n++
	}
	return n
}

// Text codes field n as text. Text that is not UTF-8 is an error.
func (c *Coder) Text(n uint32, s *string) {
	if c.tag == n<<numberShift|bytesType || c.tag == 0 {
		c.codeText(n, s)
	}
}

func (c *Coder) codeText(n uint32, s *string) {
	if c.tag != 0 {
		*s = c.text()
	} else if *s != "" {
		c.WriteText(n, *s)
	}
}

// Texts codes field n as a list of texts, which it reads as Elements does.
func (c *Coder) Texts(n uint32, list *[]string, most int) {
	switch c.tag {
	case n<<numberShift | bytesType:
		if s := c.text(); len(*list) <= most {
			*list = append(*list, s)
		}
	case 0:
		for _, s := range *list {
			c.WriteText(n, s)
		}
	}
}

// TextMap codes field n as a map from text to text.
func (c *Coder) TextMap(n uint32, entries *map[string]string) {
	if c.tag == n<<numberShift|bytesType || c.tag == 0 {
		c.codeTextMap(n, entries)
	}
}

func (c *Coder) codeTextMap(n uint32, entries *map[string]string) {
	if c.tag == 0 {
		for key, value := range *entries {
			c.TextEntry(n, &key, &value)
		}
		return
	}
	var key, value string
	c.TextEntry(n, &key, &value)
	if *entries == nil {
		*entries = map[string]string{}
	}
	(*entries)[key] = value
}

// TextEntry codes field n as one entry of a map from text to text.
func (c *Coder) TextEntry(n uint32, key, value *string) {
	for m := c.Message(n, len(*key)+len(*value)); m.More(); {
		c.EntryText(1, key)
		c.EntryText(2, value)
	}
}

// EntryText is Text that writes the empty text too, as maps and oneofs must.
func (c *Coder) EntryText(n uint32, s *string) {
	if c.tag == 0 {
		c.WriteText(n, *s)
		return
	}
	c.Text(n, s)
}

var errNotUTF8 = errors.New("is not UTF-8")

// text returns a copy of the field's text.
func (c *Coder) text() string {
	if !utf8.Valid(c.bytes) {
		c.fail(c.tag, errNotUTF8)
		return ""
	}
	return c.texts.copy(c.bytes)
}

// WriteText writes text as field n, the empty text too.
func (c *Coder) WriteText(n uint32, s string) {
	tag := n<<numberShift | bytesType
	if !utf8.ValidString(s) {
		c.fail(tag, errNotUTF8)
	}
	c.out = append(appendVarint(appendVarint(c.out, uint64(tag)), uint64(len(s))), s...)
}

// Bytes codes field n as bytes. Those that are read are never nil and share the
// message's memory.
func (c *Coder) Bytes(n uint32, b *[]byte) {
	switch c.tag {
	case n<<numberShift | bytesType:
		*b = slices.Clip(c.bytes)
	case 0:
		if len(*b) > 0 {
			c.WriteRaw(n, *b)
		}
	}
}

// Varint codes field n as a whole number or an enum, truncated as in protobuf.
func Varint[V ~int32 | ~int64 | ~uint32 | ~uint64](c *Coder, n uint32, v *V) {
	switch c.tag {
	case n<<numberShift | varint:
		*v = V(c.number)
	case 0:
		c.writeSome(n, uint64(*v))
	}
}

// writeSome writes a number that is not 0.
func (c *Coder) writeSome(n uint32, v uint64) {
	if v != 0 {
		c.WriteUint(n, v)
	}
}

// WriteUint writes a number, a boolean or an enum as field n, 0 too, as oneofs must.
func (c *Coder) WriteUint(n uint32, v uint64) {
	c.out = appendVarint(appendVarint(c.out, uint64(n<<numberShift|varint)), v)
}

// Bool codes field n as a boolean.
func (c *Coder) Bool(n uint32, b *bool) {
	if c.tag == n<<numberShift|varint {
		*b = c.number != 0
	} else if c.tag == 0 && *b {
		c.WriteUint(n, 1)
	}
}

// ReadUint returns the number of field n, and false where another field is read.
func (c *Coder) ReadUint(n uint32) (uint64, bool) {
	return c.number, c.tag == n<<numberShift|varint
}

// ReadFixed64 returns the bits of the floating-point number of field n, and false
// where another field is read.
func (c *Coder) ReadFixed64(n uint32) (uint64, bool) {
	return c.number, c.tag == n<<numberShift|fixed64
}

// WriteFixed64 writes the bits of a floating-point number as field n, 0 too.
func (c *Coder) WriteFixed64(n uint32, bits uint64) {
	c.out = protowire.AppendFixed64(appendVarint(c.out, uint64(n<<numberShift|fixed64)), bits)
}

// Int64s codes field n as a list of numbers, which it reads as Elements does. It writes them
// packed, and reads them packed or not.
func (c *Coder) Int64s(n uint32, list *[]int64, most int) {
	switch c.tag {
	case n<<numberShift | varint:
		if len(*list) <= most {
			*list = append(*list, int64(c.number))
		}
	case n<<numberShift | bytesType:
		for packed := c.bytes; len(packed) > 0 && len(*list) <= most; {
			number, size := consumeVarint(packed)
			if size < 0 {
				c.fail(c.tag, protowire.ParseError(size))
				return
			}
			*list, packed = append(*list, int64(number)), packed[size:]
		}
	case 0:
		if len(*list) > 0 {
			for m := c.Message(n, len(*list)); m.More(); {
				for _, number := range *list {
					c.out = appendVarint(c.out, uint64(number))
				}
			}
		}
	}
}

// Check passes the bytes of field n, a message that is read in another way, to read.
func (c *Coder) Check(n uint32, read func([]byte) error) {
	if c.IsMessage(n) {
		c.fail(c.tag, read(c.bytes))
	}
}

// WriteRaw writes bytes, or an encoded message, as field n.
func (c *Coder) WriteRaw(n uint32, b []byte) {
	c.out = append(appendVarint(appendVarint(c.out, uint64(n<<numberShift|bytesType)), uint64(len(b))), b...)
}

// pieceSize is about the size of the texts of an ordinary message, in bytes.
const pieceSize = 512

// texts makes strings that share few pieces of memory, for a message has many
// short ones.
type texts struct {
	// piece is the size of the next piece.
	piece   int
	builder strings.Builder
}

func (t *texts) copy(b []byte) string {
	free := t.builder.Cap() - t.builder.Len()
	// Never leaves much of a piece unused.
	if len(b) > t.piece/4 && len(b) > free {
		return string(b)
	}
	if len(b) > free {
		t.builder.Reset()
		t.builder.Grow(t.piece)
	}
	start := t.builder.Len()
	t.builder.Write(b)
	return t.builder.String()[start:]
}
