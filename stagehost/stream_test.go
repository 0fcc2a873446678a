package stagehost_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

func chunkOf(text string) []payload.Part {
	return []payload.Part{payload.OfBlob("", "text/plain", []byte(text))}
}

func TestChunksArriveInOrderBeforeTheReply(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
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
	})
}

func TestOnlyTheLastStepMayStream(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
			if err := sink.Chunk(0, chunkOf("x")); err != nil {
				return err
			}
			return settleAll(batch, sink)
		}))
		b.ask("x", onRoute(false)).fails(fault.NotSupported)
		b.emptied()
	})
}

// A piece that cannot be read where it is sent is refused, so that its caller
// gets the fault.
func TestUnsendableChunkIsRefused(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		parts []payload.Part
		want  fault.Reason
	}{
		"two parts of one name":   {append(chunkOf("x"), chunkOf("y")...), fault.RunnerOutputInvalid},
		"a name that is not text": {[]payload.Part{payload.OfBlob("\xff", "", nil)}, fault.RunnerOutputInvalid},
		"larger than a message":   {[]payload.Part{payload.OfBlob("", "", make([]byte, 16<<20))}, fault.OutputTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, b *bed) {
				b.host(batches(func(_ context.Context, _ runner.Batch, sink runner.Sink) error { return sink.Chunk(0, test.parts) }))
				b.ask("x").fails(test.want)
				b.emptied()
			})
		})
	}
}

func TestChunksAreRefusedAfterTheDeadline(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		refused := make(chan error, 1)
		b.host(batches(func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
			<-ctx.Done()
			refused <- sink.Chunk(0, chunkOf("x"))
			return ctx.Err()
		}))
		b.ask("x", deadline(time.Second)) // an item that expires before it runs never gets here
		if err := testbed.Receive(t, "refusal", refused); !errors.Is(err, runner.ErrCancelled) {
			t.Errorf("a chunk past the deadline: %v", err)
		}
		b.emptied()
	})
}

// Tokens must not repeat: an item whose answer has begun is not run again,
// though its batch leaves open whose fault the failure is.
func TestStreamedItemIsNeverRunAgain(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
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
	})
}

// talking is a runner that answers in chunks as the function does.
func talking(slots int, answer inproc.StreamFunc) runner.Runner {
	return inproc.Stream(inproc.Settings{Concurrency: slots}, answer)
}

// stream is an edit.
func stream(s stagehost.StreamSettings) func(*stagehost.Settings) {
	return func(to *stagehost.Settings) { to.Stream = s }
}

func TestStreamingRunnerGetsItemsOneByOne(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		const slots, calls = 2, 5
		var running atomic.Int64
		started, goOn := make(chan struct{}, calls), make(chan struct{})
		h := b.host(talking(slots, func(_ context.Context, item runner.Item, send func(...payload.Part) error) ([]payload.Part, error) {
			if n := running.Add(1); n > slots {
				t.Errorf("%d items run on %d slots", n, slots)
			}
			defer running.Add(-1)
			started <- struct{}{}
			<-goOn
			return item.Inputs, send(item.Inputs...)
		}))
		all := b.askMany(calls)
		for range slots {
			testbed.Receive(t, "start of a run", started)
		}
		close(goOn)
		for _, c := range all {
			if r := c.next(); r.Terminal() || r.Seq != 1 || r.NextWithin != stagehost.DefaultIdle {
				t.Errorf("the first message of request %s is %+v", c.text(), r)
			}
			if r := c.output(); r.Seq != 2 || r.Timings[0].BatchSize != 1 {
				t.Errorf("the answer to request %s is %+v", c.text(), r)
			}
		}
		if got := h.Describe().Limits.MaxInFlight; got >= 32 {
			t.Errorf("the host holds up to %d items of which it can run %d", got, slots)
		}
		b.emptied()
	})
}

// later is a runner that has said after its start how many slots it has.
type later struct {
	runner.Runner
	started atomic.Bool
}

func (l *later) Start(ctx context.Context) error {
	defer l.started.Store(true)
	return l.Runner.Start(ctx)
}

