package runners

import "math"

// tap is one source pixel's part in a target pixel.
type tap struct {
	source int
	weight float64
}

// taps returns, for every pixel of an axis of length target, which pixels of an
// axis of length source it is made of. The weights of each add up to 1.
func taps(method Resample, source, target int) [][]tap {
	out := make([][]tap, target)
	ratio := float64(source) / float64(target)
	for i := range out {
		switch method {
		case Nearest:
			out[i] = []tap{{source: min(int((float64(i)+0.5)*ratio), source-1), weight: 1}}
		case Box:
			out[i] = boxTaps(source, target, i)
		default:
			out[i] = triangleTaps(source, ratio, i)
		}
	}
	return out
}

// boxTaps weighs source pixels by how much of the target pixel they cover. In
// units of 1/target of a source pixel, target pixel i spans [i*source,
// (i+1)*source) and source pixel j spans [j*target, (j+1)*target): whole
// numbers, so that a whole ratio gives equal weights.
func boxTaps(source, target, i int) []tap {
	start, end := i*source, (i+1)*source
	var out []tap
	for j := start / target; j*target < end; j++ {
		covered := min((j+1)*target, end) - max(j*target, start)
		out = append(out, tap{source: j, weight: float64(covered) / float64(source)})
	}
	return out
}

// triangleTaps weighs source pixels by their distance from the target pixel's
// middle, falling to 0 at one source pixel, or at one target pixel where that
// is larger.
func triangleTaps(source int, ratio float64, i int) []tap {
	middle := (float64(i)+0.5)*ratio - 0.5
	reach := max(1, ratio)
	var out []tap
	sum := 0.0
	for j := int(math.Ceil(middle - reach)); float64(j) <= middle+reach; j++ {
		w := 1 - math.Abs(float64(j)-middle)/reach
		if j < 0 || j >= source || w <= 0 {
			continue
		}
		out = append(out, tap{source: j, weight: w})
		sum += w
	}
	for k := range out {
		out[k].weight /= sum
	}
	return out
}

// resize returns the image as width*height pixels of the reader's channels,
// row-major, black 0 and white 1. It holds one row of the source at a time, and ends with
// alive's error.
func resize(alive func() error, src imageRows, method Resample, width, height int) ([]float64, error) {
	across, down := taps(method, src.width, width), taps(method, src.height, height)
	row := make([]float64, src.width*src.channels)
	narrow := make([]float64, width*src.channels)
	out := make([]float64, height*len(narrow))
	for y, targets := range transpose(down, src.height) {
		if len(targets) == 0 {
			continue
		}
		if err := alive(); err != nil {
			return nil, err
		}
		src.read(y, row)
		shrink(narrow, row, across, src.channels)
		for _, t := range targets {
			accumulate(out[t.source*len(narrow):][:len(narrow)], narrow, t.weight)
		}
	}
	return out, nil
}

// transpose returns, for every source pixel, the target pixels that it is a
// part of.
func transpose(all [][]tap, source int) [][]tap {
	out := make([][]tap, source)
	for target, list := range all {
		for _, t := range list {
			out[t.source] = append(out[t.source], tap{source: target, weight: t.weight})
		}
	}
	return out
}

func shrink(dst, src []float64, across [][]tap, channels int) {
	for x, list := range across {
		for c := range channels {
			sum := 0.0
			for _, t := range list {
				sum += t.weight * src[t.source*channels+c]
			}
			dst[x*channels+c] = sum
		}
	}
}

func accumulate(dst, src []float64, weight float64) {
	for i, v := range src {
		dst[i] += weight * v
	}
}
