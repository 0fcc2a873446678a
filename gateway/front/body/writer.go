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
// A connection on which it failed is of no further use.
func PatientWriter(w http.ResponseWriter, patience time.Duration) http.ResponseWriter {
	if patience <= 0 {
		return w
	}
	return &patientWriter{ResponseWriter: w, conn: http.NewResponseController(w), patience: patience}
}

type patientWriter struct {
	http.ResponseWriter

	conn     *http.ResponseController
	patience time.Duration
}

var _ http.Flusher = (*patientWriter)(nil)

// Write implements http.ResponseWriter.
func (p *patientWriter) Write(data []byte) (int, error) {
	written := 0
	for {
		next := data[written:min(written+piece, len(data))]
		var n int
		var err error
		p.within(func() { n, err = p.ResponseWriter.Write(next) })
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
func (p *patientWriter) FlushError() (err error) {
	p.within(func() { err = p.conn.Flush() })
	return err
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

// within makes a write that lasts longer than the patience fail. A deadline set
// beforehand would have to be taken away after each write, for which HTTP/2 has
// to pass through its connection's loop twice.
func (p *patientWriter) within(write func()) {
	given := make(chan struct{})
	stalled := time.AfterFunc(p.patience, func() {
		defer close(given)
		_ = p.conn.SetWriteDeadline(time.Unix(0, 0))
	})
	write()
	if !stalled.Stop() {
		<-given // the connection is net/http's again when the handler returns
	}
}
