// Package chart draws measurements as SVG with gonum.org/v1/plot. The same figures give the
// same picture, and colour-blind readers can distinguish its colours. Values that have no
// place on an axis, such as NaN, are left out. Functions may run concurrently, and fail only
// if their writer or file does.
package chart

import (
	"bytes"
	"image/color"
	"io"
	"math"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Axis begins at 0 unless it is logarithmic.
type Axis struct {
	Name string
	// Unit follows the value of each mark.
	Unit string
	Log  bool

	// label replaces Unit.
	label func(float64) string
}

// Lines is a picture of series over one axis.
type Lines struct {
	// Title is above the picture, and Note a line below the title.
	Title, Note string
	X, Y        Axis
	Series      []Series
}

// Series is one line. A series without points only takes a colour.
type Series struct {
	Name   string
	Points []Point
	// Dashed distinguishes figures that were not measured here.
	Dashed bool

	dotted bool
}

// Point is a point of a series.
type Point = plotter.XY

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
	// groupShare is the share of a group's width that its bars take.
	groupShare = 0.7

	// Lengths are in points: the picture is 920 pixels wide.
	pictureWidth, dataWidth = 690, 430
	margin, headHeight      = 22, 56
	rowHeight, rowGap       = 210, 20
	small, large            = 9.5, 13
)

var (
	foreground = color.Gray{0x1a}
	faint      = color.Gray{0x5c}
	gridStyle  = draw.LineStyle{Color: color.Gray{0xdd}, Width: 0.75}
	boundStyle = draw.LineStyle{Color: foreground, Width: 1.5}
	dashes     = []vg.Length{5, 3}
	dots       = []vg.Length{1.5, 2}
)

// WriteLines draws lines.
func WriteLines(out io.Writer, l Lines) error {
	return write(out, l.Title, l.Note, l.plots("")...)
}

// plots returns one plot, or none if there is nothing to draw.
func (l Lines) plots(title string) []*plot.Plot {
	p := newPlot(title, gridStyle, gridStyle)
	var xs, ys []float64
	for i, s := range l.Series {
		points := slices.DeleteFunc(slices.Clone(s.Points), func(at Point) bool { return !l.X.has(at.X) || !l.Y.has(at.Y) })
		if len(points) == 0 {
			continue
		}
		line := &plotter.Line{XYs: points, LineStyle: draw.LineStyle{Color: seriesColour(i), Width: 1.5}}
		if s.Dashed {
			line.Dashes = dashes
		} else if s.dotted {
			line.Dashes = dots
		}
		p.Add(line)
		p.Legend.Add(s.Name, line)
		if len(points) <= maxDots {
			p.Add(&plotter.Scatter{XYs: points, GlyphStyle: draw.GlyphStyle{Color: seriesColour(i), Radius: 3, Shape: draw.CircleGlyph{}}})
		}
		for _, at := range points {
			xs, ys = append(xs, at.X), append(ys, at.Y)
		}
	}
	if len(xs) == 0 {
		return nil
	}
	l.X.apply(&p.X, slices.Max(xs))
	l.Y.apply(&p.Y, slices.Max(ys)*1.05)
	if l.X.Log { // its values are marked
		p.X.Min, p.X.Max = slices.Min(xs), max(slices.Max(xs), 1.1*slices.Min(xs))
		var own plot.ConstantTicks
		for _, x := range slices.Compact(slices.Sorted(slices.Values(xs))) {
			own = append(own, plot.Tick{Value: x, Label: l.X.format(x)})
		}
		p.X.Tick.Marker = own
	}
	if l.Y.Log { // it ends at ticks
		low := slices.Min(ys)
		high := max(slices.Max(ys), 1.1*low)
		p.Y.Max = low
		for _, tick := range l.Y.Ticks(low, high) {
			if tick.Value <= low {
				p.Y.Min = tick.Value
			}
			if p.Y.Max < high {
				p.Y.Max = tick.Value
			}
		}
	}
	return []*plot.Plot{p}
}

