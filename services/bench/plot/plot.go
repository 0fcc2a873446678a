package plot

import (
	"fmt"
	"io"

	"github.com/stagemesh/stagemesh/services/bench/report"
)

// Measures of the picture, in pixels.
const (
	pictureWidth = 920.0
	leftMargin   = 130.0
	rightMargin  = 40.0
	plotHeight   = 280.0
	titleHeight  = 62.0
	aboveHeight  = 46.0
	belowHeight  = 34.0
)

// Write draws the report. Runs without an answer are left out.
func Write(out io.Writer, r report.Report) error {
	runs := make([]report.Run, 0, len(r.Runs))
	for _, run := range r.Runs {
		if run.Latency.Count > 0 {
			runs = append(runs, run)
		}
	}
	c := &canvas{}
	y := c.title(r)
	if len(runs) == 0 {
		c.text(leftMargin-60, y+30, normal, begins, foreground, "There are no answers to draw.")
		y += 50
	} else {
		y = c.plots(y, runs)
	}
	_, err := io.WriteString(out, c.svg(pictureWidth, y+10))
	return err
}

func (c *canvas) title(r report.Report) float64 {
	s := r.Subject
	c.text(leftMargin-60, 30, large, begins, foreground, fmt.Sprintf("Pipeline %s by %s, %s", s.Pipeline, s.Protocol, s.Payload))
	c.text(leftMargin-60, 50, small, begins, faint, fmt.Sprintf("%s; %d cores, %s/%s, %s, stagemesh %s; %s",
		map[string]string{report.Elsewhere: s.Address, report.InProcess: "mesh in the generator's process", report.Processes: "mesh in processes beside the generator"}[s.Place],
		r.Machine.Cores, r.Machine.OS, r.Machine.Arch, r.Machine.Go, r.Product, r.Began.UTC().Format("2006-01-02")))
	return titleHeight
}

// plots draws the plots below each other, and returns where they end.
func (c *canvas) plots(y float64, runs []report.Run) float64 {
	p, y := below(y, plotHeight)
	c.percentiles(p, runs)
	if len(runs) > 1 {
		y += c.runLegend(y, runs)
	}
	p, y = below(y, barHeight*float64(len(runs)))
	c.split(p, runs)
	y += c.legend(leftMargin, pictureWidth-rightMargin, y+8, partColours(runs))
	if len(runs) > 1 {
		y = c.throughputs(y, runs)
	}
	if all := processes(runs); len(all) > 0 {
		y = c.overTime(y, runs, all)
	}
	return y
}

// runLegend writes which run has which colour.
func (c *canvas) runLegend(y float64, runs []report.Run) float64 {
	entries := make([]entry, len(runs))
	for i, run := range runs {
		entries[i] = entry{run.Load.Name(), series(i)}
	}
	return c.legend(leftMargin, pictureWidth-rightMargin, y+8, entries)
}

func (c *canvas) throughputs(y float64, runs []report.Run) float64 {
	p, y := below(y, plotHeight)
	c.throughput(p, runs)
	entries := make([]entry, len(lines))
	for i, line := range lines {
		entries[i] = entry{line.name, series(i)}
	}
	return y + c.legend(leftMargin, pictureWidth-rightMargin, y+8, entries)
}

// overTime draws what the processes were like.
func (c *canvas) overTime(y float64, runs []report.Run, all []timed) float64 {
	for which := range processLines {
		var p panel
		p, y = below(y, processHeight)
		c.process(p, which, all)
	}
	if len(runs) > 1 {
		y += c.runLegend(y, runs)
	}
	return y
}

// below returns a panel of that height, and where it ends with what names its axis.
func below(y, height float64) (panel, float64) {
	p := panel{left: leftMargin, top: y + aboveHeight, right: pictureWidth - rightMargin, bottom: y + aboveHeight + height}
	return p, p.bottom + belowHeight
}
