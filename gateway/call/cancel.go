package call

import (
	"context"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// waiting finds the calls that wait here by the ids of their requests. The gate
// bounds them.
type waiting struct {
	mu    sync.Mutex
	calls map[pipeline.RequestID]*exchange
}

func newWaiting() *waiting { return &waiting{calls: map[pipeline.RequestID]*exchange{}} }

func (w *waiting) add(c *exchange) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls[c.env.RequestID] = c
}

func (w *waiting) remove(c *exchange) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.calls, c.env.RequestID)
}

// cancel ends the request's call, and reports whether one waits here.
func (w *waiting) cancel(id pipeline.RequestID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	c, ok := w.calls[id]
	if !ok {
		return false
	}
	select {
	case c.cancelled <- calledOff():
	default: // it was told before
	}
	return true
}

// Cancel calls a request off, through any gateway: its caller gets CANCELLED,
// its item is taken back where it waits for its first step, and hosts hear that
// nobody wants it. It returns before that is done, and it is best effort: nil
// also for a request that is finished, or that nobody made. An id that is no
// UUID is INVALID_REQUEST; BROKER_UNAVAILABLE says that nobody was told.
func (s *Service) Cancel(ctx context.Context, requestID string) error {
	id, f := parseID(requestID)
	if f != nil {
		return f
	}
	if err := ctx.Err(); err != nil {
		return fault.From(err)
	}
	if s.waiting.cancel(id) {
		return nil
	}
	// How long it may have is not known here: no longer than any.
	deadline := time.Now().Add(s.settings.MaxTimeout)
	if err := s.bus.Cancel(&envelope.Cancel{Mesh: s.settings.Mesh, RequestID: id, Deadline: deadline}); err != nil {
		s.metrics.cancelled(failed)
		return unavailable(err).WithMetadata(requestIDKey, string(id))
	}
	s.metrics.cancelled(notified)
	return nil
}

// hear is the handler of notices, those of this gateway among them. Anybody may
// have sent one.
func (s *Service) hear(data []byte) {
	notice, err := envelope.DecodeCancel(data)
	if err != nil || notice.Mesh != s.settings.Mesh {
		s.metrics.reply("malformed_cancel")
		return
	}
	s.waiting.cancel(notice.RequestID)
}

// requestIDKey is the request's id among the metadata of a fault.
const requestIDKey = "request_id"

const canonicalID = 36

// parseID takes a UUID in its usual form, in capitals too.
func parseID(text string) (pipeline.RequestID, *fault.Fault) {
	id, err := uuid.Parse(text)
	if err != nil || len(text) != canonicalID {
		return "", fault.Newf(fault.InvalidRequest, "request_id: %.*q is no UUID", shown, text).WithViolation("request_id", "no UUID")
	}
	return pipeline.RequestID(id.String()), nil
}
