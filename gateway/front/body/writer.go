package body

import (
	"net/http"
	"time"
)

// piece is how much of an answer is to be taken within the patience, in bytes.
const piece = 256 << 10

// PatientWriter returns w, of which a write or flush fails from now on when the
// caller takes nothing of it for the patience; 0 waits forever. A slow download
// goes on for as long as it goes on. Where the connection knows no write
// deadlines, as in a recorder, it waits forever too.
//
// A connection on which it failed is of no further use. As of any ResponseWriter, one
// goroutine at a time writes to it.
func PatientWriter(w http.ResponseWriter, patience time.Duration) http.ResponseWriter {
	if patience <= 0 {
		return w
	}
	conn := http.NewResponseController(w)
	return &patientWriter{ResponseWriter: w, conn: conn, stall: stall{patience: patience, end: conn.SetWriteDeadline}}
}

type patientWriter struct {
	http.ResponseWriter

	conn  *http.ResponseController
	stall stall
}

var _ http.Flusher = (*patientWriter)(nil)

// Write implements http.ResponseWriter.
func (p *patientWriter) Write(data []byte) (int, error) {
	written := 0
	for {
		next := data[written:min(written+piece, len(data))]
		p.stall.begin()
		n, err := p.ResponseWriter.Write(next)
		p.stall.over()
		written += n
		if err != nil || written == len(data) {
			return written, err
		}
	}
}

// Flush implements http.Flusher. A failure shows in the next write.
func (p *patientWriter) Flush() { _ = p.FlushError() }

// FlushError is Flush that says whether it failed; http.ResponseController
// prefers it.
func (p *patientWriter) FlushError() error {
	p.stall.begin()
	defer p.stall.over()
	return p.conn.Flush()
}

// Finish sends what is still buffered of an answer, with the patience of a
// PatientWriter. Left to net/http, which sends it when the handler has returned,
// a small answer that nobody takes is kept for as long as its connection.
func Finish(w http.ResponseWriter, patience time.Duration) {
	if flusher, ok := PatientWriter(w, patience).(http.Flusher); ok {
		flusher.Flush()
	}
}

// Unwrap is how http.ResponseController reaches the connection.
func (p *patientWriter) Unwrap() http.ResponseWriter { return p.ResponseWriter }
