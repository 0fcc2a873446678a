package transport

import (
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

const (
	// firstRead bounds the allocation that a Content-Length alone can cause.
	firstRead = 128 << 10
	// trustedGrowth is the factor over the received bytes up to which Content-Length is
	// believed. All buffers before the last are then an eighth of the body together, or
	// firstRead.
	trustedGrowth = 16
)

// maxQuoted bounds how much of a caller's own text messages repeat, in runes.
const maxQuoted = 80

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

// CheckEncoding rejects compressed bodies.
func CheckEncoding(r *http.Request) error {
	if encoding := r.Header.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
		return fault.Newf(fault.UnsupportedMedia, "Content-Encoding %.*q is not taken; send the body as it is", maxQuoted, encoding)
	}
	return nil
}

// ReadBody returns the body, of at most limit bytes. The declared size, -1 if unknown, is a
// hint.
func ReadBody(from io.Reader, declared, limit int64) ([]byte, error) {
	buf := make([]byte, 0, min(max(declared, 0), limit, firstRead)+1)
	for {
		if len(buf) == cap(buf) {
			buf = growBuffer(buf, declared, limit)
		}
		n, err := from.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if int64(len(buf)) > limit {
			return nil, TooLarge(limit)
		}
		if errors.Is(err, io.EOF) {
			return buf, nil
		}
		if err != nil {
			return nil, ReadFault(err)
		}
	}
}

// growBuffer allocates the declared size once enough has arrived, and doubles the buffer
// until then. The capacity is at most one byte over the limit.
func growBuffer(buf []byte, declared, limit int64) []byte {
	have := int64(len(buf))
	size := max(2*have, 512)
	if declared >= have && declared/trustedGrowth <= have {
		size = declared + 1
	}
	size = min(size, limit+1)
	out := make([]byte, have, size)
	copy(out, buf)
	return out
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
		err = FormFault(err)
	}
	return n, err
}

// FormFault returns the fault of a form that cannot be read: the body's own, such as its
// limit, or else its syntax.
func FormFault(err error) error {
	_, isFault := errors.AsType[*fault.Fault](err)
	_, tooLarge := errors.AsType[*http.MaxBytesError](err)
	if isFault || tooLarge {
		return ReadFault(err)
	}
	// The library's error may quote a line of the form.
	return fault.Newf(fault.InvalidRequest, "the form cannot be read: %.*s", maxQuoted, err)
}

// limitMessage bounds the bodies of one message that reach next, and how long a caller may
// take nothing of its response. The connect library passes an error of the body on as it is
// when it is a *connect.Error, on every protocol, so faults keep their details.
func limitMessage(next http.Handler, s Settings) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w = StallWriter(w, s.StallTimeout)
		next.ServeHTTP(w, boundMessage(w, r, s))
		// The library flushes the other protocols itself. On HTTP/1 a flush would cost
		// the response its Content-Length.
		if r.ProtoMajor == 2 && !isEnveloped(r.Header.Get("Content-Type")) {
			flushResponse(w)
		}
	})
}

// boundMessage returns a copy of the request with a bounded body: net/http decides by the
// original's body whether the connection can carry another request.
func boundMessage(w http.ResponseWriter, r *http.Request, s Settings) *http.Request {
	out, body, limit := r.WithContext(r.Context()), StallReader(w, r, s), int64(s.MaxMessageBytes)
	if isEnveloped(r.Header.Get("Content-Type")) {
		out.Body = &envelopedBody{Closer: body, prefixes: body, messages: body, timeout: s.StallTimeout, limit: limit}
	} else {
		out.Body = &unaryBody{limitedReader{from: body, left: limit, limit: limit, err: CheckLength(r, limit)}, body}
	}
	return out
}

// isEnveloped reports whether messages come behind a prefix: gRPC, gRPC-Web and Connect's
// streams.
func isEnveloped(contentType string) bool {
	return strings.HasPrefix(contentType, "application/grpc") || strings.HasPrefix(contentType, "application/connect+")
}

// limitedReader fails with TooLarge instead of returning one byte too many.
type limitedReader struct {
	from        io.Reader
	left, limit int64
	// err is why nothing is read at all.
	err error
}

// Read implements io.Reader.
func (l *limitedReader) Read(buf []byte) (int, error) {
	if l.err != nil {
		return 0, RPCError(l.err)
	}
	if int64(len(buf)) > l.left+1 {
		buf = buf[:l.left+1]
	}
	n, err := l.from.Read(buf)
	if int64(n) > l.left {
		return 0, RPCError(TooLarge(l.limit))
	}
	l.left -= int64(n)
	return n, rpcErrorOf(err)
}

// unaryBody is the body of Connect's unary protocol: the message and nothing else.
type unaryBody struct {
	limitedReader
	io.Closer
}

// prefixSize is the flags and the length before each enveloped message.
const prefixSize = 5

// envelopedBody is a body of messages behind their prefixes. Each message is bounded, and
// its prefix is checked before any of it is read.
type envelopedBody struct {
	io.Closer

	// prefixes is where the first byte of each prefix is read, and messages where all else
	// is. They are one body: a stream's caller may be silent between two messages, so only
	// messages has a stall timeout there.
	prefixes, messages io.Reader
	timeout            time.Duration
	limit              int64
	// beforeMessage is called before each message, if not nil.
	beforeMessage func()

	prefix [prefixSize]byte
	// unread is the part of the prefix that was checked and not yet returned, and left the
	// number of bytes of the message that are not read yet.
	unread []byte
	left   int64
}

// Read implements io.Reader.
func (b *envelopedBody) Read(buf []byte) (int, error) {
	if len(b.unread) == 0 && b.left == 0 {
		if err := b.readPrefix(); err != nil {
			return 0, err
		}
	}
	if len(b.unread) > 0 {
		n := copy(buf, b.unread)
		b.unread = b.unread[n:]
		return n, nil
	}
	n, err := b.messages.Read(buf[:min(int64(len(buf)), b.left)])
	b.left -= int64(n)
	return n, b.readError(err)
}

func (b *envelopedBody) readPrefix() error {
	if b.beforeMessage != nil {
		b.beforeMessage()
	}
	if _, err := io.ReadFull(b.prefixes, b.prefix[:1]); err != nil {
		return b.readError(err)
	}
	if _, err := io.ReadFull(b.messages, b.prefix[1:]); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return b.readError(err)
	}
	b.left = int64(binary.BigEndian.Uint32(b.prefix[1:]))
	if b.left > b.limit {
		return RPCError(TooLarge(b.limit))
	}
	b.unread = b.prefix[:]
	return nil
}

// readError returns a read error as the library passes it on. A read without a stall timeout
// that was interrupted is Stalled too.
func (b *envelopedBody) readError(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return RPCError(Stalled(b.timeout))
	}
	return rpcErrorOf(err)
}
