package body

import "time"

// stall makes what is read or written fail where it lasts longer than the patience. A
// deadline set beforehand would have to be taken away after each, for which HTTP/2 has
// to pass through its connection's loop twice. It belongs to one goroutine.
type stall struct {
	patience time.Duration
	// end sets the deadline of what lasts too long.
	end func(time.Time) error

	// timer, of which there is one for all that is read or written, sets it.
	timer *time.Timer
	ended chan struct{}
}

// begin is called before each read or write.
func (s *stall) begin() {
	if s.timer != nil {
		s.timer.Reset(s.patience)
		return
	}
	s.ended = make(chan struct{}, 1)
	s.timer = time.AfterFunc(s.patience, func() {
		_ = s.end(time.Unix(0, 0))
		s.ended <- struct{}{}
	})
}

// over is called after it, and reports whether the deadline was set. It waits until
// that is done: the connection is net/http's again when the handler returns.
func (s *stall) over() (set bool) {
	if s.timer.Stop() {
		return false
	}
	<-s.ended
	return true
}
