// Package wire reads and writes protobuf's wire format for the messages of every
// hop, without generated messages in between: directly from a message's bytes into
// the mesh's own values, and back.
//
// To read, walk the fields of a Message:
//
//	for m.Next() {
//		switch m.Tag {
//		case nameTag:
//			out.Name = m.Text()
//		}
//	}
//	return m.Err()
//
// A field that no case names is skipped, and so is one with another wire type than
// the case's, as in protobuf. The caller handles repeated fields as protobuf does:
// the last scalar counts, and messages are merged by reading the second into the
// same value. The first error ends the walk.
//
// To write, call a Writer's methods field by field. It leaves out zero values, as
// proto3 does, and keeps its first error for Done.
//
// Bytes that are read share the memory of the message, without spare capacity, so
// the caller must not change the message afterwards. Text is copied, the texts of
// one message into few pieces of memory: a short one keeps up to half a KiB of its
// neighbours alive; strings.Clone copies it out.
//
// Messages and Writers are for one goroutine.
package wire

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// Message is a walk over the fields of one encoded message.
type Message struct {
	// Tag is of the field that Next found.
	Tag Tag

	rest   []byte
	number uint64 // of a field of type Varint or Fixed64
	bytes  []byte // of a field of type Bytes
	texts  *texts
	err    error
}

// Read returns the walk over a message.
func Read(data []byte) Message {
	return Message{rest: data, texts: &texts{piece: min(len(data), pieceSize)}}
}

// Skim is Read for who looks at tags only: its walk copies each text by itself.
func Skim(data []byte) Message { return Message{rest: data} }

// Next goes to the next field, and returns false where there is none or the
// message is broken; Err tells which.
func (m *Message) Next() bool {
	if m.err != nil || len(m.rest) == 0 {
		return false
	}
	tag, n := short(m.rest)
	if n == 0 {
		tag, n = protowire.ConsumeVarint(m.rest)
	}
	if n < 0 {
		return m.stop(protowire.ParseError(n))
	}
	if number := tag >> numberShift; number < uint64(protowire.MinValidNumber) || number > uint64(protowire.MaxValidNumber) {
		return m.stop(errors.New("a field's number is out of range"))
	}
	m.Tag, m.rest = Tag(tag), m.rest[n:]
	if n = m.value(); n < 0 {
		m.Fail(protowire.ParseError(n))
		return false
	}
	m.rest = m.rest[n:]
	return true
}

// value reads the field's value and returns the bytes that it takes, or below 0
// what is wrong with it.
func (m *Message) value() (n int) {
	switch m.Tag.kind() {
	case protowire.VarintType:
		if m.number, n = short(m.rest); n == 0 {
			m.number, n = protowire.ConsumeVarint(m.rest)
		}
	case protowire.Fixed64Type:
		m.number, n = protowire.ConsumeFixed64(m.rest)
	case protowire.BytesType:
		size, start := short(m.rest)
		if n = start + int(size); start > 0 && n <= len(m.rest) {
			m.bytes = m.rest[start:n]
		} else {
			m.bytes, n = protowire.ConsumeBytes(m.rest)
		}
	default:
		n = protowire.ConsumeFieldValue(m.Tag.number(), m.Tag.kind(), m.rest)
	}
	return n
}

// short reads a number of one byte, as most are, without a call; n is 0 where it is
// longer.
func short(b []byte) (number uint64, n int) {
	if len(b) > 0 && b[0] < 1<<7 {
		return uint64(b[0]), 1
	}
	return 0, 0
}

// Err returns what ended the walk early, and nil where the message is over.
func (m *Message) Err() error { return m.err }

// Fail ends the walk for what is wrong with the field, if anything is.
func (m *Message) Fail(err error) {
	if err != nil && m.err == nil {
		m.err = fmt.Errorf("field %d: %w", m.Tag.number(), err)
	}
}

func (m *Message) stop(err error) bool {
	m.err = err
	return false
}

// Inner returns the walk over the message that the field holds. What ends it
// early is for Fail.
func (m *Message) Inner() Message { return Message{rest: m.bytes, texts: m.texts} }

