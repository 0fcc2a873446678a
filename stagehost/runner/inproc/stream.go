package inproc

import (
	"context"
	"runtime/debug"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// StreamFunc answers one item in chunks. It hands each to send, in order, and returns
// the whole answer, for callers that take no chunks; that may be nothing. An error of
// send says that nobody wants more, and is to be returned.
//
// Its other errors are as those of an EachFunc. The context ends when nobody wants the
// item any more, or has waited too long for a chunk.
type StreamFunc func(ctx context.Context, item runner.Item, send func(parts ...payload.Part) error) ([]payload.Part, error)

// Stream returns a runner that answers items in chunks, as many at a time as
// Settings.Concurrency says. Its stage has to be the last of a pipeline.
func Stream(settings Settings, answer StreamFunc) *Runner {
	settings.Spec.Stream = true
	return New(settings, func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
		for i, item := range batch.Items {
			send := func(parts ...payload.Part) error { return sink.Chunk(i, parts) }
			if err := sink.Settle(i, streamed(ctx, item, answer, send)); err != nil {
				return err
			}
		}
		return nil
	})
}

func streamed(ctx context.Context, item runner.Item, answer StreamFunc, send func(parts ...payload.Part) error) (out runner.Outcome) {
	defer func() {
		if cause := recover(); cause != nil {
			out = runner.Failed(runner.FaultOf(&PanicError{Cause: cause, Stack: debug.Stack()}))
		}
	}()
	parts, err := answer(ctx, item, send)
	if err != nil {
		return runner.Failed(runner.FaultOf(err))
	}
	return runner.Output(parts...)
}
