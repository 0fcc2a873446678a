package frame_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"testing"

	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// stacked is a batch of n items of 1 KiB, which one part joins.
func stacked(n int) (*frame.Predict, *frame.Body) {
	m, body := &frame.Predict{Batch: 4711, Items: items(n)}, &frame.Body{}
	m.Parts = []frame.Part{body.Tensor("x", -1, floats(int64(n), 256))}
	return m, body
}

// apart is the same batch, each item with a part of its own.
func apart(n int) (*frame.Predict, *frame.Body) {
	m, body := &frame.Predict{Batch: 4711, Items: items(n)}, &frame.Body{}
	for i := range n {
		m.Parts = append(m.Parts, body.Tensor("x", i, floats(1, 256)))
	}
	return m, body
}

func items(n int) []frame.Item {
	out := make([]frame.Item, n)
	for i := range out {
		out[i] = frame.Item{ID: fmt.Sprintf("01932f5e-0000-7000-8000-%012d", i), Timeout: 29_950}
	}
	return out
}

func floats(shape ...int64) tensor.Tensor {
	n, _ := tensor.Elements(shape)
	return tensor.Tensor{Datatype: tensor.FP32, Shape: shape, Raw: make([]byte, 4*n)}
}

// results answers a batch of n items.
func results(n int) (*frame.Result, *frame.Body) {
	m, body := &frame.Result{Batch: 4711}, &frame.Body{}
	m.Parts = []frame.Part{body.Tensor("p", -1, floats(int64(n), 256))}
	return m, body
}

type example struct {
	name string
	m    frame.Message
	body *frame.Body
	n    int
}

func examples() []example {
	one, oneBody := stacked(1)
	many, manyBody := stacked(32)
	each, eachBody := apart(32)
	result, resultBody := results(32)
	return []example{
		{"predict of 1", one, oneBody, 1},
		{"predict of 32 stacked", many, manyBody, 32},
		{"predict of 32 apart", each, eachBody, 32},
		{"result of 32 stacked", result, resultBody, 32},
	}
}

func perItem(b *testing.B, n int) {
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/item")
}

func BenchmarkWrite(b *testing.B) {
	for _, e := range examples() {
		b.Run(e.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := frame.Write(io.Discard, e.m, e.body); err != nil {
					b.Fatal(err)
				}
			}
			perItem(b, e.n)
		})
	}
}

func BenchmarkRead(b *testing.B) {
	for _, e := range examples() {
		var data bytes.Buffer
		if err := frame.Write(&data, e.m, e.body); err != nil {
			b.Fatal(err)
		}
		b.Run(e.name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(data.Len()))
			for b.Loop() {
				if _, _, err := frame.Read(bytes.NewReader(data.Bytes()), 1<<20); err != nil {
					b.Fatal(err)
				}
			}
			perItem(b, e.n)
		})
	}
}

// BenchmarkHeader compares the codec of this package with encoding/json.
func BenchmarkHeader(b *testing.B) {
	for _, e := range examples() {
		head, err := frame.Encode(e.m, e.body.Len())
		if err != nil {
			b.Fatal(err)
		}
		header := head[16:]
		for name, run := range map[string]func() error{
			"Encode":    func() error { _, err := frame.Encode(e.m, e.body.Len()); return err },
			"Marshal":   func() error { _, err := json.Marshal(e.m); return err },
			"Decode":    func() error { _, err := frame.Decode(header); return err },
			"Unmarshal": func() error { return json.Unmarshal(header, blank(e.m)) },
		} {
			b.Run(e.name+"/"+name, func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if err := run(); err != nil {
						b.Fatal(err)
					}
				}
				perItem(b, e.n)
			})
		}
	}
}

// blank returns an empty message of the same type.
func blank(m frame.Message) any { return reflect.New(reflect.TypeOf(m).Elem()).Interface() }
