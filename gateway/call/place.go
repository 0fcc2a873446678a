package call

import (
	"context"
	"log/slog"
	"time"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// place is a stream that some requests need. It reserves room on the broker, so
// only the first of them makes it.
type place struct {
	// without is what is said where it cannot be made.
	without string
	stream  func(context.Context) error
	// reconnects ring when the stream may be gone with its broker.
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

func newPlace(without string, stream func(context.Context) error, reconnects *bell, log *slog.Logger) *place {
	return &place{without: without, stream: stream, reconnects: reconnects, log: log, turn: make(chan struct{}, 1)}
}

const (
	ensureBudget = 5 * time.Second
	ensurePause  = time.Second
)

// ensure returns nil when the stream is there. It asks the broker once for each
// connection, and once per ensurePause where that fails.
func (p *place) ensure(ctx context.Context) *fault.Fault {
	if f := p.take(ctx); f != nil {
		return f
	}
	defer p.leave()
	err := p.make(ctx)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fault.From(ctx.Err())
	}
	return fault.Newf(fault.BrokerUnavailable, "%s; the request was not queued: %w", p.without, err).WithRetryAfter(admission.RetryAfter)
}

func (p *place) take(ctx context.Context) *fault.Fault {
	select {
	case p.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fault.From(ctx.Err())
	}
}

func (p *place) leave() { <-p.turn }

// make makes the stream where it may be missing; the turn is held.
func (p *place) make(ctx context.Context) error {
	if p.ensured != nil && !closed(p.ensured) {
		return nil
	}
	if time.Now().Before(p.retry) {
		return p.failed
	}
	connection := p.reconnects.next()
	budget, cancel := context.WithTimeout(ctx, ensureBudget)
	defer cancel()
	if err := p.stream(budget); err != nil {
		if ctx.Err() == nil {
			p.log.Warn(p.without, "error", err)
			p.failed, p.retry = err, time.Now().Add(ensurePause)
		}
		return err
	}
	p.ensured = connection
	return nil
}

// missing says that the stream was found to be gone: the next request makes it.
func (p *place) missing(ctx context.Context) {
	if f := p.take(ctx); f != nil {
		return
	}
	defer p.leave()
	p.ensured = nil
}
