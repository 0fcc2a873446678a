package transport

import (
	"errors"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/gateway/admission"
)

// DefaultStallTimeout is how long a front waits for the next stallBytes of a body, and for its
// caller to take those of a response.
const DefaultStallTimeout = 30 * time.Second

// stallBytes is how much of a body must arrive, or of a response must be taken, within the
// stall timeout, in bytes.
const stallBytes = 256 << 10

// StallReader returns r's body, whose reads fail with Stalled when they wait for longer than
// the stall timeout for its end or the next stallBytes, and with SHUTTING_DOWN when the
// settings' Closing closes; no timeout waits forever. A connection without read deadlines,
// such as a recorder, also waits forever.
func StallReader(w http.ResponseWriter, r *http.Request, s Settings) io.ReadCloser {
	if s.StallTimeout <= 0 || r.Body == nil || r.Body == http.NoBody {
		return r.Body
	}
	return &stallReader{body: r.Body, timeout: s.StallTimeout, stall: stallTimer{conn: *http.NewResponseController(w), isReading: true, closing: s.Closing}}
}

type stallReader struct {
	body    io.ReadCloser
	timeout time.Duration
	stall   stallTimer
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
	r.stall.start(r.timeout - r.waited)
	n, err := r.body.Read(buf)
	expired := r.stall.stop()
	r.waited += time.Since(begin)
	if r.received += n; r.received >= stallBytes {
		r.next()
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded) && r.stall.isClosing():
		return n, admission.Stopping()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return n, Stalled(r.timeout)
	case expired:
		_ = r.stall.conn.SetReadDeadline(time.Time{})
	}
	return n, err
}

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
	return &stallWriter{ResponseWriter: w, timeout: timeout, stall: stallTimer{conn: *http.NewResponseController(w)}}
}

type stallWriter struct {
	http.ResponseWriter

	timeout time.Duration
	stall   stallTimer
}

var _ http.Flusher = (*stallWriter)(nil)

// Write implements http.ResponseWriter.
func (w *stallWriter) Write(data []byte) (int, error) {
	written := 0
	for {
		next := data[written:min(written+stallBytes, len(data))]
		w.stall.start(w.timeout)
		n, err := w.ResponseWriter.Write(next)
		w.stall.stop()
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
	w.stall.start(w.timeout)
	defer w.stall.stop()
	return w.stall.conn.Flush()
}

// Unwrap lets http.ResponseController reach the connection.
func (w *stallWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// FlushResponse sends what is still buffered of a response to a StallWriter. net/http flushes
// only after the handler returned, and would keep a small response that nobody takes for as
// long as its connection.
func FlushResponse(w http.ResponseWriter) {
	if flusher, ok := w.(http.Flusher); ok {
		flusher.Flush()
	}
}

// closingInterval is how often an operation that waits looks whether the gateway is closing.
const closingInterval = time.Second

// stallTimer sets a deadline in the past when a read or write takes longer than a timeout.
// A deadline set beforehand would have to be cleared after each operation, which on HTTP/2
// passes through the connection's loop twice. One goroutine starts and stops it.
type stallTimer struct {
	conn      http.ResponseController
	isReading bool
	// closing ends operations that take longer than closingInterval once it is closed; nil
	// never is.
	closing <-chan struct{}

	// mu is held while the deadline is set, since the connection is net/http's again when
	// the handler returns.
	mu               sync.Mutex
	timer            *time.Timer
	running, expired bool
	until            time.Time
}

// start is called before each operation.
func (s *stallTimer) start(timeout time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running, s.expired, s.until = true, false, time.Now().Add(timeout)
	if s.closing != nil {
		timeout = min(timeout, closingInterval)
	}
	if s.timer == nil {
		s.timer = time.AfterFunc(timeout, s.expire)
		return
	}
	s.timer.Reset(timeout)
}

func (s *stallTimer) expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.running {
		return
	}
	// It may be early: for the closing, or because an earlier operation has just stopped.
	if left := time.Until(s.until); left > 0 && !s.isClosing() {
		s.timer.Reset(min(left, closingInterval))
		return
	}
	s.expired = true
	past := time.Unix(0, 0)
	if s.isReading {
		_ = s.conn.SetReadDeadline(past)
	} else {
		_ = s.conn.SetWriteDeadline(past)
	}
}

// stop is called after each operation, and reports whether the deadline was set.
func (s *stallTimer) stop() (expired bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running = false
	s.timer.Stop()
	return s.expired
}

func (s *stallTimer) isClosing() bool {
	select {
	case <-s.closing:
		return true
	default:
		return false
	}
}
