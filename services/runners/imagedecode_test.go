package runners_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"image"
	"image/color"
	"image/gif"
	"image/jpeg"
	"image/png"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

func blob(data []byte) payload.Part { return payload.OfBlob("image", "", data) }

func newImageDecode(t testing.TB, s runners.ImageDecodeSettings) runner.Runner {
	t.Helper()
	r, err := runners.NewImageDecode(s)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	return r
}

func pixels(t testing.TB, o runner.Outcome) ([]int64, []float32) {
	t.Helper()
	if o.Fault != nil {
		t.Fatal(o.Fault)
	}
	if len(o.Parts) != 1 || o.Parts[0].Name != "pixels" {
		t.Fatalf("got %v, want one part named pixels", o.Parts)
	}
	v, err := o.Parts[0].Tensor.FP32Values()
	if err != nil {
		t.Fatal(err)
	}
	return o.Parts[0].Tensor.Shape, v
}

func asPNG(t testing.TB, img image.Image) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := png.Encode(&b, img); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// noise returns a grey image of random pixels.
func noise(width, height int) *image.Gray {
	source := rand.New(rand.NewPCG(uint64(width), uint64(height)))
	img := image.NewGray(image.Rect(0, 0, width, height))
	for i := range img.Pix {
		img.Pix[i] = uint8(source.UintN(256))
	}
	return img
}

func near(a, b []float32) bool {
	return slices.EqualFunc(a, b, func(x, y float32) bool { return math.Abs(float64(x-y)) < 1e-6 })
}

func TestBoxIsTheExactMeanOfWholeBlocks(t *testing.T) {
	t.Parallel()
	img := noise(32, 16)
	r := newImageDecode(t, runners.ImageDecodeSettings{Width: 8, Height: 8, Channels: runners.Grey, Layout: runners.Flat, Resample: runners.Box})
	shape, got := pixels(t, do(t, r, blob(asPNG(t, img)))[0])
	if want := []int64{1, 64}; !slices.Equal(shape, want) {
		t.Errorf("got shape %v, want %v", shape, want)
	}
	for i, v := range got {
		sum := 0
		for j := range 8 {
			sum += int(img.GrayAt(i%8*4+j%4, i/8*2+j/4).Y)
		}
		if want := float32(float64(sum) / 8 / 255); math.Abs(float64(v-want)) > 1e-7 {
			t.Errorf("pixel %d: got %v, want %v", i, v, want)
		}
	}
}

// TestRepeatedPixelsAreRestored is what the digits example rests on.
func TestRepeatedPixelsAreRestored(t *testing.T) {
	t.Parallel()
	small := noise(8, 8)
	large := image.NewGray(image.Rect(0, 0, 32, 32))
	for i := range large.Pix {
		large.Pix[i] = small.GrayAt(i%32/4, i/32/4).Y
	}
	r := newImageDecode(t, runners.ImageDecodeSettings{Width: 8, Height: 8, Channels: runners.Grey, Resample: runners.Box})
	_, got := pixels(t, do(t, r, blob(asPNG(t, large)))[0])
	for i, v := range got {
		if want := float32(float64(small.Pix[i]) / 255); v != want {
			t.Errorf("pixel %d: got %v, want %v", i, v, want)
		}
	}
}

