package admission

import (
	"cmp"
	"context"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Limiter bounds the requests in flight: all, and those of each pipeline that has a
// limit of its own. Closing it ends admission.
type Limiter struct {
	limit int

	mu  sync.Mutex
	all share
	// pipelines are those with requests in flight.
	pipelines map[pipeline.Name]*share
	closed    bool
	idle      chan struct{}

	closing context.Context
	cancel  context.CancelFunc
}

// share is requests that have a limit together.
type share struct {
	inFlight   int
	departures departures
}

// NewLimiter returns a limiter of so many requests.
func NewLimiter(limit int) *Limiter {
	closing, cancel := context.WithCancel(context.Background())
	return &Limiter{limit: limit, pipelines: map[pipeline.Name]*share{}, idle: make(chan struct{}), closing: closing, cancel: cancel}
}

// Acquire admits a request, which must Release, or returns the fault that rejects
// it.
func (l *Limiter) Acquire() *fault.Fault {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return Stopping()
	case l.all.inFlight >= l.limit:
		return fault.Newf(fault.Overloaded, "the gateway has %d requests in flight, as many as gateway.max_in_flight allows", l.limit).
			WithRetryAfter(l.all.departures.retryAfter(l.limit, time.Now()))
	}
	l.all.inFlight++
	return nil
}

// Release ends a request that was admitted.
func (l *Limiter) Release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all.inFlight--
	l.all.departures.add(time.Now())
	l.checkIdle()
}

// AcquirePipeline admits a request of a pipeline, which must ReleasePipeline, or returns
// the fault that rejects it. A limit of 0 means none.
func (l *Limiter) AcquirePipeline(name pipeline.Name, limit int) *fault.Fault {
	if limit == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.pipelines[name]
	if s == nil {
		s = &share{}
		l.pipelines[name] = s
	}
	if s.inFlight >= limit {
		return fault.Newf(fault.Overloaded, "pipeline %s has %d requests in flight, as many as its max_in_flight allows", name, limit).
			WithRetryAfter(s.departures.retryAfter(limit, time.Now()))
	}
	s.inFlight++
	return nil
}

// ReleasePipeline ends a request that was admitted with that limit.
func (l *Limiter) ReleasePipeline(name pipeline.Name, limit int) {
	if limit == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.pipelines[name]
	s.departures.add(time.Now())
	if s.inFlight--; s.inFlight == 0 {
		delete(l.pipelines, name)
	}
}

// InFlight returns the number of requests admitted and not released.
func (l *Limiter) InFlight() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.inFlight
}

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
	if !l.closed || l.all.inFlight > 0 {
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
		return RetryAfter
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
