package body_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/gateway/front/body"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// within runs f with a room of so many bytes in a request with the budget.
func within(ctx context.Context, t *testing.T, budget body.Budget, limit int, f func(*body.Room)) {
	t.Helper()
	h := body.Budgeted(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		room := body.NewRoom(r.Context(), limit)
		defer room.Close()
		f(room)
	}), budget)
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, http.MethodPost, "/", strings.NewReader("body")))
}

func reason(err error) fault.Reason {
	if err == nil {
		return ""
	}
	return fault.From(err).Reason
}

func TestARoomRefusesWhatIsTooMuchAndBooksTheRest(t *testing.T) {
	t.Parallel()
	budget := &purse{}
	within(t.Context(), t, budget, 60, func(room *body.Room) {
		if err := room.Make("inputs.a", 61); reason(err) != fault.PayloadTooLarge || !strings.Contains(err.Error(), "inputs.a takes 61 bytes, gateway.max_payload is 60") {
			t.Errorf("too much is %v", err)
		}
		if err := room.Make("inputs.a", 40); err != nil || room.Made() != 40 || budget.taken.Load() != 40 {
			t.Errorf("%v: %d bytes are made, and %d booked", err, room.Made(), budget.taken.Load())
		}
		if err := room.Make("inputs.b", 21); reason(err) != fault.PayloadTooLarge || !strings.Contains(err.Error(), "of which 40 are taken") {
			t.Errorf("too much beside it is %v", err)
		}
		if err := room.Book(61); reason(err) != fault.Overloaded {
			t.Errorf("over the budget is %v", err)
		}
		if err := room.Book(60); err != nil || budget.taken.Load() != 100 {
			t.Errorf("%v: %d bytes are booked", err, budget.taken.Load())
		}
		room.Give(50)
		if got := budget.taken.Load(); got != 50 {
			t.Errorf("%d bytes are booked after some were given back", got)
		}
	})
	if got := budget.taken.Load(); got != 0 {
		t.Errorf("%d bytes are taken by nobody", got)
	}
}

func TestARoomMakesNothingForACallerThatIsGone(t *testing.T) {
	t.Parallel()
	ctx, leave := context.WithCancel(t.Context())
	leave()
	budget := &purse{}
	within(ctx, t, budget, 0, func(room *body.Room) {
		if err := room.Make("inputs.a", 1); reason(err) != fault.Cancelled || room.Made() != 0 || budget.taken.Load() != 0 {
			t.Errorf("%v: %d bytes are made", err, room.Made())
		}
	})
}

func TestWhereThereIsNoBudgetARoomBoundsAlone(t *testing.T) {
	t.Parallel()
	room := body.NewRoom(t.Context(), 10)
	defer room.Close()
	if err := room.Make("x", 10); err != nil {
		t.Error(err)
	}
	if err := room.Make("y", 1); reason(err) != fault.PayloadTooLarge {
		t.Errorf("too much is %v", err)
	}
}
