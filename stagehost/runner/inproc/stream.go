package inproc

import (
	"context"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// StreamFunc answers one item in chunks, and returns the whole answer, or nothing
// where that is not to be had. Send sends a chunk; an error of it says that nobody
// wants more. The context ends with the batch's, and when nobody waits for the item
// any more. Errors are those of an EachFunc.
type StreamFunc func(ctx context.Context, item runner.Item, send func(chunk ...payload.Part) error) ([]payload.Part, error)

// Stream returns a runner that answers items in chunks; its spec says so. An item
// that fails, or panics, fails alone.
func Stream(settings Settings, answer StreamFunc) *Runner {
	settings.Spec.Stream = true
	return New(settings, func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
		for i, item := range batch.Items {
			if err := sink.Settle(i, streamed(ctx, i, item, sink, answer)); err != nil {
				return err
			}
		}
		return nil
	})
}

// streamed is the outcome of an item whose chunks went to the sink.
func streamed(ctx context.Context, i int, item runner.Item, sink runner.Sink, answer StreamFunc) runner.Outcome {
	ctx, end := wanted(ctx, item)
	defer end()
	return outcome(ctx, item, func(ctx context.Context, item runner.Item) ([]payload.Part, error) {
		parts, err := answer(ctx, item, func(chunk ...payload.Part) error {
			err := sink.Chunk(i, chunk)
			if err != nil {
				end() // also where the function goes on
			}
			return err
		})
		if err == nil && ctx.Err() != nil {
			return nil, fault.From(ctx.Err()) // what it made until then is a part of the answer
		}
		return parts, err
	})
}

// wanted returns a context that ends when nobody waits for the item any more. What
// it watches with is over when the function that it returns has been called.
func wanted(ctx context.Context, item runner.Item) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-item.Cancelled:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		cancel()
		<-watched
	}
}
