// Package synth has stages that do no work worth the name, to try a mesh out
// and to measure it: they give back what they were given, unchanged and of any
// kind.
//
//	mirror: {runner: {echo: {}}}
//	slow:   {runner: {sleep: {base: 5ms, per_item: 1ms}}}
//	busy:   {runner: {burn: {duration: 2ms}}}
//	talker: {runner: {stream: {chunks: 20, every: 50ms, concurrency: 8}}}
//
// Echo answers at once. Sleep waits once for a batch, base and then per_item
// for each of its items, as an accelerator does that costs something to start.
// Burn keeps a processor busy for each item. Stream answers in chunks, each of which
// is what it was given, one every so often. All of them stop when nobody wants the
// batch any more. The key concurrency is the number of batches that run at once; it is
// 1 where nobody says.
package synth
