package stagehost_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

func chunkOf(text string) []payload.Part {
	return []payload.Part{payload.OfBlob("", "text/plain", []byte(text))}
}

func TestChunksComeInOrderBeforeTheAnswer(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	const chunks = 5
	b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
		for n := range chunks {
			for i, item := range batch.Items {
				if err := sink.Chunk(i, chunkOf(fmt.Sprintf("%s/%d", first(item.Inputs), n))); err != nil {
					return err
				}
			}
		}
		return settleAll(batch, sink)
	}), together(3))
	for _, c := range b.askMany(3) {
		for n := range chunks {
			r := c.next()
			if r.Terminal() || r.Seq != uint64(n+1) || first(r.Parts) != fmt.Sprintf("%s/%d", c.text(), n) {
				t.Fatalf("message %d of request %s is %+v", n+1, c.text(), r)
			}
		}
		if r := c.output(); r.Seq != chunks+1 || first(r.Parts) != c.text() {
			t.Errorf("the answer to request %s is %+v", c.text(), r)
		}
	}
	b.emptied()
}

func TestOnlyTheLastStepMayStream(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
		if err := sink.Chunk(0, chunkOf("x")); err != nil {
			return err
		}
		return settleAll(batch, sink)
	}))
	b.ask("x", onRoute(false)).fails(fault.NotSupported)
	b.emptied()
}

// A piece that cannot be read where it is sent is refused, so that its caller
// hears whose fault it is.
func TestChunkThatCannotTravelIsRefused(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		parts []payload.Part
		want  fault.Reason
	}{
		"two parts of one name":  {append(chunkOf("x"), chunkOf("y")...), fault.RunnerOutputInvalid},
		"a name that is no text": {[]payload.Part{payload.OfBlob("\xff", "", nil)}, fault.RunnerOutputInvalid},
		"larger than a message":  {[]payload.Part{payload.OfBlob("", "", make([]byte, 16<<20))}, fault.OutputTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			b.host(batches(func(_ context.Context, _ runner.Batch, sink runner.Sink) error { return sink.Chunk(0, test.parts) }))
			b.ask("x").fails(test.want)
			b.emptied()
		})
	}
}

func TestNobodyWantsChunksPastTheDeadline(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	refused := make(chan error, 1)
	b.host(batches(func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
		<-ctx.Done()
		refused <- sink.Chunk(0, chunkOf("x"))
		return ctx.Err()
	}))
	b.ask("x", deadline(100*time.Millisecond))
	if err := <-refused; !errors.Is(err, runner.ErrCancelled) {
		t.Errorf("a chunk past the deadline: %v", err)
	}
	b.emptied()
}

// Tokens must not repeat: an item whose answer has begun is not run again,
// though its batch leaves open whose fault the failure is.
func TestStreamedItemIsNeverRunAgain(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	var runs atomic.Int64
	b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
		runs.Add(1)
		for i, item := range batch.Items {
			n, err := strconv.Atoi(first(item.Inputs))
			if err != nil {
				return err
			}
			if n < 2 {
				if err := sink.Chunk(i, chunkOf("token")); err != nil {
					return err
				}
			}
		}
		if len(batch.Items) == 4 {
			return errors.New("broken")
		}
		return settleAll(batch, sink)
	}), together(4))
	calls := b.askMany(4)
	for _, c := range calls[:2] {
		if r := c.next(); r.Terminal() || r.Seq != 1 {
			t.Errorf("first message of request %s is %+v", c.text(), r)
		}
		c.fails(fault.StreamInterrupted)
	}
	checkEcho(t, calls[2:]...)
	b.emptied()
	if n := runs.Load(); n < 2 {
		t.Errorf("%d runs", n)
	}
}
