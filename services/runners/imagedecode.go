package runners

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"image"
	"image/color"
	"image/jpeg"
	"image/png"
	"io"
	"math"
	"mime"
	"net/http"
	"runtime"
	"slices"

	"golang.org/x/sync/semaphore"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// Channels is how many values a pixel has.
type Channels string

// The channels.
const (
	Grey Channels = "grey"
	RGB  Channels = "rgb"
)

func (c Channels) count() int {
	if c == Grey {
		return 1
	}
	return 3
}

// Layout is the order of the tensor's axes after the row.
type Layout string

// The layouts: height and width and channel, in one axis or in three.
const (
	Flat Layout = "flat"
	HWC  Layout = "hwc"
	CHW  Layout = "chw"
)

// Resample is how pixels of the image become pixels of the tensor.
type Resample string

const (
	// Box takes the mean of the area that a pixel covers. It is exact if the image is a
	// whole multiple of the tensor's size.
	Box Resample = "box"
	// Bilinear weighs the pixels around linearly. To make an image smaller it takes as
	// many pixels as the area has.
	Bilinear Resample = "bilinear"
	// Nearest takes the one pixel in the middle.
	Nearest Resample = "nearest"
)

const (
	// defaultMaxPixels bounds an image unless the settings do.
	defaultMaxPixels = 25_000_000
	// maxSide bounds each side of an image; a JPEG cannot have a longer one.
	maxSide = 1<<16 - 1
	// maxValues bounds the tensor.
	maxValues = 1 << 26
	// maxScans bounds the scans of an image of max_pixels; smaller ones may have more.
	// Encoders write about ten.
	maxScans = 32
	// maxPixelBytes is the most that a pixel takes: a progressive JPEG of four channels.
	maxPixelBytes = 24
)

// The names of the parts of an image_decode stage.
const (
	Image  = "image"
	Pixels = "pixels"
)

// ImageDecodeSettings configure a stage that decodes, resizes and normalises images.
type ImageDecodeSettings struct {
	// Width and Height of the tensor, in pixels.
	Width  int `yaml:"width"`
	Height int `yaml:"height"`
	// Channels is RGB if empty.
	Channels Channels `yaml:"channels"`
	// Layout is CHW if empty.
	Layout Layout `yaml:"layout"`
	// Resample is Bilinear if empty.
	Resample Resample `yaml:"resample"`
	// Range is the values of black and white; empty means [0, 1].
	Range []float64 `yaml:"range"`
	// Mean is subtracted from each channel after that, and Std divides the difference; one
	// value for all channels, or one for each. Empty means 0 and 1.
	Mean []float64 `yaml:"mean"`
	Std  []float64 `yaml:"std"`
	// MaxPixels bounds an image's width times height; 0 means 25,000,000.
	MaxPixels int `yaml:"max_pixels"`
	// Concurrency is the number of batches that are decoded at once; 0 means one for each
	// processor.
	Concurrency int `yaml:"concurrency"`
}

func (s ImageDecodeSettings) withDefaults() ImageDecodeSettings {
	s.Channels, s.Layout, s.Resample = cmp.Or(s.Channels, RGB), cmp.Or(s.Layout, CHW), cmp.Or(s.Resample, Bilinear)
	s.MaxPixels = cmp.Or(s.MaxPixels, defaultMaxPixels)
	s.Concurrency = cmp.Or(s.Concurrency, runtime.GOMAXPROCS(0))
	if len(s.Range) == 0 {
		s.Range = []float64{0, 1}
	}
	return s
}

