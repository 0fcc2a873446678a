package meshtest_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// counting answers with as many chunks as the input asks for, "1", "2" and so on,
// and then with "done".
func counting() runner.Runner {
	return inproc.New(inproc.Settings{Concurrency: 2}, func(_ context.Context, b runner.Batch, sink runner.Sink) error {
		for i, item := range b.Items {
			n, err := strconv.Atoi(string(item.Inputs[0].Blob.Data))
			if err != nil {
				return err
			}
			for k := range n {
				if err := sink.Chunk(i, text(strconv.Itoa(k+1))); err != nil {
					return err
				}
			}
			if err := sink.SetOutcome(i, runner.Output(text("done")...)); err != nil {
				return err
			}
		}
		return nil
	})
}

// flooding answers with so many chunks of so many bytes, as fast as it can, and
// then with "done".
func flooding(chunks, size int) runner.Runner {
	return inproc.New(inproc.Settings{}, func(_ context.Context, b runner.Batch, sink runner.Sink) error {
		chunk := text(strings.Repeat("x", size))
		for i := range b.Items {
			for range chunks {
				if err := sink.Chunk(i, chunk); err != nil {
					return err
				}
			}
			if err := sink.SetOutcome(i, runner.Output(text("done")...)); err != nil {
				return err
			}
		}
		return nil
	})
}

// streamed sends a request and hands every chunk's text to emit.
func stream(ctx context.Context, g meshtest.Gateway, r *request.Request, emit func(string) error) answer {
	response, err := g.Service().Stream(ctx, r, func(c request.Chunk) error { return emit(textOf(c.Outputs)) })
	return answer{response: response, fault: meshtest.FaultOf(err)}
}

func textOf(parts []payload.Part) string { return string(parts[0].Blob.Data) }

func TestStreamGetsChunksInOrderAndThenTheAnswer(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		bed.Host("first", each(unchanged))
		bed.Host("count", counting())
		g := bed.Gateway([]pipeline.Pipeline{testbed.Pipeline("both", "first", "count")})
		for _, chunks := range []int{0, 1, 5} {
			t.Run(strconv.Itoa(chunks), func(t *testing.T) {
				var got []string
				a := stream(t.Context(), g, requestFor("both", strconv.Itoa(chunks)), func(s string) error {
					got = append(got, s)
					return nil
				}).checkOK(t)
				if a.text() != "done" || len(got) != chunks {
					t.Fatalf("answered %q after the chunks %v", a.text(), got)
				}
				for i, s := range got {
					if s != strconv.Itoa(i+1) {
						t.Errorf("chunk %d is %q", i+1, s)
					}
				}
			})
		}
	})
}

func TestUnaryCallGetsTheAnswerOnly(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		bed.Host("count", counting())
		g := bed.Gateway(nil)
		for range 20 {
			if got := infer(t.Context(), g, requestFor("stage:count", "50")).checkOK(t).text(); got != "done" {
				t.Errorf("answered %q", got)
			}
		}
	})
}

// The reader begins when its whole answer has been sent and acknowledged, so a
// burst is no reason to call it slow.
func TestBurstIsBufferedForItsReader(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		const burst, size = 5000, 1 << 10
		bed.Host("flood", flooding(burst, size))
		g := bed.Gateway(nil)
		chunks := 0
		a := stream(t.Context(), g, requestFor("stage:flood", "x"), func(s string) error {
			if chunks == 0 {
				awaitItems(t, bed, "flood", 0)
			}
			if chunks++; len(s) != size {
				t.Errorf("chunk %d has %d bytes", chunks, len(s))
			}
			return nil
		}).checkOK(t)
		if a.text() != "done" || chunks != burst {
			t.Errorf("answered %q after %d chunks", a.text(), chunks)
		}
	})
}

func TestSlowReaderFailsAlone(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	bed.Host("count", counting())
	bed.Host("flood", flooding(100, 256<<10))
	g := bed.Gateway(nil)
	reading, release := make(chan struct{}, roomy), make(chan struct{})
	slow := make(chan answer, 1)
	go func() {
		slow <- stream(t.Context(), g, requestFor("stage:flood", "x"), func(string) error {
			select {
			case reading <- struct{}{}:
			default:
			}
			<-release
			return nil
		})
	}()
	testbed.Receive(t, "first chunk", reading)
	awaitItems(t, bed, "flood", 0)
	for range 10 {
		chunks := 0
		a := stream(t.Context(), g, requestFor("stage:count", "100"), func(string) error { chunks++; return nil }).checkOK(t)
		if a.text() != "done" || chunks != 100 {
			t.Errorf("answered %q after %d chunks", a.text(), chunks)
		}
	}
	close(release)
	testbed.Receive(t, "answer of the slow reader", slow).checkFault(t, fault.SlowReader)
	infer(t.Context(), g, requestFor("stage:count", "0")).checkOK(t)
}

func TestLeavingReaderEndsItsCall(t *testing.T) {
	meshtest.EachWay(t, func(t *testing.T, bed *meshtest.Bed) {
		bed.Host("count", counting())
		g := bed.Gateway(nil)
		enough := errors.New("enough")
		chunks := 0
		response, err := g.Service().Stream(t.Context(), requestFor("stage:count", "50"), func(request.Chunk) error {
			chunks++
			return enough
		})
		if response != nil || !errors.Is(err, enough) || chunks != 1 {
			t.Errorf("answered with %+v, %v after %d chunks", response, err, chunks)
		}
		infer(t.Context(), g, requestFor("stage:count", "0")).checkOK(t)
	})
}
