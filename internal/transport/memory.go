package transport

import (
	"context"
	"crypto/tls"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
)

// Memory is what the callers of a port, or of several that share it, may hold.
type Memory struct {
	// Requests has the bytes of those who may call: of all, on a port without tokens. nil bounds
	// nothing.
	Requests *budget.Pool
	// Anonymous has what probes hold, and callers who may not call.
	Anonymous *budget.Pool
}

// maxAnonymousBytes bounds what probes and rejected callers of a port hold: their headers, one
// small message each, and what is not yet written to them.
const maxAnonymousBytes = 8 << 20

// ownAnonymousBytes are for the anonymous requests of each connection alone, enough for a probe.
const ownAnonymousBytes = requestCost + MaxHeaderBytes + 8<<10

func newAnonymousPool(limit int64) *budget.Pool {
	return budget.NewPool(budget.Settings{Limit: limit, Name: "bytes for callers without a token", Key: "docs/security.md"})
}

// NewMemory returns the memory of a port. Requests may be nil.
func NewMemory(requests *budget.Pool) *Memory {
	return &Memory{requests, newAnonymousPool(maxAnonymousBytes)}
}

// Caller is who sends a request.
type Caller struct {
	// Tenant is the caller's; "" where there are none.
	Tenant string
	// IsAnonymous is true where it does not matter who calls, as for a probe.
	IsAnonymous bool
	// IsReader is true where the caller may look and change nothing.
	IsReader bool
}

// Head is what a Guard knows of a request: nothing of its body is read.
type Head struct {
	Path, Host string
	// Header returns the first value of a header, by its name in lower case.
	Header func(name string) string
	// TLS is nil on a connection without it.
	TLS *tls.ConnectionState
}

// Guard returns who sends a request, or why it may not.
type Guard func(Head) (Caller, error)

// requestCost is what a request costs beside its header and body, in bytes: the stack of its
// goroutine, its stream, its buffers.
const requestCost = 24 << 10

// account returns the account of a request with a header of that size, which holds that.
func (m *Memory) account(conn *countedConn, c Caller, err error, header int64) (*budget.Account, error) {
	pool := m.Requests
	if err != nil || c.IsAnonymous {
		pool = m.Anonymous
		if conn != nil {
			if own := budget.NewAccount(conn.own, ""); own.Reserve(requestCost+header) == nil {
				return own, nil
			}
		}
	}
	out := budget.NewAccount(pool, c.Tenant)
	return out, out.Reserve(requestCost + header)
}

// fieldCost is what a field of a header takes beside its text, as HTTP/2 counts it.
const fieldCost = 32

// headerSize returns the decoded size of a header.
func headerSize(header map[string][]string) (n int64) {
	for name, values := range header {
		for _, value := range values {
			n += int64(len(name) + len(value) + fieldCost)
		}
	}
	return n
}

// callerContext returns the context of a caller's request.
func callerContext(ctx context.Context, memory *budget.Account, c Caller) context.Context {
	if c.IsReader {
		ctx = context.WithValue(ctx, readerKey{}, true)
	}
	return budget.NewContext(budget.WithTenant(ctx, c.Tenant), memory)
}

type readerKey struct{}

// IsReader reports whether the caller of a request may look and change nothing.
func IsReader(ctx context.Context) bool { return ctx.Value(readerKey{}) != nil }

type deniedKey struct{}

// headKey is the key of the context of a HEAD request.
type headKey struct{}

// IsHead reports whether a GET request was a HEAD request: its answer has no body, so an endless one is of no use.
func IsHead(ctx context.Context) bool { return ctx.Value(headKey{}) != nil }

// Denied returns why the Guard of WithMemory denies a request; nil if the caller may call.
func Denied(ctx context.Context) error {
	err, _ := ctx.Value(deniedKey{}).(error)
	return err
}

// WithMemory returns a handler that asks the guard who calls, and opens the account of the
// request: with its header, and with its body as it is read. The context has the caller's tenant.
// next answers who may not call, by Denied. For a request whose header does not fit, reject writes the fault; one of a caller
// who may not call is dropped.
// A response over HTTP/1 does not wait for a body that next leaves unread.
func WithMemory(next http.Handler, m *Memory, guard Guard, reject func(http.ResponseWriter, *http.Request, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		caller, err := guard(Head{r.URL.Path, r.Host, r.Header.Get, r.TLS})
		account, full := m.account(connOf(r.Context()), caller, err, headerSize(r.Header)+int64(len(r.RequestURI)))
		defer account.Close() //nolint:staticcheck // it is never nil, and holds nothing on an error
		if full == nil && err == nil && !caller.IsAnonymous {
			full = connOf(r.Context()).admit(caller.Tenant)
		}
		switch {
		case full != nil && (err != nil || caller.IsAnonymous && r.ProtoMajor == 2):
			panic(http.ErrAbortHandler) // an answer would cost what is not there
		case full != nil:
			w.Header().Set("Connection", "close")
			reject(w, r, full)
			flushInTime(w, r)
			return
		}
		if r.ProtoMajor == 2 {
			growStack(0)
		}
		hasBody := r.Body != nil && r.Body != http.NoBody
		from := &requestBody{ReadCloser: r.Body, account: account, ended: r.ProtoMajor != 1}
		// A copy, because net/http decides by the original's body whether the
		// connection can carry another request.
		ctx := callerContext(r.Context(), account, caller)
		if err != nil {
			ctx = context.WithValue(ctx, deniedKey{}, err)
		}
		if r.Method == http.MethodHead {
			ctx = context.WithValue(ctx, headKey{}, true)
		}
		bounded := r.WithContext(ctx)
		if hasBody {
			bounded.Body = from
		}
		if r.Method == http.MethodHead {
			bounded.Method = http.MethodGet // net/http sends no body: it has the original
		}
		if hasBody && r.ProtoMajor == 1 {
			from.conn, from.isLast = *http.NewResponseController(w), r.Close
			from.onDemand = strings.EqualFold(r.Header.Get("Expect"), "100-continue")
			w = &responseAfterBody{w, from}
			defer from.discard()
		}
		if hasBody && r.ProtoMajor == 2 && (err != nil || r.Method == http.MethodGet || r.Method == http.MethodHead) {
			_ = r.Body.Close() // nobody reads it, and its window is memory until the handler returns
			bounded.Body = http.NoBody
		}
		next.ServeHTTP(w, bounded)
		flushInTime(w, r)
	})
}

