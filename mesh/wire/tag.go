package wire

import "google.golang.org/protobuf/encoding/protowire"

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
