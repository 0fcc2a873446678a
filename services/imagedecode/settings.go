package imagedecode

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
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
	// Box takes the mean of the area that a pixel covers; it is exact where
	// the image is a whole multiple of the tensor's size.
	Box Resample = "box"
	// Bilinear weighs the pixels around linearly; where it makes an image
	// smaller it takes in as many as the area asks for.
	Bilinear Resample = "bilinear"
	// Nearest takes the one pixel in the middle.
	Nearest Resample = "nearest"
)

// DefaultMaxPixels bounds an image where nobody says.
const DefaultMaxPixels = 25_000_000

// maxSide bounds each side of an image; a JPEG cannot have a longer one.
const maxSide = 1<<16 - 1

// maxValues bounds the tensor.
const maxValues = 1 << 26

// Settings say what images become.
type Settings struct {
	// Width and Height of the tensor, in pixels.
	Width  int `yaml:"width"`
	Height int `yaml:"height"`
	// Channels is RGB where empty.
	Channels Channels `yaml:"channels"`
	// Layout is CHW where empty.
	Layout Layout `yaml:"layout"`
	// Resample is Bilinear where empty.
	Resample Resample `yaml:"resample"`
	// Range is what black and white become; empty means [0, 1].
	Range []float64 `yaml:"range"`
	// Mean is subtracted from each channel after that, and Std divides the
	// difference; one value for all channels, or one for each. Empty means 0
	// and 1.
	Mean []float64 `yaml:"mean"`
	Std  []float64 `yaml:"std"`
	// MaxPixels bounds an image's width times height; 0 means
	// DefaultMaxPixels.
	MaxPixels int `yaml:"max_pixels"`
	// Concurrency is the number of batches that are decoded at once; 0 means
	// one for each processor.
	Concurrency int `yaml:"concurrency"`
}

func (s Settings) withDefaults() Settings {
	s.Channels = cmp.Or(s.Channels, RGB)
	s.Layout = cmp.Or(s.Layout, CHW)
	s.Resample = cmp.Or(s.Resample, Bilinear)
	s.MaxPixels = cmp.Or(s.MaxPixels, DefaultMaxPixels)
	s.Concurrency = cmp.Or(s.Concurrency, runtime.GOMAXPROCS(0))
	if len(s.Range) == 0 {
		s.Range = []float64{0, 1}
	}
	return s
}

// Validate says what is wrong with the settings, by key.
func (s Settings) Validate() error {
	s = s.withDefaults()
	switch {
	case s.Width < 1 || s.Width > maxSide:
		return fmt.Errorf("width: %d is not between 1 and %d", s.Width, maxSide)
	case s.Height < 1 || s.Height > maxSide:
		return fmt.Errorf("height: %d is not between 1 and %d", s.Height, maxSide)
	case s.Channels != Grey && s.Channels != RGB:
		return fmt.Errorf("channels: %q is not grey or rgb", s.Channels)
	case s.Width*s.Height*s.Channels.count() > maxValues:
		return fmt.Errorf("width: %d times a height of %d and %d channels is more than %d values", s.Width, s.Height, s.Channels.count(), maxValues)
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
	}
	return s.validateNormalisation()
}

func (s Settings) validateNormalisation() error {
	channels := s.Channels.count()
	fits := func(list []float64) bool { return len(list) <= 1 || len(list) == channels }
	switch {
	case !fits(s.Mean):
		return fmt.Errorf("mean: %v is neither one number nor one for each of %d channels", s.Mean, channels)
	case !fits(s.Std):
		return fmt.Errorf("std: %v is neither one number nor one for each of %d channels", s.Std, channels)
	case slices.Contains(s.Std, 0):
		return fmt.Errorf("std: %v divides by zero", s.Std)
	}
	return nil
}

// affine maps a channel's value v, black 0 and white 1, to v*scale + offset.
type affine struct{ scale, offset float64 }

// normalisation returns one map a channel. The settings are valid and have
// their defaults.
func (s Settings) normalisation() []affine {
	out := make([]affine, s.Channels.count())
	for c := range out {
		mean, std := of(s.Mean, c, 0), of(s.Std, c, 1)
		out[c] = affine{scale: (s.Range[1] - s.Range[0]) / std, offset: (s.Range[0] - mean) / std}
	}
	return out
}

// of returns the channel's number of a list that has one for all or for each.
func of(list []float64, channel int, otherwise float64) float64 {
	switch len(list) {
	case 0:
		return otherwise
	case 1:
		return list[0]
	default:
		return list[channel]
	}
}

// shape returns the tensor's shape.
func (s Settings) shape() []int64 {
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
