package worker_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/sdk/go/worker"
)

// echo answers x by itself.
func echo(_ context.Context, b *worker.Batch) (worker.Outputs, error) {
	x, err := b.Tensor("x")
	return worker.Outputs{"x": worker.Joined(x)}, err
}

// rawEcho sends back every frame as it came: what the socket costs.
func rawEcho(socket string) int {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return 1
	}
	in, buf := bufio.NewReaderSize(conn, 64<<10), make([]byte, 1<<20)
	for {
		n, err := rawRead(in, buf)
		if err != nil {
			return 0
		}
		if _, err := conn.Write(buf[:n]); err != nil {
			return 0
		}
	}
}

// rawRead reads a frame without looking at more than its lengths.
func rawRead(in io.Reader, buf []byte) (int, error) {
	if _, err := io.ReadFull(in, buf[:16]); err != nil {
		return 0, err
	}
	n := 16 + int(binary.LittleEndian.Uint32(buf[4:])) + int(binary.LittleEndian.Uint64(buf[8:]))
	_, err := io.ReadFull(in, buf[16:n])
	return n, err
}

// kibibytes is a batch of n items of 1 KiB.
func kibibytes(number uint64, n int) (*frame.Predict, *frame.Body) {
	body := &frame.Body{}
	m := &frame.Predict{Batch: number, Items: make([]frame.Item, n)}
	for i := range m.Items {
		m.Items[i] = frame.Item{ID: fmt.Sprintf("01932f5e-0000-7000-8000-%012d", i), Timeout: 29_950}
	}
	x := tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{int64(n), 256}, Raw: make([]byte, 1024*n)}
	m.Parts = []frame.Part{body.Tensor("x", -1, x)}
	return m, body
}

// rawTrip is a round trip of the bytes alone.
func rawTrip(b *testing.B, h *host, n int) func() {
	m, body := kibibytes(1, n)
	head, err := frame.Encode(m, body.Len())
	if err != nil {
		b.Fatal(err)
	}
	data, back := append(head, make([]byte, body.Len())...), make([]byte, 1<<20)
	return func() {
		if _, err := h.conn.Write(data); err != nil {
			b.Fatal(err)
		}
		if _, err := rawRead(h.in, back); err != nil {
			b.Fatal(err)
		}
	}
}

// workerTrip is a round trip of a batch, with all that host and worker do.
func workerTrip(b *testing.B, h *host, n int) func() {
	p, inputs := kibibytes(0, n)
	return func() {
		p.Batch++
		h.send(p, inputs)
		m, body := receiveAs[*frame.Result](h)
		if x, err := m.Parts[0].Tensor(body); err != nil || m.Batch != p.Batch || len(x.Raw) != 1024*n {
			b.Fatalf("%+v, %v", m, err)
		}
	}
}

// BenchmarkRoundTripAgainstRawEcho takes turns between a worker process and one
// that echoes the same frames without reading them, so that both see the same
// machine: ratio is the worker's time in the raw echo's.
func BenchmarkRoundTripAgainstRawEcho(b *testing.B) {
	if os.Getenv("GOMAXPROCS") == "1" {
		b.Skip("two processes need two cores")
	}
	for _, n := range []int{1, 32} {
		b.Run(fmt.Sprintf("batch of %d", n), func(b *testing.B) {
			echoes, works := listen(b), listen(b)
			echoes.spawn("raw")
			echoes.accept()
			works.spawn("echo")
			works.ready()
			for _, h := range []*host{echoes, works} {
				_ = h.conn.SetDeadline(time.Time{})
			}
			raw, work := rawTrip(b, echoes, n), workerTrip(b, works, n)
			compare(b, n, raw, work)
		})
	}
}

// compare times two functions in turns of a few milliseconds.
func compare(b *testing.B, n int, raw, work func()) {
	const turn = 50
	var spent [2]time.Duration
	for range turn {
		raw()
		work()
	}
	trips := 0
	for b.Loop() {
		for i, f := range []func(){raw, work} {
			from := time.Now()
			for range turn {
				f()
			}
			spent[i] += time.Since(from)
		}
		trips += turn
	}
	each := func(i int) float64 { return float64(spent[i].Nanoseconds()) / float64(trips) }
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(each(0)/1000, "raw-us/trip")
	b.ReportMetric(each(1)/1000, "worker-us/trip")
	b.ReportMetric(float64(n)*1e9/each(1), "items/s")
	b.ReportMetric(each(1)/each(0), "ratio")
	b.ReportMetric(each(0)/each(1), "share")
}
