package transport

import (
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"time"
)

// limitMessage bounds the bodies of one message that reach next, and how long a caller may
// take nothing of its response. The connect library passes an error of the body on as it is
// when it is a *connect.Error, on every protocol, so faults keep their details.
func limitMessage(next http.Handler, s Settings) http.Handler {
	limit := int64(s.MaxMessageBytes)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// A copy, because net/http decides by the original's body whether the
		// connection can carry another request.
		bounded := r.WithContext(r.Context())
		body := StallReader(w, r, s.StallTimeout)
		enveloped := isEnveloped(r.Header.Get("Content-Type"))
		if enveloped {
			bounded.Body = &envelopedBody{Closer: body, prefixes: body, messages: body, timeout: s.StallTimeout, limit: limit}
		} else {
			bounded.Body = &unaryBody{limitedReader: limitedReader{from: body, left: limit, limit: limit}, Closer: body, err: CheckLength(r, limit)}
		}
		next.ServeHTTP(StallWriter(w, s.StallTimeout), bounded)
		// The library flushes the other protocols itself. On HTTP/1 a flush would cost
		// the response its Content-Length.
		if r.ProtoMajor == 2 && !enveloped {
			FlushResponse(w, s.StallTimeout)
		}
	})
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
}

// Read implements io.Reader.
func (l *limitedReader) Read(buf []byte) (int, error) {
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

	// err is why the body is not read at all.
	err error
}

// Read implements io.Reader.
func (u *unaryBody) Read(buf []byte) (int, error) {
	if u.err != nil {
		return 0, RPCError(u.err)
	}
	return u.limitedReader.Read(buf)
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
