package procedure

import (
	"compress/gzip"
	"errors"
	"io"

	"connectrpc.com/connect"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// decompressor is gzip with a bound on what comes out and with failures that
// the library passes on as they are.
type decompressor struct {
	gzip  gzip.Reader
	out   capped
	limit int64
	// broken is why the data is no gzip at all. The library would answer an
	// error of Reset without details, so Read tells it.
	broken error
}

var _ connect.Decompressor = (*decompressor)(nil)

func newDecompressor(limit int) func() connect.Decompressor {
	return func() connect.Decompressor { return &decompressor{limit: int64(limit)} }
}

// Reset implements connect.Decompressor.
func (d *decompressor) Reset(from io.Reader) error {
	d.broken = d.gzip.Reset(from)
	d.out = capped{from: &d.gzip, left: d.limit, limit: d.limit}
	return nil
}

// Read implements io.Reader.
func (d *decompressor) Read(buf []byte) (int, error) {
	if d.broken != nil {
		return 0, corrupt(d.broken)
	}
	n, err := d.out.Read(buf)
	if _, coded := errors.AsType[*connect.Error](err); err == nil || errors.Is(err, io.EOF) || coded {
		return n, err
	}
	return n, corrupt(err)
}

// Close implements connect.Decompressor.
func (d *decompressor) Close() error { return nil }

func corrupt(err error) error {
	return Failure(fault.Newf(fault.InvalidRequest, "the message cannot be decompressed: %w", err))
}

// newCompressor exists because a compression has both sides; options keep every
// answer below the size where it would be used.
func newCompressor() connect.Compressor { return gzip.NewWriter(io.Discard) }