// Run returns how many fields with this one's tag stand here in a row, this one
// included, and most where they are more: what a list needs room for.
func (m *Message) Run(most int) int {
	n := 1
	for ahead := (Message{rest: m.rest}); n < most && ahead.Next() && ahead.Tag == m.Tag; {
		n++
	}
	return n
}

// Uint64 returns the field's number.
func (m *Message) Uint64() uint64 { return m.number }

// Uint32 returns the low bits of the field's number, as protobuf reads one that
// is too large.
func (m *Message) Uint32() uint32 { return uint32(m.number) }

// Int64 returns the field's signed number.
func (m *Message) Int64() int64 { return int64(m.number) }

// Int32 is Uint32 for a signed number, and for an enum.
func (m *Message) Int32() int32 { return int32(m.number) }

// Bool returns the field's boolean.
func (m *Message) Bool() bool { return m.number != 0 }

// Double returns the field's floating-point number.
func (m *Message) Double() float64 { return math.Float64frombits(m.number) }

// Bytes returns the field's bytes; they are never nil and share the message's
// memory.
func (m *Message) Bytes() []byte { return m.bytes[:len(m.bytes):len(m.bytes)] }

var errNotUTF8 = errors.New("is not UTF-8")

// Text returns a copy of the field's text, and fails where it is not UTF-8.
func (m *Message) Text() string {
	if !utf8.Valid(m.bytes) {
		m.Fail(errNotUTF8)
		return ""
	}
	return m.texts.copy(m.bytes)
}

// TextEntry puts the entry that the field holds into a map from text to text,
// and returns the map: a new one where that is nil.
func (m *Message) TextEntry(into map[string]string) map[string]string {
	var key, value string
	entry := m.Inner()
	for entry.Next() {
		switch entry.Tag {
		case KeyTag:
			key = entry.Text()
		case ValueTag:
			value = entry.Text()
		}
	}
	m.Fail(entry.Err())
	if into == nil {
		into = map[string]string{}
	}
	into[key] = value
	return into
}

// Int64s appends the numbers that the field holds to a list: one, or a packed
// run of them.
func (m *Message) Int64s(list []int64) []int64 {
	if m.Tag.kind() == protowire.VarintType {
		return append(list, m.Int64())
	}
	list = slices.Grow(list, varints(m.bytes))
	for packed := m.bytes; len(packed) > 0; {
		number, n := protowire.ConsumeVarint(packed)
		if n < 0 {
			m.Fail(protowire.ParseError(n))
			return list
		}
		list, packed = append(list, int64(number)), packed[n:]
	}
	return list
}

// varints returns how many packed numbers end in these bytes.
func varints(packed []byte) (n int) {
	for _, b := range packed {
		if b < 1<<7 {
			n++
		}
	}
	return n
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
	if t == nil {
		return string(b)
	}
	// Never leaves much of a piece unused.
	if len(b) > t.piece/4 && len(b) > t.free() {
		return string(b)
	}
	if len(b) > t.free() {
		t.builder.Reset()
		t.builder.Grow(t.piece)
	}
	start := t.builder.Len()
	t.builder.Write(b)
	return t.builder.String()[start:]
}

func (t *texts) free() int { return t.builder.Cap() - t.builder.Len() }

// Tag is a field's number and wire type, as they stand before its value:
// number<<3 | Bytes.
type Tag uint32

// The wire types of the fields that are read and written here.
const (
	Varint  = Tag(protowire.VarintType)
	Fixed64 = Tag(protowire.Fixed64Type)
	Bytes   = Tag(protowire.BytesType)
)

const (
	numberShift = 3
	typeMask    = 1<<numberShift - 1
)

func (t Tag) number() protowire.Number { return protowire.Number(t >> numberShift) }

func (t Tag) kind() protowire.Type { return protowire.Type(t & typeMask) }

// The fields of a map's entry. A key is text everywhere.
const (
	KeyTag   = 1<<numberShift | Bytes
	ValueTag = 2<<numberShift | Bytes
)
