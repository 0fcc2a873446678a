package worker

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/stagemesh/stagemesh/sdk/go/frame"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// request is a batch on its way to a worker.
type request struct {
	batch  runner.Batch
	warmup bool
}

// do has the worker run a batch.
func (l *life) do(ctx context.Context, req request, sink runner.Sink) error {
	f, err := l.hand(req, sink)
	if err != nil {
		return err
	}
	l.await(ctx, f, req.batch.Items)
	f.mu.Lock()
	f.sink = nil
	f.mu.Unlock()
	err = l.settle(f, req, sink, ctx.Err() != nil)
	if !req.warmup {
		l.worker.runner.metrics.ran(l.worker.index, err)
	}
	return err
}

// hand writes the batch to every rank.
func (l *life) hand(req request, sink runner.Sink) (*flight, error) {
	id := l.newID()
	m, body := encode(id, req, l.worker.runner.Spec().BatchAxis, time.Now())
	if limit := l.worker.runner.settings.MaxFrame; body.Len() > limit {
		return nil, fault.Newf(fault.PayloadTooLarge, "the inputs have %d bytes, the stage takes at most %d at a time", body.Len(), limit)
	}
	head, err := frame.Encode(m, body.Len())
	if err != nil {
		return nil, fault.New(fault.InvalidRequest, "the request cannot be told to the stage's code").Caused(err)
	}
	f, err := l.begin(id, len(req.batch.Items), sink)
	if err != nil {
		return nil, fmt.Errorf("%w: worker %d: %w", runner.ErrNotStarted, l.worker.index, err)
	}
	l.order.Lock()
	defer l.order.Unlock()
	sent := int64(0)
	for _, r := range l.ranks {
		n, err := r.predict(body, head)
		sent += n
		if err == nil {
			continue
		}
		if sent == 0 {
			l.worker.pool().withdraw(l.worker.index, l) // its connection is over
			l.discard(f)
			return nil, fmt.Errorf("%w: worker %d: %w", runner.ErrNotStarted, l.worker.index, err)
		}
		break // the reader sees that the connection is over
	}
	return f, nil
}

// await waits for the end of the batch, and tells the worker which items nobody
// waits for any more. It begins to look at these only after a while: to watch many
// channels takes longer than short batches do. A stream is one item, and long.
func (l *life) await(ctx context.Context, f *flight, items []runner.Item) {
	if l.worker.runner.Spec().Stream {
		l.watch(ctx, f, items)
		return
	}
	select {
	case <-f.done:
	case <-ctx.Done():
		l.cancel(f, nil)
		<-f.done
	case <-f.soon:
		l.watch(ctx, f, items)
	}
}

// watch is await for as long as it takes.
func (l *life) watch(ctx context.Context, f *flight, items []runner.Item) {
	const done, all, first = 0, 1, 2
	cases := make([]reflect.SelectCase, first, first+len(items))
	cases[done], cases[all] = receive(f.done), receive(ctx.Done())
	for _, item := range items {
		cases = append(cases, receive(item.Cancelled))
	}
	for {
		switch chosen, _, _ := reflect.Select(cases); chosen {
		case done:
			return
		case all:
			l.cancel(f, nil)
			<-f.done
			return
		default:
			var unwanted []int
			for i := range items {
				if cases[first+i].Chan.IsValid() && closed(items[i].Cancelled) {
					unwanted = append(unwanted, i)
					cases[first+i].Chan = reflect.Value{}
				}
			}
			l.cancel(f, unwanted)
		}
	}
}

func receive(c <-chan struct{}) reflect.SelectCase {
	if c == nil {
		return reflect.SelectCase{Dir: reflect.SelectRecv}
	}
	return reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(c)}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// cancel says that nobody waits for these items any more: for none, where there
// are no indices. Chunks of them that come still are dropped. What the worker has
// been told it is not told again: that could interrupt how it cleans up.
func (l *life) cancel(f *flight, items []int) {
	if f.callOff(items) {
		l.tellOff(f, items)
	}
}

// tellOff tells every rank of items that were called off.
func (l *life) tellOff(f *flight, items []int) {
	for _, r := range l.ranks {
		_ = r.send(&frame.Cancel{Batch: f.id, Items: items}) // a worker that is gone needs no telling
	}
}

// settle hands out what the batch has become. Unwanted says that nobody waits for
// any of it.
func (l *life) settle(f *flight, req request, sink runner.Sink, unwanted bool) error {
	if f.err != nil {
		return f.err
	}
	if err := l.failed(f); err != nil {
		l.finished()
		l.logFailed(err, req)
		return err
	}
	outcomes, err := outcomesOf(req.batch.Items, f.ends[0].result, f.ends[0].body, unwanted)
	if err != nil {
		l.fail(err)
		return fmt.Errorf("%w: worker %d: %w", runner.ErrBadOutput, l.worker.index, err)
	}
	l.finished()
	for i, o := range outcomes {
		if e := sink.Settle(i, o); e != nil {
			err = errors.Join(err, e)
		}
	}
	return err
}

// failed returns the error of the batch, if a rank has one.
func (l *life) failed(f *flight) *BatchError {
	for _, e := range f.ends {
		if e.failed != nil {
			return newBatchError(e.failed)
		}
	}
	return nil
}

// logFailed logs a batch that failed as a whole. An item that failed alone can be
// found by its request; the host runs the others again.
func (l *life) logFailed(err *BatchError, req request) {
	log := l.worker.log.With("incarnation", l.of, "error", err.Error(), "kind", err.Kind, "traceback", err.Traceback)
	switch items := req.batch.Items; {
	case req.warmup:
		log.Error("the worker failed on its warm-up", "items", len(items))
	case len(items) == 1:
		log.Warn("the worker failed on an item", "request", items[0].RequestID)
	default:
		log.Info("the worker failed on a batch", "items", len(items))
	}
}
