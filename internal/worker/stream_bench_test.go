package worker_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/internal/worker/frame"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// tokens is the mode of a worker that sends as many words as its input asks for.
const tokens = "tokens"

func beTokens() int {
	spec := &frame.Spec{
		BatchAxis: frame.None,
		Inputs:    []frame.PartSpec{{Name: "n", Datatype: tensor.Int64, Shape: []int64{1}}},
		Outputs:   []frame.PartSpec{{Name: "text"}},
	}
	return beMeasured(spec, []string{frame.Stream}, func(m *frame.Predict, data []byte, send func(frame.Message, *frame.Body)) {
		n, err := m.Parts[0].Tensor(data)
		if err != nil {
			panic(err)
		}
		numbers, err := n.Int64Values()
		if err != nil {
			panic(err)
		}
		for range numbers[0] {
			var body frame.Body
			send(&frame.Chunk{Batch: m.Batch, Parts: []frame.Part{body.Blob("text", -1, "text/plain", []byte("token "))}}, &body)
		}
		var body frame.Body
		text := []byte(strings.Repeat("token ", int(numbers[0])))
		send(&frame.Result{Batch: m.Batch, Parts: []frame.Part{body.Blob("text", 0, "text/plain", text)}}, &body)
	})
}

// pythonTokens is the same in Python.
const pythonTokens = `
from stagemesh import Tensor, Text, Worker

class Base(Worker):
    arrays = "buffer"
    concurrency = 64
    inputs = {"n": Tensor("INT64", [1])}
    outputs = {"text": Text()}

class Plain(Base):
    def stream(self, item):
        for _ in range(item["n"][0]):
            yield {"text": "token "}

class Async(Base):
    async def stream(self, item):
        for _ in range(item["n"][0]):
            yield {"text": "token "}
`

// inPython makes a worker one of the classes above.
func inPython(b *testing.B, s *worker.Settings, class string) {
	b.Helper()
	file := filepath.Join(b.TempDir(), "tokens.py")
	if err := os.WriteFile(file, []byte(pythonTokens), 0o600); err != nil {
		b.Fatal(err)
	}
	root, err := filepath.Abs("../../sdk/python")
	if err != nil {
		b.Fatal(err)
	}
	s.Command = []string{"python3", "-m", "stagemesh", file + ":" + class}
	s.Env = map[string]string{"PYTHONPATH": root}
}

// chunkCounter is a sink that counts chunks.
type chunkCounter struct{ chunks, settled atomic.Int64 }

func (c *chunkCounter) Chunk(int, []payload.Part) error {
	c.chunks.Add(1)
	return nil
}

func (c *chunkCounter) SetOutcome(_ int, o runner.Outcome) error {
	if o.Fault == nil {
		c.settled.Add(1)
	}
	return nil
}

// BenchmarkChunks is a chunk's way from a worker to its sink, while one stream runs
// or eight side by side.
func BenchmarkChunks(b *testing.B) {
	for _, language := range []string{"Go", "Plain", "Async"} {
		for _, streams := range []int{1, 8} {
			b.Run(fmt.Sprintf("%s/%d", language, streams), func(b *testing.B) {
				s := settings(b, tokens)
				s.Slots = streams
				if language != "Go" {
					inPython(b, &s, language)
				}
				r, err := worker.New(s)
				if err != nil {
					b.Fatal(err)
				}
				if err := r.Start(b.Context()); err != nil {
					b.Fatal(err)
				}
				defer r.Stop(b.Context()) //nolint:errcheck // its own tests look at that
				benchmarkChunks(b, r, streams)
			})
		}
	}
}

// benchmarkChunks runs streams of so many chunks that they have b.N together.
func benchmarkChunks(b *testing.B, r *worker.Runner, streams int) {
	b.Helper()
	each := int64(b.N/streams + 1)
	n, err := tensor.FromInt64([]int64{1}, []int64{each})
	if err != nil {
		b.Fatal(err)
	}
	item := runner.Item{RequestID: "tokens", Rows: 1, Inputs: []payload.Part{payload.OfTensor("n", n)}, Deadline: time.Now().Add(time.Hour)}
	ended, out := make(chan error, streams), &chunkCounter{}
	began := cpu(b)
	b.ReportAllocs()
	b.ResetTimer()
	for range streams {
		slot, err := r.Acquire(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		go func() { ended <- slot.Do(b.Context(), runner.Batch{Items: []runner.Item{item}, Rows: 1}, out) }()
	}
	for range streams {
		if err := <-ended; err != nil {
			b.Error(err)
		}
	}
	b.StopTimer()
	if got, want := out.chunks.Load(), each*int64(streams); got != want || out.settled.Load() != int64(streams) {
		b.Errorf("%d of %d chunks, %d of %d outcomes", got, want, out.settled.Load(), streams)
	}
	report(b, began, 1)
}
