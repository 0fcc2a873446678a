package bench

import (
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
)

// A picture is SVG: it needs no font and no script, and is the same for the same figures.
// Colour-blind readers can distinguish its colours. Writing fails only if the writer does.

// Axis has a name, and the unit of its marks.
type Axis struct{ Name, Unit string }

// Lines is a picture of series over one axis. Its values begin at 0.
type Lines struct {
	// Title is above the picture, and Note a line below the title.
	Title, Note string
	X, Y        Axis
	// Log makes the X axis logarithmic. Its values are above 0 then.
	Log    bool
	Series []Series
}

// Series is one line.
type Series struct {
	Name   string
	Points []At
	// Dashed distinguishes figures that were not measured here.
	Dashed bool
}

// At is a point of a series. Points that are not finite are left out.
type At struct{ X, Y float64 }

// Bars is a picture of groups of bars, one bar for each series.
type Bars struct {
	Title, Note string
	Y           Axis
	// Goal is a line across the picture, with a name; 0 is none.
	Goal     float64
	GoalName string
	Groups   []string
	Series   []BarSeries
}

// BarSeries has a bar for each group, in their order.
type BarSeries struct {
	Name string
	Bars []Bar
}

// Bar is a value and its range. A value of 0 is not drawn.
type Bar struct{ Value, Low, High float64 }

const (
	// maxDots is the most points of a line that have a dot each.
	maxDots = 20
	// maxOwnMarks is the most values of an axis that have a mark each.
	maxOwnMarks = 9
	dashes      = "6 4"
)

// figure is lines over two axes.
type figure struct {
	x, y           scale
	xMarks         []float64
	xLabel, yLabel func(float64) string
	lines          []line
}

type line struct {
	colour, dash string
	points       []At
	// title describes the i-th point, which has a dot then; it may be nil.
	title func(i int, at At) string
}

func (c *canvas) draw(p panel, f figure) {
	c.xAxis(p, f.x, f.xMarks, f.xLabel)
	c.yAxis(p, f.y, f.yLabel)
	for _, l := range f.lines {
		points := make([]point, len(l.points))
		for i, at := range l.points {
			points[i] = point{f.x.at(at.X), f.y.at(at.Y)}
		}
		c.curve(points, l.colour, l.dash)
		for i, at := range l.points {
			if l.title != nil {
				c.dot(points[i], l.colour, l.title(i, at))
			}
		}
	}
}

// WriteLines draws lines.
func WriteLines(out io.Writer, l Lines) error {
	c := &canvas{}
	p, y := c.head(l.Title, l.Note)
	f := figure{xLabel: func(v float64) string { return thousands(v) + l.X.Unit }, yLabel: func(v float64) string { return thousands(v) + l.Y.Unit }}
	var own []float64
	most := 0.0
	legend := make([]legendEntry, len(l.Series))
	for i, s := range l.Series {
		legend[i] = legendEntry{s.Name, seriesColour(i)}
		one := line{colour: seriesColour(i), points: s.finite()}
		if s.Dashed {
			one.dash = dashes
		}
		if len(one.points) <= maxDots {
			one.title = func(_ int, at At) string { return s.Name + ": " + thousands(at.Y) }
		}
		for _, at := range one.points {
			own, most = append(own, at.X), max(most, at.Y)
		}
		f.lines = append(f.lines, one)
	}
	if len(own) == 0 {
		return c.writeNothing(out, y)
	}
	slices.Sort(own)
	from, to := min(own[0], 0), own[len(own)-1]
	if l.Log {
		from = max(own[0], math.SmallestNonzeroFloat32)
		to = max(to, from)
	}
	if most <= 0 {
		most = 1
	}
	f.x, f.y = p.xScale(from, to), p.yScale(0, most*1.08)
	f.x.log = l.Log
	if f.xMarks = slices.Compact(own); len(f.xMarks) > maxOwnMarks {
		f.xMarks = f.x.marks()
	}
	c.draw(p, f)
	c.text(p.left-60, p.top-12, small, left, faint, l.Y.Name)
	c.text((p.left+p.right)/2, p.bottom+36, small, middle, faint, l.X.Name)
	y += c.legend(y+28, legend) + 18
	return c.write(out, y)
}

func (s Series) finite() []At {
	finite := func(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }
	return slices.DeleteFunc(slices.Clone(s.Points), func(at At) bool { return !finite(at.X) || !finite(at.Y) })
}

