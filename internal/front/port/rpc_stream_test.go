package port_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/stagemesh/stagemesh/internal/request"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

func chunks(words ...string) []request.Chunk {
	out := make([]request.Chunk, len(words))
	for i, word := range words {
		out[i] = request.Chunk{
			RequestID: fronttest.RequestID, Seq: uint64(i + 1), Attempt: 1,
			Outputs: []payload.Part{payload.OfBlob("word", "text/plain", []byte(word))},
		}
	}
	return out
}

func word(m *inferencev1.InferStreamResponse) string {
	return string(m.GetChunk().GetOutputs()[0].GetBlob().GetData())
}

func TestChunksComeInOrderAndEndWithOneFinal(t *testing.T) {
	t.Parallel()
	onEach(t, &fronttest.Caller{Chunks: chunks("one", "two")}, func(t *testing.T, _ protocol, client inferencev1connect.InferenceServiceClient) {
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

func TestBrokenStreamEndsWithItsFault(t *testing.T) {
	t.Parallel()
	caller := fronttest.FailWith(fault.New(fault.StreamInterrupted, "the host died"))
	caller.Chunks = chunks("one")
	onEach(t, caller, func(t *testing.T, _ protocol, client inferencev1connect.InferenceServiceClient) {
		got, err := stream(t.Context(), client, blob(1))
		if len(got.messages) != 1 || word(got.messages[0]) != "one" {
			t.Errorf("got %v", got.messages)
		}
		failed := wantReason(t, err, fault.StreamInterrupted)
		if id := failed.Meta().Get("Stagemesh-Request-Id"); id != fronttest.RequestID {
			t.Errorf("Stagemesh-Request-Id is %q", id)
		}
	})
}

// endless emits the word until that fails, and reports the cause.
type endless struct {
	fronttest.Caller

	word  string
	ended chan error
}

func newEndless(word string) *endless { return &endless{word: word, ended: make(chan error, 1)} }

func (e *endless) Stream(_ context.Context, _ *request.Request, emit func(request.Chunk) error) (*request.Response, error) {
	for {
		if err := emit(chunks(e.word)[0]); err != nil {
			e.ended <- err
			return nil, err
		}
	}
}

// A stream holds its place in the gateway, so its reader has to read.
func TestStalledReaderEndsTheCall(t *testing.T) {
	t.Parallel()
	for _, p := range protocols() {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			caller := newEndless(strings.Repeat("w", 256<<10))
			url := p.serveWith(t, port.PublicSettings{Settings: transport.Settings{StallTimeout: 100 * time.Millisecond}, Caller: caller})
			// On a busy machine the stream may be over before it begins.
			if in, err := p.client(t, url).InferStream(t.Context(), connect.NewRequest(blob(1))); err == nil {
				defer in.Close()
			}
			select {
			case err := <-caller.ended:
				if got := fault.From(err); got.Reason != fault.Cancelled {
					t.Errorf("emit failed with %v", got)
				}
			case <-time.After(30 * time.Second):
				t.Error("the call goes on")
			}
		})
	}
}

func TestDisconnectedReaderEndsTheCall(t *testing.T) {
	t.Parallel()
	for _, p := range protocols() {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			caller := newEndless("word")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			in, err := p.client(t, p.serve(t, caller)).InferStream(ctx, connect.NewRequest(blob(1)))
			if err != nil || !in.Receive() {
				t.Fatalf("nothing came: %v", errors.Join(err, in.Err()))
			}
			cancel()
			_ = in.Close()
			if got := fault.From(<-caller.ended); got.Reason != fault.Cancelled {
				t.Errorf("emit failed with %v", got)
			}
		})
	}
}
