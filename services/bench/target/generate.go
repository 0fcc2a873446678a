package target

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// MaxGenerated bounds what is generated for one part, in bytes.
const MaxGenerated = 64 << 20

// seed is that of all that is generated, so that two runs send the same.
const seed = 1

// RandomBlob returns n bytes that do not compress.
func RandomBlob(n int) *inferencev1.Part {
	data := make([]byte, n)
	random := rand.NewChaCha8([32]byte{seed})
	_, _ = random.Read(data) // never fails
	return BlobOf(payload.OctetStream, data)
}

// BlobOf returns a part without a name.
func BlobOf(contentType string, data []byte) *inferencev1.Part {
	return &inferencev1.Part{Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: contentType, Data: data}}}
}

// RandomTensor returns a tensor as the text says, such as FP32[1,64] or
// pixels=UINT8[1,28,28]. Elements of FP32 and FP64 are between 0 and 1, those of whole
// numbers and of BOOL 0 or 1, and halves are 0.
func RandomTensor(text string) (*inferencev1.Part, error) {
	name, kind, named := strings.Cut(text, "=")
	if !named {
		name, kind = "", text
	}
	t, err := parseTensor(kind)
	if err != nil {
		return nil, fmt.Errorf("%q: %w", text, err)
	}
	randomise(&t)
	return &inferencev1.Part{Name: name, Body: &inferencev1.Part_Tensor{
		Tensor: &inferencev1.Tensor{Datatype: string(t.Datatype), Shape: t.Shape, Raw: t.Raw},
	}}, nil
}

// parseTensor returns a tensor of zeros.
func parseTensor(text string) (tensor.Tensor, error) {
	kind, dimensions, ok := strings.Cut(strings.TrimSuffix(text, "]"), "[")
	if !ok || !strings.HasSuffix(text, "]") {
		return tensor.Tensor{}, fmt.Errorf("use a datatype and a shape, such as FP32[1,64]")
	}
	out := tensor.Tensor{Datatype: tensor.Datatype(strings.ToUpper(kind))}
	if out.Datatype.Size() <= 0 {
		return tensor.Tensor{}, fmt.Errorf("%q is no datatype whose elements have a size, such as FP32, INT64 or UINT8", kind)
	}
	if dimensions != "" {
		for text := range strings.SplitSeq(dimensions, ",") {
			n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
			if err != nil || n < 0 {
				return tensor.Tensor{}, fmt.Errorf("%q is no extent of an axis: use whole numbers from 0", text)
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

func randomise(t *tensor.Tensor) {
	random := rand.New(rand.NewPCG(seed, seed))
	size := t.Datatype.Size()
	for raw := t.Raw; len(raw) > 0; raw = raw[size:] {
		switch t.Datatype {
		case tensor.FP32:
			binary.LittleEndian.PutUint32(raw, math.Float32bits(random.Float32()))
		case tensor.FP64:
			binary.LittleEndian.PutUint64(raw, math.Float64bits(random.Float64()))
		case tensor.FP16, tensor.BF16:
			// Zeros: what is 1 differs between them, and nothing depends on it.
		default:
			raw[0] = byte(random.IntN(2))
		}
	}
}
