package oipjson_test

import (
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/stagemesh/stagemesh/internal/front/oipjson"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

const million = 1 << 20

func floats(b *testing.B) payload.Part {
	b.Helper()
	source := rand.New(rand.NewPCG(1, 2))
	values := make([]float32, million)
	for i := range values {
		values[i] = source.Float32()
	}
	t, err := tensor.FromFP32([]int64{million}, values)
	if err != nil {
		b.Fatal(err)
	}
	return payload.OfTensor("x", t)
}

func BenchmarkDecodeMillionFloats(b *testing.B) {
	object, err := oipjson.AppendTensor(nil, floats(b))
	if err != nil {
		b.Fatal(err)
	}
	body := []byte(`{"inputs":[` + string(object) + `]}`)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := oipjson.Decode(body, nil); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAppendMillionFloats(b *testing.B) {
	part := floats(b)
	dst, err := oipjson.AppendTensor(nil, part)
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(dst)))
	b.ReportAllocs()
	for b.Loop() {
		if dst, err = oipjson.AppendTensor(dst[:0], part); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecodeSmall(b *testing.B) {
	body := one("FP32", "[1,4]", "[[0.1,0.2,0.3,0.4]]")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := oipjson.Decode(body, nil); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecodePixels(b *testing.B) {
	data := []byte{'['}
	for i := range 224 * 224 * 3 {
		if i > 0 {
			data = append(data, ',')
		}
		data = strconv.AppendInt(data, int64(i%256), 10)
	}
	body := one("UINT8", "[1,224,224,3]", string(append(data, ']')))
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := oipjson.Decode(body, nil); err != nil {
			b.Fatal(err)
		}
	}
}
