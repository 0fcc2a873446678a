package plot

import (
	"fmt"
	"strings"

	"github.com/stagemesh/stagemesh/services/bench/report"
)

// barHeight is that of a bar with the room below it.
const barHeight = 34.0

// split draws where the time went, a bar for each run.
func (c *canvas) split(p panel, runs []report.Run) {
	c.text(p.left-60, p.top-18, large, begins, foreground, "Where the time went, on average")
	longest := 0.0
	for _, run := range runs {
		longest = max(longest, total(run))
	}
	x := scale{from: 0, to: max(longest, 0.001), low: p.left, high: p.right}
	for _, mark := range x.marks() {
		at := x.at(mark)
		c.rule(at, p.top, at, p.bottom)
		c.text(at, p.bottom+18, small, centred, faint, milliseconds(mark))
	}
	colours := partColours(runs)
	for i, run := range runs {
		c.bar(p.top+float64(i)*barHeight, x, run, colours)
	}
}

func total(run report.Run) (out float64) {
	for _, part := range run.Parts() {
		out += part.Mean()
	}
	return out
}

func (c *canvas) bar(top float64, x scale, run report.Run, colours []entry) {
	const margin = 5.0
	c.text(x.low-8, top+barHeight/2+4, small, ends, foreground, run.Load.Name())
	from := 0.0
	for _, part := range run.Parts() {
		left, right := x.at(from), x.at(from+part.Mean())
		c.rect(left, top+margin, right-left, barHeight-2*margin, colourOf(colours, part.Name), fmt.Sprintf("%s %.3f ms", part.Name, part.Mean()))
		from += part.Mean()
	}
}

func colourOf(colours []entry, name string) string {
	for _, e := range colours {
		if e.name == name {
			return e.colour
		}
	}
	return outsideColour
}

// partColours returns the legend of the parts of all runs, in their order.
func partColours(runs []report.Run) []entry {
	var out []entry
	seen := map[string]bool{}
	steps := map[string]int{}
	for _, run := range runs {
		for _, part := range run.Parts() {
			if !seen[part.Name] {
				seen[part.Name] = true
				out = append(out, entry{part.Name, partColour(steps, part.Name)})
			}
		}
	}
	return out
}

// partColour returns the colour of a part; steps have theirs in the order in which they
// are seen.
func partColour(steps map[string]int, name string) string {
	space := strings.LastIndexByte(name, ' ')
	if space < 0 {
		if name == "hops" {
			return hopsColour
		}
		return outsideColour
	}
	step, ok := steps[name[:space]]
	if !ok {
		step = len(steps)
		steps[name[:space]] = step
	}
	return shade(step, map[string]int{"queue": 0, "batch": 1, "run": 2}[name[space+1:]])
}
