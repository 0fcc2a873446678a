package claim_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
	"github.com/stagemesh/stagemesh/mesh/claim"
	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const mesh pipeline.MeshName = "test"

var settings = claim.Settings{Retention: time.Hour, MaxBytes: 64 << 20, Version: 1}

func ensured(t *testing.T, b *bus.Bus, s claim.Settings) *claim.Store {
	t.Helper()
	store := claim.New(b, s)
	if err := store.Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	return store
}

func keyOf(text string) claim.Key {
	return claim.Key{Tenant: "tenant", Pipeline: "pipeline", Key: text}
}

// of is a claim of a new request.
func of(k claim.Key) *envelope.Claim {
	now := time.Now().UTC().Truncate(time.Microsecond)
	return &envelope.Claim{
		Mesh: mesh, Tenant: k.Tenant, Pipeline: k.Pipeline, RequestID: pipeline.RequestID(uuid.NewString()),
		Digest: envelope.Digest{1}, AdmittedAt: now, Deadline: now.Add(time.Minute), Durability: pipeline.Memory,
	}
}

// claimed claims the key in place of the record at after.
func claimed(t *testing.T, s *claim.Store, k claim.Key, after uint64) claim.Record {
	t.Helper()
	r, err := s.Claim(t.Context(), k, of(k), after)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func get(t *testing.T, s *claim.Store, k claim.Key) claim.Record {
	t.Helper()
	r, err := s.Get(t.Context(), k)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestOneOfManyClaimsAKey(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
	stores := []*claim.Store{ensured(t, broker.Connect(mesh), settings), ensured(t, broker.Connect(mesh), settings)}
	const rounds, claimers = 20, 32
	for round := range rounds {
		k := keyOf(fmt.Sprint(round))
		var won atomic.Pointer[envelope.Claim]
		var wins atomic.Int64
		var claiming sync.WaitGroup
		for i := range claimers {
			claiming.Go(func() {
				mine := of(k)
				switch _, err := stores[i%2].Claim(t.Context(), k, mine, 0); {
				case err == nil:
					won.Store(mine)
					wins.Add(1)
				case !errors.Is(err, claim.ErrTaken):
					t.Error(err)
				}
			})
		}
		claiming.Wait()
		if got := get(t, stores[0], k); wins.Load() != 1 || *got.Claim != *won.Load() {
			t.Fatalf("%d claimed the key; it is %+v, of %+v", wins.Load(), got, won.Load())
		}
	}
}

func TestAKeyIsOfItsTenantAndPipeline(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Connect(mesh)
	store := ensured(t, b, settings)
	keys := []claim.Key{
		{Tenant: "a", Pipeline: "p", Key: "k"},
		{Tenant: "b", Pipeline: "p", Key: "k"},
		{Tenant: "a", Pipeline: "q", Key: "k"},
		// The same text, cut elsewhere.
		{Tenant: "ap", Key: "k"},
		{Tenant: "a", Pipeline: "pk"},
		{Pipeline: "ap", Key: "k"},
		{Key: "apk"},
		{},
		{Tenant: "a", Pipeline: "p", Key: "any text\n\x00. *>"},
	}
	for _, k := range keys {
		claimed(t, store, k, 0)
	}
	for _, k := range keys {
		if r := get(t, store, k); r.Claim == nil || r.Claim.Tenant != k.Tenant || r.Claim.Pipeline != k.Pipeline {
			t.Errorf("%+v: %+v", k, r)
		}
	}
}

func TestARecordIsReplacedOnlyByWhoHasSeenIt(t *testing.T) {
	t.Parallel()
	store := ensured(t, bustest.Start(t).Connect(mesh), settings)
	k := keyOf("key")
	first := claimed(t, store, k, 0)
	for name, after := range map[string]uint64{"nothing": 0, "another": first.Seq + 1} {
		if _, err := store.Claim(t.Context(), k, of(k), after); !errors.Is(err, claim.ErrTaken) {
			t.Errorf("who has seen %s: %v, want %v", name, err, claim.ErrTaken)
		}
	}
	second := claimed(t, store, k, first.Seq)
	if err := store.Release(t.Context(), k, first); !errors.Is(err, claim.ErrTaken) {
		t.Errorf("the one that was replaced releases it: %v", err)
	}
	if r := get(t, store, k); r.Seq != second.Seq || *r.Claim != *second.Claim {
		t.Errorf("the record is %+v, want %+v", r, second)
	}
}

func TestAReleasedKeyIsFree(t *testing.T) {
	t.Parallel()
	store := ensured(t, bustest.Start(t).Connect(mesh), settings)
	k := keyOf("key")
	first := claimed(t, store, k, 0)
	if err := store.Release(t.Context(), k, first); err != nil {
		t.Fatal(err)
	}
	r := get(t, store, k)
	if !r.Claim.Released || r.Claim.RequestID != first.Claim.RequestID || r.Claim.Digest != first.Claim.Digest {
		t.Errorf("the record is %+v", r)
	}
	claimed(t, store, k, r.Seq)
}

func TestWaitHearsThatARecordIsReplaced(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
	store, other := ensured(t, broker.Connect(mesh), settings), claim.New(broker.Connect(mesh), settings)
	for i := range 20 {
		k := keyOf(fmt.Sprint(i))
		r := claimed(t, store, k, 0)
		heard := make(chan error, 1)
		go func() { heard <- other.Wait(t.Context(), k, r.Seq) }()
		begin := time.Now()
		if err := store.Release(t.Context(), k, r); err != nil {
			t.Fatal(err)
		}
		if err := bustest.Receive(t, "the word of it", heard); err != nil {
			t.Error(err)
		}
		if took := time.Since(begin); took > 4*time.Second {
			t.Errorf("heard after %s", took)
		}
		if err := other.Wait(t.Context(), k, r.Seq); err != nil {
			t.Errorf("of what was replaced before: %v", err)
		}
	}
	k := keyOf("held")
	r := claimed(t, store, k, 0)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := other.Wait(ctx, k, r.Seq); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("of what stays: %v", err)
	}
}

// Bytes that anybody may have published, and claims that are another key's.
func TestWhatIsNoClaimIsNobodysAndIsReplaced(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Connect(mesh)
	store := ensured(t, b, settings)
	another, err := of(claim.Key{Tenant: "another"}).Encode()
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"garbage": []byte("\xff\xff"), "nothing": nil, "another's": another} {
		k := keyOf(name)
		if _, err := b.JetStream().Publish(t.Context(), b.Subjects.Claim(k.Tenant, k.Pipeline, k.Key), data); err != nil {
			t.Fatal(err)
		}
		r := get(t, store, k)
		if r.Claim != nil || r.Seq == 0 {
			t.Errorf("%s: the record is %+v", name, r)
		}
		claimed(t, store, k, r.Seq)
		if r := get(t, store, k); r.Claim == nil {
			t.Errorf("%s: it was not replaced", name)
		}
	}
}

