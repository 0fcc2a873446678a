package call

import (
	"errors"
	"time"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/mesh/bus"
)

// sending is the publish of an execution.
type sending struct {
	message bus.Message
	tries   int
	// done gets the outcome of each publish, one at a time. failed gets a value
	// where the item was not newly queued: nearly all are, and then nothing needs
	// to wake.
	done   chan publishOutcome
	failed chan struct{}
	// latest is the outcome of the latest publish, once it was read from done.
	latest *publishOutcome
	// retry ticks when the next publish is due.
	retry <-chan time.Time
}

type publishOutcome struct {
	receipt bus.Receipt
	err     error
}

func newSending(m bus.Message) sending {
	return sending{message: m, done: make(chan publishOutcome, 1), failed: make(chan struct{}, 1)}
}

// outcome returns the outcome of the latest publish, where that is known.
func (s *sending) outcome() (o publishOutcome, known bool) {
	if s.latest == nil {
		select {
		case o := <-s.done:
			s.latest = &o
		default:
			return publishOutcome{}, false
		}
	}
	return *s.latest, true
}

// retryPause is the pause between two publishes of an item.
const retryPause = 50 * time.Millisecond

// publish sends the item to its first queue, and counts it there.
func (x *exchange) publish() {
	x.service.availability.Sent(x.env)
	x.send()
}

func (x *exchange) send() {
	s := &x.sending
	s.tries++
	s.latest = nil
	done, failed := s.done, s.failed
	x.service.bus.Publish(s.message, func(r bus.Receipt, err error) {
		done <- publishOutcome{r, err}
		if err != nil || r.Duplicate {
			failed <- struct{}{}
		}
	})
}

// publishAgain repeats the publish, unless it is known that the queue has no space.
func (x *exchange) publishAgain() {
	if x.waits && x.sending.tries == 0 {
		if _, f := x.service.availability.CheckQueues(x.env); f != nil {
			x.sending.retry = time.After(retryPause)
			return
		}
	}
	x.send()
}

// handleFailedPublish decides about a publish that did not queue the item. Where
// the outcome is unknown it is repeated under the same ID, which cannot run the
// request twice. A duplicate on the first try is another request's ID: the item was
// not queued.
func (x *exchange) handleFailedPublish() error {
	s := &x.sending
	o, _ := s.outcome()
	switch {
	case errors.Is(o.err, bus.ErrUnknown), errors.Is(o.err, bus.ErrDisconnected) && s.tries > 1:
		// The broker may come back, or the answer may come meanwhile.
		s.retry = time.After(retryPause)
	case errors.Is(o.err, bus.ErrQueueFull) && x.waits:
		if s.tries == 1 {
			s.tries = 0 // the item was never queued
		}
		s.retry = time.After(retryPause)
	case o.err != nil:
		return admission.Rejection(o.err, x.env.Hop())
	case o.receipt.Duplicate && s.tries == 1:
		x.service.metrics.collision()
		if err := x.encode(); err != nil {
			return err
		}
		x.pending.Rename(x.env.ExecutionID)
		x.send()
	}
	return nil
}
