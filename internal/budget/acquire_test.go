package budget

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
)

// queue starts a caller of Acquire that waits, and returns once it does. It appends its name to
// order when it has its turn.
func queue(t *testing.T, p *Pool, order *[]string, tenant string, n int64) {
	t.Helper()
	go func() {
		if err := p.Acquire(t.Context(), tenant, n); err != nil {
			t.Error(err)
		}
		*order = append(*order, tenant)
	}()
	synctest.Wait()
}

func TestWaitersGetTurnsByTenant(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := NewPool(Settings{Limit: 1})
		var order []string
		for _, tenant := range []string{"a", "a", "a", "a", "b", "b", "c"} {
			queue(t, p, &order, tenant, 1)
		}
		for i := 0; i < 7; i++ {
			p.Release(order[i], 1)
			synctest.Wait()
		}
		want := "abcabaa"
		got := ""
		for _, tenant := range order {
			got += tenant
		}
		if got != want {
			t.Errorf("turns were %s, want %s", got, want)
		}
		if p.Held() != 0 || len(p.tenants) != 0 {
			t.Errorf("the pool keeps %v", p.tenants)
		}
	})
}

func TestWaiterAloneGetsAll(t *testing.T) {
	t.Parallel()
	p := NewPool(Settings{Limit: 4, Shared: true})
	for range 4 {
		if err := p.Acquire(t.Context(), "a", 1); err != nil {
			t.Fatal(err)
		}
	}
	p.Release("a", 4)
	if err := p.Acquire(t.Context(), "a", 9); err != nil || p.Held() != 4 {
		t.Errorf("%v, %d held, want the limit for an amount above it", err, p.Held())
	}
	p.Release("a", 9)
	if p.Held() != 0 {
		t.Errorf("%d held after the release", p.Held())
	}
}

func TestWaiterWhoseContextEndsHoldsNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := NewPool(Settings{Limit: 2})
		if err := p.Acquire(t.Context(), "a", 1); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- p.Acquire(ctx, "b", 2) }()
		synctest.Wait()
		var order []string
		queue(t, p, &order, "c", 1) // b is first, and needs more than is free
		if len(order) != 0 {
			t.Error("c went before b")
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		synctest.Wait()
		if len(order) != 1 || p.Held() != 2 || len(p.tenants) != 2 {
			t.Errorf("%v have their turn, %v is held", order, p.tenants)
		}
	})
}

func TestScopeReleasesWhatWasReserved(t *testing.T) {
	t.Parallel()
	p := NewPool(Settings{Limit: 10})
	request := NewAccount(p, "a")
	scoped, release := WithScope(NewContext(t.Context(), request))
	if err := FromContext(scoped).Reserve(7); err != nil || p.Held() != 7 {
		t.Errorf("%v, %d held", err, p.Held())
	}
	if err := FromContext(scoped).Reserve(7); err == nil {
		t.Error("more than the limit was reserved")
	}
	release()
	if p.Held() != 0 {
		t.Errorf("%d held after the scope", p.Held())
	}
}
