package body

import (
	"errors"
	"io"
	"net/http"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

const (
	// firstRead bounds what is allocated on the word of a Content-Length alone.
	firstRead = 128 << 10
	// trusted is how many times what came is allocated on that word. The buffers before
	// the last are an eighth of the body together then, or the first one.
	trusted = 16
)

// Refuse returns TooLarge where the request says itself that it is over the
// limit, before a byte of its body is read.
func Refuse(r *http.Request, limit int64) error {
	if r.ContentLength > limit {
		return TooLarge(limit)
	}
	return nil
}

// shown is how much of what a caller says is repeated to it, in runes.
const shown = 80

// RefuseEncoded returns why a body is not taken as it comes: it is compressed.
func RefuseEncoded(r *http.Request) error {
	if encoding := r.Header.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
		return fault.Newf(fault.UnsupportedMedia, "Content-Encoding %.*q is not taken; send the body as it is", shown, encoding)
	}
	return nil
}

// Read returns the body, of at most limit bytes. The declared size, -1 if
// unknown, is a hint.
func Read(from io.Reader, declared, limit int64) ([]byte, error) {
	buf := make([]byte, 0, min(max(declared, 0), limit, firstRead)+1)
	for {
		if len(buf) == cap(buf) {
			buf = grow(buf, declared, limit)
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
			return nil, Broken(err)
		}
	}
}

// grow makes room for all that was declared, once enough of it has come, and doubles
// the buffer until then. It has room for one byte over the limit at most.
func grow(buf []byte, declared, limit int64) []byte {
	have := int64(len(buf))
	size := max(2*have, 512)
	if declared >= have && declared/trusted <= have {
		size = declared + 1
	}
	size = min(size, limit+1)
	out := make([]byte, have, size)
	copy(out, buf)
	return out
}

// Broken returns the fault of a body that could not be read to its end: the
// one that is in the error already, or that the caller went away.
func Broken(err error) error {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	if tooLarge, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return TooLarge(tooLarge.Limit)
	}
	return fault.Newf(fault.Cancelled, "the request's body ended early: %w", err)
}
