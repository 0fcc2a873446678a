package transport

import (
	"errors"
	"io"
	"net/http"
	"os"
	"sync"
	"time"
)

// DefaultStallTimeout is how long a front waits for the next bytes of a body, and for its
// caller to take the next bytes of a response.
const DefaultStallTimeout = 30 * time.Second

// StallReader returns r's body, whose reads fail with Stalled when no byte arrives for the
// timeout; 0 waits forever. A connection without read deadlines, such as a recorder, also
// waits forever.
func StallReader(w http.ResponseWriter, r *http.Request, timeout time.Duration) io.ReadCloser {
	if timeout <= 0 || r.Body == nil || r.Body == http.NoBody {
		return r.Body
	}
	return &stallReader{body: r.Body, stall: stallTimer{timeout: timeout, setDeadline: http.NewResponseController(w).SetReadDeadline}}
}

type stallReader struct {
	body  io.ReadCloser
	stall stallTimer
}

// Read implements io.Reader. After a good read it clears the deadline: net/http keeps
// watching an HTTP/1 connection after the body's end, and would take a leftover deadline for
// a disconnect. After a stall the deadline stays: before net/http answers over HTTP/1 it
// reads the rest of the body, and must not wait for that.
func (r *stallReader) Read(buf []byte) (int, error) {
	r.stall.start()
	n, err := r.body.Read(buf)
	expired := r.stall.stop()
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return n, Stalled(r.stall.timeout)
	case expired:
		_ = r.stall.setDeadline(time.Time{})
	}
	return n, err
}

// Close implements io.Closer.
func (r *stallReader) Close() error { return r.body.Close() }

// writeSize is how much of a response a caller must take within the timeout, in bytes.
const writeSize = 256 << 10

// StallWriter returns w, whose writes and flushes fail when the caller takes nothing for the
// timeout; 0 waits forever. A connection without write deadlines, such as a recorder, also
// waits forever.
//
// A connection on which a write failed is of no further use. One goroutine at a time writes.
func StallWriter(w http.ResponseWriter, timeout time.Duration) http.ResponseWriter {
	if timeout <= 0 {
		return w
	}
	conn := http.NewResponseController(w)
	return &stallWriter{ResponseWriter: w, conn: conn, stall: stallTimer{timeout: timeout, setDeadline: conn.SetWriteDeadline}}
}

type stallWriter struct {
	http.ResponseWriter

	conn  *http.ResponseController
	stall stallTimer
}

var _ http.Flusher = (*stallWriter)(nil)

// Write implements http.ResponseWriter.
func (w *stallWriter) Write(data []byte) (int, error) {
	written := 0
	for {
		next := data[written:min(written+writeSize, len(data))]
		w.stall.start()
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
	w.stall.start()
	defer w.stall.stop()
	return w.conn.Flush()
}

// Unwrap lets http.ResponseController reach the connection.
func (w *stallWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// FlushResponse sends what is still buffered of a response, with a stall timeout. net/http
// flushes only after the handler returned, and would keep a small response that nobody takes
// for as long as its connection.
func FlushResponse(w http.ResponseWriter, timeout time.Duration) {
	if flusher, ok := StallWriter(w, timeout).(http.Flusher); ok {
		flusher.Flush()
	}
}

// stallTimer sets a deadline in the past when a read or write takes longer than the timeout.
// A deadline set beforehand would have to be cleared after each operation, which on HTTP/2
// passes through the connection's loop twice. It belongs to one goroutine.
type stallTimer struct {
	timeout     time.Duration
	setDeadline func(time.Time) error

	timer *time.Timer
	// running counts the operation under way, until it ends or expire has set the deadline.
	running sync.WaitGroup
}

// start is called before each operation.
func (s *stallTimer) start() {
	s.running.Add(1)
	if s.timer == nil {
		s.timer = time.AfterFunc(s.timeout, s.expire)
		return
	}
	s.timer.Reset(s.timeout)
}

func (s *stallTimer) expire() {
	defer s.running.Done()
	_ = s.setDeadline(time.Unix(0, 0))
}

// stop is called after each operation, and reports whether the deadline was set. It waits
// for expire, since the connection is net/http's again when the handler returns.
func (s *stallTimer) stop() (expired bool) {
	if s.timer.Stop() {
		s.running.Done()
		return false
	}
	s.running.Wait()
	return true
}
