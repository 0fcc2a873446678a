package body

import (
	"sync"
	"time"
)

// stall makes what is read or written fail where it lasts longer than the patience. A
// deadline set beforehand would have to be taken away after each, for which HTTP/2 has
// to pass through its connection's loop twice. It belongs to one goroutine.
type stall struct {
	patience time.Duration
	// end sets the deadline of what lasts too long.
	end func(time.Time) error

	// timer, of which there is one for all that is read or written, sets it; setting is
	// held by what is under way, until it is over or the deadline is set.
	timer   *time.Timer
	setting sync.WaitGroup
}

// begin is called before each read or write.
func (s *stall) begin() {
	s.setting.Add(1)
	if s.timer == nil {
		s.timer = time.AfterFunc(s.patience, s.expire)
		return
	}
	s.timer.Reset(s.patience)
}

func (s *stall) expire() {
	defer s.setting.Done()
	_ = s.end(time.Unix(0, 0))
}

// over is called after it, and reports whether the deadline was set. It waits until
// that is done: the connection is net/http's again when the handler returns.
func (s *stall) over() (set bool) {
	if s.timer.Stop() {
		s.setting.Done()
		return false
	}
	s.setting.Wait()
	return true
}
