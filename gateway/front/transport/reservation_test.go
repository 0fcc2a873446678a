package transport_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stagemesh/stagemesh/gateway/front/fronttest"
	"github.com/stagemesh/stagemesh/gateway/front/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// purse is a budget of 100 bytes.
type purse struct{ reserved atomic.Int64 }

func (p *purse) Reserve(n int64) *fault.Fault {
	if p.reserved.Add(n) > 100 {
		p.reserved.Add(-n)
		return fault.New(fault.Overloaded, "no more")
	}
	return nil
}

func (p *purse) Release(n int64) { p.reserved.Add(-n) }

func TestBodiesTogetherStayWithinBudget(t *testing.T) {
	t.Parallel()
	budget := &purse{}
	hold, held := make(chan struct{}), make(chan struct{})
	url := fronttest.Serve(t, transport.WithBudget(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		data, err := transport.ReadBody(r.Body, r.ContentLength, 1000)
		if err != nil {
			transport.WriteFault(w, err)
			return
		}
		if strings.HasPrefix(string(data), "hold") {
			held <- struct{}{}
			<-hold
		}
		_, _ = io.WriteString(w, strconv.Itoa(len(data)))
	}), budget))
	client := fronttest.Client(t, true)
	first := make(chan string, 1)
	go func() { first <- post(t, client, url, strings.NewReader("hold"+strings.Repeat("x", 56))) }()
	<-held
	if got := budget.reserved.Load(); got != 60 {
		t.Errorf("%d bytes are taken by a body of 60", got)
	}
	if got := post(t, client, url, strings.NewReader(strings.Repeat("y", 41))); !strings.Contains(got, "OVERLOADED") {
		t.Errorf("a body that is too much is answered with %q", got)
	}
	if got := post(t, client, url, strings.NewReader(strings.Repeat("y", 40))); got != "40" {
		t.Errorf("one that fits is answered with %q", got)
	}
	close(hold)
	if got := <-first; got != "60" {
		t.Errorf("the first is answered with %q", got)
	}
	if got := budget.reserved.Load(); got != 0 {
		t.Errorf("%d bytes stay reserved", got)
	}
}

// within runs f with a memory of so many bytes in a request with the budget.
func within(ctx context.Context, t *testing.T, budget transport.Budget, limit int, f func(*transport.Reservation)) {
	t.Helper()
	h := transport.WithBudget(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		memory := transport.NewReservation(r.Context(), limit)
		defer memory.Release()
		f(memory)
	}), budget)
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, http.MethodPost, "/", strings.NewReader("body")))
}

func reason(err error) fault.Reason {
	if err == nil {
		return ""
	}
	return fault.From(err).Reason
}

func TestReservationRejectsBytesOverItsLimit(t *testing.T) {
	t.Parallel()
	budget := &purse{}
	within(t.Context(), t, budget, 60, func(memory *transport.Reservation) {
		if err := memory.Input("inputs.a", 61); reason(err) != fault.PayloadTooLarge || !strings.Contains(err.Error(), "inputs.a takes 61 bytes, gateway.max_payload is 60") {
			t.Errorf("too much is %v", err)
		}
		if err := memory.Input("inputs.a", 40); err != nil || memory.Inputs() != 40 || budget.reserved.Load() != 40 {
			t.Errorf("%v: %d bytes are made, and %d booked", err, memory.Inputs(), budget.reserved.Load())
		}
		if err := memory.Input("inputs.b", 21); reason(err) != fault.PayloadTooLarge || !strings.Contains(err.Error(), "of which 40 are taken") {
			t.Errorf("too much beside it is %v", err)
		}
		if err := memory.ReserveTemporary(61); reason(err) != fault.Overloaded {
			t.Errorf("over the budget is %v", err)
		}
		if err := memory.ReserveTemporary(60); err != nil || budget.reserved.Load() != 100 {
			t.Errorf("%v: %d bytes are booked", err, budget.reserved.Load())
		}
		memory.ReleaseTemporary(50)
		if got := budget.reserved.Load(); got != 50 {
			t.Errorf("%d bytes are booked after some were given back", got)
		}
	})
	if got := budget.reserved.Load(); got != 0 {
		t.Errorf("%d bytes stay reserved", got)
	}
}

func TestReservationFailsAfterDisconnect(t *testing.T) {
	t.Parallel()
	ctx, leave := context.WithCancel(t.Context())
	leave()
	budget := &purse{}
	within(ctx, t, budget, 0, func(memory *transport.Reservation) {
		if err := memory.Input("inputs.a", 1); reason(err) != fault.Cancelled || memory.Inputs() != 0 || budget.reserved.Load() != 0 {
			t.Errorf("%v: %d bytes are made", err, memory.Inputs())
		}
	})
}

func TestReservationWithoutBudgetHasItsLimit(t *testing.T) {
	t.Parallel()
	memory := transport.NewReservation(t.Context(), 10)
	defer memory.Release()
	if err := memory.Input("x", 10); err != nil {
		t.Error(err)
	}
	if err := memory.Input("y", 1); reason(err) != fault.PayloadTooLarge {
		t.Errorf("too much is %v", err)
	}
}
