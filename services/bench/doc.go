// Package bench measures a pipeline of a mesh: it generates load, records latencies and
// timelines, and reports them as text, JSON and pictures.
//
//	client, err := bench.NewClient(bench.ClientSettings{Protocol: bench.GRPC, Address: "http://127.0.0.1:8080", Pipeline: "digits", Inputs: inputs})
//	defer client.Close()
//	recorder, meter := bench.NewRecorder(deadline), bench.StartMeter(false)
//	defer meter.Stop()
//	outcome, err := bench.RunLoad(ctx, settings, client.Do, recorder.Record)
//	run := recorder.Run(settings, outcome)
//	meter.Into(&run)
//	err = bench.WriteText(os.Stdout, bench.Report{Version: bench.ReportVersion, Runs: []bench.Run{run}})
//
// Flags and Session do this for commands.
//
// # Load
//
// In a closed loop each caller waits for its answer before it sends its next request, so
// a slow target gets fewer requests. In an open loop requests arrive at a rate,
// independent of earlier ones, as from independent users. Latency counts from a request's
// planned time: if the generator sends late, because it or the machine was busy, the
// latency includes the delay. This corrects coordinated omission.
//
// An open loop has at most Settings.MaxInFlight requests in flight. Further arrivals are
// not sent, and are counted in Outcome.NotSent; the figures are too good if there are any.
//
// RunLoad waits for all requests that it has sent, so a target must end each of them by
// itself. The end of the context cancels those in flight, which are not recorded. RunLoad
// keeps nothing per request. It allocates nothing, except for a few bytes per arrival
// with Settings.Fine. Loads without that setting can be tested in a bubble of
// testing/synctest.
//
// # Clients
//
// A Client prepares its requests once, so that a request costs what the client library
// costs, and little more. GRPC and OIP share HTTP/2 connections; Connect and HTTP have
// one connection of HTTP/1.1 per request in flight. Nothing is compressed. A trace costs
// a request a header and a tenth of a microsecond.
//
// Answers are read to their end and discarded, except for the timeline: the answer's own
// for GRPC and Connect; the Server-Timing header for HTTP and OIP, which has microseconds
// and no delivery counts. Errors are of type *RequestError. No request outlives its
// timeout by more than ten seconds, or ten minutes if it has no timeout.
//
// # Figures
//
// Latencies are those of answers. Failures have their own, so that quick refusals do not
// make a mesh look fast. The latency of answers has three significant figures, its parts
// have two; everything above ten minutes counts as ten minutes.
//
// The parts of an answer add up to the time between sending the request and having its
// answer: for each step queue, batch and run, as in the timeline; hops, which is the rest
// of the gateway's total; and outside, which is the rest: client, network and the
// gateway's front. So the means of the parts add up to the mean of the whole. Percentiles
// do not: the slowest request in one part is rarely the slowest in another.
package bench
