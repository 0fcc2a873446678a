package tensor_test

import (
	"testing"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// images returns n single rows of 3 x 224 x 224 FP32.
func images(n int) []tensor.Tensor {
	out := make([]tensor.Tensor, n)
	for i := range out {
		out[i] = tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{1, 3, 224, 224}, Raw: make([]byte, 4*3*224*224)}
	}
	return out
}

func BenchmarkConcat32Images(b *testing.B) {
	parts := images(32)
	b.SetBytes(32 * int64(len(parts[0].Raw)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := tensor.Concat(parts); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSplit32Images(b *testing.B) {
	whole, err := tensor.Concat(images(32))
	if err != nil {
		b.Fatal(err)
	}
	rows := make([]int64, 32)
	for i := range rows {
		rows[i] = 1
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := tensor.Split(whole, rows); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkBytesElements(b *testing.B) {
	list := make([][]byte, 1024)
	for i := range list {
		list[i] = make([]byte, 16)
	}
	x, err := tensor.FromBytes([]int64{1024}, list)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := x.BytesElements(); err != nil {
			b.Fatal(err)
		}
	}
}
