package call_test

import (
	"bytes"
	"errors"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// chunks sends so many chunks of an answer, numbered, each of so many bytes.
func (b *bed) chunks(env *envelope.Envelope, n, size int) {
	for i := range n {
		data := append(strconv.AppendInt(nil, int64(i+1), 10), ' ')
		b.chunk(env, uint64(i+1), append(data, bytes.Repeat([]byte("."), max(0, size-len(data)))...))
	}
}

func number(t *testing.T, c request.Chunk) int {
	t.Helper()
	text, _, _ := bytes.Cut(c.Outputs[0].Blob.Data, []byte(" "))
	n, err := strconv.Atoi(string(text))
	if err != nil {
		t.Error(err)
	}
	return n
}

func TestChunksDoNotDelayACallWithoutAStream(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.serves(func(env *envelope.Envelope) {
		b.chunks(env, 1000, 1)
		b.end(env, 1001, []byte("done"))
	})
	for range 5 {
		response, err := b.service.Infer(t.Context(), ask("x"))
		if err != nil || textOf(response.Outputs) != "done" {
			t.Errorf("answered with %+v, %v", response, err)
		}
	}
}

// A stage that streams need not put its chunks together: the outputs that were asked
// for have come in them.
func TestOutputsInChunksNeedNotComeAgain(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.serves(func(env *envelope.Envelope) {
		b.chunks(env, 2, 1)
		b.endWith(env, 3, nil)
	})
	r := ask("x")
	r.Outputs = []string{"x"}
	chunks := 0
	response, err := b.service.Stream(t.Context(), r, func(request.Chunk) error { chunks++; return nil })
	if err != nil || len(response.Outputs) != 0 || chunks != 2 {
		t.Errorf("answered with %+v, %v after %d chunks", response, err, chunks)
	}
	// A caller that takes no chunks has not got them.
	if response, err := b.service.Infer(t.Context(), r); err == nil || fault.From(err).Reason != fault.InvalidRequest {
		t.Errorf("answered with %+v, %v", response, err)
	}
}

// The reader takes its first chunk only when the whole answer has been sent, so
// all of it must fit.
func TestBurstIsBufferedForItsReader(t *testing.T) {
	t.Parallel()
	const burst, size = 5000, 1 << 10
	b := newBed(t)
	sent := make(chan struct{})
	b.serves(func(env *envelope.Envelope) {
		b.chunks(env, burst, size)
		b.end(env, burst+1, []byte("done"))
		close(sent)
	})
	got := make([]int, 0, burst)
	response, err := b.service.Stream(t.Context(), ask("x"), func(c request.Chunk) error {
		testbed.Receive(t, "the end of the burst", sent)
		got = append(got, number(t, c))
		return nil
	})
	if err != nil || textOf(response.Outputs) != "done" {
		t.Fatalf("answered with %+v, %v", response, err)
	}
	if len(got) != burst || !slices.IsSorted(got) || got[0] != 1 {
		t.Errorf("%d chunks came", len(got))
	}
}

func TestStoppedReaderFailsAlone(t *testing.T) {
	t.Parallel()
	for name, burst := range map[string]struct{ chunks, size int }{
		"behind many chunks": {17_000, 1},
		"behind many bytes":  {100, 256 << 10},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			overrun := make(chan struct{})
			b.serves(func(env *envelope.Envelope) {
				if textOf(env.Parts) == "quick" {
					b.chunks(env, 10, 1)
					b.end(env, 11, []byte("done"))
					return
				}
				b.chunks(env, burst.chunks, burst.size)
				b.end(env, uint64(burst.chunks+1), []byte("done"))
				close(overrun)
			})
			stopped, goOn := make(chan struct{}), make(chan struct{})
			var slow sync.WaitGroup
			slow.Go(func() {
				stop := sync.OnceFunc(func() { close(stopped) })
				defer stop() // on a busy machine the burst may be over before the first chunk is read
				response, err := b.service.Stream(t.Context(), ask("slow"), func(request.Chunk) error {
					stop()
					testbed.Receive(t, "leave to go on", goOn)
					return nil
				})
				if f := fault.From(err); err == nil || f.Reason != fault.SlowReader {
					t.Errorf("the slow reader got %+v, %v", response, err)
				}
			})
			testbed.Receive(t, "first chunk", stopped)
			testbed.Receive(t, "end of the answer", overrun)
			response, err := b.service.Stream(t.Context(), ask("quick"), func(request.Chunk) error { return nil })
			if err != nil || textOf(response.Outputs) != "done" {
				t.Errorf("the quick reader got %+v, %v", response, err)
			}
			close(goOn)
			slow.Wait()
		})
	}
}

func TestLostCallerIsNoInternalError(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.serves(func(env *envelope.Envelope) {
		b.chunks(env, 2, 1)
		b.end(env, 3, []byte("done"))
	})
	broken := errors.New("write tcp: broken pipe")
	response, err := b.service.Stream(t.Context(), ask("x"), func(request.Chunk) error { return broken })
	if f := wantFault(t, response, err, fault.Cancelled); !errors.Is(f, broken) || f.Metadata["request_id"] == "" {
		t.Errorf("got %v, caused by %v", f, f.Unwrap())
	}
	if text := b.logged.String(); text != "" {
		t.Errorf("logged %s", text)
	}
}

