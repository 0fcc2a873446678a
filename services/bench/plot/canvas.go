package plot

import (
	"encoding/xml"
	"fmt"
	"strings"
)

// Sizes of text, in pixels, and how wide a letter is at most about.
const (
	small      = 12
	normal     = 14
	large      = 17
	letter     = 0.56
	foreground = "#1a1a1a"
	faint      = "#6b6b6b"
	grid       = "#dddddd"
)

// Where a text stands at its point.
const (
	begins  = "start"
	centred = "middle"
	ends    = "end"
)

// canvas is a picture in the making. Points are pixels from the left and the top.
type canvas struct{ body strings.Builder }

// rule draws a line of the grid.
func (c *canvas) rule(x1, y1, x2, y2 float64) {
	fmt.Fprintf(&c.body, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s"/>`+"\n", x1, y1, x2, y2, grid)
}

func (c *canvas) rect(x, y, w, h float64, colour, title string) {
	fmt.Fprintf(&c.body, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"><title>%s</title></rect>`+"\n", x, y, w, h, colour, escaped(title))
}

func (c *canvas) text(x, y float64, size int, at, colour, text string) {
	fmt.Fprintf(&c.body, `<text x="%.1f" y="%.1f" font-size="%d" text-anchor="%s" fill="%s">%s</text>`+"\n", x, y, size, at, colour, escaped(text))
}

// point is a place on the canvas.
type point struct{ x, y float64 }

func (c *canvas) curve(points []point, colour, dash string) {
	var at strings.Builder
	for _, p := range points {
		fmt.Fprintf(&at, "%.1f,%.1f ", p.x, p.y)
	}
	fmt.Fprintf(&c.body, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2" stroke-dasharray="%s"/>`+"\n", strings.TrimSpace(at.String()), colour, dash)
}

func (c *canvas) dot(p point, colour, title string) {
	fmt.Fprintf(&c.body, `<circle cx="%.1f" cy="%.1f" r="4" fill="%s"><title>%s</title></circle>`+"\n", p.x, p.y, colour, escaped(title))
}

// svg returns the whole picture.
func (c *canvas) svg(width, height float64) string {
	return fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f" viewBox="0 0 %.0f %.0f" font-family="system-ui, sans-serif">`+"\n",
		width, height, width, height) +
		fmt.Sprintf(`<rect width="%.0f" height="%.0f" fill="#ffffff"/>`+"\n", width, height) + c.body.String() + "</svg>\n"
}

func escaped(s string) string {
	var out strings.Builder
	_ = xml.EscapeText(&out, []byte(s)) // a builder takes all
	return out.String()
}

// width is about how wide a text is.
func width(text string, size int) float64 { return float64(len([]rune(text))) * float64(size) * letter }

// legend writes names beside their colours, in rows within the bounds, and returns how
// high they are.
func (c *canvas) legend(left, right, y float64, entries []entry) float64 {
	const box, row, gap = 12.0, 20.0, 18.0
	x, top := left, y
	for _, e := range entries {
		needs := box + 6 + width(e.name, small)
		if x+needs > right && x > left {
			x, y = left, y+row
		}
		c.rect(x, y-box+2, box, box, e.colour, e.name)
		c.text(x+box+6, y, small, begins, foreground, e.name)
		x += needs + gap
	}
	return y + row - top
}

// entry is a name in a legend.
type entry struct{ name, colour string }
