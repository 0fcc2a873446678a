package adminapi

import (
	"context"
	"log/slog"
	"time"

	"connectrpc.com/connect"

	"github.com/stagemesh/stagemesh/gateway/front/procedure"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

const (
	// atOnce is how many calls of a kind are served at a time, and budget how long
	// one may take.
	atOnce = 8
	budget = 30 * time.Second
	// retryAfter is when it is worth asking again.
	retryAfter = time.Second
)

// counter has a place for each call that is served.
type counter struct {
	// what the calls are about, for messages.
	what   string
	places chan struct{}
	log    *slog.Logger
}

func newCounter(what string, places int, log *slog.Logger) *counter {
	return &counter{what: what, places: make(chan struct{}, places), log: log}
}

// enter takes a place, which has to be left again, or says that there is none.
func (c *counter) enter() (leave func(), err error) {
	select {
	case c.places <- struct{}{}:
		return func() { <-c.places }, nil
	default:
		return nil, fault.Newf(fault.Overloaded, "%d calls about %s are being served, as many as may be", cap(c.places), c.what).WithRetryAfter(retryAfter)
	}
}

// bounded returns f as a procedure that takes a place and has a time limit.
func bounded[P, Out any](c *counter, f func(context.Context, P) (*Out, error)) func(context.Context, procedure.Request[P]) (*connect.Response[Out], error) {
	return func(ctx context.Context, in procedure.Request[P]) (*connect.Response[Out], error) {
		leave, err := c.enter()
		if err != nil {
			return nil, err
		}
		defer leave()
		ctx, cancel := context.WithTimeout(ctx, budget)
		defer cancel()
		out, err := f(ctx, in.Message)
		if err != nil {
			c.note(err)
			return nil, err
		}
		return connect.NewResponse(out), nil
	}
}

// note logs what its caller is not told.
func (c *counter) note(err error) {
	if f := fault.From(err); f.Reason == fault.Internal {
		c.log.Error(c.what, "error", f.Unwrap())
	}
}