func TestFaultOfEmitIsTheCalls(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.serves(func(env *envelope.Envelope) {
		b.chunks(env, 1, 1)
		b.end(env, 2, []byte("done"))
	})
	response, err := b.service.Stream(t.Context(), ask("x"), func(request.Chunk) error {
		return fault.New(fault.NotSupported, "no")
	})
	_ = wantFault(t, response, err, fault.NotSupported)
}

func TestStreamWithAGapBreaks(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.serves(func(env *envelope.Envelope) {
		b.chunk(env, 1, []byte("1 "))
		b.chunk(env, 3, []byte("3 "))
	})
	var got []int
	response, err := b.service.Stream(t.Context(), ask("x"), func(c request.Chunk) error {
		got = append(got, number(t, c))
		return nil
	})
	_ = wantFault(t, response, err, fault.StreamInterrupted)
	if !slices.Equal(got, []int{1}) {
		t.Errorf("the caller got the chunks %v", got)
	}
}

// The chunks that another run of the item repeats may be lost on their way.
func TestStreamOfTwoRunsBreaks(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.serves(func(env *envelope.Envelope) {
		b.chunk(env, 1, []byte("1 "))
		reply := env.NewReply()
		reply.Seq, reply.Attempt, reply.Chunk, reply.Parts = 2, 2, true, blob([]byte("2 "))
		message, err := b.host.Reply(env.Gateway, reply)
		if err = errors.Join(err, b.host.PublishUnacked(message)); err != nil {
			t.Error(err)
		}
	})
	response, err := b.service.Stream(t.Context(), ask("x"), func(request.Chunk) error { return nil })
	_ = wantFault(t, response, err, fault.StreamInterrupted)
}

// A host that dies replies no more, and its item may wait long for another.
func TestSilentStreamBreaks(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.serves(func(env *envelope.Envelope) {
		if !env.TakesChunks {
			t.Error("the item does not record that its caller takes chunks")
		}
		b.chunkOf(env, 1, []byte("1 "), time.Millisecond)
	})
	response, err := b.service.Stream(t.Context(), ask("x"), func(request.Chunk) error { return nil })
	_ = wantFault(t, response, err, fault.StreamInterrupted)
}

// streamCancelled streams a request whose host sends chunks of those numbers, and
// returns how the call ended. The request must be cancelled.
func streamCancelled(t *testing.T, emit func(request.Chunk) error, chunks ...uint64) answered {
	t.Helper()
	b := newBed(t)
	b.alive()
	items, notices := b.pulls(pipeline.Memory), b.cancelMessages()
	ended := make(chan answered, 1)
	go func() {
		response, err := b.service.Stream(t.Context(), ask("x"), emit)
		ended <- answered{response, err}
	}()
	item := testbed.Receive(t, "item", items)
	for _, seq := range chunks {
		b.chunk(item.env, seq, []byte("1 "))
	}
	got := testbed.Receive(t, "end of the call", ended)
	if notice := testbed.Receive(t, "notice", notices); notice.RequestID != item.env.RequestID {
		t.Errorf("got %+v", notice)
	}
	return got
}

// The item may run once more, from its start, without a caller.
func TestStreamWithAGapIsCancelled(t *testing.T) {
	t.Parallel()
	got := streamCancelled(t, func(request.Chunk) error { return nil }, 1, 1)
	_ = wantFault(t, got.response, got.err, fault.StreamInterrupted)
}

// Whatever the front cannot encode, the caller does not take the rest.
func TestRejectedChunkCancelsItsRequest(t *testing.T) {
	t.Parallel()
	for name, failure := range map[string]error{
		"the caller is gone": errors.New("broken pipe"),
		"no such JSON":       fault.New(fault.RunnerOutputInvalid, "JSON has no such value"),
		"no such form":       fault.New(fault.NotSupported, "no such output"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := streamCancelled(t, func(request.Chunk) error { return failure }, 1); got.err == nil {
				t.Errorf("answered with %+v", got.response)
			}
		})
	}
}

// The attempt of a job: its host dies after a chunk, and the next one answers in a burst.
func TestLossyCallOutlivesMissingChunks(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	sent := make(chan struct{})
	b.serves(func(env *envelope.Envelope) {
		lost := env.NewReply()
		lost.Seq, lost.Attempt, lost.Chunk, lost.Parts, lost.NextWithin = 2, 1, true, blob([]byte("2 of the first run")), 1
		b.sends(env, lost)
		for i := range uint64(100) {
			chunk := env.NewReply()
			chunk.Seq, chunk.Attempt, chunk.Chunk, chunk.Parts = i+1, 2, true, blob(bytes.Repeat([]byte("1 "), 128<<10))
			b.sends(env, chunk)
		}
		b.end(env, 101, []byte("done"))
		close(sent)
	})
	r := ask("x")
	r.LossyChunks = true
	runs := map[uint32]int{}
	response, err := b.service.Stream(t.Context(), r, func(c request.Chunk) error {
		testbed.Receive(t, "all of the answer", sent)
		runs[c.Attempt]++
		return nil
	})
	if err != nil || textOf(response.Outputs) != "done" || response.Chunks != 100 || runs[1] != 1 || runs[2] == 0 || runs[2] == 100 {
		t.Errorf("answered with %+v, %v after chunks %v", response, err, runs)
	}
}
