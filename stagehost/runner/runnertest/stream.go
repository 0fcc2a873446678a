package runnertest

import (
	"context"
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// TestStream tests the runners of newRunner, which have StreamSpec.
func TestStream(t *testing.T, newRunner New) {
	t.Helper()
	runAll(t, newRunner, map[string]func(*testing.T, New){
		"ChunksComeInOrderBeforeTheOutcome": testChunksComeInOrder,
		"FailureAfterChunksFailsOnce":       testFailureAfterChunks,
		"StreamEndsWhenItsItemIsCancelled":  testStreamEndsWhenCancelled,
		"StreamEndsWithItsContext":          testStreamEndsWithContext,
		"StreamEndsWhenChunksAreRefused":    testStreamEndsWhenRefused,
		"StreamsRunAtTheSameTime":           testStreamsRunConcurrently,
	})
}

// newList returns an item that is streamed: one row, with a chunk for each of rows.
func newList(rows ...int64) runner.Item {
	item := newItem(rows...)
	item.Rows = 1
	return item
}

// stream runs an item on the next slot, and returns its chunks and its outcome.
func (b *bed) stream(item runner.Item) (chunks []int64, o *runner.Outcome, err error) {
	b.Helper()
	s := b.newSink(1)
	err = b.acquire().Do(b.Context(), newBatch(item), s)
	o = s.close()[0]
	return s.chunks, o, err
}

// checkStreams checks that the runner still streams, on every slot.
func (b *bed) checkStreams() {
	b.Helper()
	for range b.Concurrency() {
		b.checkStream(newList(1, 2))
	}
}

func (b *bed) checkStream(item runner.Item) {
	b.Helper()
	chunks, o, err := b.stream(item)
	if err == nil {
		err = checkOutcome(item, o)
	}
	if err != nil || !slices.Equal(chunks, rowsOf(item)) {
		b.Errorf("the runner does not stream: chunks of the rows %d for %d, %v", chunks, rowsOf(item), err)
	}
}

func testChunksComeInOrder(t *testing.T, newRunner New) {
	b := start(t, newRunner, 1)
	if !b.Spec().Stream {
		t.Error("the spec does not stream")
	}
	many := make([]int64, 1000)
	for i := range many {
		many[i] = int64(i)
	}
	for _, rows := range [][]int64{{7}, {3, 1, 2}, {5, 5, math.MaxInt64}, many, {}} {
		b.checkStream(newList(rows...))
	}
}

func testFailureAfterChunks(t *testing.T, newRunner New) {
	for name, row := range map[string]int64{"a bad row": Bad, "a crash": Crash} {
		t.Run(name, func(t *testing.T) {
			b := start(t, newRunner, 1)
			chunks, o, err := b.stream(newList(1, 2, row, 3))
			if !slices.Equal(chunks, []int64{1, 2}) {
				t.Errorf("chunks of the rows %d", chunks)
			}
			b.checkHeld(o, err)
			b.checkStreams()
		})
	}
}

// testStreamEnds runs an item that is held after a chunk, and calls cancel then. The
// stream has to end, and the runner to work.
func testStreamEnds(t *testing.T, newRunner New, refuse error, cancel func(ctx context.CancelFunc, item chan struct{})) {
	b := start(t, newRunner, 1)
	ctx, end := context.WithCancel(t.Context())
	defer end()
	s, cancelled, ended := b.newSink(1), make(chan struct{}), make(chan error, 1)
	s.refuse = refuse
	item := newList(1, Hold, 2)
	item.Cancelled = cancelled
	slot := b.acquire()
	go func() { ended <- slot.Do(ctx, newBatch(item), s) }()
	late, stop := context.WithTimeout(t.Context(), testTimeout)
	defer stop()
	select {
	case <-s.first:
	case <-late.Done():
		t.Fatal("the first chunk never comes")
	}
	cancel(end, cancelled)
	select {
	case err := <-ended:
		b.checkHeld(s.close()[0], err)
	case <-late.Done():
		t.Fatal("the stream goes on though nobody waits for it")
	}
	b.checkStreams()
}

func testStreamEndsWhenCancelled(t *testing.T, newRunner New) {
	testStreamEnds(t, newRunner, nil, func(_ context.CancelFunc, item chan struct{}) { close(item) })
}

func testStreamEndsWithContext(t *testing.T, newRunner New) {
	testStreamEnds(t, newRunner, nil, func(ctx context.CancelFunc, _ chan struct{}) { ctx() })
}

func testStreamEndsWhenRefused(t *testing.T, newRunner New) {
	testStreamEnds(t, newRunner, runner.ErrCancelled, func(context.CancelFunc, chan struct{}) {})
}

func testStreamsRunConcurrently(t *testing.T, newRunner New) {
	const slots = 3
	b := start(t, newRunner, slots)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var held sync.WaitGroup
	defer held.Wait()
	for range slots - 1 {
		slot, s := b.acquire(), b.newSink(1)
		held.Go(func() {
			err := slot.Do(ctx, newBatch(newList(1, Hold)), s)
			b.checkHeld(s.close()[0], err)
		})
		<-s.first
	}
	for range 3 {
		b.checkStream(newList(1, 2))
	}
	cancel()
	held.Wait()
	b.checkStreams()
}