// TestResamplingMatchesItsDefinition compares with the definitions, each
// target pixel computed from all source pixels.
func TestResamplingMatchesItsDefinition(t *testing.T) {
	t.Parallel()
	// weights of all source pixels in target pixel i, before they are made to
	// add up to 1.
	definitions := map[runners.Resample]func(source, target, i, j int) float64{
		runners.Box: func(source, target, i, j int) float64 {
			ratio := float64(source) / float64(target)
			return max(0, min(float64(j+1), float64(i+1)*ratio)-max(float64(j), float64(i)*ratio))
		},
		runners.Bilinear: func(source, target, i, j int) float64 {
			ratio := float64(source) / float64(target)
			return max(0, 1-math.Abs((float64(j)+0.5)-(float64(i)+0.5)*ratio)/max(1, ratio))
		},
		runners.Nearest: func(source, target, i, j int) float64 {
			if (2*i+1)*source/(2*target) == j {
				return 1
			}
			return 0
		},
	}
	for _, size := range [][4]int{{32, 32, 8, 8}, {10, 7, 3, 4}, {3, 4, 10, 7}, {5, 5, 5, 5}, {1, 1, 4, 2}, {9, 1, 2, 3}, {100, 3, 7, 3}} {
		img := noise(size[0], size[1])
		data := asPNG(t, img)
		for method, weight := range definitions {
			t.Run(fmt.Sprint(method, size), func(t *testing.T) {
				t.Parallel()
				r := newImageDecode(t, runners.ImageDecodeSettings{Width: size[2], Height: size[3], Channels: runners.Grey, Resample: method})
				_, got := pixels(t, do(t, r, blob(data))[0])
				want := make([]float32, size[2]*size[3])
				for i := range want {
					sum, total := 0.0, 0.0
					for y := range size[1] {
						for x := range size[0] {
							w := weight(size[0], size[2], i%size[2], x) * weight(size[1], size[3], i/size[2], y)
							sum += w * float64(img.GrayAt(x, y).Y) / 255
							total += w
						}
					}
					want[i] = float32(sum / total)
				}
				if !near(got, want) {
					t.Errorf("got %v, want %v", got, want)
				}
			})
		}
	}
}

// quarters is 2 by 2 pixels: red, green, blue, white.
func quarters() *image.NRGBA {
	img := image.NewNRGBA(image.Rect(0, 0, 2, 2))
	for i, c := range []color.NRGBA{{255, 0, 0, 255}, {0, 255, 0, 255}, {0, 0, 255, 255}, {255, 255, 255, 255}} {
		img.SetNRGBA(i%2, i/2, c)
	}
	return img
}

func TestLayoutsAndNormalisation(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name     string
		settings runners.ImageDecodeSettings
		shape    []int64
		want     []float32
	}{
		{
			"chw is the default",
			runners.ImageDecodeSettings{},
			[]int64{1, 3, 2, 2},
			[]float32{1, 0, 0, 1, 0, 1, 0, 1, 0, 0, 1, 1},
		},
		{
			"hwc",
			runners.ImageDecodeSettings{Layout: runners.HWC},
			[]int64{1, 2, 2, 3},
			[]float32{1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1},
		},
		{
			"flat",
			runners.ImageDecodeSettings{Layout: runners.Flat},
			[]int64{1, 12},
			[]float32{1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1},
		},
		{
			"grey is luma",
			runners.ImageDecodeSettings{Channels: runners.Grey},
			[]int64{1, 1, 2, 2},
			[]float32{0.299, 0.587, 0.114, 1},
		},
		{
			"range",
			runners.ImageDecodeSettings{Channels: runners.Grey, Range: []float64{-1, 1}},
			[]int64{1, 1, 2, 2},
			[]float32{-0.402, 0.174, -0.772, 1},
		},
		{
			"one mean and deviation",
			runners.ImageDecodeSettings{Layout: runners.Flat, Range: []float64{0, 255}, Mean: []float64{127.5}, Std: []float64{127.5}},
			[]int64{1, 12},
			[]float32{1, -1, -1, -1, 1, -1, -1, -1, 1, 1, 1, 1},
		},
		{
			"a mean and deviation for each channel",
			runners.ImageDecodeSettings{Mean: []float64{0, 0.5, 1}, Std: []float64{1, 0.5, 0.25}},
			[]int64{1, 3, 2, 2},
			[]float32{1, 0, 0, 1, -1, 1, -1, 1, -4, -4, 0, 0},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			row.settings.Width, row.settings.Height = 2, 2
			r := newImageDecode(t, row.settings)
			shape, got := pixels(t, do(t, r, blob(asPNG(t, quarters())))[0])
			if !slices.Equal(shape, row.shape) || !near(got, row.want) {
				t.Errorf("got %v %v, want %v %v", shape, got, row.shape, row.want)
			}
			if spec := r.Spec(); !slices.Equal(spec.Outputs[0].Shape, row.shape) || spec.BatchAxis != runner.BatchNone {
				t.Errorf("the spec says %v", spec)
			}
		})
	}
}

