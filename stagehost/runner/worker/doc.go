// Package worker runs a stage as processes, in any language, that speak the
// protocol of sdk/PROTOCOL.md.
//
//	r, err := worker.New(worker.Settings{
//		Stage: "classify", Command: []string{"python3", "classify.py"}, MaxSize: 32, Logger: log,
//	})
//	err = r.Start(ctx)      // every worker has warmed up; or the last cause
//	...                     // a runner.Runner from here on
//	err = r.Stop(ctx)       // nothing is left: processes, sockets, goroutines
//
// Replicas says how many workers there are and what each has: devices, CPUs, an
// environment, ranks. A worker of several ranks is a gang: every rank gets every
// batch, rank 0 answers, and all live and die together.
//
// # Slots
//
// A worker has as many slots as it takes batches at a time. Acquire gives one of
// the worker that has most to spare, and waits where none has, so a fast worker
// gets more work than a slow one. The slots of a worker that is not ready are not
// given. One that its host got before the worker died runs its batch on another
// worker that is idle, or when the next one is.
//
// A worker that answers in chunks is offered DefaultStreams slots where Settings has
// none, and takes as many of them as its code can run side by side. What all took is
// Concurrency from the end of Start on.
//
// # Batches
//
// Do sends the batch, waits for what becomes of it, and tells the worker which
// items nobody waits for any more. It returns when the worker has ended the batch:
// the slot is busy as long as the worker is. Items' bytes are not copied on their
// way out, and outputs are pieces of what came in. Errors of Do are
//
//   - what the worker said of a batch that failed as a whole: a *BatchError. Its
//     text is for the log; the caller of an item that is found to be at fault gets
//     a sentence that gives nothing away (runner.FaultOf). Out of memory wraps
//     runner.ErrOutOfMemory too.
//   - runner.ErrCrashed: its process ended with the batch in hand, or had to be ended.
//   - runner.ErrBadOutput: the result does not fit the batch. The worker is
//     replaced.
//   - runner.ErrNotStarted: the batch has not left the host.
//
// # Life of a worker
//
// Package supervise decides, package spawn starts and ends processes, and one
// goroutine for each worker is between them. A worker is READY after its own
// examples, or zeros, went through it, as a batch of one and of MaxSize rows; one
// that streams, as a batch of one. A process that ends is noticed at once by itself,
// one that hangs by heartbeats while it is idle and by RunLimit while it has a
// batch, which counts from the last chunk of it. Whatever died starts
// again, later and later, and Health says why no worker is ready. What a worker
// writes goes to the log line by line.
//
// The spec is that of the first worker that is ready. One that comes with another
// one later is not taken: a changed interface needs a new runner.
//
// A Runner is safe for concurrent use, and so are its slots.
package worker
