package plot

import (
	"io"
	"math"
	"slices"
)

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
	// manyPoints are too many for a dot each.
	manyPoints = 20
	// fewMarks have space on an axis, each with its own value.
	fewMarks = 9
	dashes   = "6 4"
)

// WriteLines draws lines.
func WriteLines(out io.Writer, l Lines) error {
	c := &canvas{}
	p, y := c.head(l.Title, l.Note)
	var own []float64
	most := 0.0
	for _, s := range l.Series {
		for _, at := range s.finite() {
			own, most = append(own, at.X), max(most, at.Y)
		}
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
	x, scaleY := p.xScale(from, to), p.yScale(0, most*1.08)
	x.log = l.Log
	marks := slices.Compact(own)
	if len(marks) > fewMarks {
		marks = x.marks()
	}
	c.xAxis(p, x, marks, func(v float64) string { return thousands(v) + l.X.Unit })
	c.values(p, scaleY, l.Y)
	c.text((p.left+p.right)/2, p.bottom+36, small, middle, faint, l.X.Name)
	legend := make([]legendEntry, len(l.Series))
	for i, s := range l.Series {
		legend[i] = legendEntry{s.Name, seriesColour(i)}
		dash := ""
		if s.Dashed {
			dash = dashes
		}
		var points []point
		for _, at := range s.finite() {
			points = append(points, point{x.at(at.X), scaleY.at(at.Y)})
		}
		c.curve(points, seriesColour(i), dash)
		if len(points) > manyPoints {
			continue
		}
		for j, at := range s.finite() {
			c.dot(points[j], seriesColour(i), s.Name+": "+thousands(at.Y))
		}
	}
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
	c.values(p, scaleY, b.Y)
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

// values draws the axis to the left, with its name.
func (c *canvas) values(p panel, y scale, axis Axis) {
	c.yAxis(p, y, func(v float64) string { return thousands(v) + axis.Unit })
	c.text(p.left-60, p.top-12, small, left, faint, axis.Name)
}
