package dispatch

import "time"

// The limits of a pool hold for a key each, a tenant or the value of an attribute. They
// are pure, and not safe for concurrent use. Keys are dropped once they say nothing.

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

// quotaUse is what a store has of a key: how much was reserved in the window that begins
// then.
type quotaUse struct {
	window   time.Time
	reserved int64
}

// quota bounds what the jobs of a key cost in each window; windows begin at multiples of
// their length. What a key may use is first reserved in a store, in blocks. So the death
// of a dispatcher loses the rest of a block, and the quota is never exceeded.
type quota struct {
	most   int64
	window time.Duration
	// block is how much is reserved at once.
	block int64
	keys  map[string]*quotaKey
}

type quotaKey struct {
	quotaUse
	free int64 // reserved and not used
}

func newQuota(most int64, window time.Duration, block int64) *quota {
	return &quota{most: most, window: window, block: block, keys: map[string]*quotaKey{}}
}

// quotaState is what a quota says of a job.
type quotaState uint8

const (
	// within: the job may start.
	within quotaState = iota
	// reserve: the store has to be written first.
	reserve
	// exhausted: the job waits for the next window.
	exhausted
)

// permits reports whether a job of that cost may start now. Where that takes a
// reservation, it returns what to store; the store confirms that by stored.
func (q *quota) permits(key string, cost int64, now time.Time) (quotaState, quotaUse) {
	window := now.Truncate(q.window)
	k := q.keys[key]
	if k == nil || k.window.Before(window) {
		k = &quotaKey{quotaUse: quotaUse{window: window}}
	}
	missing := cost - k.free
	if missing <= 0 {
		return within, k.quotaUse
	}
	available := q.most - k.reserved
	if missing > available {
		return exhausted, k.quotaUse
	}
	return reserve, quotaUse{window: k.window, reserved: k.reserved + min(available, max(missing, q.block))}
}

// load takes what the store had when the pool got its owner, or when another wrote it.
// None of it is free.
func (q *quota) load(key string, use quotaUse) { q.keys[key] = &quotaKey{quotaUse: use} }

// stored takes what the store has confirmed, which permits returned.
func (q *quota) stored(key string, use quotaUse) {
	k := q.keys[key]
	if k == nil || !k.window.Equal(use.window) {
		k = &quotaKey{quotaUse: quotaUse{window: use.window}}
		q.keys[key] = k
	}
	k.free += use.reserved - k.reserved
	k.reserved = use.reserved
}

// use charges a job that starts, and returns the window that pays for it.
func (q *quota) use(key string, cost int64) (window time.Time) {
	k := q.keys[key]
	if k == nil {
		return window // the job costs nothing
	}
	k.free -= cost
	return k.window
}

// correct adds what a job cost more than was charged for it, or less if negative. Later
// windows neither gain nor lose by it.
func (q *quota) correct(key string, window time.Time, more int64) {
	if k := q.keys[key]; k != nil && k.window.Equal(window) {
		k.free -= more
	}
}

// drop forgets the keys whose windows are over.
func (q *quota) drop(now time.Time) {
	for key, k := range q.keys {
		if now.Sub(k.window) >= q.window {
			delete(q.keys, key)
		}
	}
}
