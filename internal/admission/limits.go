package admission

import (
	"cmp"
	"context"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Limiter bounds the requests in flight: all, and of each pipeline that has a
// limit of its own. Tenants share the places of both. Closing it ends admission.
type Limiter struct {
	isShared bool

	mu  sync.Mutex
	all *places
	// pipelines are those with requests in flight, by the limit that these were admitted with.
	pipelines map[limited]*places
	closed    bool
	idle      chan struct{}

	closing context.Context
	cancel  context.CancelFunc
}

type limited struct {
	pipeline pipeline.Name
	limit    int
}

// places belong to requests that have a limit together.
type places struct {
	limit      int
	taken      *budget.Pool
	departures departures
}

// NewLimiter returns a limiter of so many requests. If it is shared, no tenant gets all places.
func NewLimiter(limit int, isShared bool) *Limiter {
	closing, cancel := context.WithCancel(context.Background())
	l := &Limiter{isShared: isShared, pipelines: map[limited]*places{}, idle: make(chan struct{}), closing: closing, cancel: cancel}
	l.all = l.newPlaces(limit, "requests in flight", "gateway.max_in_flight")
	return l
}

func (l *Limiter) newPlaces(limit int, name, key string) *places {
	return &places{limit: limit, taken: budget.NewPool(budget.Settings{Limit: int64(limit), Name: name, Key: key, Shared: l.isShared})}
}

func (p *places) acquire(tenant string) *fault.Fault {
	f := p.taken.Reserve(tenant, 1)
	if f != nil {
		f = f.WithRetryAfter(p.departures.retryAfter(p.limit, time.Now()))
	}
	return f
}

func (p *places) release(tenant string) {
	p.taken.Release(tenant, 1)
	p.departures.add(time.Now())
}

// Acquire admits a request of a tenant, which must Release, or returns the fault that rejects
// it.
func (l *Limiter) Acquire(tenant string) *fault.Fault {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return Stopping()
	}
	return l.all.acquire(tenant)
}

// Release ends a request that was admitted.
func (l *Limiter) Release(tenant string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all.release(tenant)
	l.checkIdle()
}

// AcquirePipeline admits a request of a pipeline, which must ReleasePipeline, or returns
// the fault that rejects it. A limit of 0 means none.
func (l *Limiter) AcquirePipeline(tenant string, name pipeline.Name, limit int) *fault.Fault {
	if limit == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.pipelines[limited{name, limit}]
	if p == nil {
		p = l.newPlaces(limit, "requests of pipeline "+string(name)+" in flight", "its max_in_flight")
		l.pipelines[limited{name, limit}] = p
	}
	return p.acquire(tenant)
}

// ReleasePipeline ends a request that was admitted with that limit.
func (l *Limiter) ReleasePipeline(tenant string, name pipeline.Name, limit int) {
	if limit == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.pipelines[limited{name, limit}]
	p.release(tenant)
	if p.taken.Held() == 0 {
		delete(l.pipelines, limited{name, limit})
	}
}

// InFlight returns the number of requests admitted and not released.
func (l *Limiter) InFlight() int { return int(l.all.taken.Held()) }

// Close rejects every request from now on.
func (l *Limiter) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.cancel()
	l.checkIdle()
}

// Closing returns a context that ends with Close, for requests that need not be
// finished then.
func (l *Limiter) Closing() context.Context { return l.closing }

// AwaitIdle returns when the limiter is closed and no request is in flight.
func (l *Limiter) AwaitIdle(ctx context.Context) error {
	select {
	case <-l.idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (l *Limiter) checkIdle() {
	if !l.closed || l.all.taken.Held() > 0 {
		return
	}
	select {
	case <-l.idle:
	default:
		close(l.idle)
	}
}

// departures counts how many requests ended in the last full second and in the
// current one.
type departures struct {
	began             time.Time
	previous, current int
}

const departuresPeriod = time.Second

// advance begins a new period where the old one is over.
func (d *departures) advance(now time.Time) {
	switch elapsed := now.Sub(d.began); {
	case elapsed < departuresPeriod:
	case elapsed < 2*departuresPeriod:
		d.began, d.previous, d.current = d.began.Add(departuresPeriod), d.current, 0
	default:
		d.began, d.previous, d.current = now, 0, 0
	}
}

func (d *departures) add(now time.Time) {
	d.advance(now)
	d.current++
}

// freePart is the part of a limit that must be free again before a rejected
// caller comes back: one in so many.
const freePart = 10

// retryAfter returns how long it takes until a tenth of the limit is free at the
// recent rate of departures. With no recent departure it is RetryAfter.
func (d *departures) retryAfter(limit int, now time.Time) time.Duration {
	d.advance(now)
	period := now.Sub(d.began)
	if d.previous > 0 {
		period += departuresPeriod
	}
	count := d.previous + d.current
	if count == 0 || period <= 0 {
		return budget.RetryAfter
	}
	free := 1 + limit/freePart
	return min(max(time.Duration(float64(period)*float64(free)/float64(count)), minRetry), maxRetry)
}

// DefaultMaxPayload bounds the inputs of a request, in bytes.
const DefaultMaxPayload = 4 << 20

// bodyPerPayload is how much larger a JSON body is than the inputs in it.
const bodyPerPayload = 4

// MaxBody returns the default limit of a request's body, in bytes, for a limit of
// its inputs; 0 means DefaultMaxPayload.
func MaxBody(maxPayload int) int {
	return bodyPerPayload * cmp.Or(maxPayload, DefaultMaxPayload)
}

// MaxRequest returns how many bytes of memory one request may need, for its
// body and for the inputs decoded from it; 0 means DefaultMaxPayload.
func MaxRequest(maxPayload int) int {
	return MaxBody(maxPayload) + cmp.Or(maxPayload, DefaultMaxPayload)
}
