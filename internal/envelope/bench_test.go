package envelope_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/tensor"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// typical is an item for the second of three steps whose input is a tensor of
// size bytes.
func typical(size int) *envelope.Envelope {
	hop := func(step, stage string) pipeline.Hop {
		return pipeline.Hop{
			Step: pipeline.StepName(step), Stage: pipeline.StageName(stage),
			Parameters: payload.Parameters{"size": payload.Int64(8), "filter": payload.String("bilinear")},
		}
	}
	return &envelope.Envelope{
		Mesh: "local", Tenant: "somebody", RequestID: requestID, ExecutionID: executionID,
		Gateway: "01890a5d-ac96-774b-bcce-b302099a8059", Pipeline: "digits",
		Route:    []pipeline.Hop{hop("decode", "imagedecode"), hop("classify", "onnx"), hop("label", "topk")},
		Position: 1,
		Deadline: time.Unix(1700000030, 0), AdmittedAt: time.Unix(1700000000, 0), Durability: pipeline.Memory,
		Trace: envelope.Trace{Parent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
		Parts: []payload.Part{payload.OfTensor("pixels", tensor.Tensor{
			Datatype: tensor.FP32, Shape: []int64{1, int64(size / 4)}, Raw: make([]byte, size),
		})},
		Timings: []envelope.StepTiming{{
			Step: "decode", Stage: "imagedecode", Host: "01890a5d-ac96-774b-bcce-b302099a805a", Attempt: 1,
			QueueWait: time.Millisecond, Run: time.Millisecond, BatchSize: 8, BatchRows: 8, Dispatch: "idle",
		}},
	}
}

// plain is an item for the last of three steps without parameters.
func plain(size int) *envelope.Envelope {
	e := typical(size)
	for i := range e.Route {
		e.Route[i].Parameters = nil
	}
	return e.Next(nil, e.Parts, e.Timings[0])
}

func sizes() []int { return []int{1 << 10, 64 << 10} }

func benchmark(b *testing.B, run func(b *testing.B, e *envelope.Envelope)) {
	b.Run("plain", func(b *testing.B) {
		b.SetBytes(1 << 10)
		b.ReportAllocs()
		run(b, plain(1<<10))
	})
	for _, size := range sizes() {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			b.SetBytes(int64(size))
			b.ReportAllocs()
			run(b, typical(size))
		})
	}
}

func BenchmarkEncode(b *testing.B) {
	benchmark(b, func(b *testing.B, e *envelope.Envelope) {
		for b.Loop() {
			if _, err := e.Encode(); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkDecode(b *testing.B) {
	benchmark(b, func(b *testing.B, e *envelope.Envelope) {
		data, err := e.Encode()
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			if _, err := envelope.Decode(data); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func answer(e *envelope.Envelope) *envelope.Reply {
	r := e.NewReply()
	r.Parts = e.Parts
	return r
}

func BenchmarkEncodeReply(b *testing.B) {
	benchmark(b, func(b *testing.B, e *envelope.Envelope) {
		r := answer(e)
		for b.Loop() {
			if _, err := r.Encode(); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkDecodeReply(b *testing.B) {
	benchmark(b, func(b *testing.B, e *envelope.Envelope) {
		data, err := answer(e).Encode()
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			if _, err := envelope.DecodeReply(data); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkPeekTerminal(b *testing.B) {
	benchmark(b, func(b *testing.B, e *envelope.Envelope) {
		data, err := answer(e).Encode()
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			if _, err := envelope.PeekTerminal(data); err != nil {
				b.Fatal(err)
			}
		}
	})
}
