package imagedecode

import "image"

// rows reads a decoded image row by row.
type rows struct {
	width, height int
	channels      int
	// read writes row y: width*channels values, black 0 and white 1.
	read func(y int, row []float64)
}

// rowsOf returns a reader of the image as grey or RGB.
func rowsOf(img image.Image, channels Channels) rows {
	bounds := img.Bounds()
	out := rows{width: bounds.Dx(), height: bounds.Dy(), channels: channels.count()}
	switch src := img.(type) {
	case *image.Gray:
		out.read = func(y int, row []float64) { readGrey(src, y, row, out.channels) }
	case image.RGBA64Image:
		out.read = func(y int, row []float64) {
			for x := range out.width {
				p := src.RGBA64At(bounds.Min.X+x, bounds.Min.Y+y)
				put(row[x*out.channels:], out.channels, uint32(p.R), uint32(p.G), uint32(p.B))
			}
		}
	default:
		out.read = func(y int, row []float64) {
			for x := range out.width {
				r, g, b, _ := src.At(bounds.Min.X+x, bounds.Min.Y+y).RGBA()
				put(row[x*out.channels:], out.channels, r, g, b)
			}
		}
	}
	return out
}

func readGrey(src *image.Gray, y int, row []float64, channels int) {
	for x, v := range src.Pix[y*src.Stride:][:src.Rect.Dx()] {
		for c := range channels {
			row[x*channels+c] = float64(v) / 255
		}
	}
}

// put writes one pixel from 16-bit channels.
func put(row []float64, channels int, r, g, b uint32) {
	const white = 65535
	switch {
	case channels == 3:
		row[0], row[1], row[2] = float64(r)/white, float64(g)/white, float64(b)/white
	case r == g && g == b:
		row[0] = float64(r) / white
	default:
		row[0] = (0.299*float64(r) + 0.587*float64(g) + 0.114*float64(b)) / white
	}
}
