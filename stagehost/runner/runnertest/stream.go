package runnertest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// StreamSpec is what a runner under TestStream takes and gives: a list of INT64,
// which it gives back in chunks.
func StreamSpec() runner.Spec {
	spec := Spec()
	spec.BatchAxis, spec.Stream = runner.BatchNone, true
	return spec
}

// AnswerStream is AnswerItem in chunks: one for each row, in order, until one fails;
// and then the whole.
func AnswerStream(ctx context.Context, item runner.Item, send func(chunk ...payload.Part) error) ([]payload.Part, error) {
	for _, row := range rowsOf(item) {
		if _, err := Answer(ctx, row); err != nil {
			return nil, err
		}
		chunk, err := tensor.FromInt64([]int64{1}, []int64{row})
		if err != nil {
			return nil, err
		}
		if err := send(payload.OfTensor(outputName, chunk)); err != nil {
			return nil, err
		}
	}
	return []payload.Part{payload.OfTensor(outputName, *item.Inputs[0].Tensor)}, nil
}

// TestStream holds the runners that newRunner returns, which have StreamSpec,
// against every promise of runners that answer in chunks.
func TestStream(t *testing.T, newRunner New) {
	t.Helper()
	for _, p := range []struct {
		name string
		test func(*testing.T, New)
	}{
		{"ChunksComeInOrderAndThenTheOutcome", chunksComeInOrderAndThenTheOutcome},
		{"WhatFailsAfterChunksFailsOnce", whatFailsAfterChunksFailsOnce},
		{"StreamEndsWhenNobodyWaitsForItsItem", streamEndsWhenNobodyWaitsForItsItem},
		{"StreamEndsWithItsContext", streamEndsWithItsContext},
		{"StreamEndsWhenNobodyTakesItsChunks", streamEndsWhenNobodyTakesItsChunks},
		{"StreamsRunSideBySide", streamsRunSideBySide},
	} {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			p.test(t, newRunner)
		})
	}
}

func chunksComeInOrderAndThenTheOutcome(t *testing.T, newRunner New) {
	b := start(t, newRunner, 1)
	if !b.Spec().Stream {
		t.Error("the spec does not say that it streams")
	}
	many := make([]int64, 1000)
	for i := range many {
		many[i] = int64(i)
	}
	for name, item := range map[string]runner.Item{
		"one chunk":   listOf(7),
		"some chunks": listOf(3, 1, 2),
		"equal ones":  listOf(5, 5, math.MaxInt64),
		"many":        listOf(many...),
		"none":        listOf(),
	} {
		s := b.newStream()
		if err := b.acquire().Do(t.Context(), batchOf([]runner.Item{item}), s); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		chunks, o := s.close()
		if !slices.Equal(chunks, rowsOf(item)) {
			t.Errorf("%s: chunks of the rows %d for %d", name, chunks, rowsOf(item))
		}
		if o == nil {
			t.Errorf("%s: it has no outcome", name)
		} else if err := checkOutput(item, *o); err != nil {
			t.Errorf("%s: it got %v", name, err)
		}
	}
}

func whatFailsAfterChunksFailsOnce(t *testing.T, newRunner New) {
	for name, row := range map[string]int64{"a bad row": Bad, "a crash": Crash} {
		t.Run(name, func(t *testing.T) {
			b := start(t, newRunner, 1)
			s := b.newStream()
			err := b.acquire().Do(t.Context(), batchOf([]runner.Item{listOf(1, 2, row, 3)}), s)
			chunks, o := s.close()
			if !slices.Equal(chunks, []int64{1, 2}) {
				t.Errorf("chunks of the rows %d", chunks)
			}
			if err == nil && (o == nil || o.Fault == nil) {
				t.Errorf("it has neither error nor fault: %+v", o)
			}
			b.streams()
		})
	}
}

// endsHeld runs an item that is held after a chunk, and calls end then: the stream
// has to be over soon, and the runner to work.
func endsHeld(t *testing.T, newRunner New, run func(b *bed, item runner.Item, s *stream, ended chan<- error) (end func())) {
	b := start(t, newRunner, 1)
	s, ended := b.newStream(), make(chan error, 1)
	end := run(b, listOf(1, Hold, 2), s, ended)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	select {
	case <-s.first:
	case <-ctx.Done():
		t.Fatal("the chunk before it is held never comes")
	}
	end()
	select {
	case err := <-ended:
		if chunks, o := s.close(); err == nil && (o == nil || o.Fault == nil) {
			t.Errorf("what was held has an output after the chunks %d", chunks)
		}
	case <-ctx.Done():
		t.Fatal("the stream goes on though nobody waits for it")
	}
	b.streams()
}

