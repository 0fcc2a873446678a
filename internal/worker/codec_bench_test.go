package worker

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// BenchmarkCodec is what a batch of 32 x 1 KiB costs its host without the socket
// and the goroutines: into the bytes of a predict, and out of a result's.
func BenchmarkCodec(b *testing.B) {
	const n = 32
	items := make([]runner.Item, n)
	for i := range items {
		t := tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{1, 1024}, Raw: make([]byte, 1024)}
		items[i] = runner.Item{
			RequestID: fmt.Sprintf("0191f2ab-7c11-7e60-8a3b-%012d", i), Rows: 1,
			Inputs: []payload.Part{payload.OfTensor("x", t)}, Deadline: time.Now().Add(time.Hour),
		}
	}
	var body frame.Body
	whole := tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{n, 1024}, Raw: make([]byte, n*1024)}
	head, err := frame.Encode(&frame.Result{Batch: 1, Parts: []frame.Part{body.Tensor("y", -1, whole)}}, n*1024)
	if err != nil {
		b.Fatal(err)
	}
	result := append(head, whole.Raw...)
	b.ReportAllocs()
	for b.Loop() {
		m, body := encode(1, request{batch: runner.Batch{Items: items}}, runner.BatchRows, time.Now())
		head, err := frame.Encode(m, body.Len())
		if err != nil {
			b.Fatal(err)
		}
		out := net.Buffers(body.Buffers(head))
		if _, err := out.WriteTo(io.Discard); err != nil {
			b.Fatal(err)
		}
		got, data, err := frame.Read(bytes.NewReader(result), 1<<20)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := outcomesOf(items, got.(*frame.Result), data, false, false); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/item")
}
