package report

import "time"

// Bounds on the samples of a process.
const (
	maxSamples    = 60
	firstInterval = time.Second
)

// series keeps samples evenly, however long a run is: when it is full it drops every
// second, and goes on at double the interval. It decides, and waits for nothing; times
// are since its begin. It is for one goroutine.
type series struct {
	interval time.Duration
	at       []time.Duration
	samples  []ProcessSample
}

func newSeries() *series { return &series{interval: firstInterval} }

// next returns when a sample is due after one of that time. What was missed, since the
// process was busy, is not made up for.
func (s *series) next(after time.Duration) time.Duration {
	return after.Truncate(s.interval) + s.interval
}

// add keeps the sample of a time, which is after all before it; but not where it turns
// out that its interval has one, as it may when that is doubled.
func (s *series) add(at time.Duration, sample ProcessSample) {
	for len(s.samples) >= maxSamples {
		s.thin()
	}
	if n := len(s.at); n > 0 && s.at[n-1]/s.interval == at/s.interval {
		return
	}
	sample.AtMS = milliseconds(at)
	s.at, s.samples = append(s.at, at), append(s.samples, sample)
}

// thin doubles the interval, and keeps the first sample of each.
func (s *series) thin() {
	s.interval *= 2
	kept := 0
	last := time.Duration(-1)
	for i, at := range s.at {
		if at/s.interval == last {
			continue
		}
		last = at / s.interval
		s.at[kept], s.samples[kept] = at, s.samples[i]
		kept++
	}
	s.at, s.samples = s.at[:kept], s.samples[:kept]
}
