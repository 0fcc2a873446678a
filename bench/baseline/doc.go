// Package baseline is the least that takes a request through the same hops as a mesh
// does: it says what the hops cost by themselves, so that the rest is what the mesh
// costs.
//
//	route := baseline.NewRoute([]string{"decode", "classify"}, pipeline.Memory)
//	front, err := baseline.StartFront(ctx, broker, route)
//	host, err := baseline.StartHost(ctx, broker, route, "decode")
//	... front.URL() ...
//	err = errors.Join(host.Stop(), front.Stop())
//
// A front is a bare Connect handler of the same method: it publishes the bytes of the one
// input to the stream of the first stage, and waits for a core NATS message with the
// answer; whether the first stream has it is looked at only where it has not. A host is a bare pull consumer, of the client library's own kind, that
// publishes what it gets to the stream of the next stage, and acknowledges it once that is
// acknowledged; after the last stage it publishes to the front, and acknowledges at once.
// Streams are work queues with one consumer each, as in a mesh, and so are messages in
// memory or on file.
//
// There is nothing else: no batches, deadlines, runners, validation, traces, timelines,
// duplicates told apart, cancellation, limits per stage, discovery, nor an answer to
// failure beyond an error. What is published is what was received, byte for byte: eight
// bytes that say which request it is, and the payload.
//
// # What it is good for
//
// It carries the input over every hop and back, so it is fair to a pipeline whose stages
// give back as many bytes as they get; and it runs nothing, so what runners take is in the
// ratio. What callers give up on stays in its streams until it has gone through: it is for
// loads that are answered. A broker keeps 64 MiB for a connection that reads too slowly,
// and answers beyond that cost the front its own: the payloads in flight should be less.
// While one of the two is asked the other idles on the same broker, where a mesh asks
// twice a second for work, and the baseline hardly at all.
//
// # Frozen
//
// This package is what stagemesh's own figures are told against, and was written before
// stagemesh was tuned. It is not to be changed together with what it is compared with:
// not to make it faster, as figures of before could no longer be compared, and never to
// make it slower. A change that a library forces is told in docs/performance.md.
//
// A route has one front, and any number of hosts, in one process or in many. Each has a
// connection of its own, as the parts of a mesh have. All are stopped once, the front last.
package baseline
