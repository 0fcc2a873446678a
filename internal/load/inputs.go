package load

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// MaxGenerated bounds the bytes that are generated for one part.
const MaxGenerated = 64 << 20

// inputSeed makes two runs send the same inputs.
const inputSeed = 1

// RandomBlob returns n bytes that do not compress.
func RandomBlob(n int) payload.Part {
	data := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{inputSeed}).Read(data) // never fails
	return payload.OfBlob("", payload.OctetStream, data)
}

// RandomTensor returns the tensor that the text describes, such as FP32[1,64] or
// pixels=UINT8[1,28,28]. Elements of FP32 and FP64 are between 0 and 1,
// of integers and BOOL 0 or 1, and of FP16 and BF16 0.
func RandomTensor(text string) (payload.Part, error) {
	name, kind, named := strings.Cut(text, "=")
	if !named {
		name, kind = "", text
	}
	t, err := zeroTensor(kind)
	if err != nil {
		return payload.Part{}, fmt.Errorf("%q: %w", text, err)
	}
	random := rand.New(rand.NewPCG(inputSeed, inputSeed))
	size := t.Datatype.Size()
	for raw := t.Raw; len(raw) > 0; raw = raw[size:] {
		switch t.Datatype {
		case tensor.FP32:
			binary.LittleEndian.PutUint32(raw, math.Float32bits(random.Float32()))
		case tensor.FP64:
			binary.LittleEndian.PutUint64(raw, math.Float64bits(random.Float64()))
		case tensor.FP16, tensor.BF16:
		default:
			raw[0] = byte(random.IntN(2))
		}
	}
	return payload.OfTensor(name, t), nil
}

func zeroTensor(text string) (tensor.Tensor, error) {
	kind, dimensions, ok := strings.Cut(strings.TrimSuffix(text, "]"), "[")
	if !ok || !strings.HasSuffix(text, "]") {
		return tensor.Tensor{}, errors.New("use a datatype and a shape, such as FP32[1,64]")
	}
	out := tensor.Tensor{Datatype: tensor.Datatype(strings.ToUpper(kind))}
	if out.Datatype.Size() <= 0 {
		return tensor.Tensor{}, fmt.Errorf("%q is not a datatype of fixed size, such as FP32, INT64 or UINT8", kind)
	}
	if dimensions != "" {
		for text := range strings.SplitSeq(dimensions, ",") {
			n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
			if err != nil || n < 0 {
				return tensor.Tensor{}, fmt.Errorf("%q is not the size of an axis: use integers from 0", text)
			}
			out.Shape = append(out.Shape, n)
		}
	}
	n, ok := tensor.Elements(out.Shape)
	if !ok || n > int64(MaxGenerated/out.Datatype.Size()) {
		return tensor.Tensor{}, fmt.Errorf("it is larger than %d bytes", MaxGenerated)
	}
	out.Raw = make([]byte, int(n)*out.Datatype.Size())
	return out, nil
}
