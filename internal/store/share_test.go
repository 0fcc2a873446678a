package store_test

import (
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// fill stores results of a tenant until its share is used up, and returns how many, 64 KiB each.
func fill(t *testing.T, b *bus.Bus, r *store.Results, tenant string) (n int) {
	t.Helper()
	text := strings.Repeat("x", 64<<10)
	for ; ; n++ {
		stored, f := r.Share.Reserve(t.Context(), tenant, true, int64(len(text)))
		if f != nil {
			if f.Reason != fault.Overloaded || !f.Retryable() || !strings.Contains(f.Message, "results.max_bytes") {
				t.Errorf("the fault is %v", f)
			}
			return n
		}
		result := answer(newRequest(), text)
		result.Tenant = tenant
		if _, err := put(t, b, result); err != nil {
			t.Fatalf("%d results of %s are stored, and then: %v", n, tenant, err)
		}
		stored()
	}
}

func TestTenantLeavesSpaceInAStream(t *testing.T) {
	t.Parallel()
	const most = 115 // results, in nine tenths of 8 MiB
	s := store.Settings{MaxBytes: 8 << 20}
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	r := newResults(t, b, s)
	if n := fill(t, b, r, "a"); n > most*9/10 || n < most*3/4 {
		t.Errorf("a tenant alone stores %d of %d results, want about seven eighths", n, most)
	}
	// Another process knows it from the stream, and one that starts again as well.
	other := store.NewResults(broker.Connect(mesh), s)
	if _, f := other.Share.Reserve(t.Context(), "a", true, 64<<10); f == nil {
		t.Error("another process lets the tenant store more")
	}
	if n := fill(t, b, other, "b"); n < 3 {
		t.Errorf("the next tenant stores %d results, want some", n)
	}
	counted, err := other.Share.Count(t.Context())
	if err != nil || counted["a"].Bytes < 6<<20 || counted["a"].Bytes > 8<<20 || counted["b"].Messages == 0 {
		t.Errorf("the tenants have %v, %v", counted, err)
	}
	if _, f := other.Share.Reserve(t.Context(), "a", false, 1<<20); f == nil || !strings.Contains(f.Message, "is full") {
		t.Errorf("the space of requests in flight is given away: %v", f)
	}
	stream, err := b.JetStream().Stream(t.Context(), b.ResultStream())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := fill(t, b, r, "a"); n < most*3/4 {
		t.Errorf("after its results have ended the tenant stores %d", n)
	}
}
