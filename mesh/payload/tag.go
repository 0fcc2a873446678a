package payload

import "github.com/stagemesh/stagemesh/mesh/wire"

// The fields of payload.proto's messages.
const (
	partNameTag       = 1<<3 | wire.Bytes
	partBlobTag       = 2<<3 | wire.Bytes
	partTensorTag     = 3<<3 | wire.Bytes
	partRefTag        = 4<<3 | wire.Bytes
	partParametersTag = 5<<3 | wire.Bytes

	blobContentTypeTag = 1<<3 | wire.Bytes
	blobDataTag        = 2<<3 | wire.Bytes

	tensorDatatypeTag = 1<<3 | wire.Bytes
	tensorShapeTag    = 2<<3 | wire.Bytes
	tensorExtentTag   = 2<<3 | wire.Varint // a shape that is not packed
	tensorRawTag      = 3<<3 | wire.Bytes

	valueBoolTag   = 1<<3 | wire.Varint
	valueInt64Tag  = 2<<3 | wire.Varint
	valueDoubleTag = 3<<3 | wire.Fixed64
	valueStringTag = 4<<3 | wire.Bytes
	valueUint64Tag = 5<<3 | wire.Varint

	modelModelTag   = 1<<3 | wire.Bytes
	modelAliasTag   = 2<<3 | wire.Bytes
	modelVersionTag = 3<<3 | wire.Bytes
)
