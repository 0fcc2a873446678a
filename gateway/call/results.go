package call

import (
	"context"
	"log/slog"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/result"
)

// results is where durable requests have their answers. Its stream reserves
// room on the broker, so only the first of them makes it.
type results struct {
	store      *result.Store
	reconnects *bell
	log        *slog.Logger

	// turn is held by who makes the stream, and guards what follows.
	turn chan struct{}
	// ensured is closed once the connection that the stream was made on is lost.
	ensured <-chan struct{}
	// failed is why there is no stream; it is not tried again before retry.
	failed error
	retry  time.Time
}

func newResults(b *bus.Bus, s result.Settings, log *slog.Logger) *results {
	return &results{store: result.New(b, s), reconnects: newBell(), log: log, turn: make(chan struct{}, 1)}
}

const (
	ensureBudget = 5 * time.Second
	ensurePause  = time.Second
)

// ensure returns nil when answers can be stored. It asks the broker once for
// each connection, and once per ensurePause where that fails.
func (r *results) ensure(ctx context.Context) *fault.Fault {
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	case <-ctx.Done():
		return fault.From(ctx.Err())
	}
	err := r.make(ctx)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fault.From(ctx.Err())
	}
	return fault.Newf(fault.BrokerUnavailable, "the broker keeps no answers for durable requests; the request was not queued: %w", err).WithRetryAfter(retryAfter)
}

// make makes the stream where it may be missing; the turn is held.
func (r *results) make(ctx context.Context) error {
	if r.ensured != nil && !closed(r.ensured) {
		return nil
	}
	if time.Now().Before(r.retry) {
		return r.failed
	}
	connection := r.reconnects.next()
	budget, cancel := context.WithTimeout(ctx, ensureBudget)
	defer cancel()
	if err := r.store.Ensure(budget); err != nil {
		if ctx.Err() == nil {
			r.log.Warn("no place for the answers of durable requests", "error", err)
			r.failed, r.retry = err, time.Now().Add(ensurePause)
		}
		return err
	}
	r.ensured = connection
	return nil
}

// watch wakes the durable calls after every reconnect, until the context ends.
func (r *results) watch(ctx context.Context, reconnects <-chan struct{}) {
	for {
		select {
		case <-reconnects:
			r.reconnects.ring()
		case <-ctx.Done():
			return
		}
	}
}