func TestWithoutAStreamNobodyHasAKey(t *testing.T) {
	t.Parallel()
	store := claim.New(bustest.Start(t).Connect(mesh), settings)
	k := keyOf("key")
	if r := get(t, store, k); r != (claim.Record{}) {
		t.Errorf("the record is %+v", r)
	}
	if _, err := store.Claim(t.Context(), k, of(k), 0); !errors.Is(err, bus.ErrNoClaims) {
		t.Errorf("a claim: %v, want %v", err, bus.ErrNoClaims)
	}
}

func TestWhileTheBrokerIsAwayItIsSaidAtOnce(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
	b := broker.Connect(mesh)
	store := ensured(t, b, settings)
	k := keyOf("key")
	broker.Stop()
	bustest.Eventually(t, "the connection is lost", func() bool { return !b.Connected() })
	if _, err := store.Get(t.Context(), k); !errors.Is(err, bus.ErrDisconnected) {
		t.Errorf("get: %v", err)
	}
	if _, err := store.Claim(t.Context(), k, of(k), 0); !errors.Is(err, bus.ErrDisconnected) {
		t.Errorf("claim: %v", err)
	}
	broker.Restore()
}

func TestAReleaseGetsThroughWhenTheBrokerIsBack(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
	b := broker.Connect(mesh)
	store := ensured(t, b, settings)
	k := keyOf("key")
	r := claimed(t, store, k, 0)
	broker.Stop()
	bustest.Eventually(t, "the connection is lost", func() bool { return !b.Connected() })
	done := make(chan error, 1)
	go func() { done <- store.Release(t.Context(), k, r) }()
	broker.Restore()
	if err := bustest.Receive(t, "end of the release", done); err != nil && !errors.Is(err, claim.ErrTaken) {
		t.Error(err)
	}
	bustest.Eventually(t, "the key is free", func() bool {
		r, err := store.Get(t.Context(), k)
		return err == nil && r.Claim.Released
	})
}

