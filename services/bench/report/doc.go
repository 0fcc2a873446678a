// Package report measures what a load comes to, and tells it: as a value that goes to
// JSON and back, and as text.
//
//	recorder, meter := report.NewRecorder(deadline), report.StartMeter(shared)
//	defer meter.Stop()
//	outcome, err := load.Run(ctx, settings, target, recorder)
//	run := recorder.Run(settings, outcome)
//	meter.Into(&run)
//	r := report.Report{Version: report.Version, Runs: []report.Run{run}}
//	err = report.WriteText(os.Stdout, r)
//
// Latencies are those of answers; failures have their own, so that quick refusals do
// not make a mesh look quick. They are kept in HDR histograms, of three significant
// figures up to ten minutes for the latency of answers, and of two for its parts. What is beyond counts as ten minutes.
//
// # Where the time went
//
// Per answer the parts add up to what passed between sending the request and having
// its answer: of each step queue, batch and run, as its timeline says; hops, which is
// the gateway's total without all of those; and outside, which is what passed without
// the gateway's total: client, network and the gateway's front. So the means of the
// parts add up to the mean of the whole. Percentiles do not: the slowest in one part
// is rarely the slowest in another.
//
// A Recorder is safe for concurrent use. It holds a few histograms for each processor,
// however many requests there are; a sample costs no allocation. What is read from it is
// complete once the load has ended.
//
// # The process
//
// A Meter has one goroutine, which looks at the process every second and less often the
// longer the run is, so that there are at most sixty samples of heap, resident memory and
// goroutines. It is over when Stop or Into returns. A Meter is for one goroutine.
package report
