package plot

import (
	"io"
	"math"
	"slices"
)

// Axis names what is along it, and the unit of its marks.
type Axis struct{ Name, Unit string }

// Lines is a picture of series over one axis, whose values begin at 0.
type Lines struct {
	// Title stands above, and Note in a line below it.
	Title, Note string
	X, Y        Axis
	// Log gives each factor of x the same room; its values are above 0 then.
	Log    bool
	Series []Series
}

// Series is one line.
type Series struct {
	Name   string
	Points []At
	// Dashed sets apart what was not measured here.
	Dashed bool
}

// At is a point of a series. One with a value that is no number is left out.
type At struct{ X, Y float64 }

// Bars is a picture of groups of bars, one bar for each series.
type Bars struct {
	Title, Note string
	Y           Axis
	// Goal is drawn as a line across, with its name; 0 is none.
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

// Bar is a value, and how far it was spread. One of 0 is not drawn.
type Bar struct{ Value, Low, High float64 }

// WriteLines draws lines.
func WriteLines(out io.Writer, l Lines) error {
	c := &canvas{}
	points := finite(l.Series)
	p, y := c.head(l.Title, l.Note)
	if len(points) == 0 {
		return c.nothing(out, y)
	}
	x, scaleY := l.scales(p, points)
	c.marks(p, x, xMarks(x, points), l.X.Unit)
	c.values(p, scaleY, l.Y)
	c.text((p.left+p.right)/2, p.bottom+36, small, centred, faint, l.X.Name)
	entries := make([]entry, len(l.Series))
	for i, s := range l.Series {
		entries[i] = entry{s.Name, series(i)}
		c.series(s, x, scaleY, series(i))
	}
	y += c.legend(p.left, p.right, y+28, entries) + 18
	return c.write(out, y)
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
		return c.nothing(out, y)
	}
	scaleY := scale{from: 0, to: most * 1.08, low: p.bottom, high: p.top}
	c.values(p, scaleY, b.Y)
	room := (p.right - p.left) / float64(len(b.Groups))
	for i, name := range b.Groups {
		left := p.left + float64(i)*room
		c.text(left+room/2, p.bottom+18, small, centred, foreground, name)
		b.group(c, i, left, room, scaleY)
	}
	entries := make([]entry, len(b.Series))
	for i, s := range b.Series {
		entries[i] = entry{s.Name, series(i)}
	}
	if b.Goal > 0 {
		at := scaleY.at(b.Goal)
		c.curve([]point{{p.left, at}, {p.right, at}}, foreground, "6 4")
		c.text(p.right, at-6, small, ends, foreground, b.GoalName)
	}
	y += c.legend(p.left, p.right, y+8, entries)
	return c.write(out, y)
}

// group draws the bars of one group.
func (b Bars) group(c *canvas, i int, left, room float64, y scale) {
	const share = 0.7
	each := room * share / float64(len(b.Series))
	for j, s := range b.Series {
		if i >= len(s.Bars) || s.Bars[i].Value <= 0 {
			continue
		}
		bar, x := s.Bars[i], left+room*(1-share)/2+float64(j)*each
		top := y.at(bar.Value)
		c.rect(x+2, top, each-4, y.low-top, series(j), s.Name+", "+b.Groups[i]+": "+thousands(bar.Value)+b.Y.Unit)
		if bar.High > bar.Low {
			c.curve([]point{{x + each/2, y.at(bar.Low)}, {x + each/2, y.at(bar.High)}}, foreground, "")
		}
	}
}

// head writes what stands above, and returns the panel and where it ends with the
// names of its marks.
func (c *canvas) head(title, note string) (panel, float64) {
	c.text(leftMargin-60, 30, large, begins, foreground, title)
	c.text(leftMargin-60, 50, small, begins, faint, note)
	return below(titleHeight-20, plotHeight)
}

func (c *canvas) nothing(out io.Writer, y float64) error {
	c.text(leftMargin, titleHeight+30, normal, begins, foreground, "There is nothing to draw.")
	return c.write(out, y)
}

func (c *canvas) write(out io.Writer, y float64) error {
	_, err := io.WriteString(out, c.svg(pictureWidth, y+10))
	return err
}

func (l Lines) scales(p panel, points []At) (x, y scale) {
	x = scale{from: points[0].X, to: points[0].X, low: p.left, high: p.right, log: l.Log}
	most := 0.0
	for _, at := range points {
		x.from, x.to, most = min(x.from, at.X), max(x.to, at.X), max(most, at.Y)
	}
	if !l.Log {
		x.from = min(x.from, 0)
	} else {
		x.from = max(x.from, math.SmallestNonzeroFloat32)
		x.to = max(x.to, x.from)
	}
	if most <= 0 {
		most = 1
	}
	return x, scale{from: 0, to: most * 1.08, low: p.bottom, high: p.top}
}

// finite returns the points of all series that have a place.
func finite(all []Series) (out []At) {
	for _, s := range all {
		for _, at := range s.Points {
			if at.finite() {
				out = append(out, at)
			}
		}
	}
	return out
}

func (a At) finite() bool {
	return !math.IsNaN(a.X) && !math.IsInf(a.X, 0) && !math.IsNaN(a.Y) && !math.IsInf(a.Y, 0)
}

// fewMarks are those that have room on an axis, each by its own value.
const fewMarks = 9

// xMarks are the values themselves where they are few.
func xMarks(x scale, points []At) []float64 {
	var own []float64
	for _, at := range points {
		own = append(own, at.X)
	}
	slices.Sort(own)
	if own = slices.Compact(own); len(own) <= fewMarks {
		return own
	}
	return x.marks()
}

func (c *canvas) marks(p panel, x scale, marks []float64, unit string) {
	for _, mark := range marks {
		at := x.at(mark)
		c.rule(at, p.top, at, p.bottom)
		c.text(at, p.bottom+18, small, centred, faint, thousands(mark)+unit)
	}
}

// values draws the axis to the left.
func (c *canvas) values(p panel, y scale, axis Axis) {
	for _, mark := range y.marks() {
		at := y.at(mark)
		c.rule(p.left, at, p.right, at)
		c.text(p.left-8, at+4, small, ends, faint, thousands(mark)+axis.Unit)
	}
	c.text(p.left-60, p.top-12, small, begins, faint, axis.Name)
}

// manyPoints are too many for a dot each.
const manyPoints = 20

func (c *canvas) series(s Series, x, y scale, colour string) {
	dash := ""
	if s.Dashed {
		dash = "6 4"
	}
	var points []point
	for _, at := range s.Points {
		if at.finite() {
			points = append(points, point{x.at(at.X), y.at(at.Y)})
		}
	}
	c.curve(points, colour, dash)
	if len(points) > manyPoints {
		return
	}
	for _, at := range s.Points {
		if at.finite() {
			c.dot(point{x.at(at.X), y.at(at.Y)}, colour, s.Name+": "+thousands(at.Y))
		}
	}
}
