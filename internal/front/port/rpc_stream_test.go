package port_test

import (
	"testing"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
)

func word(m *inferencev1.InferStreamResponse) string {
	return string(m.GetChunk().GetOutputs()[0].GetBlob().GetData())
}

func TestChunksComeInOrderAndEndWithOneFinal(t *testing.T) {
	t.Parallel()
	onEach(t, &fronttest.Caller{Chunks: fronttest.Words("one", "two")}, func(t *testing.T, _ protocol, client inferencev1connect.InferenceServiceClient) {
		got, err := stream(t.Context(), client, blob(1))
		if err != nil || len(got.messages) != 3 {
			t.Fatalf("got %v, %v", got.messages, err)
		}
		for i, m := range got.messages {
			if m.GetRequestId() != fronttest.RequestID || m.GetSeq() != uint64(i+1) {
				t.Errorf("message %d is %s %d", i, m.GetRequestId(), m.GetSeq())
			}
		}
		if word(got.messages[0]) != "one" || word(got.messages[1]) != "two" || got.messages[0].GetAttempt() != 1 {
			t.Errorf("chunks %v", got.messages[:2])
		}
		final := got.messages[2]
		if final.GetFinal().GetRequestId() != fronttest.RequestID || final.GetAttempt() != 2 || len(final.GetFinal().GetOutputs()) != 1 {
			t.Errorf("final %v", final)
		}
		if got.header.Get("Stagemesh-Request-Id") != fronttest.RequestID || got.trailer.Get("Stagemesh-Request-Id") != fronttest.RequestID {
			t.Errorf("header %v, trailer %v", got.header, got.trailer)
		}
	})
}

func TestStreamWithoutChunksIsItsFinalMessage(t *testing.T) {
	t.Parallel()
	onEach(t, &fronttest.Caller{}, func(t *testing.T, _ protocol, client inferencev1connect.InferenceServiceClient) {
		got, err := stream(t.Context(), client, blob(1))
		if err != nil || len(got.messages) != 1 || got.messages[0].GetSeq() != 1 || got.messages[0].GetFinal() == nil {
			t.Errorf("got %v, %v", got.messages, err)
		}
	})
}