// validate checks settings that have their defaults.
func (s ImageDecodeSettings) validate() error {
	channels := s.Channels.count()
	fits := func(list []float64) bool { return len(list) <= 1 || len(list) == channels }
	switch {
	case s.Width < 1 || s.Width > maxSide:
		return fmt.Errorf("width: %d is not between 1 and %d", s.Width, maxSide)
	case s.Height < 1 || s.Height > maxSide:
		return fmt.Errorf("height: %d is not between 1 and %d", s.Height, maxSide)
	case s.Channels != Grey && s.Channels != RGB:
		return fmt.Errorf("channels: %q is not grey or rgb", s.Channels)
	case s.Width*s.Height*channels > maxValues:
		return fmt.Errorf("width: %d times a height of %d and %d channels is more than %d values", s.Width, s.Height, channels, maxValues)
	case s.Layout != Flat && s.Layout != HWC && s.Layout != CHW:
		return fmt.Errorf("layout: %q is not flat, hwc or chw", s.Layout)
	case s.Resample != Box && s.Resample != Bilinear && s.Resample != Nearest:
		return fmt.Errorf("resample: %q is not box, bilinear or nearest", s.Resample)
	case len(s.Range) != 2:
		return fmt.Errorf("range: %v is not two numbers, for black and for white", s.Range)
	case s.MaxPixels < 0:
		return fmt.Errorf("max_pixels: %d is negative", s.MaxPixels)
	case s.Concurrency < 0:
		return fmt.Errorf("concurrency: %d is negative", s.Concurrency)
	case !fits(s.Mean):
		return fmt.Errorf("mean: %v is neither one number nor one for each of %d channels", s.Mean, channels)
	case !fits(s.Std):
		return fmt.Errorf("std: %v is neither one number nor one for each of %d channels", s.Std, channels)
	case slices.Contains(s.Std, 0):
		return fmt.Errorf("std: %v divides by zero", s.Std)
	}
	return nil
}

// NewImageDecode returns a runner that takes a PNG or JPEG image and returns an FP32 tensor
// of one row: [1, H*W*C], [1, H, W, C] or [1, C, H, W]. The image is stretched to the size;
// nothing is cropped.
//
// The bytes say whether the image is a PNG or a JPEG, but a content type that names
// something else is refused. A bad image fails alone with INVALID_INPUT. The image's size
// is checked against max_pixels before anything of that size is allocated, and so is the
// number of its scans times its size. Decoding ends with the item. All images that are
// decoded at once take up to 24 bytes for each of max_pixels; more of them wait.
//
// Grey is 0.299 R + 0.587 G + 0.114 B. Transparent pixels show black behind them. The
// orientation in the image's metadata is not followed, and colour profiles are not applied.
func NewImageDecode(s ImageDecodeSettings) (*inproc.Runner, error) {
	s = s.withDefaults()
	if err := s.validate(); err != nil {
		return nil, err
	}
	d := imageDecoder{ImageDecodeSettings: s, maps: s.normalisation()}
	d.maxBytes = maxPixelBytes * int64(min(s.MaxPixels, maxSide*maxSide))
	d.memory = semaphore.NewWeighted(d.maxBytes)
	spec, err := d.spec()
	if err != nil {
		return nil, err
	}
	return inproc.Each(inproc.Settings{Spec: spec, Concurrency: s.Concurrency}, d.answer), nil
}

// affine maps a channel's value v, black 0 and white 1, to v*scale + offset.
type affine struct{ scale, offset float64 }

// normalisation returns one map a channel.
func (s ImageDecodeSettings) normalisation() []affine {
	of := func(list []float64, channel int, otherwise float64) float64 {
		if len(list) == 0 {
			return otherwise
		}
		return list[min(channel, len(list)-1)] // one for all, or one for each
	}
	out := make([]affine, s.Channels.count())
	for c := range out {
		mean, std := of(s.Mean, c, 0), of(s.Std, c, 1)
		out[c] = affine{scale: (s.Range[1] - s.Range[0]) / std, offset: (s.Range[0] - mean) / std}
	}
	return out
}

// shape returns the tensor's shape.
func (s ImageDecodeSettings) shape() []int64 {
	w, h, c := int64(s.Width), int64(s.Height), int64(s.Channels.count())
	switch s.Layout {
	case Flat:
		return []int64{1, h * w * c}
	case HWC:
		return []int64{1, h, w, c}
	default:
		return []int64{1, c, h, w}
	}
}

type imageDecoder struct {
	ImageDecodeSettings
	maps []affine
	// memory is for the images that are decoded at once: maxBytes together.
	memory   *semaphore.Weighted
	maxBytes int64
}

