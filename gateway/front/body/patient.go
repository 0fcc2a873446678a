package body

import (
	"errors"
	"io"
	"net/http"
	"os"
	"time"
)

// Patience is how long a front waits for the next bytes of a body, and for its
// caller to take the next bytes of an answer.
const Patience = 30 * time.Second

// Patient returns r's body, which from now on fails with Stalled when no byte
// comes for the patience; 0 waits forever. A slow upload goes on for as long
// as it goes on. Where the connection knows no read deadlines, as in a
// recorder, it waits forever too.
func Patient(w http.ResponseWriter, r *http.Request, patience time.Duration) io.ReadCloser {
	if patience <= 0 || r.Body == nil || r.Body == http.NoBody {
		return r.Body
	}
	return &patient{body: r.Body, stall: stall{patience: patience, end: http.NewResponseController(w).SetReadDeadline}}
}

type patient struct {
	body  io.ReadCloser
	stall stall
}

// Read implements io.Reader. No deadline outlives one that went well: net/http goes on
// watching an HTTP/1 connection after the body's end, to which one that is left behind
// would look like the caller's going away. That of a read that stalled stays: before
// net/http answers over HTTP/1 it reads what is left of the body, and must not wait
// for that.
func (p *patient) Read(buf []byte) (int, error) {
	p.stall.begin()
	n, err := p.body.Read(buf)
	stalled := p.stall.over()
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return n, Stalled(p.stall.patience)
	case stalled:
		_ = p.stall.end(time.Time{})
	}
	return n, err
}

// Close implements io.Closer.
func (p *patient) Close() error { return p.body.Close() }
