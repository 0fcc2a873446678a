package report

import "fmt"

// Bounds beyond which a run is remarked upon.
const (
	// busy is the share of the machine's processors that the generator may take.
	busy = 0.8
	// lateMS is how much later than planned one request in a hundred may be sent.
	lateMS = 5
	// fewAnswers are too few for the percentile 99.9.
	fewAnswers = 1000
)

// Notes are what a reader of a run should know before trusting its figures.
func Notes(r Report, run Run) []string {
	var out []string
	note := func(when bool, format string, args ...any) {
		if when {
			out = append(out, fmt.Sprintf(format, args...))
		}
	}
	g := run.Generator
	note(run.NotSent > 0, "%d of %d arrivals were not sent, because %d requests were in flight: the mesh does not keep up with this rate, and the figures are of those that were sent.",
		run.NotSent, run.NotSent+run.Sent, run.Load.MaxInFlight)
	note(!g.Shared && g.CPUShare > busy, "the generator itself took %s of the %d cores: the figures may be its own. Give it another machine, or ask less.", share(g.CPUShare), r.Machine.Cores)
	note(g.Shared && g.CPUShare > 0, "generator and mesh share a process, which took %s of the %d cores. --processes sets them apart.", share(g.CPUShare), r.Machine.Cores)
	note(run.Load.Kind == Open && g.Late.P99MS > lateMS, "one request in a hundred was sent %s or more after its time, because this machine was busy; that is in the figures, as it would be in a caller's.", duration(g.Late.P99MS))
	note(run.Latency.Count > 0 && run.Latency.Count < fewAnswers, "%s are too few for P99.9; run longer.", count(run.Latency.Count, "answer"))
	note(run.Answered > 0 && len(run.Steps) == 0, "the answers have no timelines, so all of their time is outside.")
	return out
}