func TestKindsOfImages(t *testing.T) {
	t.Parallel()
	one := image.Rect(0, 0, 1, 1)
	grey16 := image.NewGray16(one)
	grey16.SetGray16(0, 0, color.Gray16{Y: 12345})
	clear := image.NewNRGBA(one)
	clear.SetNRGBA(0, 0, color.NRGBA{R: 255, G: 255, B: 255, A: 51})
	palette := image.NewPaletted(one, color.Palette{color.Black, color.NRGBA{R: 51, G: 102, B: 153, A: 255}})
	palette.SetColorIndex(0, 0, 1)
	for _, row := range []struct {
		name string
		img  image.Image
		want []float32
	}{
		{"16 bits", grey16, []float32{12345.0 / 65535, 12345.0 / 65535, 12345.0 / 65535}},
		{"transparent over black", clear, []float32{0.2, 0.2, 0.2}},
		{"palette", palette, []float32{0.2, 0.4, 0.6}},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			_, got := pixels(t, do(t, newImageDecode(t, runners.ImageDecodeSettings{Width: 1, Height: 1}), blob(asPNG(t, row.img)))[0])
			if !near(got, row.want) {
				t.Errorf("got %v, want %v", got, row.want)
			}
		})
	}
}

func TestJPEGIsDecoded(t *testing.T) {
	t.Parallel()
	img := image.NewRGBA(image.Rect(0, 0, 64, 48))
	for i := range img.Pix {
		img.Pix[i] = []uint8{200, 100, 50, 255}[i%4]
	}
	var b bytes.Buffer
	if err := jpeg.Encode(&b, img, &jpeg.Options{Quality: 100}); err != nil {
		t.Fatal(err)
	}
	r := newImageDecode(t, runners.ImageDecodeSettings{Width: 2, Height: 2})
	for _, contentType := range []string{"image/jpeg", "image/png", "image/jpg", "image/*", "application/octet-stream", "", "image/jpeg; q=1"} {
		_, got := pixels(t, do(t, r, payload.OfBlob("image", contentType, b.Bytes()))[0])
		for i, want := range []float64{200, 100, 50} {
			if math.Abs(float64(got[4*i])-want/255) > 0.01 {
				t.Errorf("%q: got %v, want %v at channel %d", contentType, got, want/255, i)
			}
		}
	}
}

// header returns a PNG that claims a size and ends after saying so.
func header(width, height uint32) []byte {
	b := []byte("\x89PNG\r\n\x1a\n")
	ihdr := binary.BigEndian.AppendUint32([]byte("IHDR"), width)
	ihdr = binary.BigEndian.AppendUint32(ihdr, height)
	ihdr = append(ihdr, 8, 0, 0, 0, 0)
	b = binary.BigEndian.AppendUint32(b, uint32(len(ihdr)-4))
	return binary.BigEndian.AppendUint32(append(b, ihdr...), crc32.ChecksumIEEE(ihdr))
}

func TestBadImageFailsAlone(t *testing.T) {
	t.Parallel()
	good := asPNG(t, noise(32, 32))
	damaged := bytes.Clone(good)
	damaged[len(damaged)-20] ^= 0xff
	var animation, photo bytes.Buffer
	if err := gif.Encode(&animation, noise(4, 4), nil); err != nil {
		t.Fatal(err)
	}
	if err := jpeg.Encode(&photo, noise(64, 64), nil); err != nil {
		t.Fatal(err)
	}
	r := newImageDecode(t, runners.ImageDecodeSettings{Width: 4, Height: 4, MaxPixels: 1 << 20, Concurrency: 1})
	for _, row := range []struct {
		name string
		part payload.Part
		want string
	}{
		{"empty", blob(nil), "it is empty"},
		{"text", blob([]byte("hello, mesh")), "got text/plain; charset=utf-8; its first bytes are 68 65 6c 6c 6f 2c 20 6d"},
		{"gif", blob(animation.Bytes()), "got image/gif"},
		{"gif that says it is a png", payload.OfBlob("image", "image/png", animation.Bytes()), "got image/gif"},
		{"png that says it is a gif", payload.OfBlob("image", "image/gif", good), "its content type is image/gif"},
		{"nonsense content type", payload.OfBlob("image", ";;", good), "its content type is ;;"},
		{"signature alone", blob(good[:8]), "begin as image/png but cannot be decoded: unexpected EOF"},
		{"truncated png", blob(good[:len(good)/2]), "begin as image/png of 32 by 32 pixels but cannot be decoded"},
		{"damaged png", blob(damaged), "cannot be decoded"},
		{"truncated jpeg", blob(photo.Bytes()[:photo.Len()/2]), "begin as image/jpeg of 64 by 64 pixels but cannot be decoded"},
		{"enormous", blob(header(60000, 60000)), "it is of 60000 by 60000 pixels; at most 1048576 in all"},
		{"long", blob(header(1<<20, 1)), "it is of 1048576 by 1 pixels"},
		{"product beyond 64 bits", blob(header(math.MaxInt32, math.MaxInt32)), ""},
		{"no pixels", blob(header(0, 5)), "cannot be decoded"},
		{"tensor", payload.OfTensor("image", tensor.Tensor{Datatype: tensor.Uint8, Shape: []int64{1}, Raw: []byte{1}}), "it is a tensor"},
		{"another name", payload.OfBlob("picture", "", good), "it is missing"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			out := do(t, r, blob(good), row.part, blob(good))
			f := out[1].Fault
			if f == nil {
				t.Fatalf("got %v, want a fault", out[1].Parts)
			}
			reason := fault.InvalidInput
			if strings.HasPrefix(row.want, "its content type") {
				reason = fault.UnsupportedMedia
			}
			if f.Reason != reason || !strings.HasPrefix(f.Message, "input image: ") || !strings.Contains(f.Message, row.want) {
				t.Errorf("got %v, want %q", f, row.want)
			}
			if len(f.Violations) != 1 || f.Violations[0].Field != "inputs.image" {
				t.Errorf("got violations %v", f.Violations)
			}
			pixels(t, out[0])
			pixels(t, out[2])
		})
	}
}

