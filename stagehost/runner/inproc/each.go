package inproc

import (
	"context"
	"runtime/debug"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// EachFunc answers one item. An error that is a *fault.Fault reaches the caller
// as it is; any other error's text does too, as RUNNER_FAILED.
type EachFunc func(ctx context.Context, item runner.Item) ([]payload.Part, error)

// Each returns a runner that answers the items of a batch one after the other.
// An item that fails, or panics, fails alone.
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
	if gone(item) {
		return runner.Failed(fault.New(fault.Cancelled, "nobody waits for the item any more"))
	}
	parts, err := answer(ctx, item)
	if err != nil {
		return runner.Failed(runner.FaultOf(err))
	}
	return runner.Output(parts...)
}

func gone(item runner.Item) bool {
	select {
	case <-item.Cancelled:
		return true
	default:
		return false
	}
}
