package transport

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// DefaultPingInterval is the interval where NewEventStream is given none: well below the
// minute after which most proxies close an idle response.
const DefaultPingInterval = 15 * time.Second

// EventStreamType is the media type of a response with server-sent events.
const EventStreamType = "text/event-stream"

// Event is a server-sent event.
type Event struct {
	// ID is the event's, a word; empty sends none.
	ID string
	// Name is letters only; empty sends none, which readers take for "message".
	Name string
	// Data is one JSON document. Line ends in it are white space there, and are sent as
	// spaces: every document is one line.
	Data []byte
}

// append appends the event as it is sent.
func (e Event) append(dst []byte) []byte {
	if e.ID != "" {
		dst = append(append(append(dst, "id: "...), e.ID...), '\n')
	}
	if e.Name != "" {
		dst = append(append(dst, "event: "...), e.Name...)
		dst = append(dst, '\n')
	}
	dst = append(dst, "data: "...)
	start := len(dst)
	dst = append(dst, e.Data...)
	JoinLines(dst[start:])
	return append(dst, "\n\n"...)
}

// JoinLines replaces line ends, which JSON has between tokens only, by spaces.
func JoinLines(document []byte) {
	for i, c := range document {
		if c == '\n' || c == '\r' {
			document[i] = ' '
		}
	}
}

// EventStream is one response of server-sent events.
type EventStream struct {
	w        http.ResponseWriter
	conn     *http.ResponseController
	interval time.Duration

	mu sync.Mutex
	// ping fires when nothing was sent for the interval; nil outside Run.
	ping  *time.Timer
	begun bool
	// err is why nothing more can be sent.
	err error
	buf []byte
}

// NewEventStream returns a response that has not begun. The writer w should fail when the
// caller takes nothing: see StallWriter. After the interval without an event Run sends a
// comment; 0 is DefaultPingInterval.
func NewEventStream(w http.ResponseWriter, interval time.Duration) *EventStream {
	if interval <= 0 {
		interval = DefaultPingInterval
	}
	return &EventStream{w: w, conn: http.NewResponseController(w), interval: interval}
}

// Run runs work, which sends events, and sends comments while it sends none. The context of
// work ends with ctx, and when a comment cannot be sent.
func (s *EventStream) Run(ctx context.Context, work func(ctx context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.NewTimer(s.interval)
	s.setPing(timer)
	var pinger sync.WaitGroup
	pinger.Go(func() {
		for {
			select {
			case <-timer.C:
				if err := s.Ping(); err != nil {
					cancel(err)
					return
				}
			case <-ctx.Done():
				return
			}
		}
	})
	defer func() {
		cancel(nil)
		pinger.Wait()
		s.setPing(nil)
		timer.Stop()
	}()
	return work(ctx)
}

func (s *EventStream) setPing(timer *time.Timer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ping = timer
}

// Begun reports whether the headers were sent.
func (s *EventStream) Begun() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.begun
}

// SetHeader sets a header of the response, unless the headers were sent already.
func (s *EventStream) SetHeader(name, value string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.begun {
		s.w.Header().Set(name, value)
	}
}

// Send sends an event. It fails with CANCELLED when the caller has disconnected.
func (s *EventStream) Send(e Event) error { return s.write(e.append) }

// Ping sends a comment, so that the caller has the headers.
func (s *EventStream) Ping() error {
	return s.write(func(b []byte) []byte { return append(b, ": ping\n\n"...) })
}

// maxKeptBuffer is the largest buffer that is kept for the next event.
const maxKeptBuffer = 64 << 10

func (s *EventStream) write(appendTo func([]byte) []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	s.begin()
	s.buf = appendTo(s.buf[:0])
	_, err := s.w.Write(s.buf)
	if err == nil {
		err = s.conn.Flush()
	}
	if cap(s.buf) > maxKeptBuffer {
		s.buf = nil
	}
	if err != nil {
		s.err = fault.Newf(fault.Cancelled, "the answer could not be sent: %w", err)
		return s.err
	}
	if s.ping != nil {
		s.ping.Reset(s.interval)
	}
	return nil
}

// begin sends the headers, once.
func (s *EventStream) begin() {
	if s.begun {
		return
	}
	s.begun = true
	h := s.w.Header()
	h.Set("Content-Type", EventStreamType)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // nginx would hold events back
	h.Set("X-Content-Type-Options", "nosniff")
	s.w.WriteHeader(http.StatusOK)
}
