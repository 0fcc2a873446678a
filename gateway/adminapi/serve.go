package adminapi

import (
	"context"
	"log/slog"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

const (
	// maxCalls is how many calls of a service run at a time, and callTimeout the time
	// limit of each.
	maxCalls    = 8
	callTimeout = 30 * time.Second
	retryAfter  = time.Second
	// maxWatches is how many watches of a service run at a time.
	maxWatches = 64
	// pollInterval is how often a watch polls for changes without notification, and
	// minInterval the least time between two messages.
	pollInterval = time.Second
	minInterval  = 500 * time.Millisecond
)

// limiter bounds the calls of one kind that are served at a time.
type limiter struct {
	// subject of the calls, for messages.
	subject string
	slots   chan struct{}
	log     *slog.Logger
}

func newLimiter(subject string, slots int, log *slog.Logger) *limiter {
	return &limiter{subject: subject, slots: make(chan struct{}, slots), log: log}
}

// acquire takes a slot, or returns OVERLOADED.
func (l *limiter) acquire() (release func(), err error) {
	select {
	case l.slots <- struct{}{}:
		return func() { <-l.slots }, nil
	default:
		return nil, fault.Newf(fault.Overloaded, "%d calls about %s are being served, as many as may be", cap(l.slots), l.subject).WithRetryAfter(retryAfter)
	}
}

// logInternal logs the cause of INTERNAL, which callers do not see.
func (l *limiter) logInternal(err error) {
	if f := fault.From(err); f.Reason == fault.Internal {
		l.log.Error(l.subject, "error", f.Unwrap())
	}
}

// limit returns f as a method that takes a slot and has a time limit.
func limit[P, Out any](l *limiter, f func(context.Context, P) (*Out, error)) func(context.Context, *transport.Call, P) (*Out, error) {
	return func(ctx context.Context, _ *transport.Call, in P) (*Out, error) {
		release, err := l.acquire()
		if err != nil {
			return nil, err
		}
		defer release()
		ctx, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		out, err := f(ctx, in)
		if err != nil {
			l.logInternal(err)
		}
		return out, err
	}
}

// watch returns a method that sends the result of get, and again on every change,
// until the caller disconnects or the gateway stops.
func watch[P, Out any](s Settings, l *limiter, changed func() <-chan struct{}, get func(context.Context, P) (*Out, error)) func(context.Context, *transport.Call, P, func(*Out) error) error {
	return func(ctx context.Context, _ *transport.Call, in P, send func(*Out) error) error {
		release, err := l.acquire()
		if err != nil {
			return err
		}
		defer release()
		w := &watcher[Out]{get: func(ctx context.Context) (*Out, error) { return get(ctx, in) }, changed: changed, send: send}
		err = w.run(ctx, s.Stopping)
		l.logInternal(err)
		return err
	}
}

// watcher is one watch.
type watcher[Out any] struct {
	get     func(context.Context) (*Out, error)
	changed func() <-chan struct{}
	send    func(*Out) error
	last    *Out
}

func (w *watcher[Out]) run(ctx context.Context, stopping <-chan struct{}) error {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	gap := time.NewTimer(minInterval)
	defer gap.Stop()
	for {
		changed := w.changed()
		if err := w.sendChange(ctx); err != nil {
			return err
		}
		gap.Reset(minInterval)
		if err := wait(ctx, stopping, nil, gap.C); err != nil {
			return err
		}
		if err := wait(ctx, stopping, changed, ticker.C); err != nil {
			return err
		}
	}
}

// sendChange sends the current message, unless it equals the last one.
func (w *watcher[Out]) sendChange(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	now, err := w.get(ctx)
	if err != nil {
		return err
	}
	if w.last != nil && proto.Equal(messageOf(now), messageOf(w.last)) {
		return nil
	}
	w.last = now
	return w.send(now)
}

// messageOf returns a pointer to a generated message as a proto.Message.
func messageOf[Out any](m *Out) proto.Message {
	message, _ := any(m).(proto.Message)
	return message
}

// wait returns nil with the first of changed and due, or the cause if the watch ends.
func wait(ctx context.Context, stopping, changed <-chan struct{}, due <-chan time.Time) error {
	select {
	case <-changed:
	case <-due:
	case <-stopping:
		return fault.New(fault.ShuttingDown, "the gateway is stopping; watch another one")
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}
