package dispatch

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stagemesh/stagemesh/internal/config"
)

// LimitConfig bounds the jobs of each tenant, or value of an attribute, by Concurrency, Rate or Quota.
type LimitConfig struct {
	// By is tenant, or attributes and a name, as in attributes.model.
	By string `yaml:"by"`
	// Concurrency bounds the jobs that run.
	Concurrency int `yaml:"concurrency"`
	// Rate bounds the jobs that start within any Window.
	Rate int `yaml:"rate"`
	// Quota bounds what starts in each Window, from a multiple of it in UTC, in Unit: requests, bytes or tokens.
	Quota  int64         `yaml:"quota,size"`
	Unit   string        `yaml:"unit"`
	Window time.Duration `yaml:"window"`
}

const (
	tenantKey    = "tenant"
	attributeKey = "attributes."
	maxLimits    = 8       // of a pool
	maxRate      = 100_000 // a dispatcher remembers as many starts of each key
)

func (l LimitConfig) validate() error {
	errs := []error{
		config.NotNegative("concurrency", l.Concurrency), within("rate", l.Rate, maxRate), config.NotNegative("quota", l.Quota), config.NotNegative("window", l.Window),
		oneOf("unit", l.unit(), unitRequests, unitBytes, unitTokens),
	}
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
	case (l.Concurrency == 0) != (l.Window > 0):
		errs = append(errs, errors.New("window: is required with rate and quota, and for these only"))
	case l.Unit != "" && l.Quota == 0:
		errs = append(errs, fmt.Errorf("unit: %q is for quotas only", l.Unit))
	}
	return errors.Join(errs...)
}

func (l LimitConfig) unit() string { return cmp.Or(l.Unit, unitRequests) }

func (l LimitConfig) quotaName() string { return fmt.Sprintf("%s %s %s", l.By, l.unit(), l.Window) }

// limits bound a pool, each by a key: a tenant, or the value of an attribute. They are pure.
type limits []*limit

// limit is one of them. Beside its configuration, one of its fields is set.
type limit struct {
	LimitConfig

	inFlight map[string]int // jobs by key
	starts   *rateLimit
	quota    *quotaLimit
}

func newLimits(configs []LimitConfig, now time.Time) (out limits) {
	for _, c := range configs {
		l := &limit{LimitConfig: c}
		switch {
		case c.Concurrency > 0:
			l.inFlight = map[string]int{}
		case c.Rate > 0:
			l.starts = &rateLimit{LimitConfig: c, from: now.Add(c.Window), starts: map[string][]time.Time{}, sweep: minSwept}
		default:
			l.quota = &quotaLimit{LimitConfig: c, keys: map[string]*quotaKey{}}
		}
		out = append(out, l)
	}
	return out
}

func (ls limits) keysOf(tenant string, attributes map[string]string) (keys []string) {
	for _, l := range ls {
		key := tenant
		if name, ok := strings.CutPrefix(l.By, attributeKey); ok {
			key = attributes[name]
		}
		keys = append(keys, strings.ReplaceAll(strings.ToValidUTF8(key, ""), "\x00", "")) // a line's name joins them by NUL
	}
	return keys
}

// limitOf returns the limit that holds the first job of a line back. With wants, a quota is then reserved.
func (ls limits) limitOf(of *line, now time.Time, wants bool) *limit {
	for i, l := range ls {
		var ok bool
		switch key := of.keys[i]; {
		case l.inFlight != nil:
			ok = l.inFlight[key] < l.Concurrency
		case l.starts != nil:
			ok = l.starts.permits(key, now)
		default:
			cost := of.head().costIn(l.unit())
			if ok = l.quota.permits(key, cost, now); !ok && wants {
				l.quota.want(key, cost, now)
			}
		}
		if !ok {
			return l
		}
	}
	return nil
}

// tooSmallFor returns the quota that a job never fits into; nil if there is none.
func (ls limits) tooSmallFor(e *entry) *limit {
	for _, l := range ls {
		if l.quota != nil && e.costIn(l.unit()) > l.Quota {
			return l
		}
	}
	return nil
}

func (ls limits) start(e *entry, isNew bool, now time.Time) {
	for i, l := range ls {
		key := e.line.keys[i]
		switch {
		case l.inFlight != nil:
			l.inFlight[key]++
		case l.starts != nil:
			l.starts.start(key, now)
		case isNew: // the owner that started it has paid for others
			l.quota.key(key).left -= e.costIn(l.unit())
		}
	}
}

func (ls limits) end(e *entry) {
	for i, l := range ls {
		if key := e.line.keys[i]; l.inFlight[key] > 1 {
			l.inFlight[key]--
		} else {
			delete(l.inFlight, key)
		}
	}
}

// refund undoes a start of a new attempt, but for end.
func (ls limits) refund(e *entry, started time.Time) {
	for i, l := range ls {
		if key := e.line.keys[i]; l.starts != nil {
			l.starts.undo(key, started)
		}
	}
	ls.correct(e, started, true, 0)
}

