package rest

import (
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"

	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// textPlain is the type of a part that names none, by RFC 7578.
const textPlain = "text/plain"

// parts reads a form: one blob per part.
func parts(from io.Reader, boundary string, limit int64) ([]payload.Part, error) {
	if boundary == "" {
		return nil, fault.New(fault.InvalidRequest, "multipart/form-data names no boundary")
	}
	form := multipart.NewReader(from, boundary)
	var out []payload.Part
	for {
		part, err := form.NextPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, malformed(err)
		}
		if len(out) == payload.MaxParts {
			return nil, fault.Newf(fault.InvalidRequest, "more than %d parts", payload.MaxParts)
		}
		blob, err := blobOf(part, len(out), limit)
		if err != nil {
			return nil, err
		}
		out = append(out, blob)
	}
	if len(out) == 0 {
		return nil, empty()
	}
	return out, nil
}

func blobOf(part *multipart.Part, index int, limit int64) (payload.Part, error) {
	name := part.FormName()
	if name == "" {
		return payload.Part{}, invalid(fmt.Sprintf("inputs[%d]", index), errors.New("the part has no name; a part's name is its input's"))
	}
	contentType := part.Header.Get("Content-Type")
	if contentType == "" {
		contentType = textPlain
	}
	data, err := transport.ReadBody(formReader{part}, -1, limit)
	return payload.OfBlob(name, contentType, data), err
}

// formReader tells a form that is broken from a body that is.
type formReader struct{ part io.Reader }

// Read implements io.Reader.
func (r formReader) Read(buf []byte) (int, error) {
	n, err := r.part.Read(buf)
	if err != nil && !errors.Is(err, io.EOF) {
		err = malformed(err)
	}
	return n, err
}

// malformed returns what is wrong with a form: the body's own end, such as its
// limit, or else its syntax.
func malformed(err error) error {
	_, isFault := errors.AsType[*fault.Fault](err)
	_, tooLarge := errors.AsType[*http.MaxBytesError](err)
	if isFault || tooLarge {
		return transport.ReadFault(err)
	}
	// The library's words may quote a line of the form.
	return fault.Newf(fault.InvalidRequest, "the form cannot be read: %.*s", shown, err)
}
