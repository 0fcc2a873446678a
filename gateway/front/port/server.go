package port

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"time"
)

// Bounds on what a connection may cost before and between requests. There is
// no bound on a whole request or answer: uploads and answers have
// transport.DefaultStallTimeout, and streams may be long.
const (
	readHeaderTimeout = 10 * time.Second
	idleTimeout       = 2 * time.Minute
	maxHeaderBytes    = 64 << 10

	// maxConcurrentStreams is per connection: gRPC clients use one.
	maxConcurrentStreams = 1000
	pingAfter            = 30 * time.Second
	pingTimeout          = 15 * time.Second
	writeStall           = 30 * time.Second
)

// NewServer returns a server for the handler that speaks HTTP/1 and HTTP/2 on
// one port, HTTP/2 without TLS too. The caller listens, serves and stops it.
func NewServer(h http.Handler, log *slog.Logger) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler:           h,
		Protocols:         protocols,
		ReadHeaderTimeout: readHeaderTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(errorHandler{log.Handler()}, slog.LevelWarn),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: maxConcurrentStreams,
			SendPingTimeout:      pingAfter,
			PingTimeout:          pingTimeout,
			WriteByteTimeout:     writeStall,
		},
	}
}

// errorHandler logs failed TLS handshakes, such as those of TCP probes, at the level debug.
type errorHandler struct{ slog.Handler }

// Handle implements slog.Handler.
func (h errorHandler) Handle(ctx context.Context, r slog.Record) error {
	if strings.HasPrefix(r.Message, "http: TLS handshake error ") {
		r.Level = slog.LevelDebug
	}
	if !h.Enabled(ctx, r.Level) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}
