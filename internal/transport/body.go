package transport

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/grpc/mem"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// firstRead is the least buffer for a body.
const firstRead = 8 << 10

// TooLarge returns the fault of a request over the limit, in bytes.
func TooLarge(limit int64) *fault.Fault {
	return fault.Newf(fault.PayloadTooLarge, "the request is larger than this gateway's limit of %d bytes", limit).
		WithMetadata("limit_bytes", strconv.FormatInt(limit, 10))
}

// Stalled returns the fault of a request whose body arrives too slowly.
func Stalled(timeout time.Duration) *fault.Fault {
	return fault.Newf(fault.DeadlineExceeded, "the request's body came too slowly: less than %d KiB within %s", stallBytes>>10, timeout)
}

// CheckLength returns TooLarge where Content-Length is over the limit.
func CheckLength(r *http.Request, limit int64) error {
	if r.ContentLength > limit {
		return TooLarge(limit)
	}
	return nil
}

// contentEncoding returns the Content-Encoding of a request as HTTP compares it; empty for none.
func contentEncoding(r *http.Request) string {
	encoding := strings.ToLower(r.Header.Get("Content-Encoding"))
	if encoding == "identity" {
		return ""
	}
	return encoding
}

// CheckEncoding rejects compressed bodies.
func CheckEncoding(r *http.Request) error {
	if encoding := contentEncoding(r); encoding != "" {
		return fault.Newf(fault.UnsupportedMedia, "Content-Encoding %.*q is not accepted; send the body as it is", fault.MaxQuoted, encoding)
	}
	return nil
}

// ReadBody returns the body, of at most limit bytes. The declared size, -1 if unknown, is a
// hint.
func ReadBody(from io.Reader, declared, limit int64) ([]byte, error) {
	buffer := growingBuffer{declared: declared, limit: limit}
	defer buffer.keep()
	out, err := buffer.read(from)
	if err != nil {
		return nil, ReadFault(err)
	}
	if buffer.kept != nil {
		out = bytes.Clone(out)
	}
	return out, nil
}

// inflaterBytes is what a reader of gzip or deflate takes.
const inflaterBytes = 64 << 10

// ReadEncodedBody is ReadBody for the body of a request that its Content-Encoding compresses, and
// that inflates to at most limit bytes. The account of the request has these until it closes.
func ReadEncodedBody(from io.Reader, r *http.Request, limit int64) ([]byte, error) {
	encoding, account := contentEncoding(r), budget.FromContext(r.Context())
	switch encoding {
	case "":
		return ReadBody(from, r.ContentLength, limit)
	case encodingGzip, "x-gzip", encodingDeflate:
	default:
		return nil, fault.Newf(fault.UnsupportedMedia, "Content-Encoding %.*q is not accepted; send the body in gzip, deflate, or as it is", fault.MaxQuoted, encoding)
	}
	if err := account.Reserve(inflaterBytes); err != nil {
		return nil, err
	}
	defer account.Release(inflaterBytes)
	buffer := growingBuffer{limit: limit, account: account}
	out, err := inflate(from, encoding, &buffer)
	if err != nil {
		buffer.keep()
		return nil, ReadFault(err)
	}
	return out, nil
}

// bodyBuffers has buffers of 8 KiB to 16 MiB: most bodies are decoded, and then their buffers are free.
var bodyBuffers, _ = mem.NewBinaryTieredBufferPool(13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24) //nolint:mnd // powers of two

// growingBuffer is what a body is read into, twice what has come at most.
type growingBuffer struct {
	// declared, if above 0, is the size of a body that is not decoded at once: the last buffer is its own.
	declared, limit int64
	// account, if not nil, is where each buffer is reserved before it is allocated.
	account *budget.Account
	// kept is the present buffer, if there is one.
	kept *[]byte
}

