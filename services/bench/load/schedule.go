package load

import (
	"math/rand/v2"
	"time"
)

// Schedule says when requests arrive, as times since its begin that never go back. It
// is pure, and for one goroutine.
type Schedule struct {
	arrivals Arrivals
	rate     float64
	random   *rand.Rand
	// n arrivals have been told, the last at the sum of the gaps, in seconds.
	n   int64
	sum float64
}

// NewSchedule returns the schedule of arrivals at a rate a second.
func NewSchedule(a Arrivals, rate float64, seed uint64) *Schedule {
	return &Schedule{arrivals: a, rate: rate, random: rand.New(rand.NewPCG(seed, seed))}
}

// never is beyond any run, and within what a Duration can be.
const never = 100 * 365 * 24 * time.Hour

// Next returns the time of the next arrival. Constant ones begin at 0; they are
// multiples, not sums, and so do not drift.
func (s *Schedule) Next() time.Duration {
	if s.arrivals == Poisson {
		s.sum += s.random.ExpFloat64() / s.rate
	} else {
		s.sum = float64(s.n) / s.rate
	}
	s.n++
	return time.Duration(min(s.sum, never.Seconds()) * float64(time.Second))
}
