package dispatch

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/mesh/config"
)

// LimitConfig bounds the jobs of each tenant in a pool, or of each value of an attribute: by
// Concurrency, Rate or Quota.
type LimitConfig struct {
	// By is tenant, or attributes and a name, as in attributes.model.
	By string `yaml:"by"`
	// Concurrency bounds the jobs that run.
	Concurrency int `yaml:"concurrency"`
	// Rate bounds the jobs that start within any Window.
	Rate int `yaml:"rate"`
	// Quota bounds what starts in each Window, which begins at a multiple of its length in UTC.
	// It is in Unit: requests, the default, bytes or tokens.
	Quota  int64         `yaml:"quota,size"`
	Unit   string        `yaml:"unit"`
	Window time.Duration `yaml:"window"`
}

const (
	tenantKey    = "tenant"
	attributeKey = "attributes."
	// maxLimits bounds those of a pool, and maxRate LimitConfig.Rate: a dispatcher remembers as
	// many starts of each key.
	maxLimits = 8
	maxRate   = 100_000
)

func (l LimitConfig) validate() error {
	errs := []error{config.NotNegative("concurrency", l.Concurrency), config.NotNegative("rate", l.Rate), config.NotNegative("quota", l.Quota), config.NotNegative("window", l.Window)}
	if name, ok := strings.CutPrefix(l.By, attributeKey); l.By != tenantKey && (!ok || name == "") {
		errs = append(errs, fmt.Errorf("by: %q; use tenant, or an attribute such as attributes.model", l.By))
	}
	kinds := 0
	for _, n := range []int64{int64(l.Concurrency), int64(l.Rate), l.Quota} {
		if n != 0 {
			kinds++
		}
	}
	switch {
	case kinds != 1:
		errs = append(errs, errors.New("concurrency: a limit has exactly one of concurrency, rate and quota"))
	case l.Rate > maxRate:
		errs = append(errs, fmt.Errorf("rate: %d, at most %d are possible; take a shorter window", l.Rate, maxRate))
	case (l.Concurrency == 0) != (l.Window > 0):
		errs = append(errs, errors.New("window: is required with rate and quota, and for these only"))
	case !slices.Contains(units, l.unit()) || l.Unit != "" && l.Quota == 0:
		errs = append(errs, fmt.Errorf("unit: %q; a quota is in requests, bytes or tokens", l.Unit))
	}
	return errors.Join(errs...)
}

// quotaName is the name of what is reserved of a quota.
func (l LimitConfig) quotaName() string { return fmt.Sprintf("%s %s %s", l.By, l.unit(), l.Window) }

func (l LimitConfig) unit() unit { return cmp.Or(unit(l.Unit), unitRequests) }

// limits are those of a pool. Each holds for a key of its own: a tenant, or the value of an
// attribute. They are pure, and not safe for concurrent use. Keys are dropped once they mean
// nothing.
type limits []*limit

// limit is one of them: one of its fields is set.
type limit struct {
	LimitConfig

	inFlight concurrencyLimit
	starts   *rateLimit
	quota    *quotaLimit
}

func newLimits(configs []LimitConfig, now time.Time) (out limits) {
	for _, c := range configs {
		l := &limit{LimitConfig: c}
		switch {
		case c.Concurrency > 0:
			l.inFlight = concurrencyLimit{}
		case c.Rate > 0:
			l.starts = newRateLimit(c.Rate, c.Window, now)
		default:
			l.quota = newQuotaLimit(c)
		}
		out = append(out, l)
	}
	return out
}

// keysOf returns the key of a job for each limit.
func (ls limits) keysOf(tenant string, attributes map[string]string) (keys []string) {
	for _, l := range ls {
		key := tenant
		if name, ok := strings.CutPrefix(l.By, attributeKey); ok {
			key = attributes[name]
		}
		keys = append(keys, strings.ToValidUTF8(key, ""))
	}
	return keys
}