func (l *later) Concurrency() int {
	if l.started.Load() {
		return l.Runner.Concurrency()
	}
	return 1
}

func TestMaxInFlightFollowsTheRunner(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	const slots = 80
	started, goOn := make(chan struct{}, slots), make(chan struct{})
	h := b.host(&later{Runner: talking(slots, func(_ context.Context, item runner.Item, _ func(...payload.Part) error) ([]payload.Part, error) {
		started <- struct{}{}
		<-goOn
		return item.Inputs, nil
	})}, func(s *stagehost.Settings) { s.Batch.MaxSize = 1 })
	all := b.askMany(slots)
	for range slots {
		testbed.Receive(t, "start of a run", started)
	}
	close(goOn)
	for _, c := range all {
		c.output()
	}
	if got := h.Describe().Limits; got.Concurrency != slots || got.MaxInFlight < slots {
		t.Errorf("the host says of itself %+v", got)
	}
	b.emptied()
}

// What nobody has seen may be done again.
func TestCallerWithoutChunksMayBeRetried(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		var runs atomic.Int64
		b.host(inproc.New(inproc.Settings{Spec: runner.Spec{Stream: true}}, func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
			if err := sink.Chunk(0, chunkOf("token")); err != nil {
				return err
			}
			if runs.Add(1) == 1 {
				return fmt.Errorf("%w: for once", runner.ErrCrashed)
			}
			return settleAll(batch, sink)
		}))
		c := b.ask("x", func(e *envelope.Envelope) { e.TakesChunks = false })
		if r := c.next(); !r.Terminal() || r.Seq != 1 || first(r.Parts) != "x" {
			t.Errorf("the first message is %+v", r)
		}
		if n := runs.Load(); n != 2 {
			t.Errorf("%d runs", n)
		}
		b.emptied()
	})
}

func TestStalledStreamFailsAlone(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		chunks int
		want   fault.Reason
	}{
		"before its first chunk": {0, fault.RunnerStalled},
		"after a chunk":          {1, fault.StreamInterrupted},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			stopped := make(chan struct{})
			h := b.host(talking(2, func(ctx context.Context, item runner.Item, send func(...payload.Part) error) ([]payload.Part, error) {
				if first(item.Inputs) != "silent" {
					return item.Inputs, nil
				}
				for range test.chunks {
					if err := send(chunkOf("token")...); err != nil {
						return nil, err
					}
				}
				<-ctx.Done()
				close(stopped)
				return nil, ctx.Err()
			}), stream(stagehost.StreamSettings{FirstChunk: 50 * time.Millisecond, Idle: 50 * time.Millisecond}))
			silent := b.ask("silent")
			for range test.chunks {
				if r := silent.next(); r.Terminal() {
					t.Fatalf("the first message is %+v", r)
				}
			}
			silent.fails(test.want)
			testbed.Receive(t, "stop of the runner", stopped)
			checkEcho(t, b.ask("other"))
			b.emptied()
			h.stop()
			if n := h.counts.Of("stagemesh.stage.faults OUTCOME_REFUSED"); n != 0 {
				t.Errorf("%d outcomes of a stopped runner count as its fault", n)
			}
		})
	}
}

// A chunk is a sign of life, however many there are.
func TestActiveStreamIsNotStalled(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	const chunks, limit = 10, 400 * time.Millisecond
	b.host(talking(1, func(ctx context.Context, item runner.Item, send func(...payload.Part) error) ([]payload.Part, error) {
		tick := time.NewTicker(limit / 4)
		defer tick.Stop()
		for range chunks {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			if err := send(chunkOf("token")...); err != nil {
				return nil, err
			}
		}
		return item.Inputs, nil
	}), stream(stagehost.StreamSettings{FirstChunk: limit, Idle: limit}))
	c := b.ask("x")
	for range chunks {
		if r := c.next(); r.Terminal() {
			t.Fatalf("the stream was ended: %+v", r)
		}
	}
	checkEcho(t, c)
	b.emptied()
}