func (d imageDecoder) spec() (runner.Spec, error) {
	const side = 16
	img := image.NewNRGBA(image.Rect(0, 0, side, side))
	for y := range side {
		for x := range side {
			img.SetNRGBA(x, y, color.NRGBA{R: uint8(x * 16), G: uint8(y * 16), B: 128, A: 255})
		}
	}
	var example bytes.Buffer
	if err := png.Encode(&example, img); err != nil {
		return runner.Spec{}, err
	}
	types := []string{"image/png", "image/jpeg"}
	return runner.Spec{
		Inputs: []runner.PartSpec{{
			Name: Image, ContentTypes: types, Description: "a PNG or JPEG image",
		}},
		Outputs: []runner.PartSpec{{
			Name: Pixels, Datatype: tensor.FP32, Shape: d.shape(),
			Description: fmt.Sprintf("the image as %d by %d %s pixels", d.Width, d.Height, d.Channels),
		}},
		Parameters: []runner.ParameterSpec{}, // none
		BatchAxis:  runner.BatchNone,
		Examples: []runner.Example{{
			Name:   "a slope of colours",
			Inputs: []payload.Part{payload.OfBlob(Image, types[0], example.Bytes())},
		}},
	}, nil
}

func (d imageDecoder) answer(ctx context.Context, item runner.Item) ([]payload.Part, error) {
	part, ok := item.Input(Image)
	if !ok {
		return nil, invalid(Image, "it is missing")
	}
	if part.Tensor != nil {
		return nil, invalid(Image, "it is a tensor; send the bytes of a PNG or JPEG image")
	}
	alive := func() error { return item.Err(ctx) }
	header, err := readHeader(part.Blob, d.MaxPixels)
	if err != nil {
		return nil, err
	}
	size := min(header.bytes(), d.maxBytes)
	if err := d.memory.Acquire(ctx, size); err != nil {
		return nil, fault.From(err)
	}
	defer d.memory.Release(size)
	img, err := header.decode(&imageReader{alive: alive, data: part.Blob.Data, scans: header.maxScans(d.MaxPixels)})
	if err != nil {
		return nil, err
	}
	pixels, err := resize(alive, rowsOf(img, d.Channels), d.Resample, d.Width, d.Height)
	if err != nil {
		return nil, err
	}
	out, err := tensor.FromFP32(d.shape(), d.arrange(pixels))
	return []payload.Part{payload.OfTensor(Pixels, out)}, err
}

// arrange normalises the pixels and puts them in the layout's order.
func (d imageDecoder) arrange(pixels []float64) []float32 {
	out := make([]float32, len(pixels))
	channels := len(d.maps)
	plane := len(pixels) / channels
	for i, v := range pixels {
		pixel, c := i/channels, i%channels
		at := i
		if d.Layout == CHW {
			at = c*plane + pixel
		}
		out[at] = float32(v*d.maps[c].scale + d.maps[c].offset)
	}
	return out
}

// imageHeader is what an image says about itself before its pixels.
type imageHeader struct {
	image.Config
	kind        string
	read        func(io.Reader) (image.Image, error)
	progressive bool
}

// readHeader returns the header of an image, which has at most maxPixels pixels.
func readHeader(blob payload.Blob, maxPixels int) (h imageHeader, err error) {
	if !isImageType(blob.ContentType) {
		return h, unusable(fault.UnsupportedMedia, Image, "its content type is %s; send an image/png or image/jpeg", blob.ContentType)
	}
	if len(blob.Data) == 0 {
		return h, invalid(Image, "it is empty; send a PNG or JPEG image")
	}
	readSize := png.DecodeConfig
	h.kind, h.read = http.DetectContentType(blob.Data), png.Decode
	switch h.kind {
	case "image/png":
	case "image/jpeg":
		readSize, h.read = jpeg.DecodeConfig, jpeg.Decode
		h.progressive = bytes.Contains(blob.Data, []byte{0xff, 0xc2})
	default:
		return h, invalid(Image, "expected a PNG or JPEG image, got %s; its first bytes are % x", h.kind, blob.Data[:min(len(blob.Data), 8)])
	}
	if h.Config, err = readSize(bytes.NewReader(blob.Data)); err != nil {
		return h, invalid(Image, "its bytes begin as %s but cannot be decoded: %w", h.kind, err)
	}
	// Sides first: their product cannot overflow then.
	if h.Width > maxSide || h.Height > maxSide || h.Width*h.Height > maxPixels {
		return h, invalid(Image, "it is of %d by %d pixels; at most %d in all and %d on a side are accepted", h.Width, h.Height, maxPixels, maxSide)
	}
	return h, nil
}

// pixels is how many pixels are decoded. A JPEG has whole blocks, of up to 32 by 16.
func (h imageHeader) pixels() int { return max(h.Width, 32) * max(h.Height, 16) }

