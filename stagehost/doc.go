// Package stagehost is one running host of a stage: it pulls items from the
// stage's queue, batches them, hands batches to a runner, and sends what each
// item became to the next stage or back to the gateway.
//
//	h, err := stagehost.New(settings)
//	err = h.Run(ctx)
//
// # Inside
//
// One goroutine, the loop, owns the ledger of items and the batcher, both pure,
// and is the only one to move an item. Pumps post events to it: the puller's
// subscriptions post items as they arrive, decoded and checked; the slot pump
// posts idle slots; each batch's sink posts outcomes, with the message they
// become already encoded; the bus posts acknowledgements. The channel of events
// is the only way in, so settling against expiry, acknowledgement, failure and
// drain is a matter of one event after the other.
//
// An item is settled with its queue only after what it became is acknowledged
// by whoever has it now. Every item pulled is settled exactly once.
//
// # Stopping
//
// When Run's context ends the host says that it is gone, stops asking for
// items, waits for those on their way, finishes what it holds without waiting
// for fuller batches, settles, and leaves. What is not finished within the
// drain timeout is given back to the queue, and running batches are told to
// stop. A host whose runner is lost does the same, but gives back at once what
// no slot will run any more.
//
// A batch that does not stop within a few seconds is left behind: Run returns
// an error, so that the program can exit and does not exit with success. Go
// code cannot be ended from outside, so such a batch's goroutine, and all that
// it uses, stays until it returns or the process ends; the runner is not
// stopped beneath it.
package stagehost