// read returns what is read until the end, which is valid until keep.
func (g *growingBuffer) read(from io.Reader) (out []byte, err error) {
	for err == nil {
		if len(out) == cap(out) {
			if out, err = g.grow(out); err != nil {
				return nil, err
			}
		}
		var n int
		n, err = from.Read(out[len(out):cap(out)])
		if out = out[:len(out)+n]; int64(len(out)) > g.limit {
			return nil, TooLarge(g.limit)
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return out, err
}

// grow returns a buffer of twice the size with the same bytes, of one byte over the limit at most.
func (g *growingBuffer) grow(buf []byte) ([]byte, error) {
	size := min(max(2*int64(len(buf)), firstRead), g.limit+1)
	if err := g.account.Reserve(size); err != nil {
		return nil, err
	}
	if have := int64(len(buf)); 0 < g.declared && have <= g.declared && g.declared < size {
		defer g.keep()
		return append(make([]byte, 0, min(g.declared, g.limit)+1), buf...), nil
	}
	next := bodyBuffers.Get(int(size))
	out := (*next)[:copy(*next, buf):size]
	g.keep()
	g.kept = next
	return out, nil
}

// keep keeps the present buffer for other bodies.
func (g *growingBuffer) keep() {
	if g.kept != nil {
		g.account.Release(int64(len(*g.kept)))
		bodyBuffers.Put(g.kept)
		g.kept = nil
	}
}

// ReadFault returns the fault of a body that could not be read to its end: the fault in the
// error's chain, TooLarge, or CANCELLED because the caller disconnected.
func ReadFault(err error) error {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	if tooLarge, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return TooLarge(tooLarge.Limit)
	}
	return fault.Newf(fault.Cancelled, "the request's body ended early: %w", err)
}

// FormReader reads a part of a form. Its errors are faults.
type FormReader struct{ io.Reader }

// Read implements io.Reader.
func (r FormReader) Read(buf []byte) (int, error) {
	n, err := r.Reader.Read(buf)
	if err != nil && !errors.Is(err, io.EOF) {
		err = formFault(err)
	}
	return n, err
}

// formFault returns the fault of a form that cannot be read: the body's own, such as its
// limit, or else its syntax.
func formFault(err error) error {
	_, isFault := errors.AsType[*fault.Fault](err)
	_, tooLarge := errors.AsType[*http.MaxBytesError](err)
	if isFault || tooLarge {
		return ReadFault(err)
	}
	// The library's error may quote a line of the form.
	return fault.Newf(fault.InvalidRequest, "the form cannot be read: %.*s", fault.MaxQuoted, err)
}

// limitMessage bounds the bodies of one message that reach next, and how long a caller may
// take nothing of its response. The connect library passes an error of the body on as it is
// when it is a *connect.Error, on every protocol, so faults keep their details.
func limitMessage(next http.Handler, s Settings) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w = StallWriter(w, s.StallTimeout)
		body := StallReader(w, r, s)
		next.ServeHTTP(w, withCallBody(r, body, body, s))
		// The library flushes the other protocols itself. On HTTP/1 a flush would cost
		// the response its Content-Length.
		if r.ProtoMajor == 2 && !IsEnveloped(r.Header.Get("Content-Type")) {
			flushResponse(w)
		}
	})
}

// withCallBody returns a copy of the request with a body that keeps its messages for takeMessage:
// net/http decides by the original's body whether the connection can carry another request.
func withCallBody(r *http.Request, prefixes io.ReadCloser, messages io.Reader, s Settings) *http.Request {
	body := &callBody{
		Closer: prefixes, prefixes: prefixes, messages: messages, timeout: s.StallTimeout, limit: int64(s.MaxMessageBytes),
		memory: budget.FromContext(r.Context()), release: func() { ReleaseBody(r) },
		isEnveloped: IsEnveloped(r.Header.Get("Content-Type")), isPlain: s.Uncompressed, host: r.Host,
	}
	encoding := cmp.Or(r.Header.Get("Grpc-Encoding"), r.Header.Get("Connect-Content-Encoding"))
	out := r.WithContext(context.WithValue(r.Context(), callBodyKey{}, body))
	out.Body = body
	if !body.isEnveloped {
		body.declared, encoding = r.ContentLength, r.Header.Get("Content-Encoding")
		if encoding == encodingGzip {
			// The library would decompress what it is given.
			out.Header = r.Header.Clone()
			out.Header.Del("Content-Encoding")
		}
	}
	body.isGzip = encoding == encodingGzip
	return out
}

// IsEnveloped reports whether messages come behind a prefix: gRPC, gRPC-Web and Connect's
// streams.
func IsEnveloped(contentType string) bool {
	return strings.HasPrefix(contentType, "application/grpc") || strings.HasPrefix(contentType, "application/connect+")
}

// prefixSize is the flags and the length before each enveloped message, and flagCompressed
// the flag of a compressed one.
const (
	prefixSize     = 5
	flagCompressed = 1
)

