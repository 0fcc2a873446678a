package load

import (
	"sync/atomic"
	"time"
)

// window decides which requests are made, and which of them count.
type window struct {
	// begin is when the warm-up is over. What begins at the end, or after it, is not
	// made; a zero end is none.
	begin, end time.Time
	// left is how many requests may still count, where there is a bound on them.
	bounded bool
	left    atomic.Int64
}

func newWindow(s Settings, now time.Time) *window {
	w := &window{begin: now.Add(s.Warmup), bounded: s.Requests > 0}
	if s.Duration > 0 {
		w.end = w.begin.Add(s.Duration)
	}
	w.left.Store(s.Requests)
	return w
}

// admit says whether the request that is planned for then is made, and whether it
// counts.
func (w *window) admit(then time.Time) (made, counts bool) {
	switch {
	case then.Before(w.begin):
		return true, false
	case !w.end.IsZero() && !then.Before(w.end):
		return false, false
	case w.bounded && w.left.Add(-1) < 0:
		return false, false
	}
	return true, true
}
