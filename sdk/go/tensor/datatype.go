package tensor

// Datatype is an element type by its Open Inference Protocol name.
type Datatype string

// The datatypes of the Open Inference Protocol.
const (
	Bool   Datatype = "BOOL"
	Uint8  Datatype = "UINT8"
	Uint16 Datatype = "UINT16"
	Uint32 Datatype = "UINT32"
	Uint64 Datatype = "UINT64"
	Int8   Datatype = "INT8"
	Int16  Datatype = "INT16"
	Int32  Datatype = "INT32"
	Int64  Datatype = "INT64"
	FP16   Datatype = "FP16"
	BF16   Datatype = "BF16"
	FP32   Datatype = "FP32"
	FP64   Datatype = "FP64"
	// Bytes elements are variable: each follows its own length as an unsigned
	// 32-bit little-endian integer.
	Bytes Datatype = "BYTES"
)

// Size returns the bytes of one element: 0 for Bytes, whose elements vary, and
// -1 for a name that is no datatype.
func (d Datatype) Size() int {
	switch d {
	case Bool, Uint8, Int8:
		return 1
	case Uint16, Int16, FP16, BF16:
		return 2
	case Uint32, Int32, FP32:
		return 4
	case Uint64, Int64, FP64:
		return 8
	case Bytes:
		return 0
	}
	return -1
}

// Valid reports whether d is a datatype of the Open Inference Protocol.
func (d Datatype) Valid() bool { return d.Size() >= 0 }
