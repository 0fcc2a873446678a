package transport

import (
	"errors"
	"io"
	"net/http"
	"strconv"
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

// Stalled returns the fault of a request whose body stopped arriving.
func Stalled(timeout time.Duration) *fault.Fault {
	return fault.Newf(fault.DeadlineExceeded, "nothing of the request's body came for %s", timeout)
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