func streamEndsWhenNobodyWaitsForItsItem(t *testing.T, newRunner New) {
	endsHeld(t, newRunner, func(b *bed, item runner.Item, s *stream, ended chan<- error) func() {
		cancelled := make(chan struct{})
		item.Cancelled = cancelled
		slot := b.acquire()
		go func() { ended <- slot.Do(t.Context(), batchOf([]runner.Item{item}), s) }()
		return func() { close(cancelled) }
	})
}

func streamEndsWithItsContext(t *testing.T, newRunner New) {
	endsHeld(t, newRunner, func(b *bed, item runner.Item, s *stream, ended chan<- error) func() {
		ctx, cancel := context.WithCancel(t.Context())
		slot := b.acquire()
		go func() { ended <- slot.Do(ctx, batchOf([]runner.Item{item}), s) }()
		return cancel
	})
}

func streamEndsWhenNobodyTakesItsChunks(t *testing.T, newRunner New) {
	endsHeld(t, newRunner, func(b *bed, item runner.Item, s *stream, ended chan<- error) func() {
		s.refuse = true
		slot := b.acquire()
		go func() { ended <- slot.Do(t.Context(), batchOf([]runner.Item{item}), s) }()
		return func() {}
	})
}

func streamsRunSideBySide(t *testing.T, newRunner New) {
	const slots = 3
	b := start(t, newRunner, slots)
	ctx, end := context.WithCancel(t.Context())
	defer end()
	var held sync.WaitGroup
	defer held.Wait()
	for range slots - 1 {
		slot, s := b.acquire(), b.newStream()
		held.Go(func() {
			err := slot.Do(ctx, batchOf([]runner.Item{listOf(1, Hold)}), s)
			if _, o := s.close(); err == nil && (o == nil || o.Fault == nil) {
				t.Error("what was held has an output")
			}
		})
		<-s.first
	}
	for range 3 {
		b.stream(b.acquire())
	}
	end()
	held.Wait()
	b.streams()
}

// listOf returns an item that is streamed: of as many chunks as rows, and one row.
func listOf(rows ...int64) runner.Item {
	item := itemOf(rows...)
	item.Rows = 1
	return item
}

// streams makes sure that the runner still streams, on every slot.
func (b *bed) streams() {
	b.Helper()
	for range b.Concurrency() {
		b.stream(b.acquire())
	}
}

func (b *bed) stream(slot runner.Slot) {
	b.Helper()
	item, s := listOf(1, 2), b.newStream()
	err := slot.Do(b.Context(), batchOf([]runner.Item{item}), s)
	chunks, o := s.close()
	if err == nil && o != nil {
		err = checkOutput(item, *o)
	}
	if err != nil || o == nil || !slices.Equal(chunks, rowsOf(item)) {
		b.Errorf("the runner does not stream: chunks %d, outcome %+v, %v", chunks, o, err)
	}
}

// stream is the sink of one item that is answered in chunks.
type stream struct {
	*sink
	// first is closed with the first chunk.
	first  chan struct{}
	refuse bool
	chunks []int64
}

var _ runner.Sink = (*stream)(nil)

func (b *bed) newStream() *stream {
	return &stream{sink: b.newSink(1), first: make(chan struct{})}
}

// Chunk implements runner.Sink.
func (s *stream) Chunk(i int, parts []payload.Part) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	row, err := chunkRow(parts)
	switch {
	case i != 0 || err != nil:
		s.wrong = append(s.wrong, fmt.Sprintf("a chunk for item %d: %v", i, err))
	case s.closed || s.outcomes[0] != nil:
		s.wrong = append(s.wrong, "a chunk after the outcome")
	}
	if s.chunks = append(s.chunks, row); len(s.chunks) == 1 {
		close(s.first)
	}
	if s.refuse {
		return runner.ErrCancelled
	}
	return nil
}

// close says that Do has returned, and returns the rows of the chunks and the
// outcome, if there is one.
func (s *stream) close() ([]int64, *runner.Outcome) {
	outcomes := s.sink.close()
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.chunks, outcomes[0]
}

// chunkRow returns the row that a chunk has.
func chunkRow(parts []payload.Part) (int64, error) {
	if len(parts) != 1 || parts[0].Name != outputName || parts[0].Tensor == nil {
		return 0, errors.New("it is not the one tensor " + outputName)
	}
	rows, err := parts[0].Tensor.Int64Values()
	if err != nil {
		return 0, err
	}
	if len(rows) != 1 {
		return 0, fmt.Errorf("it has %d rows", len(rows))
	}
	return rows[0], nil
}
