package load

import (
	"sync/atomic"
	"time"
)

// Outcome is what a run came to, beside what was recorded.
type Outcome struct {
	// Began is when the warm-up was over.
	Began time.Time
	// Elapsed is from then until the last recorded answer, or the end of the
	// duration, whichever was later.
	Elapsed time.Duration
	// Sent are the requests that count and were sent; all of them are recorded,
	// unless the run was interrupted.
	Sent int64
	// NotSent are the arrivals that count and found the open loop's bound reached.
	NotSent int64
	// Interrupted says that the context ended the run.
	Interrupted bool
}

// tally counts while requests are made.
type tally struct {
	sent, notSent atomic.Int64
	// last is when the last recorded answer came, since the begin.
	last atomic.Int64
}

// answered notes that a recorded answer came, so long after the begin.
func (t *tally) answered(after time.Duration) {
	for {
		last := t.last.Load()
		if int64(after) <= last || t.last.CompareAndSwap(last, int64(after)) {
			return
		}
	}
}

// outcome returns what the tally came to.
func (t *tally) outcome(w *window, now time.Time, interrupted bool) Outcome {
	out := Outcome{Began: w.begin, Sent: t.sent.Load(), NotSent: t.notSent.Load(), Interrupted: interrupted}
	switch {
	case interrupted:
		out.Elapsed = max(0, now.Sub(w.begin))
	case w.end.IsZero() || w.bounded && w.left.Load() <= 0:
		out.Elapsed = time.Duration(t.last.Load())
	default:
		out.Elapsed = max(time.Duration(t.last.Load()), w.end.Sub(w.begin))
	}
	return out
}
