package admit

import "time"

// roomToTell is which part of a bound is to be free again before a refused caller
// comes back: one in so many.
const roomToTell = 10

// The least and the most that a refused caller is asked to wait.
const (
	leastRetry = 100 * time.Millisecond
	mostRetry  = 30 * time.Second
)

// pace counts how fast requests leave: those of the second before and those of
// the one that has begun.
type pace struct {
	began         time.Time
	before, since int
}

const paceOf = time.Second

// turn begins a new second where the old one is over.
func (p *pace) turn(now time.Time) {
	switch over := now.Sub(p.began); {
	case over < paceOf:
	case over < 2*paceOf:
		p.began, p.before, p.since = p.began.Add(paceOf), p.since, 0
	default:
		p.began, p.before, p.since = now, 0, 0
	}
}

func (p *pace) one(now time.Time) {
	p.turn(now)
	p.since++
}

// forNext is how long it takes until n more have left: retryAfter where none has
// left lately.
func (p *pace) forNext(n int, now time.Time) time.Duration {
	p.turn(now)
	of := now.Sub(p.began)
	if p.before > 0 {
		of += paceOf
	}
	count := p.before + p.since
	if count == 0 || of <= 0 {
		return retryAfter
	}
	return min(max(time.Duration(float64(of)*float64(n)/float64(count)), leastRetry), mostRetry)
}