// scans returns a progressive JPEG of some bytes for each scan, every one of which visits all
// blocks of a grey image.
func scans(side, n int) []byte {
	segment := func(marker byte, content ...byte) []byte {
		return append(binary.BigEndian.AppendUint16([]byte{0xff, marker}, uint16(len(content)+2)), content...)
	}
	quantization := append([]byte{0}, bytes.Repeat([]byte{1}, 64)...)
	frame := append(binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16([]byte{8}, uint16(side)), uint16(side)), 1, 1, 0x11, 0)
	// The only code, one bit of 0, is a run of 16384 empty blocks or more: 14 bits follow.
	codes := append(append([]byte{0x10, 1}, make([]byte, 15)...), 0xe0)
	runs := (side*side/64 + 1<<14 - 1) >> 14
	scan := append(segment(0xda, 1, 1, 0, 1, 63, 0), make([]byte, (15*runs+7)/8)...)
	return slices.Concat([]byte{0xff, 0xd8}, segment(0xdb, quantization...), segment(0xc2, frame...), segment(0xc4, codes...), bytes.Repeat(scan, n), []byte{0xff, 0xd9})
}

func TestScansOfLargeImagesAreBounded(t *testing.T) {
	t.Parallel()
	r := newImageDecode(t, runners.ImageDecodeSettings{Width: 4, Height: 4, Channels: runners.Grey, MaxPixels: 4096 * 4096})
	out := do(t, r, blob(scans(4096, 200)), blob(scans(4096, 12)), blob(scans(64, 200)))
	if f := out[0].Fault; f == nil || f.Reason != fault.InvalidInput || !strings.Contains(f.Message, "scans") {
		t.Errorf("200 scans of 4096 by 4096 pixels: got %v, want an invalid input", f)
	}
	pixels(t, out[1])
	pixels(t, out[2])
}

func TestPNGHasNoScans(t *testing.T) {
	t.Parallel()
	data := asPNG(t, noise(2048, 2048))
	if n := bytes.Count(data, []byte{0xff, 0xda}); n <= 32 {
		t.Fatalf("the marker is there %d times", n)
	}
	r := newImageDecode(t, runners.ImageDecodeSettings{Width: 4, Height: 4, MaxPixels: 2048 * 2048})
	pixels(t, do(t, r, blob(data))[0])
}

// lookedAt is a context that calls look whenever its error is asked for.
type lookedAt struct {
	context.Context
	look func() error
}

func (c lookedAt) Err() error { return c.look() }

// doIn runs an image in a context.
func doIn(ctx context.Context, r runner.Runner, data []byte) (runner.Outcome, error) {
	slot, err := r.Acquire(ctx)
	if err != nil {
		return runner.Outcome{}, err
	}
	s := &sink{outcomes: map[int]runner.Outcome{}}
	err = slot.Do(ctx, runner.Batch{Rows: 1, Items: []runner.Item{{Inputs: []payload.Part{blob(data)}, Rows: 1}}}, s)
	return s.outcomes[0], err
}