// WriteBars draws bars.
func WriteBars(out io.Writer, b Bars) error {
	p := newPlot("", draw.LineStyle{}, gridStyle)
	most, each := 0.0, groupShare/float64(len(b.Series))
	for i, s := range b.Series {
		bars := &plotter.BarChart{
			Values: make(plotter.Values, len(b.Groups)), Color: seriesColour(i),
			Width: vg.Length(each) * dataWidth / vg.Length(len(b.Groups)), XMin: (float64(i)+0.5)*each - groupShare/2,
		}
		var ranges []plot.Plotter
		for j, bar := range s.Bars[:min(len(s.Bars), len(b.Groups))] {
			if !b.Y.has(bar.Value) || !b.Y.has(bar.Low) || !b.Y.has(bar.High) {
				continue
			}
			bars.Values[j], most = bar.Value, max(most, bar.Value, bar.High)
			if bar.Low < bar.High {
				x := bars.XMin + float64(j)
				ranges = append(ranges, &plotter.Line{XYs: plotter.XYs{{X: x, Y: bar.Low}, {X: x, Y: bar.High}}, LineStyle: boundStyle})
			}
		}
		p.Add(bars)
		p.Add(ranges...)
		p.Legend.Add(s.Name, bars)
	}
	if most <= 0 {
		return write(out, b.Title, b.Note)
	}
	b.Y.apply(&p.Y, max(most, b.Goal)*1.05)
	nameRows(&p.X, b.Groups)
	if b.Goal > 0 {
		goal := &plotter.Line{XYs: plotter.XYs{{X: p.X.Min, Y: b.Goal}, {X: p.X.Max, Y: b.Goal}}, LineStyle: boundStyle}
		goal.Dashes = dashes
		p.Add(goal)
		p.Legend.Add(b.GoalName, goal)
	}
	return write(out, b.Title, b.Note, p)
}

// newPlot returns a plot whose axes are the outer lines of its grid.
func newPlot(title string, vertical, horizontal draw.LineStyle) *plot.Plot {
	p := plot.New()
	p.BackgroundColor = nil
	p.Title.Text, p.Title.TextStyle, p.Title.Padding = title, textStyle(large, foreground), 8
	p.Title.TextStyle.XAlign, p.Title.TextStyle.YAlign = draw.XCenter, draw.YTop
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Width, axis.Tick.Width, axis.Padding, axis.Label.Padding = 0, 0, 6, 4
		axis.Tick.Label.Font, axis.Tick.Label.Color = textStyle(small, faint).Font, faint
		axis.Label.TextStyle.Font, axis.Label.TextStyle.Color = axis.Tick.Label.Font, faint
	}
	p.Legend.TextStyle, p.Legend.Padding = textStyle(small, foreground), 5
	p.Legend.Top, p.Legend.Left = true, true
	p.Add(&plotter.Grid{Vertical: vertical, Horizontal: horizontal})
	return p
}

func textStyle(size vg.Length, colour color.Color) text.Style {
	return text.Style{Color: colour, Font: font.Font{Typeface: "Liberation", Variant: "Sans", Size: size}, Handler: plot.DefaultTextHandler}
}