// WriteBars draws bars.
func WriteBars(out io.Writer, b Bars) error {
	c := &canvas{}
	p, y := c.head(b.Title, b.Note)
	most := b.Goal
	for _, s := range b.Series {
		for _, bar := range s.Bars {
			most = max(most, bar.Value, bar.High)
		}
	}
	if len(b.Groups) == 0 || len(b.Series) == 0 || most <= 0 || math.IsInf(most, 0) || math.IsNaN(most) {
		return c.writeNothing(out, y)
	}
	scaleY := p.yScale(0, most*1.08)
	c.yAxis(p, scaleY, func(v float64) string { return thousands(v) + b.Y.Unit })
	c.text(p.left-60, p.top-12, small, left, faint, b.Y.Name)
	const share = 0.7 // of a group's width that its bars take
	width := (p.right - p.left) / float64(len(b.Groups))
	each := width * share / float64(len(b.Series))
	legend := make([]legendEntry, len(b.Series))
	for i, name := range b.Groups {
		begin := p.left + float64(i)*width
		c.text(begin+width/2, p.bottom+18, small, middle, foreground, name)
		for j, s := range b.Series {
			legend[j] = legendEntry{s.Name, seriesColour(j)}
			if i >= len(s.Bars) || s.Bars[i].Value <= 0 {
				continue
			}
			bar, x := s.Bars[i], begin+width*(1-share)/2+float64(j)*each
			top := scaleY.at(bar.Value)
			c.rect(x+2, top, each-4, scaleY.low-top, seriesColour(j), s.Name+", "+name+": "+thousands(bar.Value)+b.Y.Unit)
			if bar.High > bar.Low {
				c.curve([]point{{x + each/2, scaleY.at(bar.Low)}, {x + each/2, scaleY.at(bar.High)}}, foreground, "")
			}
		}
	}
	if b.Goal > 0 {
		at := scaleY.at(b.Goal)
		c.curve([]point{{p.left, at}, {p.right, at}}, foreground, dashes)
		c.text(p.right, at-6, small, right, foreground, b.GoalName)
	}
	y += c.legend(y+8, legend)
	return c.write(out, y)
}

// head writes title and note, and returns the panel and where it ends.
func (c *canvas) head(title, note string) (panel, float64) {
	c.text(leftMargin-60, 30, large, left, foreground, title)
	c.text(leftMargin-60, 50, small, left, faint, note)
	return panelBelow(titleHeight-20, plotHeight)
}

func (c *canvas) writeNothing(out io.Writer, y float64) error {
	c.text(leftMargin, titleHeight+30, normal, left, foreground, "There is nothing to draw.")
	return c.write(out, y)
}

// Sizes of text in pixels, the width of a letter as a share of that, and colours.
const (
	small      = 12
	normal     = 14
	large      = 17
	letter     = 0.56
	foreground = "#1a1a1a"
	faint      = "#6b6b6b"
	grid       = "#dddddd"
)

// The anchors of a text.
const (
	left   = "start"
	middle = "middle"
	right  = "end"
)

// Measures of a picture, in pixels.
const (
	pictureWidth = 920.0
	leftMargin   = 130.0
	rightMargin  = 40.0
	plotHeight   = 280.0
	titleHeight  = 62.0
	aboveHeight  = 46.0
	belowHeight  = 34.0
)

// seriesColour returns the colours of Okabe and Ito, "Color Universal Design" (2008),
// which colour-blind readers can distinguish; without the yellow, which is too light for
// a line.
func seriesColour(i int) string {
	colours := []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"}
	return colours[i%len(colours)]
}

// canvas collects the elements of a picture. Points are pixels from the left and the top.
type canvas struct{ body strings.Builder }

type point struct{ x, y float64 }

