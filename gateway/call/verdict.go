package call

import (
	"time"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/store"
)

// seen is what is known of an idempotency key.
type seen struct {
	record store.KeyRecord
	// result is the stored answer of the request that has the key; nil where
	// there is none.
	result *envelope.Result
	// lost says that the request waited in a memory queue which is gone.
	lost bool
}

// verdict is what a call with the key is to do.
type verdict uint8

const (
	// free: no request has the key, or the one that has it has no answer that
	// binds and will have none. The call may take it.
	free verdict = iota
	// mismatched: a request with another payload has the key.
	mismatched
	// running: the request will have its answer.
	running
	// finished: it has.
	finished
)

// grace is how long after its deadline a request may still find its answer: the
// clocks of two gateways differ, and its own looks once more.
const grace = time.Second

func (s *seen) verdict(d envelope.Digest, now time.Time) verdict {
	c := s.record.Claim
	switch {
	case c == nil:
		return free
	case s.answered() && c.Digest == d:
		// Also where the key was released before the answer came.
		return finished
	case c.Released, s.hopeless(now):
		return free
	case c.Digest != d:
		return mismatched
	}
	return running
}

// answered says that the request has an answer that binds.
func (s *seen) answered() bool { return s.result != nil && binds(s.result.Reply.Fault) }

// hopeless says that the request will have none.
func (s *seen) hopeless(now time.Time) bool {
	if s.result != nil {
		return !s.answered()
	}
	return s.lost || now.After(s.record.Claim.Deadline.Add(grace))
}

// binds reports whether a request that ended so, with an answer where f is nil,
// is done: who comes with its key again gets the same.
func binds(f *fault.Fault) bool {
	return f == nil || !f.Retryable() && f.Reason != fault.Cancelled
}