func TestDecodingEndsWithItsContext(t *testing.T) {
	t.Parallel()
	var photo bytes.Buffer
	if err := jpeg.Encode(&photo, noise(256, 256), nil); err != nil {
		t.Fatal(err)
	}
	r := newImageDecode(t, runners.ImageDecodeSettings{Width: 4, Height: 4, Concurrency: 4})
	for name, data := range map[string][]byte{
		"png": asPNG(t, noise(256, 256)), "jpeg": photo.Bytes(), "scans": scans(64, 50),
		"resampling": asPNG(t, image.NewGray(image.Rect(0, 0, 1, 1000))),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			looks := 0
			out, err := doIn(lookedAt{t.Context(), func() error {
				if looks++; looks > 10 {
					return context.Canceled
				}
				return nil
			}}, r, data)
			if err != nil || out.Fault == nil || out.Fault.Reason != fault.Cancelled {
				t.Errorf("got %v, %v, want CANCELLED", out, err)
			}
		})
	}
}

func TestLargeImagesShareTheMemory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newImageDecode(t, runners.ImageDecodeSettings{Width: 4, Height: 4, Concurrency: 3, MaxPixels: 256 * 256})
		decoding, goOn := make(chan struct{}, 3), make(chan struct{})
		outcomes := make(chan error, 3)
		data := asPNG(t, image.NewNRGBA64(image.Rect(0, 0, 256, 256)))
		for range cap(outcomes) {
			go func() {
				looks := 0
				out, err := doIn(lookedAt{t.Context(), func() error {
					if looks++; looks == 2 { // the first is before the item runs
						decoding <- struct{}{}
						<-goOn
					}
					return nil
				}}, r, data)
				if out.Fault != nil {
					err = out.Fault
				}
				outcomes <- err
			}()
		}
		synctest.Wait()
		if n := len(decoding); n != 1 {
			t.Errorf("%d images of 16 bytes a pixel are decoded at once in the memory of 24 bytes", n)
		}
		close(goOn)
		for range cap(outcomes) {
			if err := <-outcomes; err != nil {
				t.Error(err)
			}
		}
	})
}

func TestImageOfMaxPixelsIsAccepted(t *testing.T) {
	t.Parallel()
	for maximum, taken := range map[int]bool{48: true, 47: false} {
		r := newImageDecode(t, runners.ImageDecodeSettings{Width: 2, Height: 2, MaxPixels: maximum})
		if got := do(t, r, blob(asPNG(t, noise(8, 6))))[0].Fault == nil; got != taken {
			t.Errorf("48 pixels where %d may be: taken is %v", maximum, got)
		}
	}
}

func TestImageDecodeExampleIsAnswered(t *testing.T) {
	t.Parallel()
	r := newImageDecode(t, runners.ImageDecodeSettings{Width: 16, Height: 16})
	examples := r.Spec().Examples
	if len(examples) == 0 {
		t.Fatal("there is none")
	}
	for _, e := range examples {
		pixels(t, do(t, r, e.Inputs...)[0])
	}
}

