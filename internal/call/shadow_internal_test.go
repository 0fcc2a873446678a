package call

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

func TestOutputsOfShadowsAreCompared(t *testing.T) {
	t.Parallel()
	floats := func(values ...float32) payload.Part {
		x, err := tensor.FromFP32([]int64{int64(len(values))}, values)
		if err != nil {
			t.Fatal(err)
		}
		return payload.OfTensor("x", x)
	}
	raw := func(of tensor.Datatype, data ...byte) payload.Part {
		return payload.OfTensor("x", tensor.Tensor{Datatype: of, Shape: []int64{1}, Raw: data})
	}
	half := func(bits uint16) payload.Part {
		return raw(tensor.FP16, binary.LittleEndian.AppendUint16(nil, bits)...)
	}
	double := func(v float64) payload.Part {
		return raw(tensor.FP64, binary.LittleEndian.AppendUint64(nil, math.Float64bits(v))...)
	}
	text := payload.OfBlob("t", "text/plain", []byte("a"))
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	for name, row := range map[string]struct {
		want, got []payload.Part
		same      bool
	}{
		"another order":        {[]payload.Part{text, floats(1)}, []payload.Part{floats(1), text}, true},
		"one less":             {[]payload.Part{text, floats(1)}, []payload.Part{text}, false},
		"another name":         {[]payload.Part{text}, []payload.Part{payload.OfBlob("u", "text/plain", []byte("a"))}, false},
		"another content type": {[]payload.Part{text}, []payload.Part{payload.OfBlob("t", "text/html", []byte("a"))}, false},
		"other bytes":          {[]payload.Part{text}, []payload.Part{payload.OfBlob("t", "text/plain", []byte("b"))}, false},
		"a blob for a tensor":  {[]payload.Part{floats(1)}, []payload.Part{payload.OfBlob("x", "", []byte("a"))}, false},
		"another shape":        {[]payload.Part{floats(1)}, []payload.Part{floats(1, 1)}, false},
		"another type":         {[]payload.Part{raw(tensor.Int8, 1)}, []payload.Part{raw(tensor.Uint8, 1)}, false},
		"other integers":       {[]payload.Part{raw(tensor.Int8, 1)}, []payload.Part{raw(tensor.Int8, 2)}, false},
		"close floats":         {[]payload.Part{floats(1000, 0, inf, nan)}, []payload.Part{floats(1000.001, 1e-6, inf, nan)}, true},
		"floats apart":         {[]payload.Part{floats(1000)}, []payload.Part{floats(1000.01)}, false},
		"small ones apart":     {[]payload.Part{floats(0)}, []payload.Part{floats(1e-4)}, false},
		"infinite for finite":  {[]payload.Part{floats(inf)}, []payload.Part{floats(1)}, false},
		"finite for infinite":  {[]payload.Part{floats(1)}, []payload.Part{floats(inf)}, false},
		"another sign":         {[]payload.Part{floats(inf)}, []payload.Part{floats(-inf)}, false},
		"a number for none":    {[]payload.Part{floats(nan)}, []payload.Part{floats(1)}, false},
		"close halves":         {[]payload.Part{half(0x3c00)}, []payload.Part{half(0x3c01)}, true}, // 1 and 1.00098
		"halves apart":         {[]payload.Part{half(0x3c00)}, []payload.Part{half(0x3c03)}, false},
		"halves of two signs":  {[]payload.Part{half(0x3c00)}, []payload.Part{half(0xbc00)}, false},
		"subnormal halves":     {[]payload.Part{half(0x0001)}, []payload.Part{half(0x8001)}, true},
		"infinite half":        {[]payload.Part{half(0x7c00)}, []payload.Part{half(0x7bff)}, false}, // and 65504
		"infinite halves":      {[]payload.Part{half(0xfc00)}, []payload.Part{half(0xfc00)}, true},
		"half that is none":    {[]payload.Part{half(0x7e00)}, []payload.Part{half(0x7fff)}, true},
		"none for a half":      {[]payload.Part{half(0x7bff)}, []payload.Part{half(0x7e00)}, false},
		"infinite brain float": {[]payload.Part{raw(tensor.BF16, 0x80, 0x7f)}, []payload.Part{raw(tensor.BF16, 0x7f, 0x7f)}, false},
		"close brain floats":   {[]payload.Part{raw(tensor.BF16, 0x80, 0x3f)}, []payload.Part{raw(tensor.BF16, 0x81, 0x3f)}, true},
		"brain floats apart":   {[]payload.Part{raw(tensor.BF16, 0x80, 0x3f)}, []payload.Part{raw(tensor.BF16, 0x84, 0x3f)}, false},
		"close doubles":        {[]payload.Part{double(1)}, []payload.Part{double(1 + 1e-8)}, true},
		"doubles apart":        {[]payload.Part{double(1)}, []payload.Part{double(1 + 1e-6)}, false},
	} {
		if same := sameOutputs(row.want, row.got); same != row.same {
			t.Errorf("%s: same is %t", name, same)
		}
	}
}
