package main

import (
	"bytes"
	"context"
	"image"
	"image/png"
	"math"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// none are the settings of a stage that has none.
type none struct{}

// kinds are the stages of this program.
func kinds() []meshfile.Kind {
	of := func(name string, spec runner.Spec, answer inproc.EachFunc) meshfile.Kind {
		return meshfile.KindOf(name, func(none) (*inproc.Runner, error) {
			spec.BatchAxis = runner.BatchNone
			return inproc.Each(inproc.Settings{Spec: spec}, answer), nil
		})
	}
	pixels := runner.PartSpec{Name: "pixels", Datatype: tensor.FP32, Shape: []int64{side, -1}}
	read := runner.PartSpec{Name: "digits", Datatype: tensor.Bytes, Shape: []int64{-1, 1}}
	text := runner.PartSpec{Name: "text", Datatype: tensor.Bytes, Shape: []int64{1}}
	separator := []runner.ParameterSpec{{Name: "separator", Type: payload.TypeString}}
	return []meshfile.Kind{
		of("page", runner.Spec{Inputs: []runner.PartSpec{{Name: "image"}}, Outputs: []runner.PartSpec{pixels, fp32Spec("ink", 1)}}, readPage),
		of("cut", runner.Spec{Inputs: []runner.PartSpec{pixels}, Outputs: []runner.PartSpec{fp32Spec("tiles", -1, features)}}, cut),
		of("sharpness", runner.Spec{Inputs: []runner.PartSpec{pixels}, Outputs: []runner.PartSpec{fp32Spec("score", 1)}}, sharpness),
		of("join", runner.Spec{Inputs: []runner.PartSpec{read}, Outputs: []runner.PartSpec{text}, Parameters: separator}, join),
		meshfile.KindOf("spell", func(s spellSettings) (*inproc.Runner, error) {
			spec := runner.Spec{Inputs: []runner.PartSpec{read}, Outputs: []runner.PartSpec{text}, BatchAxis: runner.BatchNone}
			return inproc.Each(inproc.Settings{Spec: spec, Concurrency: len(pages)}, s.spell), nil
		}),
	}
}

func fp32Spec(name string, shape ...int64) runner.PartSpec {
	return runner.PartSpec{Name: name, Datatype: tensor.FP32, Shape: shape}
}

func answer(name string, shape []int64, values []float32) (payload.Part, error) {
	t, err := tensor.FromFP32(shape, values)
	return payload.OfTensor(name, t), err
}

// readPage decodes a page, and says how much of it is ink.
func readPage(_ context.Context, item runner.Item) ([]payload.Part, error) {
	in, _ := item.Input("image")
	decoded, err := png.Decode(bytes.NewReader(in.Blob.Data))
	if err != nil || decoded.Bounds().Dy() != side {
		return nil, fault.Newf(fault.InvalidInput, "the image is not a PNG of %d rows: %v", side, err)
	}
	grey, is := decoded.(*image.Gray)
	if !is {
		return nil, fault.New(fault.InvalidInput, "the image is not grey")
	}
	width := grey.Bounds().Dx()
	values, ink := make([]float32, 0, side*width), 0.0
	for y := range side {
		for _, v := range grey.Pix[y*grey.Stride:][:width] {
			values = append(values, float32(v)/math.MaxUint8)
			ink += float64(v) / math.MaxUint8
		}
	}
	pixels, err := answer("pixels", []int64{side, int64(width)}, values)
	if err != nil {
		return nil, err
	}
	share, err := answer("ink", []int64{1}, []float32{float32(ink / float64(side*width))})
	return []payload.Part{pixels, share}, err
}

// The network takes a digit as 8 by 8 boxes of 4 by 4 pixels.
const (
	boxes    = 8
	boxSide  = side / boxes
	features = boxes * boxes
)

func pixelsOf(item runner.Item) (values []float32, width int, err error) {
	in, _ := item.Input("pixels")
	values, err = in.Tensor.FP32Values()
	return values, int(in.Tensor.Shape[1]), err
}

// cut cuts a page into digits, and each into boxes.
func cut(_ context.Context, item runner.Item) ([]payload.Part, error) {
	pixels, width, err := pixelsOf(item)
	if err != nil {
		return nil, err
	}
	n := width / side
	out := make([]float32, n*features)
	for y := range side {
		for x := range n * side {
			at := x/side*features + y/boxSide*boxes + x%side/boxSide
			out[at] += pixels[y*width+x] / (boxSide * boxSide)
		}
	}
	tiles, err := answer("tiles", []int64{int64(n), features}, out)
	return []payload.Part{tiles}, err
}

// sharpness is the mean difference of neighbours.
func sharpness(_ context.Context, item runner.Item) ([]payload.Part, error) {
	pixels, width, err := pixelsOf(item)
	if err != nil {
		return nil, err
	}
	sum := 0.0
	for i := 1; i < len(pixels); i++ {
		if i%width > 0 {
			sum += math.Abs(float64(pixels[i] - pixels[i-1]))
		}
	}
	score, err := answer("score", []int64{1}, []float32{float32(sum / float64(len(pixels)))})
	return []payload.Part{score}, err
}

func digitsOf(item runner.Item) ([]string, error) {
	in, _ := item.Input("digits")
	all, err := in.Tensor.BytesElements()
	out := make([]string, len(all))
	for i, one := range all {
		out[i] = string(one)
	}
	return out, err
}

func textPart(text string) ([]payload.Part, error) {
	t, err := tensor.FromBytes([]int64{1}, [][]byte{[]byte(text)})
	return []payload.Part{payload.OfTensor("text", t)}, err
}

func join(_ context.Context, item runner.Item) ([]payload.Part, error) {
	digits, err := digitsOf(item)
	if err != nil {
		return nil, err
	}
	separator, _ := item.Parameters["separator"].Any().(string)
	return textPart(strings.Join(digits, separator))
}

// spellSettings configure a stage that writes digits in words.
type spellSettings struct {
	// Pause is how long it thinks about each digit.
	Pause time.Duration `yaml:"pause"`
}

func (s spellSettings) spell(ctx context.Context, item runner.Item) ([]payload.Part, error) {
	digits, err := digitsOf(item)
	if err != nil {
		return nil, err
	}
	words := []string{"zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"}
	for i, digit := range digits {
		select {
		case <-time.After(s.Pause):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		digits[i] = words[digit[0]-'0']
	}
	return textPart(strings.Join(digits, " "))
}