// gridLine draws a line of the grid.
func (c *canvas) gridLine(x1, y1, x2, y2 float64) {
	fmt.Fprintf(&c.body, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s"/>`+"\n", x1, y1, x2, y2, grid)
}

func (c *canvas) rect(x, y, w, h float64, colour, title string) {
	fmt.Fprintf(&c.body, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"><title>%s</title></rect>`+"\n", x, y, w, h, colour, escape(title))
}

func (c *canvas) text(x, y float64, size int, anchor, colour, text string) {
	fmt.Fprintf(&c.body, `<text x="%.1f" y="%.1f" font-size="%d" text-anchor="%s" fill="%s">%s</text>`+"\n", x, y, size, anchor, colour, escape(text))
}

func (c *canvas) curve(points []point, colour, dash string) {
	var at strings.Builder
	for _, p := range points {
		fmt.Fprintf(&at, "%.1f,%.1f ", p.x, p.y)
	}
	fmt.Fprintf(&c.body, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2" stroke-dasharray="%s"/>`+"\n", strings.TrimSpace(at.String()), colour, dash)
}

func (c *canvas) dot(p point, colour, title string) {
	fmt.Fprintf(&c.body, `<circle cx="%.1f" cy="%.1f" r="4" fill="%s"><title>%s</title></circle>`+"\n", p.x, p.y, colour, escape(title))
}

// write writes the picture, which ends a little below y.
func (c *canvas) write(out io.Writer, y float64) error {
	_, err := fmt.Fprintf(out, `<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f" viewBox="0 0 %.0f %.0f" font-family="system-ui, sans-serif">`+"\n"+
		`<rect width="%.0f" height="%.0f" fill="#ffffff"/>`+"\n%s</svg>\n",
		pictureWidth, y+10, pictureWidth, y+10, pictureWidth, y+10, c.body.String())
	return err
}

func escape(s string) string {
	var out strings.Builder
	_ = xml.EscapeText(&out, []byte(s)) // a builder accepts everything
	return out.String()
}

// legendEntry is a name and its colour.
type legendEntry struct{ name, colour string }

// legend writes names beside their colours, in rows, and returns the height of all rows.
func (c *canvas) legend(y float64, entries []legendEntry) float64 {
	const box, row, gap = 12.0, 20.0, 18.0
	x, top := leftMargin, y
	for _, e := range entries {
		needs := box + 6 + float64(len([]rune(e.name)))*small*letter
		if x+needs > pictureWidth-rightMargin && x > leftMargin {
			x, y = leftMargin, y+row
		}
		c.rect(x, y-box+2, box, box, e.colour, e.name)
		c.text(x+box+6, y, small, left, foreground, e.name)
		x += needs + gap
	}
	return y + row - top
}

// panel is the place of a plot on the canvas.
type panel struct{ left, top, right, bottom float64 }

// panelBelow returns a panel of that height, and where it ends with its axis labels.
func panelBelow(y, height float64) (panel, float64) {
	p := panel{left: leftMargin, top: y + aboveHeight, right: pictureWidth - rightMargin, bottom: y + aboveHeight + height}
	return p, p.bottom + belowHeight
}

// xScale and yScale map values to pixels of the panel.
func (p panel) xScale(from, to float64) scale {
	return scale{from: from, to: to, low: p.left, high: p.right}
}

func (p panel) yScale(from, to float64) scale {
	return scale{from: from, to: to, low: p.bottom, high: p.top}
}

// xAxis draws the marks of the axis below the panel, yAxis those to its left.
func (c *canvas) xAxis(p panel, x scale, marks []float64, label func(float64) string) {
	for _, mark := range marks {
		at := x.at(mark)
		c.gridLine(at, p.top, at, p.bottom)
		c.text(at, p.bottom+18, small, middle, faint, label(mark))
	}
}

func (c *canvas) yAxis(p panel, y scale, label func(float64) string) {
	for _, mark := range y.marks() {
		at := y.at(mark)
		c.gridLine(p.left, at, p.right, at)
		c.text(p.left-8, at+4, small, right, faint, label(mark))
	}
}

// scale maps the values between from and to to the pixels between low and high.
type scale struct {
	from, to  float64
	low, high float64
	log       bool
}

func (s scale) at(v float64) float64 {
	from, to := s.from, s.to
	if s.log {
		v, from, to = math.Log10(math.Max(v, s.from)), math.Log10(from), math.Log10(to)
	}
	if to == from {
		return s.low
	}
	return s.low + (s.high-s.low)*(v-from)/(to-from)
}

// marks returns the values that an axis labels: about five round values of a linear
// scale; 1, 2 and 5 of each power of ten of a logarithmic one, or only 1 if it has many
// powers.
func (s scale) marks() (out []float64) {
	if s.log {
		begin, end := int(math.Floor(math.Log10(s.from))), int(math.Ceil(math.Log10(s.to)))
		multiples := []float64{1, 2, 5}
		if end-begin > 3 {
			multiples = multiples[:1]
		}
		for power := begin; power <= end; power++ {
			for _, m := range multiples {
				if v := m * math.Pow10(power); v >= s.from*0.999 && v <= s.to*1.001 {
					out = append(out, v)
				}
			}
		}
		return out
	}
	if s.to <= s.from {
		return []float64{s.from}
	}
	step := math.Pow10(int(math.Floor(math.Log10((s.to - s.from) / 5))))
	for _, m := range []float64{1, 2, 5, 10} {
		if (s.to-s.from)/(step*m) <= 6 {
			step *= m
			break
		}
	}
	for i := 0; s.from+float64(i)*step <= s.to*1.0001; i++ {
		out = append(out, s.from+float64(i)*step)
	}
	return out
}

// latencyScale returns a logarithmic scale from the mark below low to the mark above high.
func (p panel) latencyScale(low, high float64) scale {
	if low <= 0 || math.IsInf(low, 0) {
		low = 0.001
	}
	high = math.Max(high, low*1.1)
	marks := []float64{1, 2, 5, 10}
	s := p.yScale(low, high)
	s.log = true
	power := math.Pow10(int(math.Floor(math.Log10(low))))
	for _, m := range marks {
		if m*power <= low*1.0001 {
			s.from = m * power
		}
	}
	power = math.Pow10(int(math.Floor(math.Log10(high))))
	for _, m := range marks {
		if m*power >= high*0.9999 {
			s.to = m * power
			break
		}
	}
	return s
}

// labelMS labels a mark of a time axis.
func labelMS(ms float64) string {
	switch {
	case ms == 0:
		return "0"
	case ms < 1:
		return short(ms*1000) + " µs"
	case ms < 1000:
		return short(ms) + " ms"
	}
	return short(ms/1000) + " s"
}

func short(v float64) string { return strconv.FormatFloat(float64(float32(v)), 'g', 4, 32) }

// thousands labels a mark of a count.
func thousands(v float64) string {
	if v >= 10_000 {
		return short(v/1000) + "k"
	}
	return fmt.Sprintf("%.4g", v)
}
