package admit

import (
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Shares bounds the requests in flight of each pipeline that has a bound. It
// remembers those that have some.
type Shares struct {
	mu     sync.Mutex
	inside map[pipeline.Name]int
	left   map[pipeline.Name]*pace
}

// NewShares returns shares that nobody has.
func NewShares() *Shares {
	return &Shares{inside: map[pipeline.Name]int{}, left: map[pipeline.Name]*pace{}}
}

// Enter lets a request of a pipeline in, which must Leave, or returns the fault
// that refuses it. A bound of 0 is none.
func (s *Shares) Enter(name pipeline.Name, bound int) *fault.Fault {
	if bound == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.inside[name] >= bound {
		return fault.Newf(fault.Overloaded, "pipeline %s has %d requests in flight, as many as its max_in_flight allows", name, bound).
			WithRetryAfter(s.left[name].forNext(1+bound/roomToTell, time.Now()))
	}
	if s.inside[name]++; s.left[name] == nil {
		s.left[name] = &pace{}
	}
	return nil
}

// Leave lets a request out that has entered with that bound.
func (s *Shares) Leave(name pipeline.Name, bound int) {
	if bound == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left[name].one(time.Now())
	if s.inside[name]--; s.inside[name] == 0 {
		delete(s.inside, name)
		delete(s.left, name)
	}
}