func TestImageDecodeSettingsAreChecked(t *testing.T) {
	t.Parallel()
	valid := runners.ImageDecodeSettings{Width: 8, Height: 8}
	for _, row := range []struct {
		name   string
		change func(*runners.ImageDecodeSettings)
		want   string
	}{
		{"no width", func(s *runners.ImageDecodeSettings) { s.Width = 0 }, "width: 0 "},
		{"huge width", func(s *runners.ImageDecodeSettings) { s.Width = 1 << 30 }, "width: 1073741824 "},
		{"no height", func(s *runners.ImageDecodeSettings) { s.Height = -1 }, "height: -1 "},
		{"huge tensor", func(s *runners.ImageDecodeSettings) { s.Width, s.Height = 60000, 60000 }, "width: 60000 times"},
		{"channels", func(s *runners.ImageDecodeSettings) { s.Channels = "gray" }, `channels: "gray" `},
		{"layout", func(s *runners.ImageDecodeSettings) { s.Layout = "nchw" }, `layout: "nchw" `},
		{"resample", func(s *runners.ImageDecodeSettings) { s.Resample = "cubic" }, `resample: "cubic" `},
		{"range", func(s *runners.ImageDecodeSettings) { s.Range = []float64{1} }, "range: [1] "},
		{"mean", func(s *runners.ImageDecodeSettings) { s.Mean = []float64{1, 2} }, "mean: [1 2] "},
		{"std", func(s *runners.ImageDecodeSettings) { s.Std = []float64{1, 2, 3, 4} }, "std: [1 2 3 4] "},
		{"std of zero", func(s *runners.ImageDecodeSettings) { s.Std = []float64{1, 0, 3} }, "std: [1 0 3] divides"},
		{"max_pixels", func(s *runners.ImageDecodeSettings) { s.MaxPixels = -5 }, "max_pixels: -5 "},
		{"concurrency", func(s *runners.ImageDecodeSettings) { s.Concurrency = -1 }, "concurrency: -1 "},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			s := valid
			row.change(&s)
			if _, err := runners.NewImageDecode(s); err == nil || !strings.HasPrefix(err.Error(), row.want) {
				t.Errorf("got %v, want %q", err, row.want)
			}
		})
	}
	if _, err := runners.NewImageDecode(valid); err != nil {
		t.Error(err)
	}
}

// FuzzAnyBytes holds that bytes become a tensor of the promised shape with
// values in the range, or an invalid input.
func FuzzAnyBytes(f *testing.F) {
	good := asPNG(f, quarters())
	var photo, animation bytes.Buffer
	if err := errors.Join(jpeg.Encode(&photo, noise(16, 16), nil), gif.Encode(&animation, noise(2, 2), nil)); err != nil {
		f.Fatal(err)
	}
	for _, seed := range [][]byte{
		nil, []byte("text"), good, good[:len(good)-15], asPNG(f, noise(9, 3)), photo.Bytes(), photo.Bytes()[:200],
		animation.Bytes(), header(60000, 60000), header(3, 3), scans(64, 2),
	} {
		f.Add(seed)
	}
	r := newImageDecode(f, runners.ImageDecodeSettings{Width: 3, Height: 2, MaxPixels: 1 << 16})
	f.Fuzz(func(t *testing.T, data []byte) {
		out := do(t, r, blob(data))[0]
		if out.Fault != nil {
			if out.Fault.Reason != fault.InvalidInput {
				t.Errorf("got %v", out.Fault)
			}
			return
		}
		shape, values := pixels(t, out)
		if !slices.Equal(shape, []int64{1, 3, 2, 3}) {
			t.Errorf("got shape %v", shape)
		}
		for _, v := range values {
			if !(v >= 0 && v <= 1.000001) {
				t.Errorf("got a pixel of %v", v)
			}
		}
	})
}

func BenchmarkDecode(b *testing.B) {
	var photo bytes.Buffer
	large := image.NewRGBA(image.Rect(0, 0, 1920, 1080))
	copy(large.Pix, noise(1920, 1080).Pix)
	if err := jpeg.Encode(&photo, large, nil); err != nil {
		b.Fatal(err)
	}
	for _, row := range []struct {
		name     string
		data     []byte
		settings runners.ImageDecodeSettings
	}{
		{"grey 32x32 png to 8x8", asPNG(b, noise(32, 32)), runners.ImageDecodeSettings{Width: 8, Height: 8, Channels: runners.Grey, Resample: runners.Box}},
		{"rgb 1920x1080 jpeg to 224x224", photo.Bytes(), runners.ImageDecodeSettings{Width: 224, Height: 224}},
	} {
		b.Run(row.name, func(b *testing.B) {
			r := newImageDecode(b, row.settings)
			b.ReportAllocs()
			for b.Loop() {
				pixels(b, do(b, r, blob(row.data))[0])
			}
		})
	}
}

func BenchmarkHostileImage(b *testing.B) {
	r := newImageDecode(b, runners.ImageDecodeSettings{Width: 224, Height: 224})
	for name, data := range map[string][]byte{
		"jpeg of 31 scans": scans(5000, 31), "jpeg of 200 scans": scans(5000, 200),
		"png of 16 bits": asPNG(b, image.NewNRGBA64(image.Rect(0, 0, 5000, 5000))),
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				do(b, r, blob(data))
			}
		})
	}
}