// reached returns the limit that keeps the first job of a line from starting; nil if none does.
func (ls limits) reached(of *line, now time.Time) *limit {
	for i, l := range ls {
		var ok bool
		switch key := of.keys[i]; {
		case l.inFlight != nil:
			ok = l.inFlight[key] < l.Concurrency
		case l.starts != nil:
			ok, _ = l.starts.permits(key, now)
		default:
			ok = l.quota.permits(key, of.head().costIn(l.quota.unit), now)
		}
		if !ok {
			return l
		}
	}
	return nil
}

// want has the next reservation cover the first job of a line that is at the limit.
func (l *limit) want(ls limits, of *line, now time.Time) {
	if l.quota != nil {
		l.quota.want(of.keys[slices.Index(ls, l)], of.head().costIn(l.quota.unit), now)
	}
}

// tooSmallFor returns the quota that a job never fits into; nil if there is none.
func (ls limits) tooSmallFor(e *entry) *limit {
	for _, l := range ls {
		if l.quota != nil && e.costIn(l.quota.unit) > l.quota.most {
			return l
		}
	}
	return nil
}

// start takes note of a job that starts, or was found running.
func (ls limits) start(e *entry, isNew bool, now time.Time) {
	for i, l := range ls {
		key := e.line.keys[i]
		switch {
		case l.inFlight != nil:
			l.inFlight[key]++
		case l.starts != nil:
			l.starts.start(key, now)
		case isNew: // the owner that started it has paid for others
			l.quota.left[l.quota.keyOf(key)] -= e.costIn(l.quota.unit)
		}
	}
}

// end takes note that a job does not run any more.
func (ls limits) end(e *entry) {
	for i, l := range ls {
		if l.inFlight != nil {
			l.inFlight.end(e.line.keys[i])
		}
	}
}

// correct takes note of what an attempt cost that started at a time: nothing if it was refused,
// else its tokens, 0 where these are not known.
func (ls limits) correct(e *entry, started time.Time, isRefused bool, tokens int64) {
	for i, l := range ls {
		q := l.quota
		if q == nil || q.windowOf(started) != q.at {
			continue
		}
		cost := e.costIn(q.unit)
		switch key := q.keyOf(e.line.keys[i]); {
		case isRefused:
			q.left[key] += cost
		case q.unit == unitTokens && tokens > 0:
			q.left[key] += cost - tokens
		}
	}
}

// costIn is what a job costs in a unit.
func (e *entry) costIn(u unit) int64 {
	switch u {
	case unitBytes:
		return int64(e.size)
	case unitTokens:
		return int64(e.tokens)
	}
	return 1
}

// concurrencyLimit counts the jobs of a key in flight.
type concurrencyLimit map[string]int

