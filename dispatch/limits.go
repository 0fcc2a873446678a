package dispatch

import "time"

// The limits of a pool hold for a key each, a tenant. They are pure, and not safe for concurrent use. Keys are dropped once they say nothing.

// concurrencyLimit bounds the jobs of a key in flight.
type concurrencyLimit struct {
	most     int
	inFlight map[string]int
}

func newConcurrencyLimit(most int) *concurrencyLimit {
	return &concurrencyLimit{most: most, inFlight: map[string]int{}}
}

func (l *concurrencyLimit) permits(key string) bool { return l.inFlight[key] < l.most }

func (l *concurrencyLimit) start(key string) { l.inFlight[key]++ }

func (l *concurrencyLimit) end(key string) {
	if l.inFlight[key]--; l.inFlight[key] <= 0 {
		delete(l.inFlight, key)
	}
}

// minSwept is the least number of keys that are worth looking through.
const minSwept = 1024

// rateLimit bounds the jobs of a key that start within any window: no interval of that
// length, including its begin and excluding its end, has more. It is a log of starts, so
// it takes 24 bytes for each start it permits in a window.
type rateLimit struct {
	most   int
	window time.Duration
	// from is when the first job may start: starts of an earlier owner are not known.
	from time.Time
	// starts are the last ones of each key, at most most, oldest first.
	starts map[string][]time.Time
	sweep  int // keys at which those are dropped that say nothing
}

func newRateLimit(most int, window time.Duration, now time.Time) *rateLimit {
	return &rateLimit{most: most, window: window, from: now.Add(window), starts: map[string][]time.Time{}, sweep: minSwept}
}

// permits reports whether a job of the key may start now, and if not, when.
func (l *rateLimit) permits(key string, now time.Time) (ok bool, at time.Time) {
	at = l.from
	if starts := l.starts[key]; len(starts) >= l.most {
		if free := starts[0].Add(l.window); free.After(at) {
			at = free
		}
	}
	return !now.Before(at), at
}

func (l *rateLimit) start(key string, now time.Time) {
	starts := l.starts[key]
	if len(starts) >= l.most {
		starts = append(starts[:0], starts[1:]...)
	}
	l.starts[key] = append(starts, now)
	if len(l.starts) < l.sweep {
		return
	}
	for key, starts := range l.starts {
		if now.Sub(starts[len(starts)-1]) >= l.window {
			delete(l.starts, key)
		}
	}
	l.sweep = max(minSwept, 2*len(l.starts))
}

// tenantLimit bounds the jobs of each tenant in a pool.
type tenantLimit struct {
	concurrency *concurrencyLimit // nil where there is none
	rate        *rateLimit        // nil where there is none
}

func newTenantLimit(c LimitConfig, now time.Time) tenantLimit {
	var out tenantLimit
	if c.Concurrency > 0 {
		out.concurrency = newConcurrencyLimit(c.Concurrency)
	}
	if c.Rate > 0 {
		out.rate = newRateLimit(c.Rate, c.Window, now)
	}
	return out
}

// permits reports whether a job of the tenant may start now.
func (l tenantLimit) permits(tenant string, now time.Time) bool {
	if l.concurrency != nil && !l.concurrency.permits(tenant) {
		return false
	}
	if l.rate == nil {
		return true
	}
	ok, _ := l.rate.permits(tenant, now)
	return ok
}

// start takes note of a job that starts, or was found running.
func (l tenantLimit) start(tenant string, now time.Time) {
	if l.concurrency != nil {
		l.concurrency.start(tenant)
	}
	if l.rate != nil {
		l.rate.start(tenant, now)
	}
}

func (l tenantLimit) end(tenant string) {
	if l.concurrency != nil {
		l.concurrency.end(tenant)
	}
}