// correct takes note of the cost of an attempt: none if it was refused, else its tokens where known.
func (ls limits) correct(e *entry, started time.Time, isRefused bool, tokens int64) {
	for i, l := range ls {
		q, cost := l.quota, e.costIn(l.unit())
		switch {
		case q == nil || q.windowOf(started) != q.at:
		case isRefused:
			q.key(e.line.keys[i]).left += cost
		case l.Unit == unitTokens && tokens > 0:
			q.key(e.line.keys[i]).left += cost - tokens
		}
	}
}

func (e *entry) costIn(unit string) int64 {
	switch unit {
	case unitBytes:
		return int64(e.size)
	case unitTokens:
		return int64(e.tokens)
	}
	return 1
}

// minSwept is the least number of keys that are worth looking through.
const minSwept = 1024

// rateLimit bounds the starts of a key in any window, its begin included and its end not.
type rateLimit struct {
	LimitConfig

	from   time.Time              // when the first job may start: starts of an earlier owner are not known
	starts map[string][]time.Time // the last Rate ones of each key, oldest first
	sweep  int                    // keys at which those are dropped that say nothing
}

func (l *rateLimit) permits(key string, now time.Time) bool {
	starts := l.starts[key]
	return !now.Before(l.from) && (len(starts) < l.Rate || now.Sub(starts[0]) >= l.Window)
}

func (l *rateLimit) start(key string, now time.Time) {
	l.starts[key] = addLast(l.starts[key], now, l.Rate)
	if len(l.starts) < l.sweep {
		return
	}
	for key, starts := range l.starts {
		if now.Sub(starts[len(starts)-1]) >= l.Window {
			delete(l.starts, key)
		}
	}
	l.sweep = max(minSwept, 2*len(l.starts))
}

func (l *rateLimit) undo(key string, at time.Time) {
	starts := l.starts[key]
	if i := slices.Index(starts, at); len(starts) == 1 && i == 0 {
		delete(l.starts, key)
	} else if i >= 0 {
		l.starts[key] = slices.Delete(starts, i, i+1)
	}
}

const (
	quotaParts   = 100  // how many reservations use up a quota
	maxQuotaKeys = 1024 // bounds the keys of a quota in a window; those after them have one together
)

// quotaLimit bounds the cost of a key in a window. It spends parts that are reserved on the broker.
type quotaLimit struct {
	LimitConfig

	at    int64 // the number of the window
	keys  map[string]*quotaKey
	wants bool // a key wants a reservation
}

// quotaKey is what is reserved and not spent, wanted, and granted until that is stored. From refused on
// the window has no more.
type quotaKey struct{ left, wanted, granted, refused int64 }

type storedQuota struct {
	Window   int64            `json:"window"`
	Reserved map[string]int64 `json:"reserved"`
}

// storedQuotas are the quotas of a pool, by name.
type storedQuotas map[string]storedQuota

func (q *quotaLimit) begin(window int64) {
	q.at, q.keys, q.wants = window, map[string]*quotaKey{}, false
}

func (q *quotaLimit) windowOf(at time.Time) int64 { return at.UnixNano() / int64(q.Window) }

func (q *quotaLimit) key(name string) *quotaKey {
	if q.keys[name] == nil && len(q.keys) >= maxQuotaKeys {
		name = ""
	}
	if q.keys[name] == nil {
		q.keys[name] = &quotaKey{}
	}
	return q.keys[name]
}

func (q *quotaLimit) permits(name string, cost int64, now time.Time) bool {
	return q.windowOf(now) <= q.at && q.key(name).left >= cost
}

func (q *quotaLimit) want(name string, cost int64, now time.Time) {
	if at := q.windowOf(now); at > q.at {
		q.begin(at)
	}
	key := q.key(name)
	if short := cost - key.left; short > 0 && (key.refused == 0 || short < key.refused) {
		key.wanted, q.wants = max(key.wanted, short), true
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
	for name := range stored.Reserved {
		q.key(name) // is a key of its own from now on
	}
	for name, key := range q.keys {
		if _, ok := stored.Reserved[name]; !ok && len(stored.Reserved) >= maxQuotaKeys {
			name = ""
		}
		key.granted = 0
		switch rest := q.Quota - stored.Reserved[name]; {
		case key.wanted > rest:
			key.refused = key.wanted
		case key.wanted > 0:
			key.granted = min(rest, max(key.wanted, q.Quota/quotaParts))
			stored.Reserved[name] += key.granted
		}
	}
	return stored
}

// reserve returns the quotas for the broker, with what jobs wait for. Call grant once they are stored.
func (ls limits) reserve(stored storedQuotas) storedQuotas {
	next := storedQuotas{}
	for _, l := range ls {
		if l.quota != nil {
			next[l.quotaName()] = l.quota.reserve(stored[l.quotaName()])
		}
	}
	return next
}

func (ls limits) grant() {
	for _, l := range ls {
		if l.quota == nil {
			continue
		}
		for _, key := range l.quota.keys {
			key.left, key.wanted, key.granted = key.left+key.granted, 0, 0
		}
		l.quota.wants = false
	}
}

func (ls limits) wants() bool {
	return slices.ContainsFunc(ls, func(l *limit) bool { return l.quota != nil && l.quota.wants })
}
