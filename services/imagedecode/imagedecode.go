package imagedecode

import (
	"bytes"
	"context"
	"fmt"
	"image"
	"image/color"
	"image/png"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// Input and Output are the names of the runner's parts.
const (
	Input  = "image"
	Output = "pixels"
)

// New returns a runner that decodes images. It runs batches one item after the
// other; a bad image fails alone.
func New(settings Settings) (*inproc.Runner, error) {
	if err := settings.Validate(); err != nil {
		return nil, err
	}
	d := decoder{settings: settings.withDefaults()}
	d.maps = d.settings.normalisation()
	spec, err := d.spec()
	if err != nil {
		return nil, err
	}
	return inproc.Each(inproc.Settings{Spec: spec, Concurrency: d.settings.Concurrency}, d.answer), nil
}

type decoder struct {
	settings Settings
	maps     []affine
}

func (d decoder) spec() (runner.Spec, error) {
	example, err := samplePNG()
	if err != nil {
		return runner.Spec{}, err
	}
	types := []string{"image/png", "image/jpeg"}
	return runner.Spec{
		Inputs: []runner.PartSpec{{
			Name: Input, ContentTypes: types, Description: "a PNG or JPEG image",
		}},
		Outputs: []runner.PartSpec{{
			Name: Output, Datatype: tensor.FP32, Shape: d.settings.shape(),
			Description: fmt.Sprintf("the image as %d by %d %s pixels", d.settings.Width, d.settings.Height, d.settings.Channels),
		}},
		BatchAxis: runner.BatchNone,
		Examples: []runner.Example{{
			Name:   "a slope of colours",
			Inputs: []payload.Part{payload.OfBlob(Input, types[0], example)},
		}},
	}, nil
}

// samplePNG returns a small image.
func samplePNG() ([]byte, error) {
	const side = 16
	img := image.NewNRGBA(image.Rect(0, 0, side, side))
	for y := range side {
		for x := range side {
			img.SetNRGBA(x, y, color.NRGBA{R: uint8(x * 16), G: uint8(y * 16), B: 128, A: 255})
		}
	}
	var b bytes.Buffer
	err := png.Encode(&b, img)
	return b.Bytes(), err
}

func (d decoder) answer(_ context.Context, item runner.Item) ([]payload.Part, error) {
	part, ok := item.Input(Input)
	if !ok {
		return nil, invalid("it is missing")
	}
	if part.Tensor != nil {
		return nil, invalid("it is a tensor; send the bytes of a PNG or JPEG image")
	}
	img, err := decode(part.Blob, d.settings.MaxPixels)
	if err != nil {
		return nil, err
	}
	pixels := resize(rowsOf(img, d.settings.Channels), d.settings.Resample, d.settings.Width, d.settings.Height)
	out, err := tensor.FromFP32(d.settings.shape(), d.arrange(pixels))
	return []payload.Part{payload.OfTensor(Output, out)}, err
}

// arrange normalises the pixels and puts them in the layout's order.
func (d decoder) arrange(pixels []float64) []float32 {
	out := make([]float32, len(pixels))
	channels := len(d.maps)
	plane := len(pixels) / channels
	for i, v := range pixels {
		pixel, c := i/channels, i%channels
		at := i
		if d.settings.Layout == CHW {
			at = c*plane + pixel
		}
		out[at] = float32(v*d.maps[c].scale + d.maps[c].offset)
	}
	return out
}
