package worker_test

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Modes of workers that are measured.
const (
	noop    = "noop"     // gives the first part back, in one read and one write
	rawEcho = "raw echo" // the same without decoding anything
)

// beNoop answers every batch with its own first part.
func beNoop() int {
	return beMeasured(&frame.Spec{}, nil, func(m *frame.Predict, body []byte, send func(frame.Message, *frame.Body)) {
		var out frame.Body
		t, err := m.Parts[0].Tensor(body)
		if err != nil {
			panic(err)
		}
		send(&frame.Result{Batch: m.Batch, Parts: []frame.Part{out.Tensor("y", -1, t)}}, &out)
	})
}

// beMeasured is a worker that does no more than to answer batches. One with a capability runs
// them side by side.
func beMeasured(spec *frame.Spec, capabilities []string, answer func(*frame.Predict, []byte, func(frame.Message, *frame.Body))) int {
	conn, err := net.Dial("unix", os.Getenv("STAGEMESH_SOCKET"))
	if err != nil {
		return 1
	}
	var mu sync.Mutex
	send := func(m frame.Message, body *frame.Body) {
		mu.Lock()
		defer mu.Unlock()
		_ = frame.Write(conn, m, body) // or the host is gone
	}
	in, limit := bufio.NewReaderSize(conn, 64<<10), int64(0)
	send(&frame.Hello{Protocols: []int{1}, Name: "measured", Capabilities: capabilities}, nil)
	for {
		m, body, err := frame.Read(in, limit)
		if err != nil {
			return 0
		}
		switch m := m.(type) {
		case *frame.Welcome:
			limit = m.MaxFrame
			send(&frame.Ready{Slots: m.Slots, Spec: spec}, nil)
		case *frame.Predict:
			if capabilities == nil {
				answer(m, body, send)
			} else {
				go answer(m, body, send)
			}
		case *frame.Ping:
			send(&frame.Pong{N: m.N}, nil)
		case *frame.Stop:
			return 0
		}
	}
}

// beRawEcho answers every frame with one whose body is the same.
func beRawEcho() int {
	conn, err := net.Dial("unix", os.Getenv("STAGEMESH_SOCKET"))
	if err != nil {
		return 1
	}
	buf := make([]byte, 1<<20)
	in := bufio.NewReaderSize(conn, 64<<10)
	for {
		if _, err := io.ReadFull(in, buf[:16]); err != nil {
			return 0
		}
		size := int(binary.LittleEndian.Uint32(buf[4:])) + int(binary.LittleEndian.Uint64(buf[8:]))
		if _, err := io.ReadFull(in, buf[16:16+size]); err != nil {
			return 0
		}
		if _, err := conn.Write(buf[:16+size]); err != nil {
			return 0
		}
	}
}

// sizes are batches of rows of 1 KiB.
var sizes = []int{1, 32}

func rows(n int) []runner.Item {
	items := make([]runner.Item, n)
	for i := range items {
		t := tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{1, 1024}, Raw: make([]byte, 1024)}
		items[i] = runner.Item{
			RequestID: fmt.Sprintf("0191f2ab-7c11-7e60-8a3b-%012d", i), Rows: 1,
			Inputs: []payload.Part{payload.OfTensor("x", t)}, Cancelled: make(chan struct{}),
			Deadline: time.Now().Add(time.Hour),
		}
	}
	return items
}

// drop is a sink that counts.
type drop struct{ n int }

func (*drop) Chunk(int, []payload.Part) error { return nil }

func (d *drop) SetOutcome(_ int, o runner.Outcome) error {
	if len(o.Parts) == 1 {
		d.n++
	}
	return nil
}

// cpu returns what this process has used of processors: the host's part, without
// the worker's.
func cpu(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// report adds what the host has used per item, and items a second.
func report(b *testing.B, began time.Duration, items int) {
	b.Helper()
	n := float64(b.N * items)
	b.ReportMetric(float64(cpu(b)-began)/n, "host-ns/item")
	b.ReportMetric(n/b.Elapsed().Seconds(), "items/s")
}

// BenchmarkDo is a batch's way to a worker and back.
func BenchmarkDo(b *testing.B) {
	for _, n := range sizes {
		b.Run(fmt.Sprintf("%dx1KiB", n), func(b *testing.B) {
			s := settings(b, noop)
			r, err := worker.New(s)
			if err != nil {
				b.Fatal(err)
			}
			if err := r.Start(b.Context()); err != nil {
				b.Fatal(err)
			}
			defer r.Stop(b.Context()) //nolint:errcheck // its own tests look at that
			items, out := rows(n), &drop{}
			batch := runner.Batch{Items: items, Rows: n}
			began := cpu(b)
			b.ReportAllocs()
			for b.Loop() {
				slot, err := r.Acquire(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				if err := slot.Do(b.Context(), batch, out); err != nil {
					b.Fatal(err)
				}
			}
			report(b, began, n)
			if out.n < b.N*n {
				b.Errorf("%d of %d items have an output", out.n, b.N*n)
			}
		})
	}
}

// BenchmarkRawEcho is what the socket takes for the same bytes: to be compared with
// BenchmarkDo of the same run.
func BenchmarkRawEcho(b *testing.B) {
	for _, n := range sizes {
		b.Run(fmt.Sprintf("%dx1KiB", n), func(b *testing.B) {
			conn := rawWorker(b)
			m := &frame.Predict{Batch: 1, Items: make([]frame.Item, n)}
			var body frame.Body
			var tensors []tensor.Tensor
			for i, item := range rows(n) {
				m.Items[i] = frame.Item{ID: item.RequestID, Rows: 1, Timeout: 1000}
				tensors = append(tensors, *item.Inputs[0].Tensor)
			}
			m.Parts = []frame.Part{body.Joined("x", tensors)}
			head, err := frame.Encode(m, body.Len())
			if err != nil {
				b.Fatal(err)
			}
			out := append(head, make([]byte, body.Len())...)
			in := make([]byte, len(out))
			began := cpu(b)
			for b.Loop() {
				if _, err := conn.Write(out); err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(conn, in); err != nil {
					b.Fatal(err)
				}
			}
			report(b, began, n)
		})
	}
}

func rawWorker(b *testing.B) net.Conn {
	b.Helper()
	path := filepath.Join(b.TempDir(), "raw")
	l, err := net.Listen("unix", path)
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	cmd := exec.CommandContext(b.Context(), os.Args[0])
	cmd.Env = []string{modeVariable + "=" + rawEcho, "STAGEMESH_SOCKET=" + path}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = cmd.Wait() })
	conn, err := l.Accept()
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { conn.Close() })
	return conn
}
