package transport

import (
	"errors"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// DefaultStallTimeout is how long a front waits for the next stallBytes of a body, and for its
// caller to take as many of a response.
const DefaultStallTimeout = 30 * time.Second

// stallBytes is how much of a body must arrive, or of a response must be taken, within the
// stall timeout, in bytes.
const stallBytes = 256 << 10

// stopping returns the fault of a message that is not awaited any longer.
func stopping() *fault.Fault {
	return fault.New(fault.ShuttingDown, "the gateway is stopping").WithRetryAfter(budget.RetryAfter)
}

// StallReader returns r's body, whose reads fail with Stalled when they wait for longer than
// the stall timeout for its end or the next stallBytes, and with SHUTTING_DOWN when the
// settings' Closing closes; no timeout waits forever. A connection without read deadlines,
// such as a recorder, also waits forever.
func StallReader(w http.ResponseWriter, r *http.Request, s Settings) io.ReadCloser {
	if s.StallTimeout <= 0 || r.Body == nil || r.Body == http.NoBody {
		return r.Body
	}
	return &stallReader{body: r.Body, conn: *http.NewResponseController(w), timeout: s.StallTimeout, closing: s.Closing}
}

type stallReader struct {
	body    io.ReadCloser
	conn    http.ResponseController
	timeout time.Duration
	closing <-chan struct{}
	// waited is how long reads have waited for the received bytes, of the next stallBytes.
	waited   time.Duration
	received int
}

// Read implements io.Reader. After a good read it clears the deadline: net/http keeps
// watching an HTTP/1 connection after the body's end, and would take a leftover deadline for
// a disconnect. After a stall the deadline stays: before net/http answers over HTTP/1 it
// reads the rest of the body, and must not wait for that.
func (r *stallReader) Read(buf []byte) (int, error) {
	begin := time.Now()
	stall := startStallTimer(begin, operation{r, begin.Add(r.timeout - r.waited), r.closing})
	n, err := r.body.Read(buf)
	expired := stall.stop()
	r.waited += time.Since(begin)
	if r.received += n; r.received >= stallBytes {
		r.next()
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded) && IsClosed(r.closing):
		return n, stopping()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return n, Stalled(r.timeout)
	case expired:
		_ = r.setDeadline(time.Time{})
	}
	return n, err
}

func (r *stallReader) setDeadline(at time.Time) error { return r.conn.SetReadDeadline(at) }

// next begins another timeout: for the next bytes, or for another message.
func (r *stallReader) next() { r.waited, r.received = 0, 0 }

// Close implements io.Closer.
func (r *stallReader) Close() error { return r.body.Close() }

// StallWriter returns w, whose writes and flushes fail when the caller takes nothing for the
// timeout; 0 waits forever. A connection without write deadlines, such as a recorder, also
// waits forever.
//
// A connection on which a write failed is of no further use. One goroutine at a time writes.
func StallWriter(w http.ResponseWriter, timeout time.Duration) http.ResponseWriter {
	if timeout <= 0 {
		return w
	}
	return &stallWriter{ResponseWriter: w, conn: *http.NewResponseController(w), timeout: timeout}
}

type stallWriter struct {
	http.ResponseWriter

	conn    http.ResponseController
	timeout time.Duration
}

var _ http.Flusher = (*stallWriter)(nil)

// Write implements http.ResponseWriter.
func (w *stallWriter) Write(data []byte) (int, error) {
	written := 0
	for {
		next := data[written:min(written+stallBytes, len(data))]
		stall := w.start()
		n, err := w.ResponseWriter.Write(next)
		stall.stop()
		written += n
		if err != nil || written == len(data) {
			return written, err
		}
	}
}

// Flush implements http.Flusher. The next write reports a failure.
func (w *stallWriter) Flush() { _ = w.FlushError() }

// FlushError is Flush with an error; http.ResponseController prefers it.
func (w *stallWriter) FlushError() error {
	defer w.start().stop()
	return w.conn.Flush()
}

func (w *stallWriter) setDeadline(at time.Time) error { return w.conn.SetWriteDeadline(at) }

func (w *stallWriter) start() *stallTimer {
	now := time.Now()
	return startStallTimer(now, operation{w, now.Add(w.timeout), nil})
}

// Unwrap lets http.ResponseController reach the connection.
func (w *stallWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// WithStallTimeout returns a handler that serves next with a StallWriter, and sends what is
// still buffered of the response before it returns.
func WithStallTimeout(next http.Handler, timeout time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w = StallWriter(w, timeout)
		next.ServeHTTP(w, r)
		flushResponse(w)
	})
}

// flushResponse sends what is still buffered of a response to a StallWriter. net/http flushes
// only after the handler returned, and would keep a small response that nobody takes for as
// long as its connection.
func flushResponse(w http.ResponseWriter) {
	if flusher, ok := w.(http.Flusher); ok {
		flusher.Flush()
	}
}

// closingInterval is how often an operation that waits looks whether the gateway is closing.
const closingInterval = time.Second

// operation is a read or write that sets a deadline in the past at that time, or soon after
// closing closes; a nil one never does. A deadline set beforehand would have to be cleared
// after each operation, which on HTTP/2 passes through the connection's loop twice.
type operation struct {
	conn interface {
		setDeadline(at time.Time) error
	}
	until   time.Time
	closing <-chan struct{}
}

// stallTimer guards one operation at a time. Its timer runs on after that and serves later
// operations: starting and stopping one for each costs 3 % of a request over plain HTTP.
type stallTimer struct {
	// mu is held while the deadline is set, since the connection is net/http's again when
	// the handler returns.
	mu    sync.Mutex
	timer *time.Timer
	// firesAt is zero while the timer does not run.
	firesAt time.Time
	// operation is zero between two of them.
	operation operation
	expired   bool
}

var stallTimers = sync.Pool{New: func() any { return &stallTimer{} }}

// startStallTimer is called before each operation.
func startStallTimer(now time.Time, o operation) *stallTimer {
	s, _ := stallTimers.Get().(*stallTimer)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.operation, s.expired = o, false
	s.fireInTime(now)
	return s
}

// fireInTime has the timer fire when the operation needs it, or earlier.
func (s *stallTimer) fireInTime(now time.Time) {
	at := s.operation.until
	if next := now.Add(closingInterval); s.operation.closing != nil && next.Before(at) {
		at = next
	}
	switch {
	case !s.firesAt.IsZero() && !at.Before(s.firesAt):
		return
	case s.timer == nil:
		s.timer = time.AfterFunc(at.Sub(now), s.fire)
	default:
		s.timer.Reset(at.Sub(now))
	}
	s.firesAt = at
}

func (s *stallTimer) fire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.firesAt = time.Time{}
	if s.operation.conn == nil {
		return
	}
	// It may be early: for the closing, or because an earlier operation has started it.
	if now := time.Now(); now.Before(s.operation.until) && !IsClosed(s.operation.closing) {
		s.fireInTime(now)
		return
	}
	s.expired = true
	_ = s.operation.conn.setDeadline(time.Unix(0, 0))
}

// stop is called after the operation, and reports whether the deadline was set.
func (s *stallTimer) stop() (expired bool) {
	s.mu.Lock()
	expired, s.operation = s.expired, operation{}
	s.mu.Unlock()
	stallTimers.Put(s)
	return expired
}

// IsClosed reports whether a channel is closed on which nothing is sent.
func IsClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
