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
// answer. A host is a bare pull consumer, of the client library's own kind, that
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
// # Frozen
//
// This package is what stagemesh's own figures are told against, and was written before
// stagemesh was tuned. It is not to be changed together with what it is compared with:
// not to make it faster, as figures of before could no longer be compared, and never to
// make it slower. A change that a library forces is told in docs/performance.md.
//
// Fronts and hosts may run in one process or in many. Each has a connection of its own,
// as the parts of a mesh have. Both are stopped once.
package baseline
