package adminapi

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/gateway/front/procedure"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

const (
	// watchesAtOnce is how many watches of a kind there are at a time.
	watchesAtOnce = 64
	// lookAgain is how often a watch looks for what nobody tells, and leastGap the
	// least time between two looks.
	lookAgain = time.Second
	leastGap  = 500 * time.Millisecond
)

// watched returns a procedure that sends what there is, and again whenever that has
// changed, until the caller or the gateway leaves.
func watched[P any, Out any](s Settings, c *counter, changed func() <-chan struct{}, look func(context.Context, P) (*Out, error)) func(context.Context, procedure.Request[P], *connect.ServerStream[Out]) error {
	return func(ctx context.Context, in procedure.Request[P], stream *connect.ServerStream[Out]) error {
		leave, err := c.enter()
		if err != nil {
			return err
		}
		defer leave()
		w := &watch[Out]{look: func(ctx context.Context) (*Out, error) { return look(ctx, in.Message) }, changed: changed, send: stream.Send}
		if err := w.run(ctx, s.Stopping); err != nil {
			c.note(err)
			return err
		}
		return nil
	}
}

// watch is one caller who watches.
type watch[Out any] struct {
	look    func(context.Context) (*Out, error)
	changed func() <-chan struct{}
	send    func(*Out) error
	last    *Out
}

func (w *watch[Out]) run(ctx context.Context, stopping <-chan struct{}) error {
	ticker := time.NewTicker(lookAgain)
	defer ticker.Stop()
	gap := time.NewTimer(leastGap)
	defer gap.Stop()
	for {
		changed := w.changed()
		if err := w.once(ctx); err != nil {
			return err
		}
		gap.Reset(leastGap)
		if err := wait(ctx, stopping, nil, gap.C); err != nil {
			return err
		}
		if err := wait(ctx, stopping, changed, ticker.C); err != nil {
			return err
		}
	}
}

// once sends what there is, where that is not what was sent last.
func (w *watch[Out]) once(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	now, err := w.look(ctx)
	if err != nil {
		return err
	}
	if w.last != nil && proto.Equal(messageOf(now), messageOf(w.last)) {
		return nil
	}
	w.last = now
	return w.send(now)
}

// messageOf returns a generated message as such.
func messageOf[Out any](m *Out) proto.Message {
	message, _ := any(m).(proto.Message)
	return message
}

// wait returns nil with the first of the two, or why the watch ends.
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