// growStack gives the goroutine that net/http starts for a request over HTTP/2 a stack of 16 KiB, which most
// requests need, at once: it begins with 2 KiB, and would grow deep in the call, where a copy costs most
// (9 % of a gateway's CPU with one caller by gRPC, 4 % with this). The index keeps the array.
//
//go:noinline
func growStack(index int) byte {
	var array [10 << 10]byte
	return array[index]
}

// flushInTime sends what is still buffered of a response over HTTP/2, in limited time: net/http
// would wait without end for a window, and the memory of the request is not counted any longer.
func flushInTime(w http.ResponseWriter, r *http.Request) {
	if r.ProtoMajor == 2 {
		flushResponse(StallWriter(w, HandshakeTimeout))
	}
}

// requestBody is a body that reserves budget as it is read.
type requestBody struct {
	io.ReadCloser
	account *budget.Account
	// reserved is what the body has of the account.
	reserved atomic.Int64

	// conn is the connection of HTTP/1. onDemand is true until a body is read that is sent only then, and ended
	// once there is nothing to discard. isLast is true if the client closes the connection after it.
	conn                    http.ResponseController
	onDemand, ended, isLast bool
}

func (b *requestBody) release() { b.account.Release(b.reserved.Swap(0)) }

// Read implements io.Reader.
func (b *requestBody) Read(buf []byte) (int, error) {
	n, err := b.ReadCloser.Read(buf)
	if !b.ended { // else the response may be written meanwhile
		b.onDemand, b.ended = false, err != nil
	}
	if full := b.account.Reserve(int64(n)); full != nil {
		return 0, full
	}
	b.reserved.Add(int64(n))
	return n, err
}

// Close implements io.Closer. Over HTTP/1 net/http reads the rest.
func (b *requestBody) Close() error {
	b.discard()
	return b.ReadCloser.Close()
}

// What is read of the rest of a body that nobody needs: so much, as of net/http, in so much time.
const (
	discardBytes   = 256 << 10
	discardTimeout = time.Second
)

// discard has net/http read the rest of a body before the response over HTTP/1, up to 256 KiB. A
// client that sends on, or sends nothing, loses its connection: net/http would wait for it without end.
func (b *requestBody) discard() {
	if b.ended {
		return
	}
	b.ended = true
	until := time.Now()
	if !b.onDemand {
		until = until.Add(discardTimeout)
	}
	_ = b.conn.SetReadDeadline(until) // without deadlines, in tests, there is no connection
	if b.isLast && !b.onDemand {
		_, _ = io.CopyN(io.Discard, b.ReadCloser, discardBytes) // net/http reads nothing, and bytes left unread reset the connection
	}
	_ = b.ReadCloser.Close()
	_ = b.conn.SetReadDeadline(time.Time{})
}

// responseAfterBody is a response over HTTP/1 that begins once the body is discarded.
type responseAfterBody struct {
	http.ResponseWriter

	body *requestBody
}

var _ http.Flusher = (*responseAfterBody)(nil)

// WriteHeader implements http.ResponseWriter.
func (w *responseAfterBody) WriteHeader(status int) {
	w.body.discard()
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *responseAfterBody) Write(data []byte) (int, error) {
	w.body.discard()
	return w.ResponseWriter.Write(data)
}

// Flush implements http.Flusher.
func (w *responseAfterBody) Flush() { _ = w.FlushError() }

// FlushError is Flush with an error; http.ResponseController prefers it.
func (w *responseAfterBody) FlushError() error {
	w.body.discard()
	return w.body.conn.Flush()
}

// Unwrap lets http.ResponseController reach the connection.
func (w *responseAfterBody) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// EnableFullDuplex lets the response begin before the body's end; http.ResponseController finds it.
func (w *responseAfterBody) EnableFullDuplex() error {
	w.body.ended = true
	return w.body.conn.EnableFullDuplex()
}

// ReleaseBody releases the budget that the request's body has reserved so far. Streams of
// messages call it before each message, because only the latest is kept.
func ReleaseBody(r *http.Request) {
	if from, ok := r.Body.(*requestBody); ok {
		from.release()
	}
}
