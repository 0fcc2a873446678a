package inproc

import (
	"context"
	"runtime/debug"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// EachFunc answers one item. An error that is a *fault.Fault reaches the caller
// as it is; any other error's text does too, as RUNNER_FAILED.
type EachFunc func(ctx context.Context, item runner.Item) ([]payload.Part, error)

// Each returns a runner that answers the items of a batch one after the other.
// An item that fails, or panics, fails alone. One that nobody waits for any more
// when its turn comes is not run.
func Each(settings Settings, answer EachFunc) *Runner {
	return New(settings, func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
		for i, item := range batch.Items {
			if err := sink.Settle(i, outcome(ctx, item, answer)); err != nil {
				return err
			}
		}
		return nil
	})
}

func outcome(ctx context.Context, item runner.Item, answer EachFunc) (out runner.Outcome) {
	defer func() {
		if cause := recover(); cause != nil {
			out = runner.Failed(runner.FaultOf(&PanicError{Cause: cause, Stack: debug.Stack()}))
		}
	}()
	if f := late(ctx, item); f != nil {
		return runner.Failed(f)
	}
	parts, err := answer(ctx, item)
	if err != nil {
		return runner.Failed(runner.FaultOf(err))
	}
	return runner.Output(parts...)
}

// late says why an item is not worth running: its batch was told to end, or its
// own deadline passed while its neighbours ran.
func late(ctx context.Context, item runner.Item) *fault.Fault {
	switch {
	case ctx.Err() != nil:
		return fault.From(ctx.Err())
	case !item.Deadline.IsZero() && !time.Now().Before(item.Deadline):
		return fault.From(context.DeadlineExceeded)
	}
	select {
	case <-item.Cancelled:
		return fault.New(fault.Cancelled, "nobody waits for the item any more")
	default:
		return nil
	}
}
