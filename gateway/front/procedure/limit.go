package procedure

import (
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"strings"

	"github.com/stagemesh/stagemesh/gateway/front/body"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// prefixSize is the flags and the length before each message of gRPC, gRPC-Web
// and Connect's streams.
const prefixSize = 5

// limit bounds the bodies that reach next, and how long a caller may take
// nothing of its answer: a stream keeps its place in the gateway until it is
// sent. The connect library hands an error of the body on as it is when it is a
// *connect.Error, on every protocol, so refusals keep their details.
func limit(next http.Handler, s Settings) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// A copy, because net/http decides by the original's body whether the
		// connection can carry another request.
		bounded := r.WithContext(r.Context())
		bounded.Body = newMessage(r, body.Patient(w, r, s.Patience), int64(s.MaxMessageBytes))
		next.ServeHTTP(body.PatientWriter(w, s.Patience), bounded)
		// The library flushes the other protocols by itself. On HTTP/1 a flush
		// would cost the answer its Content-Length.
		if r.ProtoMajor == 2 && !enveloped(r.Header.Get("Content-Type")) {
			body.Finish(w, s.Patience)
		}
	})
}

// newMessage returns a body that holds one message.
func newMessage(r *http.Request, from io.ReadCloser, limit int64) io.ReadCloser {
	if enveloped(r.Header.Get("Content-Type")) {
		return &envelope{capped: capped{from: from, left: limit + prefixSize, limit: limit}, Closer: from}
	}
	out := &unary{capped: capped{from: from, left: limit, limit: limit}, Closer: from}
	out.refused = body.Refuse(r, limit)
	return out
}

func enveloped(contentType string) bool {
	return strings.HasPrefix(contentType, "application/grpc") || strings.HasPrefix(contentType, "application/connect+")
}

// capped fails with the limit's fault instead of giving one byte too many.
type capped struct {
	from        io.Reader
	left, limit int64
}

// Read implements io.Reader.
func (c *capped) Read(buf []byte) (int, error) {
	if int64(len(buf)) > c.left+1 {
		buf = buf[:c.left+1]
	}
	n, err := c.from.Read(buf)
	if int64(n) > c.left {
		return 0, Failure(body.TooLarge(c.limit))
	}
	c.left -= int64(n)
	return n, coded(err)
}

// coded returns a fault as what the library passes on; other errors it knows
// best itself.
func coded(err error) error {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return Failure(f)
	}
	return err
}

// unary is the body of Connect's unary protocol: the message and nothing else.
type unary struct {
	capped
	io.Closer

	refused error
}

// Read implements io.Reader.
func (u *unary) Read(buf []byte) (int, error) {
	if u.refused != nil {
		return 0, Failure(u.refused)
	}
	return u.capped.Read(buf)
}

// envelope is a body of one message behind its prefix.
type envelope struct {
	capped
	io.Closer

	prefix [prefixSize]byte
	// unread is what of the prefix was checked and not yet given; nil before.
	unread []byte
}

// Read implements io.Reader. The prefix is read whole and checked before any
// of it is given.
func (e *envelope) Read(buf []byte) (int, error) {
	if e.unread == nil {
		if err := e.readPrefix(); err != nil {
			return 0, err
		}
	}
	if len(e.unread) > 0 {
		n := copy(buf, e.unread)
		e.unread = e.unread[n:]
		return n, nil
	}
	return e.capped.Read(buf)
}

func (e *envelope) readPrefix() error {
	if _, err := io.ReadFull(&e.capped, e.prefix[:]); err != nil {
		return err
	}
	if int64(binary.BigEndian.Uint32(e.prefix[1:])) > e.limit {
		return Failure(body.TooLarge(e.limit))
	}
	e.unread = e.prefix[:]
	return nil
}
