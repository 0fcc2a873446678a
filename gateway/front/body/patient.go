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
	return &patient{body: r.Body, conn: http.NewResponseController(w), patience: patience}
}

type patient struct {
	body     io.ReadCloser
	conn     *http.ResponseController
	patience time.Duration
	idle     bool
}

// Read implements io.Reader. The deadline is set only around reads: net/http
// goes on watching an HTTP/1 connection after the body's end, and a deadline
// that is left behind would look like the caller's going away.
func (p *patient) Read(buf []byte) (int, error) {
	if !p.idle && p.conn.SetReadDeadline(time.Now().Add(p.patience)) != nil {
		p.idle = true
	}
	n, err := p.body.Read(buf)
	if err != nil {
		p.rest()
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return n, Stalled(p.patience)
	}
	return n, err
}

// Close implements io.Closer.
func (p *patient) Close() error {
	p.rest()
	return p.body.Close()
}

// rest takes the deadline away for good.
func (p *patient) rest() {
	if !p.idle {
		p.idle = true
		_ = p.conn.SetReadDeadline(time.Time{})
	}
}