// The broker ends at any moment of a claim.
func TestAClaimWhoseAcknowledgementIsLostIsFound(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
	b := broker.Connect(mesh)
	store := ensured(t, b, settings)
	for round := range 10 {
		k := keyOf(fmt.Sprint(round))
		back(t, store, k)
		mine := of(k)
		got := make(chan error, 1)
		var r claim.Record
		go func() {
			var err error
			r, err = store.Claim(t.Context(), k, mine, 0)
			got <- err
		}()
		if round%2 == 0 {
			bustest.Eventually(t, "the claim is stored", func() bool {
				at, err := claim.New(b, settings).Get(t.Context(), k)
				return err == nil && at.Claim != nil
			})
		}
		broker.Stop()
		broker.Restore()
		err := bustest.Receive(t, "end of the claim", got)
		if errors.Is(err, bus.ErrDisconnected) || errors.Is(err, bus.ErrNoClaims) {
			continue // it was not sent, or came to a broker that had ended its streams
		}
		if err != nil {
			t.Fatal(err)
		}
		if at := back(t, store, k); at.Seq != r.Seq || at.Claim == nil || at.Claim.RequestID != mine.RequestID {
			t.Errorf("the record is %+v, the claim says %+v", at, r)
		}
	}
}

// back returns the key's record once the broker says it.
func back(t *testing.T, s *claim.Store, k claim.Key) (r claim.Record) {
	t.Helper()
	bustest.Eventually(t, "the broker is back", func() bool {
		var err error
		r, err = s.Get(t.Context(), k)
		return err == nil
	})
	return r
}

func TestAClaimThatIsNeverAnsweredEndsWithItsContext(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
	b := broker.Connect(mesh, func(s *bus.Settings) { s.AckTimeout = 50 * time.Millisecond })
	store := claim.New(b, settings)
	k := keyOf("key")
	// Somebody takes the claim and says nothing: there is no stream.
	sub, err := broker.Client().SubscribeSync(b.Claims())
	if err != nil {
		t.Fatal(err)
	}
	bustest.Eventually(t, "somebody listens", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		_, err := store.Claim(ctx, k, of(k), 0)
		if err != nil && !errors.Is(err, bus.ErrUnknown) && !errors.Is(err, bus.ErrNoClaims) {
			t.Fatal(err)
		}
		return errors.Is(err, bus.ErrUnknown) && errors.Is(err, context.DeadlineExceeded)
	})
	if n, _, err := sub.Pending(); err != nil || n < 2 {
		t.Errorf("it was sent %d times, %v", n, err)
	}
}

func TestAFullStreamForgetsNoKeyAndReleasesThoseThatItHas(t *testing.T) {
	t.Parallel()
	store := ensured(t, bustest.Start(t).Connect(mesh), claim.Settings{MaxBytes: 64 << 10})
	var kept []claim.Record
	for {
		k := keyOf(fmt.Sprint(len(kept)))
		r, err := store.Claim(t.Context(), k, of(k), 0)
		if errors.Is(err, bus.ErrQueueFull) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		kept = append(kept, r)
	}
	t.Logf("a key takes %d bytes", 64<<10/len(kept))
	if len(kept) < 100 {
		t.Errorf("%d keys fit into 64 KiB", len(kept))
	}
	for i, r := range kept {
		k := keyOf(fmt.Sprint(i))
		if at := get(t, store, k); at.Claim == nil || at.Claim.RequestID != r.Claim.RequestID {
			t.Fatalf("key %d was forgotten: %+v", i, at)
		}
		if err := store.Release(t.Context(), k, r); err != nil {
			t.Fatalf("key %d: %v", i, err)
		}
	}
}

func TestKeysSurviveTheBroker(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
	store := ensured(t, broker.Connect(mesh), settings)
	k := keyOf("key")
	want := claimed(t, store, k, 0)
	broker.Stop()
	broker.Restore()
	bustest.Eventually(t, "the record is there again", func() bool {
		r, err := store.Get(t.Context(), k)
		return err == nil && r.Seq == want.Seq && *r.Claim == *want.Claim
	})
}

func TestKeysAreForgottenAfterTheWindow(t *testing.T) {
	t.Parallel()
	s := settings
	s.Retention = time.Second
	store := ensured(t, bustest.Start(t).Connect(mesh), s)
	k := keyOf("key")
	claimed(t, store, k, 0)
	bustest.Eventually(t, "the key is forgotten", func() bool { return get(t, store, k) == claim.Record{} })
	claimed(t, store, k, 0)
}

func TestOnlyAHigherVersionChangesTheWindow(t *testing.T) {
	t.Parallel()
	b := bustest.Start(t).Connect(mesh)
	ensured(t, b, settings)
	window := func() time.Duration {
		stream, err := b.JetStream().Stream(t.Context(), b.ClaimStream())
		if err != nil {
			t.Fatal(err)
		}
		return stream.CachedInfo().Config.MaxAge
	}
	same := settings
	same.Retention = 2 * time.Hour
	ensured(t, b, same)
	if got := window(); got != time.Hour {
		t.Errorf("the same version changed the window to %s", got)
	}
	same.Version++
	ensured(t, b, same)
	if got := window(); got != 2*time.Hour {
		t.Errorf("%s after a higher version, want 2h", got)
	}
}
