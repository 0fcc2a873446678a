package store

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Unavailable is the fault of a question that the broker did not answer, or whose answer was
// rejected, or of a write that it did not store.
func Unavailable(err error) *fault.Fault {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	if f := bus.StoreFault(err); f != nil {
		return f
	}
	return fault.New(fault.BrokerUnavailable, "the broker cannot be reached").WithRetryAfter(budget.RetryAfter).Caused(err)
}

// LazyStream is a stream that some requests need. It reserves space on the broker,
// so only the first of them makes it.
type LazyStream struct {
	bus *bus.Bus
	log *slog.Logger
	// problem is logged and returned where it cannot be made.
	problem    string
	makeStream func(context.Context) error

	// lock is held by the request that makes the stream, and guards the fields below.
	// Requests give up waiting for it when their context ends.
	lock *semaphore.Weighted
	// connection is the one on which the stream was made; it may be lost with its
	// broker. isMade is false where the stream was not made or was found missing.
	connection uint64
	isMade     bool
	// err is why there is no stream; it is not tried again before retryAt.
	err     error
	retryAt time.Time
}

// NewLazyStream returns a stream that is not made yet. The problem is reported if it cannot be
// made.
func NewLazyStream(b *bus.Bus, log *slog.Logger, problem string, makeStream func(context.Context) error) *LazyStream {
	return &LazyStream{bus: b, log: log, problem: problem, makeStream: makeStream, lock: semaphore.NewWeighted(1)}
}

const (
	ensureTimeout = 5 * time.Second
	ensurePause   = time.Second
)

// Ensure returns nil when the stream is there. It asks the broker once for each
// connection, and once per ensurePause where that fails.
func (l *LazyStream) Ensure(ctx context.Context) *fault.Fault {
	if f := l.bus.BrokerFault(); f != nil {
		return f
	}
	err := l.lock.Acquire(ctx, 1)
	if err == nil {
		err = l.makeIfMissing(ctx)
		l.lock.Release(1)
	}
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fault.From(ctx.Err())
	}
	if f := bus.StoreFault(err); f != nil {
		return f
	}
	return fault.Newf(fault.BrokerUnavailable, "%s; the request was not queued: %w", l.problem, err).WithRetryAfter(budget.RetryAfter)
}

// makeIfMissing makes the stream where it may be missing; the lock is held.
func (l *LazyStream) makeIfMissing(ctx context.Context) error {
	connection := l.bus.Connection()
	if l.isMade && l.connection == connection {
		return nil
	}
	if time.Now().Before(l.retryAt) {
		return l.err
	}
	limited, cancel := context.WithTimeout(ctx, ensureTimeout)
	defer cancel()
	if err := l.makeStream(limited); err != nil {
		if ctx.Err() == nil {
			l.log.Warn(l.problem, "error", err)
			l.err, l.retryAt = err, time.Now().Add(ensurePause)
		}
		return err
	}
	l.isMade, l.connection = true, connection
	return nil
}

// Reset records that the stream was found missing: the next request makes it.
func (l *LazyStream) Reset(ctx context.Context) {
	if l.lock.Acquire(ctx, 1) == nil {
		l.isMade = false
		l.lock.Release(1)
	}
}
