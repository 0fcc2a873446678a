package budget

import (
	"testing"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// take reserves one at a time until the pool refuses, and returns how many it got.
func take(p *Pool, tenant string) (n int64) {
	for p.Reserve(tenant, 1) == nil {
		n++
	}
	return n
}

func TestTenantAloneLeavesAnEighth(t *testing.T) {
	t.Parallel()
	p := NewPool(Settings{Limit: 800, Name: "bytes", Key: "the.key", Shared: true})
	if n := take(p, "a"); n != 700 {
		t.Errorf("a tenant alone got %d of 800, want 700", n)
	}
	if n := take(p, "b"); n < 80 {
		t.Errorf("the next tenant got %d, want 80 at least", n)
	}
	if f := p.Reserve("a", 1); f == nil || f.Reason != fault.Overloaded || f.RetryAfter == 0 {
		t.Errorf("the greedy tenant gets %v, want OVERLOADED with a pause", f)
	}
}

func TestGreedyTenantsConverge(t *testing.T) {
	t.Parallel()
	p := NewPool(Settings{Limit: 800, Shared: true})
	take(p, "a")
	for range 800 { // a gives back as its requests end, and both ask for more
		p.Release("a", 1)
		_ = p.Reserve("b", 1) // one of them is refused
		_ = p.Reserve("a", 1)
	}
	a, b := p.tenants["a"].held, p.tenants["b"].held
	if a-b > 8 || b-a > 8 || a+b < 700 {
		t.Errorf("the tenants hold %d and %d of 800, want about the same, and 700 together", a, b)
	}
}

func TestOneTenantGetsAll(t *testing.T) {
	t.Parallel()
	p := NewPool(Settings{Limit: 100})
	if n := take(p, ""); n != 100 {
		t.Errorf("callers of a pool that is not shared got %d of 100", n)
	}
	p.Release("", 100)
	if p.Held() != 0 || len(p.tenants) != 0 {
		t.Errorf("%d are held by %d tenants after all was returned", p.Held(), len(p.tenants))
	}
}
