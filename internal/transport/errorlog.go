package transport

import (
	"context"
	"log"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"
)

// errorsEvery is the pause between lines that clients can cause.
const errorsEvery = time.Minute

// ErrorLog returns the log of an http.Server. Clients cause most of its lines by malformed frames
// or queries: one a minute has the level WARN, the others debug, as have failed TLS handshakes,
// such as from TCP probes. Panics are all logged.
func ErrorLog(to *slog.Logger) *log.Logger {
	return slog.NewLogLogger(&errorHandler{Handler: to.Handler()}, slog.LevelWarn)
}

type errorHandler struct {
	slog.Handler
	// next is when the next line has the level WARN, in nanoseconds since 1970.
	next atomic.Int64
}

// Handle implements slog.Handler.
func (h *errorHandler) Handle(ctx context.Context, r slog.Record) error {
	next := h.next.Load()
	switch {
	case strings.HasPrefix(r.Message, "http: panic serving "):
	case strings.HasPrefix(r.Message, "http: TLS handshake error "),
		r.Time.UnixNano() < next, !h.next.CompareAndSwap(next, r.Time.Add(errorsEvery).UnixNano()):
		r.Level = slog.LevelDebug
	}
	if !h.Enabled(ctx, r.Level) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}
