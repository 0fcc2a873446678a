// Package plot draws a report as one picture in SVG: latency by percentile, where the
// time went, and, of several runs, latency by throughput. Of runs that shared their
// process with the mesh, and were long enough, it has heap and goroutines over time.
//
//	err := plot.Write(file, r)
//	err = plot.WriteLines(file, plot.Lines{Title: "Answers a second", Series: series})
//
// The picture is text: it needs no font and no script, is the same for the same report,
// and may be put on a page. The colours are told apart by those who see few of them.
//
// The axis of percentiles gives each nine the same room, as the tail is what callers
// see; that of latencies is logarithmic. Bars are means, because only means add up.
//
// WriteLines and WriteBars draw figures that are compared: series over one axis, and
// groups of bars. Their values begin at 0, so that lengths may be compared by eye.
//
// Everything is a pure function. Write fails only where its writer does.
package plot