func TestWrongBatchModeFailsTheStart(t *testing.T) {
	t.Parallel()
	talk := talking(1, func(context.Context, runner.Item, func(...payload.Part) error) ([]payload.Part, error) {
		return nil, nil
	})
	for name, test := range map[string]struct {
		runner runner.Runner
		mode   batch.Mode
		says   string
	}{
		"batches for one that streams": {talk, batch.Window, "batch.mode: window is for runners of batches"},
		"a stream for one of batches":  {batches(nil), batch.Stream, "batch.mode: stream is for runners that answer in chunks"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			h := b.start(test.runner, func(s *stagehost.Settings) {
				s.Batch = batch.Settings{Mode: test.mode, MaxSize: 1, MaxWait: time.Second}
			})
			<-h.done
			if h.err == nil || !strings.Contains(h.err.Error(), test.says) {
				t.Errorf("it ended with %v", h.err)
			}
			h.err = nil
		})
	}
}

// What follows a chunk that cannot be sent would be another answer, whatever the
// runner makes of the refusal.
func TestFailedChunkEndsItsItem(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		h := b.host(talking(1, func(_ context.Context, item runner.Item, send func(...payload.Part) error) ([]payload.Part, error) {
			if err := send(chunkOf("token")...); err != nil {
				return nil, err
			}
			if err := send(payload.OfBlob("\xff", "", nil)); err == nil {
				t.Error("a chunk without a readable name is taken")
			}
			if err := send(chunkOf("token")...); !errors.Is(err, runner.ErrCancelled) {
				t.Errorf("a chunk after it: %v", err)
			}
			return item.Inputs, nil
		}))
		c := b.ask("x")
		if r := c.next(); r.Terminal() {
			t.Fatalf("the first message is %+v", r)
		}
		c.fails(fault.RunnerOutputInvalid)
		b.emptied()
		h.stop()
		if n := h.counts.Of("stagemesh.stage.faults OUTCOME_REFUSED"); n != 0 {
			t.Errorf("%d outcomes count as the runner's fault", n)
		}
	})
}

func TestIdleTimeoutCountsFromEachChunk(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		takes bool
		want  fault.Reason
	}{
		"who takes chunks":    {true, fault.StreamInterrupted},
		"who takes no chunks": {false, fault.RunnerStalled},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			b.host(talking(1, func(ctx context.Context, _ runner.Item, send func(...payload.Part) error) ([]payload.Part, error) {
				if err := send(chunkOf("token")...); err != nil {
					return nil, err
				}
				<-ctx.Done()
				return nil, ctx.Err()
			}), stream(stagehost.StreamSettings{FirstChunk: longTime, Idle: 50 * time.Millisecond}))
			c := b.ask("x", func(e *envelope.Envelope) { e.TakesChunks = test.takes })
			if test.takes {
				c.next()
			}
			if f := c.next().Fault; f == nil || f.Reason != test.want || !strings.Contains(f.Message, "stream.idle_timeout") {
				t.Errorf("it ended with %v", f)
			}
			b.emptied()
		})
	}
}

// A function that ends when its context does may return out it has.
func TestPartOfACancelledStreamIsNotStored(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.host(inproc.New(inproc.Settings{Spec: runner.Spec{Stream: true}}, func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
		if err := sink.Chunk(0, chunkOf("first rerun")); err != nil {
			return err
		}
		<-ctx.Done()
		return sink.SetOutcome(0, runner.Output(chunkOf("first rerun")...))
	}))
	c := b.ask("x", durable)
	c.next()
	c.cancel()
	c.fails(fault.Cancelled)
	if got := b.stored(c.env.RequestID); got.Fault == nil || got.Fault.Reason != fault.Cancelled {
		t.Errorf("stored is %+v", got)
	}
}

