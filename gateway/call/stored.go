package call

import (
	"context"
	"errors"
	"time"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// search is when a call looks for its stored answer. The zero search
// does not.
type search struct {
	// reconnected is closed with the next connection to the broker: what was
	// sent before it may be lost.
	reconnected <-chan struct{}
	// due ticks when a look is due; left are those to come, without end where
	// a host announced the answer.
	due       <-chan time.Time
	pause     time.Duration
	left      int
	announced bool
}

// After a reconnect a call looks for about 3 s: a broker that is just back may
// not know yet what it has stored.
const (
	looks        = 8
	firstPause   = 25 * time.Millisecond
	longestPause = time.Second
	// lastLook is for the look at the deadline.
	lastLook = 500 * time.Millisecond
)

// begin makes a look due at once.
func (s *search) begin() { s.pause, s.left, s.due = firstPause, looks, time.After(0) }

func (s *search) announce() {
	s.announced = true
	s.begin()
}

// again makes another look due later, after one that found nothing.
func (s *search) again() {
	s.left--
	if s.left <= 0 && !s.announced {
		s.due = nil
		return
	}
	s.due = time.After(s.pause)
	s.pause = min(2*s.pause, longestPause)
}

// look returns the stored answer, if there is one. That the broker does not say
// is no reason to fail: the call has until its deadline.
func (c *exchange) look(ctx context.Context) (*Response, error) {
	r, err := c.service.results.store.Get(ctx, c.env.RequestID)
	switch {
	case err == nil:
		return c.found(r)
	case errors.Is(err, envelope.ErrMalformed):
		return nil, unreadable(err)
	}
	c.search.again()
	return nil, nil
}

// lastLook is look when the call's own context is over.
func (c *exchange) lastLook(ctx context.Context) (*Response, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastLook)
	defer cancel()
	return c.look(ctx)
}

// found answers with what is stored. To a stream it must be what follows the
// chunks that its caller has.
func (c *exchange) found(r *envelope.Result) (*Response, error) {
	reply := r.Reply
	c.answered = true
	switch {
	case reply.RequestID != c.env.RequestID:
		return nil, unreadable(errMismatch)
	case reply.Fault != nil:
		return nil, reply.Fault
	case c.emit != nil && (reply.Seq != c.seq+1 || c.seq > 0 && reply.ExecutionID != c.env.ExecutionID):
		return nil, fault.New(fault.StreamInterrupted, "chunks of the answer were lost; its end is stored, and can be fetched by the request's id")
	}
	return c.response(reply)
}

func unreadable(err error) *fault.Fault {
	return fault.Newf(fault.Internal, "the stored answer cannot be read: %w", err)
}
