package budget

import (
	"context"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

func reason(err error) fault.Reason {
	if err == nil {
		return ""
	}
	return fault.From(err).Reason
}

func TestAccountRejectsBytesOverItsLimit(t *testing.T) {
	t.Parallel()
	pool := NewPool(Settings{Limit: 100})
	memory := Of(NewContext(t.Context(), NewAccount(pool, "a")), 60)
	if err := memory.Input("inputs.a", 61); reason(err) != fault.PayloadTooLarge || !strings.Contains(err.Error(), "inputs.a takes 61 bytes, gateway.max_payload is 60") {
		t.Errorf("too much is %v", err)
	}
	if err := memory.Input("inputs.a", 40); err != nil || memory.Inputs() != 40 || pool.Held() != 40 {
		t.Errorf("%v: %d bytes are decoded, and %d reserved", err, memory.Inputs(), pool.Held())
	}
	if err := memory.Input("inputs.b", 21); reason(err) != fault.PayloadTooLarge || !strings.Contains(err.Error(), "of which 40 are taken") {
		t.Errorf("too much beside it is %v", err)
	}
	if err := memory.Reserve(61); reason(err) != fault.Overloaded {
		t.Errorf("over the pool is %v", err)
	}
	if err := memory.Reserve(60); err != nil || pool.Held() != 100 {
		t.Errorf("%v: %d bytes are reserved", err, pool.Held())
	}
	memory.Release(50)
	if pool.Held() != 50 {
		t.Errorf("%d bytes are reserved after some were released", pool.Held())
	}
	memory.Close()
	memory.Release(10)
	if pool.Held() != 0 {
		t.Errorf("%d bytes stay reserved", pool.Held())
	}
	if err := memory.Reserve(1); reason(err) != fault.Cancelled {
		t.Errorf("a closed account answers %v", err)
	}
}

func TestReservingFailsAfterDisconnect(t *testing.T) {
	t.Parallel()
	pool := NewPool(Settings{Limit: 100})
	ctx, leave := context.WithCancel(NewContext(t.Context(), NewAccount(pool, "")))
	leave()
	memory := Of(ctx, 0)
	if err := memory.Input("inputs.a", 1); reason(err) != fault.Cancelled || memory.Inputs() != 0 || pool.Held() != 0 {
		t.Errorf("%v: %d bytes are decoded", err, memory.Inputs())
	}
}

func TestAccountWithoutPoolHasItsLimit(t *testing.T) {
	t.Parallel()
	memory := Of(t.Context(), 10)
	defer memory.Close()
	if err := memory.Input("x", 10); err != nil {
		t.Error(err)
	}
	if err := memory.Input("y", 1); reason(err) != fault.PayloadTooLarge {
		t.Errorf("too much is %v", err)
	}
}