func TestTooLargeOutputIsLeftOutAfterItsChunks(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		const chunks = 20
		b.host(talking(1, func(_ context.Context, _ runner.Item, send func(...payload.Part) error) ([]payload.Part, error) {
			one := make([]byte, 1<<20)
			for range chunks {
				if err := send(payload.OfBlob("", "text/plain", one)); err != nil {
					return nil, err
				}
			}
			return []payload.Part{payload.OfBlob("", "text/plain", make([]byte, chunks<<20))}, nil
		}))
		c := b.ask("x")
		for range chunks {
			if r := c.next(); r.Terminal() {
				t.Fatalf("it ended with %v", r.Fault)
			}
		}
		if r := c.output(); len(r.Parts) != 0 || r.Seq != chunks+1 {
			t.Errorf("the end is message %d with %d parts", r.Seq, len(r.Parts))
		}
		b.ask("x", func(e *envelope.Envelope) { e.TakesChunks = false }).fails(fault.OutputTooLarge)
		b.emptied()
	})
}

func TestChunkOnlyReplyFailsWithoutChunks(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		b.host(talking(1, func(_ context.Context, _ runner.Item, send func(...payload.Part) error) ([]payload.Part, error) {
			return nil, send(chunkOf("token")...)
		}))
		b.ask("x", func(e *envelope.Envelope) { e.TakesChunks = false }).fails(fault.NotSupported)
		c := b.ask("x")
		c.next()
		if r := c.output(); len(r.Parts) != 0 {
			t.Errorf("the end is %+v", r)
		}
		b.emptied()
	})
}

// The gateway is away when the answer is to go out, and stays so.
func TestStreamedItemIsNotNakedAtDrain(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	runs := make(chan struct{}, roomy)
	answer := func(_ context.Context, item runner.Item, send func(...payload.Part) error) ([]payload.Part, error) {
		runs <- struct{}{}
		return item.Inputs, send(chunkOf("token")...)
	}
	h := b.host(talking(1, answer), func(s *stagehost.Settings) { s.DrainTimeout = 50 * time.Millisecond })
	away := b.expect(chunkOf("x"), func(e *envelope.Envelope) { e.Gateway = "away" })
	b.send(away.env)
	testbed.Eventually(t, "its answer is sent again", func() bool { return h.counts.Of("stagemesh.stage.send_retries") > 1 })
	h.stop()
	testbed.Receive(t, "run", runs)
	b.host(talking(1, answer))
	checkEnd := b.ask("other")
	checkEnd.next()
	checkEcho(t, checkEnd)
	testbed.Receive(t, "run of the other", runs)
	b.emptied()
	if len(runs) > 0 {
		t.Error("the item was run again")
	}
}

// Streams share their process: which of them ended it is not known before one was alone.
func TestNeighbourOfAPoisonStreamSurvives(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		var beside sync.WaitGroup
		beside.Add(2)
		var runs atomic.Int64
		b.host(inproc.New(inproc.Settings{Spec: runner.Spec{Stream: true}, Concurrency: 2}, func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
			killer := first(batch.Items[0].Inputs) == "killer"
			if !batch.Suspect && runs.Add(1) <= 2 {
				beside.Done()
				beside.Wait() // the one process is gone, with both
			}
			if killer || !batch.Suspect {
				return runner.ErrCrashed
			}
			return settleAll(batch, sink)
		}), func(s *stagehost.Settings) { s.CrashLimit = 1 })
		innocent, killer := b.ask("innocent"), b.ask("killer")
		checkEcho(t, innocent)
		killer.fails(fault.RunnerCrashed)
		b.emptied()
	})
}

// What waits on a host that is full for long cannot run where a slot is idle.
func TestFullHostLeavesItemsToAnIdleOne(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	started, goOn := make(chan struct{}, roomy), make(chan struct{})
	answer := func(_ context.Context, item runner.Item, _ func(...payload.Part) error) ([]payload.Part, error) {
		started <- struct{}{}
		<-goOn
		return item.Inputs, nil
	}
	const slots = 2
	b.host(talking(slots, answer))
	calls := b.askMany(slots)
	for range slots {
		testbed.Receive(t, "start", started)
	}
	b.host(talking(slots, answer))
	for range slots {
		calls = append(calls, b.ask("more"))
		testbed.Receive(t, "start where a slot is idle", started)
	}
	close(goOn)
	checkEcho(t, calls...)
	b.emptied()
}
