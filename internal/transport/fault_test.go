package transport_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

func TestFaultBodyHasAllFields(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	transport.WriteFault(w, fault.New(fault.QueueFull, "the queue of resnet is full").
		At("resnet", "classify", "host-1").
		WithRetryAfter(1001*time.Microsecond).
		WithViolation("inputs.x", "too \"big\" for <x>").
		WithMetadata("request_id", "r-1").
		WithMetadata("queue", "900"))
	const want = `{"error":{"code":"RESOURCE_EXHAUSTED","reason":"QUEUE_FULL","message":"the queue of resnet is full","request_id":"r-1",` +
		`"stage":"resnet","step":"classify","host":"host-1","violations":[{"field":"inputs.x","description":"too \"big\" for <x>"}],` +
		`"retry_after_ms":2,"metadata":{"queue":"900"}}}`
	if w.Code != http.StatusTooManyRequests || w.Body.String() != want {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	for name, want := range map[string]string{"Retry-After": "1", "Stagemesh-Request-Id": "r-1", "Content-Type": "application/json"} {
		if got := w.Header().Get(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

func TestUnsetFaultFieldsAreOmitted(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	transport.WriteFaultStatus(w, fault.New(fault.InvalidRequest, "no"), http.StatusMethodNotAllowed)
	const want = `{"error":{"code":"INVALID_ARGUMENT","reason":"INVALID_REQUEST","message":"no"}}`
	if w.Code != http.StatusMethodNotAllowed || w.Body.String() != want {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	if h := w.Header(); h.Get("Retry-After") != "" || h.Get("Stagemesh-Request-Id") != "" {
		t.Errorf("headers %v", h)
	}
}

func TestInvalidUTF8InFaultStaysJSON(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	transport.WriteFault(w, fault.New(fault.InvalidRequest, "a\xffb"))
	if !strings.Contains(w.Body.String(), `a\ufffdb`) {
		t.Errorf("got %s", w.Body)
	}
}

// A request ends before its RPC does, so that its client gets the reason.
func TestRequestsEndBeforeTheirRPC(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	for requested, most := range map[time.Duration]time.Duration{0: 190 * time.Millisecond, time.Second: 190 * time.Millisecond, time.Millisecond: time.Millisecond} {
		if got, err := transport.EarlierTimeout(ctx, requested); err != nil || got > most {
			t.Errorf("of %s: %s, %v", requested, got, err)
		}
	}
	if got, err := transport.EarlierTimeout(t.Context(), time.Minute); err != nil || got != time.Minute {
		t.Errorf("without a deadline: %s, %v", got, err)
	}
}