// maxScans is how many scans of all its pixels a JPEG may have.
func (h imageHeader) maxScans(maxPixels int) int {
	if h.kind == "image/png" {
		return math.MaxInt
	}
	return maxScans * max(1, maxPixels/h.pixels())
}

// bytes is at least the memory that decoding takes. The image may be there twice, in two
// colour models or as the passes of a PNG; a progressive JPEG keeps four bytes for each
// value besides.
func (h imageHeader) bytes() int64 {
	size := 4
	switch h.ColorModel {
	case color.GrayModel:
		size = 1
	case color.Gray16Model:
		size = 2
	case color.RGBA64Model, color.NRGBA64Model:
		size = 8
	}
	if h.progressive {
		size *= 3
	}
	return 2 * int64(size) * int64(h.pixels())
}

// decode reads the image.
func (h imageHeader) decode(from *imageReader) (image.RGBA64Image, error) {
	img, err := h.read(from)
	if from.err != nil {
		return nil, from.err
	}
	if err != nil {
		return nil, invalid(Image, "its bytes begin as %s of %d by %d pixels but cannot be decoded: %w", h.kind, h.Width, h.Height, err)
	}
	if img.Bounds().Empty() {
		return nil, invalid(Image, "it has no pixels")
	}
	out, ok := img.(image.RGBA64Image) // as all images of these two packages are
	if !ok {
		return nil, invalid(Image, "its pixels cannot be read")
	}
	return out, nil
}

// imageReader reads the bytes of an image for its decoder, little by little, as long as
// alive returns nil. A read ends after the marker of a JPEG's scan: a scan of a few bytes
// may take the decoder as long as one of megabytes.
type imageReader struct {
	alive func() error
	data  []byte
	at    int
	// scans may still come. Other bytes that look like their marker count, too.
	scans int
	// err is why the decoder gets no more.
	err error
}

// Read implements io.Reader.
func (r *imageReader) Read(p []byte) (int, error) {
	if r.scans < 0 {
		r.err = invalid(Image, "it has too many scans for its size; at most %d of an image of max_pixels are accepted", maxScans)
	} else {
		r.err = r.alive()
	}
	if r.err != nil {
		return 0, r.err
	}
	if r.at == len(r.data) {
		return 0, io.EOF
	}
	const most = 2048
	start := max(r.at-1, 0) // between the two bytes of a marker
	end := min(r.at+min(len(p), most), len(r.data))
	if i := bytes.Index(r.data[start:end], []byte{0xff, 0xda}); i >= 0 {
		end = start + i + 2
		r.scans--
	}
	n := copy(p, r.data[r.at:end])
	r.at = end
	return n, nil
}

// isImageType reports whether a blob of the content type may be an image that is taken. If
// the type is missing or general, the bytes decide.
func isImageType(contentType string) bool {
	if contentType == "" {
		return true
	}
	kind, _, err := mime.ParseMediaType(contentType)
	return err == nil && slices.Contains([]string{"image/png", "image/jpeg", "image/jpg", "image/*", payload.OctetStream}, kind)
}

// imageRows reads a decoded image row by row.
type imageRows struct {
	width, height int
	channels      int
	// read writes row y: width*channels values, black 0 and white 1.
	read func(y int, row []float64)
}

// rowsOf returns a reader of the image as grey or RGB.
func rowsOf(img image.RGBA64Image, channels Channels) imageRows {
	bounds := img.Bounds()
	out := imageRows{width: bounds.Dx(), height: bounds.Dy(), channels: channels.count()}
	if grey, ok := img.(*image.Gray); ok {
		out.read = func(y int, row []float64) {
			for x, v := range grey.Pix[y*grey.Stride:][:out.width] {
				for c := range out.channels {
					row[x*out.channels+c] = float64(v) / 255
				}
			}
		}
		return out
	}
	const white = 65535
	out.read = func(y int, row []float64) {
		for x := range out.width {
			p := img.RGBA64At(bounds.Min.X+x, bounds.Min.Y+y)
			r, g, b := float64(p.R), float64(p.G), float64(p.B)
			switch {
			case out.channels == 3:
				row[3*x], row[3*x+1], row[3*x+2] = r/white, g/white, b/white
			case p.R == p.G && p.G == p.B:
				row[x] = r / white
			default:
				row[x] = (0.299*r + 0.587*g + 0.114*b) / white
			}
		}
	}
	return out
}
