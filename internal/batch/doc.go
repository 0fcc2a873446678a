// Package batch decides which items of a stage's backlog run together, and
// when. It is only a policy: it has no goroutine, lock, clock or channel, takes
// the time as an argument, and uses an item's metadata only. A host owns one
// Batcher and reports to it what happens.
//
// # Use
//
// Add an item when it arrives, Remove it when its request is cancelled, and
// call Finished when a slot has finished a batch. After every such event, and
// when the time that Wake returned has come:
//
//	answer(b.Expire(now))
//	for idle > 0 {
//		next, ok := b.Next(now, idle)
//		if !ok {
//			break
//		}
//		idle--
//		run(next)
//	}
//	wake, ok := b.Wake(idle) // for the timer
//
// Each item leaves exactly once: in a batch, or by Remove or Expire. Next never
// returns an expired item. A Batcher is not safe for concurrent use. Its
// operations take time logarithmic in the backlog of a key, and linear in the
// number of keys with a backlog. Add fails with a fault for the caller, or with
// an error that is a defect of the host; nothing else fails.
//
// # What shares a batch
//
// Items of equal keys do, as far as max_size, which counts rows, and max_bytes
// allow. max_bytes counts the payload, and again what the runner pads: all rows with
// the longest extents of the batch. A batch takes items in order and ends before the first that does not
// fit, which is then first in the next; so large items are not passed over. Add
// rejects an item that fits in no batch.
//
// High goes before normal and normal before low, within a batch and across
// keys, and the earlier arrival goes first within a class. So that nothing
// starves, a class is worth ClassLead of waiting time and no more. The next key
// is the one whose first item goes first.
//
// Items may share a Limit too, whatever their keys. While as many of its batches run as may,
// its items wait, and those after them are served. Batches must be counted with Limit.Add.
//
// # When a batch is dispatched
//
// Always when a slot is idle and no limit forbids it, and then, by Reason: when it is full; when the
// host drains; or as the mode requires. Until then the backlog collects. Times
// count from the items' arrivals, so the time that an item waits behind a busy
// slot is not added to the time that it is held for others.
//
// In window mode a batch is held until its oldest item has waited max_wait
// (timer), or until a batch of that size, by the recent run times of this key,
// might be too late for the most urgent one (deadline).
//
// In eager mode an idle slot gets the queued items at once (idle), with one
// exception. Callers that got their replies together return together, but one
// of them first. If that one were served at once, the others would wait until
// its batch ends, return first the next time, and so on: 8 callers would be
// served one and seven at a time for ever. So after a batch the queued items
// are held for the callers that its replies bring back (gather): at most a
// fifth of the batch's run time for the first to return and as long again for
// those after it, at most max_wait in all, and never for longer than the most
// urgent item allows. With several idle slots each waits for its part only.
// Nothing is held where traffic is single-file, before the first run of a key,
// for a run of less than half a millisecond, or where callers did not return
// in time lately: where they pause, or arrivals are at random. Items of another
// key do not wait beside an idle slot for a batch that is held.
//
// Adaptive mode is eager mode where several slots are idle. While one is, it
// holds the queued items (gather) as long as that is likely to save more time
// than it costs. It learns three things of each key: that a batch of n rows runs
// for a + b*n, how soon callers return after a batch, and how closely requests
// follow each other. An item that joins a batch saves a run the time a, and every
// item that waits loses the time of the hold. So arrivals at random are hardly
// ever held, bursts and callers in closed loops are. A batch is held for max_wait
// at most, counted from when a slot was idle, and never for a lone caller: no other
// item arrived during the last run, which had one. Where a is small
// half of the items run first. Where it is next to nothing a batch gains nothing: it
// gets as many rows as save a fiftieth of its time, and no more, and now and then twice as
// many to learn whether that still holds. Where the runner says that it runs the items of a
// batch one after the other, a batch takes some 10 ms, or 100 ms where it saves as much. The tests compare this mode with
// the eager one, and with the best window for each load.
//
// In stream mode every item is a batch of its own, which an idle slot gets at once
// (idle): it answers in chunks, and items that run together would wait for the slowest.
package batch
