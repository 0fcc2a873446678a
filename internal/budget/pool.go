// Package budget bounds what callers hold together: the bytes of requests and answers, places,
// waits, connections. A Pool has the bound, and tenants share it.
//
//	bytes := budget.NewPool(budget.Settings{Limit: 512 << 20, Name: "bytes of requests and answers", Key: "gateway.max_in_flight_bytes", Shared: true})
//	if f := bytes.Reserve(tenant, 4096); f != nil {
//		return f // OVERLOADED, before the memory is allocated
//	}
//	defer bytes.Release(tenant, 4096)
//
// A shared pool needs no shares that an operator sets. A tenant gets more only while it then
// holds at most seven times what stays free. So one alone may hold seven eighths, two hold
// seven fifteenths each, and whoever comes next always finds something free: the dynamic
// thresholds by which switches share packet memory (Choudhury and Hahne, 1998).
//
// Callers that wait get turns by tenant:
//
//	if err := reads.Acquire(ctx, tenant, size); err != nil {
//		return err // the context ended first
//	}
//	defer reads.Release(tenant, size)
//
// Everything here is safe for concurrent use and starts no goroutine.
package budget

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// greed is how many times what stays free one tenant may hold of a shared pool.
const greed = 7

// RetryAfter is the pause after which a refused caller may try again where nothing better is known.
const RetryAfter = time.Second

// Settings are the settings of a pool.
type Settings struct {
	// Limit is what all tenants may hold together, in the unit of Name.
	Limit int64
	// Name says what is counted, in the plural, and Key which setting bounds it, for messages.
	Name, Key string
	// Shared is true where there are several tenants. Otherwise whoever comes gets all.
	Shared bool
}

// Pool is an amount that tenants share.
type Pool struct {
	settings Settings

	mu   sync.Mutex
	held int64
	// tenants are those that hold something or wait.
	tenants map[string]*share
	// waiting are the callers of Acquire that wait, in the order in which they came.
	waiting []*waiter
	turn    uint64
}

// share is what a tenant holds, how many callers of it wait, and the number of its last turn.
type share struct {
	held    int64
	waiting int
	turn    uint64
}

type waiter struct {
	tenant string
	of     *share
	n      int64
	// ready closes once the waiter has its amount.
	ready chan struct{}
}

// NewPool returns a pool of which nobody holds anything.
func NewPool(s Settings) *Pool {
	return &Pool{settings: s, tenants: map[string]*share{}}
}

// Reserve reserves n for a tenant, which Release returns, or returns the fault that rejects it.
func (p *Pool) Reserve(tenant string, n int64) *fault.Fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	of := p.ofLocked(tenant)
	defer p.forgetLocked(tenant, of)
	own, free := of.held+n, p.settings.Limit-p.held-n
	switch {
	case free < 0:
		return p.reject("%d of at most %d %s are taken, see %s", p.held, p.settings.Limit, p.settings.Name, p.settings.Key)
	case p.settings.Shared && IsGreedy(own, free):
		return p.reject("this tenant has %d of at most %d %s, which leaves too little to others, see %s", own-n, p.settings.Limit, p.settings.Name, p.settings.Key)
	}
	p.held += n
	of.held = own
	return nil
}

// IsGreedy reports whether a tenant may not hold own while so much stays free. One place it may
// always have.
func IsGreedy(own, free int64) bool { return own > 1 && own > greed*free }

// checkAlone returns the fault that rejects a request of n, or a final one if even with nothing
// else held the pool would reject it.
func (p *Pool) checkAlone(n int64, f *fault.Fault) *fault.Fault {
	most := p.settings.Limit
	if p.settings.Shared {
		most -= (most + greed) / (greed + 1)
	}
	if n <= most {
		return f
	}
	return fault.Newf(fault.PayloadTooLarge, "the request and what is decoded from it take %d bytes, more than the %d that one may have of %s; send raw bytes, or less at once",
		n, most, p.settings.Key).WithMetadata("limit_bytes", strconv.FormatInt(most, 10))
}

func (p *Pool) reject(format string, args ...any) *fault.Fault {
	return fault.Newf(fault.Overloaded, format, args...).WithRetryAfter(RetryAfter)
}

// Acquire reserves n for a tenant once it is free, or returns the context's error. The next turn is
// of the waiting tenant that holds least, and of those the one whose last turn is longest ago. So
// the callers of one tenant hold up another's for one turn, and one tenant alone gets all.
// An amount above the limit is the limit.
func (p *Pool) Acquire(ctx context.Context, tenant string, n int64) error {
	p.mu.Lock()
	of := p.ofLocked(tenant)
	if len(p.waiting) == 0 && p.takeLocked(of, n) {
		p.mu.Unlock()
		return nil
	}
	w := &waiter{tenant, of, n, make(chan struct{})}
	p.waiting = append(p.waiting, w)
	of.waiting++
	p.grantLocked()
	p.mu.Unlock()
	select {
	case <-w.ready:
		return nil
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(p.waiting, w); i >= 0 {
		p.waiting = slices.Delete(p.waiting, i, i+1)
		of.waiting--
		p.forgetLocked(tenant, of)
	} else {
		p.release(tenant, n)
	}
	p.grantLocked()
	return ctx.Err()
}

// grantLocked gives turns while the next one fits.
func (p *Pool) grantLocked() {
	for len(p.waiting) > 0 {
		next := 0
		for i, w := range p.waiting {
			first := p.waiting[next].of
			if w.of.held < first.held || w.of.held == first.held && w.of.turn < first.turn {
				next = i
			}
		}
		w := p.waiting[next]
		if !p.takeLocked(w.of, w.n) {
			return
		}
		p.waiting = slices.Delete(p.waiting, next, next+1)
		w.of.waiting--
		close(w.ready)
	}
}

// takeLocked gives a tenant its turn if n are free.
func (p *Pool) takeLocked(of *share, n int64) bool {
	n = min(n, p.settings.Limit)
	if p.held+n > p.settings.Limit {
		return false
	}
	p.held += n
	of.held += n
	p.turn++
	of.turn = p.turn
	return true
}

// ofLocked returns the share of a tenant, which forgetLocked drops.
func (p *Pool) ofLocked(tenant string) *share {
	out := p.tenants[tenant]
	if out == nil {
		out = &share{}
		p.tenants[tenant] = out
	}
	return out
}

// forgetLocked drops the share of a tenant that neither holds nor waits.
func (p *Pool) forgetLocked(tenant string, of *share) {
	if of.held == 0 && of.waiting == 0 {
		delete(p.tenants, tenant)
	}
}

// Release returns n that the tenant holds.
func (p *Pool) Release(tenant string, n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.release(tenant, n)
	p.grantLocked()
}

func (p *Pool) release(tenant string, n int64) {
	n = min(n, p.settings.Limit)
	p.held -= n
	of := p.ofLocked(tenant)
	of.held -= n
	p.forgetLocked(tenant, of)
}

// Held returns what all tenants hold.
func (p *Pool) Held() int64 {
	if p == nil {
		return 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.held
}