// write draws the plots below each other, and their legends on the right, where they cover no
// data.
func write(out io.Writer, title, note string, plots ...*plot.Plot) error {
	row, right := vg.Length(rowHeight), vg.Length(margin)
	column := make([][]*plot.Plot, len(plots))
	for i, p := range plots {
		column[i] = []*plot.Plot{p}
		legend := p.Legend.Rectangle(draw.Canvas{}).Size()
		row, right = max(row, legend.Y+3*margin), max(right, legend.X+2*margin)
	}
	height := headHeight + margin + (row+rowGap)*vg.Length(max(1, len(plots)))
	svg := vgsvg.New(pictureWidth, height)
	c := draw.New(svg)
	c.SetColor(color.White)
	c.Fill(c.Rectangle.Path())
	c.FillText(textStyle(large, foreground), vg.Point{X: margin, Y: height - 22}, title)
	c.FillText(textStyle(small, faint), vg.Point{X: margin, Y: height - 38}, note)
	if len(plots) == 0 {
		c.FillText(textStyle(small, foreground), vg.Point{X: margin, Y: height / 2}, "There is nothing to draw.")
	} else {
		tiles := draw.Tiles{Rows: len(plots), Cols: 1, PadTop: headHeight, PadBottom: margin, PadLeft: margin, PadRight: right, PadY: rowGap}
		for i, row := range plot.Align(column, tiles, c) {
			plots[i].Legend.XOffs = plots[i].DataCanvas(row[0]).Size().X + margin/2
			plots[i].Draw(row[0])
		}
	}
	var buffer bytes.Buffer
	if _, err := svg.WriteTo(&buffer); err != nil {
		return err
	}
	// The font is as wide as Arial, which more readers have.
	_, err := out.Write(bytes.ReplaceAll(buffer.Bytes(), []byte("font-family:Liberation Sans;"), []byte("font-family:Liberation Sans,Arial,sans-serif;")))
	return err
}

// has is true for values that have a place on the axis.
func (a Axis) has(v float64) bool {
	return v >= 0 && v <= 1e15 && (!a.Log || v >= 1e-6)
}

// apply sets an axis up for values from 0 to most.
func (a Axis) apply(axis *plot.Axis, most float64) {
	axis.Label.Text, axis.Tick.Marker, axis.Min, axis.Max = a.Name, a, 0, most
	if most <= 0 {
		axis.Max = 1
	}
	if a.Log {
		axis.Scale = plot.LogScale{}
	}
}

// Ticks returns about five round values, or 1, 2 and 5 of each power of ten on a logarithmic
// axis. Of many powers, 1 alone has a label.
func (a Axis) Ticks(low, high float64) (out []plot.Tick) {
	if a.Log {
		for power := math.Pow10(int(math.Floor(math.Log10(low)))); power <= 10*high; power *= 10 {
			for _, times := range []float64{1, 2, 5} {
				tick := plot.Tick{Value: times * power}
				if times == 1 || high/low < 1000 {
					tick.Label = a.format(tick.Value)
				}
				out = append(out, tick)
			}
		}
		return out
	}
	step := math.Pow10(int(math.Floor(math.Log10(high / 5))))
	for _, times := range []float64{2, 2.5, 2} { // 2, 5 and 10 times the first step
		if high/step > 6 {
			step *= times
		}
	}
	for v := 0.0; v <= high; v += step {
		out = append(out, plot.Tick{Value: v, Label: a.format(v)})
	}
	return out
}

func (a Axis) format(v float64) string {
	if a.label != nil {
		return a.label(v)
	}
	if v >= 10_000 {
		return short(v/1000) + "k" + a.Unit
	}
	return short(v) + a.Unit
}

func short(v float64) string { return strconv.FormatFloat(float64(float32(v)), 'g', 4, 32) }

// nameRows sets an axis up for a row or column of each name.
func nameRows(axis *plot.Axis, names []string) {
	ticks := make(plot.ConstantTicks, len(names))
	for i, name := range names {
		ticks[i] = plot.Tick{Value: float64(i), Label: name}
	}
	axis.Min, axis.Max, axis.Tick.Marker = -0.5, float64(len(names))-0.5, ticks
}

// seriesColour returns the colours of Okabe and Ito, "Color Universal Design" (2008),
// which colour-blind readers can distinguish; without the yellow, which is too light for
// a line.
func seriesColour(i int) color.NRGBA {
	colours := []color.NRGBA{
		{0x00, 0x72, 0xb2, 0xff},
		{0xd5, 0x5e, 0x00, 0xff},
		{0x00, 0x9e, 0x73, 0xff},
		{0xcc, 0x79, 0xa7, 0xff},
		{0xe6, 0x9f, 0x00, 0xff},
		{0x56, 0xb4, 0xe9, 0xff},
		{0x00, 0x00, 0x00, 0xff},
	}
	return colours[i%len(colours)]
}
