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
// Everything here is safe for concurrent use and starts no goroutine.
package budget

import (
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// Greed is how many times what stays free one tenant may hold of a shared pool.
const Greed = 7

// RetryAfter is the pause after which a refused caller may try again.
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
	// tenants are those that hold something.
	tenants map[string]int64
}

// NewPool returns a pool of which nobody holds anything.
func NewPool(s Settings) *Pool { return &Pool{settings: s, tenants: map[string]int64{}} }

// Reserve reserves n for a tenant, which Release returns, or returns the fault that rejects it.
func (p *Pool) Reserve(tenant string, n int64) *fault.Fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	own, free := p.tenants[tenant]+n, p.settings.Limit-p.held-n
	switch {
	case free < 0:
		return p.reject("%d of at most %d %s are taken, see %s", p.held, p.settings.Limit, p.settings.Name, p.settings.Key)
	case p.settings.Shared && own > Greed*free:
		return p.reject("this tenant has %d of at most %d %s, which leaves too little to others, see %s", own-n, p.settings.Limit, p.settings.Name, p.settings.Key)
	}
	p.held += n
	p.tenants[tenant] = own
	return nil
}

func (p *Pool) reject(format string, args ...any) *fault.Fault {
	return fault.Newf(fault.Overloaded, format, args...).WithRetryAfter(RetryAfter)
}

// Release returns n that the tenant holds.
func (p *Pool) Release(tenant string, n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held -= n
	if p.tenants[tenant] -= n; p.tenants[tenant] == 0 {
		delete(p.tenants, tenant)
	}
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
