package transport

import (
	"cmp"
	"errors"
	"io"
	"math"
	"mime/multipart"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// maxPartHeader bounds the header of a form's part, with what precedes it, in bytes. The library
// takes 10,000 headers, which are many times their bytes in memory.
const maxPartHeader = 4 << 10

// FormBytes is what reading a form takes beside the bytes of its parts.
const FormBytes = 256 << 10

// Form reads the parts of a form. Errors of NextPart are faults, or io.EOF after the last part.
type Form struct {
	parts *multipart.Reader
	from  io.Reader
	// left is how many bytes of a header may be read, -1 once there are more.
	left int64
	// failed is why the body cannot be read; the library returns another error within a header.
	failed error
}

// NewForm returns a reader of the form.
func NewForm(from io.Reader, boundary string) *Form {
	out := &Form{from: from}
	out.parts = multipart.NewReader(formHeaders{out}, boundary)
	return out
}

// NextPart returns the next part, whose content is read before the next call.
func (f *Form) NextPart() (*multipart.Part, error) {
	f.left = maxPartHeader
	part, err := f.parts.NextPart()
	isLong := f.left < 0
	f.left = math.MaxInt64
	switch {
	case err == nil || errors.Is(err, io.EOF):
		return part, err
	case isLong:
		return nil, fault.Newf(fault.InvalidRequest, "the form has a part whose header takes more than %d bytes", maxPartHeader)
	}
	return nil, formFault(cmp.Or(f.failed, err))
}

// formHeaders is what a form is read from.
type formHeaders struct{ form *Form }

// Read implements io.Reader.
func (r formHeaders) Read(buf []byte) (int, error) {
	if r.form.left <= 0 {
		r.form.left = -1
		return 0, io.ErrUnexpectedEOF
	}
	n, err := r.form.from.Read(buf[:min(int64(len(buf)), r.form.left)])
	r.form.left -= int64(n)
	if err != nil && !errors.Is(err, io.EOF) {
		r.form.failed = err
	}
	return n, err
}