// callBody is the body of a call. It reads each message itself, within its limit, with memory
// that is reserved, and decompresses it. The connect library would ask nobody for that memory,
// so it gets one of a byte in its place, and takeMessage has the real one.
type callBody struct {
	io.Closer

	// prefixes is where the first byte of each prefix is read, and messages where all else
	// is. They are one body: a stream's caller may be silent between two messages, so only
	// messages has a stall timeout there.
	prefixes, messages io.Reader
	timeout            time.Duration
	// declared is the length of a body that is one message, -1 if it is unknown.
	declared, limit int64
	// host is the name by which the caller has called.
	host string
	// memory is the account of the request, and release releases what was reserved for what the
	// body has read.
	memory  *budget.Account
	release func()
	// For streams of messages: beforeMessage is called before each, if not nil, and interrupt makes reading fail.
	beforeMessage, interrupt     func()
	isEnveloped, isGzip, isPlain bool

	// message is the one that was read last, which is in the buffer.
	message []byte
	buffer  growingBuffer
	prefix  [prefixSize + 1]byte
	// unread is the part of the prefix that was checked and not yet returned, and ended is true
	// after the message of a body that is one.
	unread []byte
	ended  bool
}

type callBodyKey struct{}

// takeMessage returns the message that was read last, and what releases its memory.
func takeMessage(ctx context.Context) (message []byte, release func()) {
	b, ok := ctx.Value(callBodyKey{}).(*callBody)
	if !ok {
		return nil, func() {}
	}
	message, b.message = b.message, nil
	return message, func() {
		b.release()
		b.buffer.keep() // it is decoded
	}
}

// Read implements io.Reader. Errors are as the connect library passes them on: a *connect.Error
// as it is, on every protocol, so faults keep their details.
func (b *callBody) Read(buf []byte) (int, error) {
	if !b.isEnveloped {
		if !b.ended {
			b.ended = true
			if err := b.readMessage(b.messages, b.declared, b.isGzip); err != nil {
				return 0, b.readError(err)
			}
		}
		return 0, io.EOF
	}
	if len(b.unread) == 0 {
		if err := b.readPrefix(); err != nil {
			return 0, b.readError(err)
		}
	}
	n := copy(buf, b.unread)
	b.unread = b.unread[n:]
	return n, nil
}

// readPrefix reads a prefix and its message.
func (b *callBody) readPrefix() error {
	if b.beforeMessage != nil {
		b.beforeMessage()
	}
	if _, err := io.ReadFull(b.prefixes, b.prefix[:1]); err != nil {
		return err
	}
	if _, err := io.ReadFull(b.messages, b.prefix[1:prefixSize]); err != nil {
		return noEnd(err)
	}
	size := int64(binary.BigEndian.Uint32(b.prefix[1:prefixSize]))
	isCompressed := b.prefix[0]&flagCompressed != 0 && b.isGzip
	if err := b.readMessage(io.LimitReader(b.messages, size), size, isCompressed); err != nil {
		return err
	}
	if isCompressed {
		b.prefix[0] &^= flagCompressed
	}
	// An empty message is not decoded by the library, so others get one byte.
	size = min(int64(len(b.message)), 1)
	binary.BigEndian.PutUint32(b.prefix[1:], uint32(size))
	b.unread = b.prefix[:prefixSize+size]
	return nil
}

// noEnd returns the error of a read where the body must not end.
func noEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// readMessage reads a message of that size, -1 if it is unknown.
func (b *callBody) readMessage(from io.Reader, size int64, isCompressed bool) (err error) {
	if size > b.limit {
		return TooLarge(b.limit)
	}
	if isCompressed && b.isPlain {
		return notCompressible()
	}
	if !isCompressed {
		b.buffer = growingBuffer{limit: b.limit}
		if b.message, err = b.buffer.read(from); err == nil && size > int64(len(b.message)) {
			err = connect.NewError(connect.CodeInternal, fmt.Errorf("protocol error: promised %d bytes, got %d", size, len(b.message)))
		}
		return err
	}
	b.buffer = growingBuffer{limit: b.limit, account: b.memory}
	within := &io.LimitedReader{R: from, N: b.limit + 1}
	if b.message, err = inflate(within, encodingGzip, &b.buffer); err == nil {
		_, err = io.Copy(io.Discard, within) // what is behind the end of the gzip
	}
	if within.N == 0 {
		return TooLarge(b.limit)
	}
	return err
}

// readError returns a read error as the library passes it on. A read without a stall timeout
// that was interrupted is Stalled too.
func (b *callBody) readError(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return RPCError(Stalled(b.timeout))
	}
	return rpcErrorOf(err)
}

// notCompressible returns the fault of a message in gzip to a service that takes none.
func notCompressible() *fault.Fault {
	return fault.New(fault.UnsupportedMedia, "messages of this service are not accepted in gzip; send them as they are")
}