func (l concurrencyLimit) end(key string) {
	if l[key]--; l[key] <= 0 {
		delete(l, key)
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

const (
	// quotaParts is how many reservations use up a quota.
	quotaParts = 100
	// maxQuotaKeys bounds the keys of a quota in a window; those after them have one together.
	maxQuotaKeys = 1024
)

// quotaLimit bounds what the jobs of a key cost in a window. It spends what is reserved on the
// broker, a part of the quota at a time. An owner that dies loses what it has left.
type quotaLimit struct {
	most   int64
	window time.Duration
	unit   unit

	at int64 // the number of the window
	// left is what each key has reserved and not spent, wanted what its jobs wait for besides.
	// Below refused there is no more in this window.
	left, wanted, refused map[string]int64
	// granted is reserved once the broker has stored it.
	granted map[string]int64
}

// storedQuota is what is reserved of a quota on the broker.
type storedQuota struct {
	Window   int64            `json:"window"`
	Reserved map[string]int64 `json:"reserved"`
}

func newQuotaLimit(c LimitConfig) *quotaLimit {
	q := &quotaLimit{most: c.Quota, window: c.Window, unit: c.unit()}
	q.begin(0)
	return q
}

// begin begins a window.
func (q *quotaLimit) begin(window int64) {
	q.at = window
	q.left, q.wanted, q.refused, q.granted = map[string]int64{}, map[string]int64{}, map[string]int64{}, map[string]int64{}
}

func (q *quotaLimit) windowOf(at time.Time) int64 { return at.UnixNano() / int64(q.window) }

// keyOf returns the key whose quota a key has.
func (q *quotaLimit) keyOf(key string) string {
	if _, ok := q.left[key]; !ok && len(q.left) >= maxQuotaKeys {
		return ""
	}
	return key
}

// permits reports whether a job may start by what is reserved.
func (q *quotaLimit) permits(key string, cost int64, now time.Time) bool {
	return q.windowOf(now) <= q.at && q.left[q.keyOf(key)] >= cost
}

// want has the next reservation cover a job.
func (q *quotaLimit) want(key string, cost int64, now time.Time) {
	if at := q.windowOf(now); at > q.at {
		q.begin(at)
	}
	key = q.keyOf(key)
	short := cost - q.left[key]
	if refused, ok := q.refused[key]; short > 0 && (!ok || short < refused) {
		q.left[key] += 0 // it is a key of its own from now on
		q.wanted[key] = max(q.wanted[key], short)
	}
}

// reserve adds what is wanted to what is reserved on the broker.
func (q *quotaLimit) reserve(stored storedQuota) storedQuota {
	if stored.Window > q.at { // the clock of another owner is ahead
		q.begin(stored.Window)
	}
	if stored.Window < q.at || stored.Reserved == nil {
		stored = storedQuota{Window: q.at, Reserved: map[string]int64{}}
	}
	for key := range stored.Reserved {
		q.left[key] += 0 // it is a key of its own from now on
	}
	clear(q.granted)
	for key, wanted := range q.wanted {
		at := key
		if _, ok := stored.Reserved[key]; !ok && len(stored.Reserved) >= maxQuotaKeys {
			at = ""
		}
		switch rest := q.most - stored.Reserved[at]; {
		case wanted > rest:
			q.refused[key] = wanted
			continue
		case wanted < 0:
			// It is returned at most once, also if the broker stores this and nobody knows.
			q.left[key] += wanted
			delete(q.wanted, key)
		default:
			wanted = min(rest, max(wanted, q.most/quotaParts))
			q.granted[key] = wanted
		}
		stored.Reserved[at] += wanted
	}
	return stored
}

// reserve returns the quotas as the broker is to store them, with what jobs wait for. Call grant
// once the broker has stored them.
func (ls limits) reserve(value []byte) ([]byte, error) {
	stored, next := map[string]storedQuota{}, map[string]storedQuota{}
	if value != nil {
		if err := json.Unmarshal(value, &stored); err != nil {
			return nil, fmt.Errorf("the quotas on the broker: %w", err)
		}
	}
	for _, l := range ls {
		if l.quota != nil {
			name := l.quotaName()
			next[name] = l.quota.reserve(stored[name])
		}
	}
	return json.Marshal(next)
}

func (ls limits) grant() {
	for _, l := range ls {
		if l.quota == nil {
			continue
		}
		for key, n := range l.quota.granted {
			l.quota.left[key] += n
		}
		clear(l.quota.granted)
		clear(l.quota.wanted)
	}
}

// wants reports whether jobs wait for a reservation.
func (ls limits) wants() bool {
	for _, l := range ls {
		if l.quota != nil && len(l.quota.wanted) > 0 {
			return true
		}
	}
	return false
}

// giveBack has the next reservation return what is left, or pay what is owed.
func (ls limits) giveBack() {
	for _, l := range ls {
		if l.quota != nil {
			clear(l.quota.wanted)
			for key, left := range l.quota.left {
				if left != 0 {
					l.quota.wanted[key] = -left
				}
			}
		}
	}
}
