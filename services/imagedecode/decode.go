package imagedecode

import (
	"bytes"
	"fmt"
	"image"
	"image/jpeg"
	"image/png"
	"mime"
	"net/http"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

// decode returns the image, which has at most maxPixels of them.
func decode(blob payload.Blob, maxPixels int) (image.Image, error) {
	if !accepted(blob.ContentType) {
		return nil, invalid("its content type is %s; send an image/png or image/jpeg", blob.ContentType)
	}
	if len(blob.Data) == 0 {
		return nil, invalid("it is empty; send a PNG or JPEG image")
	}
	readSize, read := png.DecodeConfig, png.Decode
	kind := http.DetectContentType(blob.Data)
	switch kind {
	case "image/png":
	case "image/jpeg":
		readSize, read = jpeg.DecodeConfig, jpeg.Decode
	default:
		return nil, invalid("it is no PNG or JPEG image but looks like %s; its first bytes are % x", kind, blob.Data[:min(len(blob.Data), 8)])
	}
	size, err := readSize(bytes.NewReader(blob.Data))
	if err != nil {
		return nil, invalid("its bytes begin as %s but cannot be decoded: %w", kind, err)
	}
	// Sides first: their product cannot overflow then.
	if size.Width > maxSide || size.Height > maxSide || size.Width*size.Height > maxPixels {
		return nil, invalid("it is of %d by %d pixels; at most %d in all and %d on a side are taken", size.Width, size.Height, maxPixels, maxSide)
	}
	img, err := read(bytes.NewReader(blob.Data))
	if err != nil {
		return nil, invalid("its bytes begin as %s of %d by %d pixels but cannot be decoded: %w", kind, size.Width, size.Height, err)
	}
	if img.Bounds().Empty() {
		return nil, invalid("it has no pixels")
	}
	return img, nil
}

// accepted reports whether a blob of the content type may be an image that is
// taken: where it says nothing of use, the bytes decide.
func accepted(contentType string) bool {
	if contentType == "" {
		return true
	}
	kind, _, err := mime.ParseMediaType(contentType)
	if err != nil {
		return false
	}
	switch kind {
	case "image/png", "image/jpeg", "image/jpg", "image/*", payload.OctetStream:
		return true
	default:
		return false
	}
}

// invalid returns the fault of an item whose image cannot be used. The format
// goes on after "input image: ".
func invalid(format string, args ...any) error {
	cause := fmt.Errorf(format, args...)
	return fault.Newf(fault.InvalidInput, "input %s: %w", Input, cause).WithViolation("inputs."+Input, "%s", cause)
}
