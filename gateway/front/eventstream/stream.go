package eventstream

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// DefaultSilence is the silence where New is given none: well below the minute
// after which most proxies give an answer up.
const DefaultSilence = 15 * time.Second

// MediaType is that of the answer.
const MediaType = "text/event-stream"

// Stream is one answer.
type Stream struct {
	w       http.ResponseWriter
	conn    *http.ResponseController
	silence time.Duration

	mu sync.Mutex
	// ping is due when nothing was sent for the silence; nil outside Run.
	ping  *time.Timer
	begun bool
	// broken is why nothing more can be sent.
	broken error
	buf    []byte
}

// New returns an answer that has not begun, to be written to w, which gives up a
// caller that takes nothing: see body.PatientWriter. Silence is how long nothing is
// sent before a comment is; 0 is DefaultSilence.
func New(w http.ResponseWriter, silence time.Duration) *Stream {
	if silence <= 0 {
		silence = DefaultSilence
	}
	return &Stream{w: w, conn: http.NewResponseController(w), silence: silence}
}

// Run runs work, which sends events, and comments where it does not. The context
// that work gets ends with ctx, and when nobody takes the comments.
func (s *Stream) Run(ctx context.Context, work func(ctx context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.NewTimer(s.silence)
	s.pinging(timer)
	var pinger sync.WaitGroup
	pinger.Go(func() {
		if err := s.comment(ctx, timer.C); err != nil {
			cancel(err)
		}
	})
	defer func() {
		cancel(nil)
		pinger.Wait()
		s.pinging(nil)
		timer.Stop()
	}()
	return work(ctx)
}

func (s *Stream) pinging(timer *time.Timer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ping = timer
}

// comment sends a comment whenever one is due, until the context ends.
func (s *Stream) comment(ctx context.Context, due <-chan time.Time) error {
	for {
		select {
		case <-due:
			if err := s.write(func(b []byte) []byte { return append(b, ": ping\n\n"...) }); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// Begun reports whether the headers have left.
func (s *Stream) Begun() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.begun
}

// Say sets a header of the answer, where they have not left yet.
func (s *Stream) Say(name, value string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.begun {
		s.w.Header().Set(name, value)
	}
}

// Send sends an event. An error is a *fault.Fault: nobody takes it.
func (s *Stream) Send(e Event) error { return s.write(e.append) }

func (s *Stream) write(what func([]byte) []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken != nil {
		return s.broken
	}
	s.begin()
	s.buf = what(s.buf[:0])
	_, err := s.w.Write(s.buf)
	if err == nil {
		err = s.conn.Flush()
	}
	if cap(s.buf) > keptBytes {
		s.buf = nil
	}
	if err != nil {
		s.broken = fault.Newf(fault.Cancelled, "the answer could not be sent: %w", err)
		return s.broken
	}
	if s.ping != nil {
		s.ping.Reset(s.silence)
	}
	return nil
}

// keptBytes is the largest buffer that is kept for the next event.
const keptBytes = 64 << 10

// begin sets the headers that every stream has, and sends them.
func (s *Stream) begin() {
	if s.begun {
		return
	}
	s.begun = true
	h := s.w.Header()
	h.Set("Content-Type", MediaType)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // nginx would keep events back
	h.Set("X-Content-Type-Options", "nosniff")
	s.w.WriteHeader(http.StatusOK)
}
