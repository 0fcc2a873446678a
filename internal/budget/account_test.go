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
	if err := memory.Input("inputs.a", 40); err != nil || pool.Held() != 40 {
		t.Errorf("%v: %d bytes are reserved", err, pool.Held())
	}
	if err := memory.Input("inputs.b", 21); reason(err) != fault.PayloadTooLarge || !strings.Contains(err.Error(), "of which 40 are taken") {
		t.Errorf("too much beside it is %v", err)
	}
	if err := memory.Reserve(61); reason(err) != fault.PayloadTooLarge || !strings.Contains(err.Error(), "take 101 bytes, more than the 100 ") {
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
	if err := memory.Input("inputs.a", 1); reason(err) != fault.Cancelled || pool.Held() != 0 {
		t.Errorf("%v: %d bytes are reserved", err, pool.Held())
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

func TestRequestClosesItsParts(t *testing.T) {
	t.Parallel()
	pool := NewPool(Settings{Limit: 100})
	request := NewAccount(pool, "a")
	first, second := request.Part(), Of(NewContext(t.Context(), request), 0)
	third := second.Part()
	for _, a := range []*Account{request, first, second, third} {
		if err := a.Reserve(10); err != nil {
			t.Fatal(err)
		}
	}
	first.Close()
	second.Release(5)
	if pool.Held() != 25 {
		t.Errorf("%d bytes are reserved after a part was closed", pool.Held())
	}
	request.Close()
	third.Close()
	second.Close()
	if pool.Held() != 0 {
		t.Errorf("%d bytes stay reserved", pool.Held())
	}
	if err := third.Reserve(1); reason(err) != fault.Cancelled {
		t.Errorf("a part of a closed account answers %v", err)
	}
}

// A caller may come again if others are in its way, and not if it is alone.
func TestRequestThatDoesNotFitAloneIsTooLarge(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		isShared  bool
		others, n int64
		want      fault.Reason
	}{
		"all":                        {false, 0, 40, ""},
		"beside others":              {false, 10, 40, fault.Overloaded},
		"more than all":              {false, 0, 41, fault.PayloadTooLarge},
		"more than all, and others":  {false, 90, 41, fault.PayloadTooLarge},
		"a share":                    {true, 0, 27, ""},
		"a share, beside others":     {true, 10, 27, fault.Overloaded},
		"more than a share":          {true, 0, 28, fault.PayloadTooLarge},
		"more than a share, and all": {true, 0, 41, fault.PayloadTooLarge},
	} {
		pool := NewPool(Settings{Limit: 100, Shared: row.isShared})
		if f := pool.Reserve("b", row.others); f != nil {
			t.Fatal(f)
		}
		request := NewAccount(pool, "a")
		if err := request.Reserve(min(60, 100-row.others)); err != nil {
			t.Fatal(err)
		}
		request.held = 60 // of which the others let it have so much
		message := request.Part()
		if err := message.Reserve(row.n); reason(err) != row.want {
			t.Errorf("%s: %v, want %q", name, err, row.want)
		}
	}
}

// The messages of a stream that are in flight together may come again one after the other.
func TestMessageOfManyIsTooLargeByItself(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		hasMany bool
		held, n int64
		want    fault.Reason
	}{
		"of one request":               {false, 0, 60, fault.PayloadTooLarge},
		"beside others of its stream":  {true, 30, 30, fault.Overloaded},
		"too large itself, in pieces":  {true, 40, 61, fault.PayloadTooLarge},
		"too large itself, in a piece": {true, 0, 101, fault.PayloadTooLarge},
	} {
		request := NewAccount(NewPool(Settings{Limit: 100}), "")
		if row.hasMany {
			request.HasMany()
		}
		first, message := request.Part(), request.Part()
		if err := first.Reserve(50); err != nil {
			t.Fatal(err)
		}
		if err := message.Reserve(row.held); err != nil {
			t.Fatal(err)
		}
		if err := message.Reserve(row.n); reason(err) != row.want {
			t.Errorf("%s: %v, want %q", name, err, row.want)
		}
	}
}
