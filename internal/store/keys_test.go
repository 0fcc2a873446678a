package store_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func keyOf(text string) request.Key {
	return request.Key{Tenant: "tenant", Pipeline: "pipeline", Key: text}
}

// claimOf returns a claim of a new request.
func claimOf(k request.Key) *envelope.Claim {
	now := time.Now().UTC().Truncate(time.Microsecond)
	return &envelope.Claim{
		Mesh: mesh, Tenant: k.Tenant, Pipeline: k.Pipeline, RequestID: pipeline.RequestID(uuid.NewString()),
		Digest: envelope.Digest{1}, AdmittedAt: now, Deadline: now.Add(time.Minute), Durability: pipeline.Memory,
	}
}

// mustClaim claims the key in place of the record at after.
func mustClaim(t *testing.T, s *store.Keys, k request.Key, after uint64) store.KeyRecord {
	t.Helper()
	r, err := s.Claim(t.Context(), k, claimOf(k), after)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func mustGet(t *testing.T, s *store.Keys, k request.Key) store.KeyRecord {
	t.Helper()
	r, err := s.Get(t.Context(), k)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestOneOfManyClaimsAKey(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	stores := []*store.Keys{newKeys(t, broker.Connect(mesh), settings), newKeys(t, broker.Connect(mesh), settings)}
	const rounds, claimers = 20, 32
	for round := range rounds {
		k := keyOf(fmt.Sprint(round))
		var won atomic.Pointer[envelope.Claim]
		var wins atomic.Int64
		var claiming sync.WaitGroup
		for i := range claimers {
			claiming.Go(func() {
				mine := claimOf(k)
				switch _, err := stores[i%2].Claim(t.Context(), k, mine, 0); {
				case err == nil:
					won.Store(mine)
					wins.Add(1)
				case !errors.Is(err, store.ErrKeyTaken):
					t.Error(err)
				}
			})
		}
		claiming.Wait()
		if got := mustGet(t, stores[0], k); wins.Load() != 1 || *got.Claim != *won.Load() {
			t.Fatalf("%d claimed the key; it is %+v, of %+v", wins.Load(), got, won.Load())
		}
	}
}

func TestKeyBelongsToItsTenantAndPipeline(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh)
	keys := newKeys(t, b, settings)
	different := []request.Key{
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
	for _, k := range different {
		mustClaim(t, keys, k, 0)
	}
	for _, k := range different {
		if r := mustGet(t, keys, k); r.Claim == nil || r.Claim.Tenant != k.Tenant || r.Claim.Pipeline != k.Pipeline {
			t.Errorf("%+v: %+v", k, r)
		}
	}
}

func TestKeyRecordIsReplacedByCompareAndSet(t *testing.T) {
	t.Parallel()
	keys := newKeys(t, testbed.StartBroker(t).Connect(mesh), settings)
	k := keyOf("key")
	first := mustClaim(t, keys, k, 0)
	for name, after := range map[string]uint64{"nothing": 0, "another": first.Seq + 1} {
		if _, err := keys.Claim(t.Context(), k, claimOf(k), after); !errors.Is(err, store.ErrKeyTaken) {
			t.Errorf("a caller that has seen %s: %v, want %v", name, err, store.ErrKeyTaken)
		}
	}
	second := mustClaim(t, keys, k, first.Seq)
	if err := keys.Release(t.Context(), k, first); !errors.Is(err, store.ErrKeyTaken) {
		t.Errorf("the replaced record releases the key: %v", err)
	}
	if r := mustGet(t, keys, k); r.Seq != second.Seq || *r.Claim != *second.Claim {
		t.Errorf("the record is %+v, want %+v", r, second)
	}
}

func TestReleasedKeyIsFree(t *testing.T) {
	t.Parallel()
	keys := newKeys(t, testbed.StartBroker(t).Connect(mesh), settings)
	k := keyOf("key")
	first := mustClaim(t, keys, k, 0)
	if err := keys.Release(t.Context(), k, first); err != nil {
		t.Fatal(err)
	}
	r := mustGet(t, keys, k)
	if !r.Claim.Released || r.Claim.RequestID != first.Claim.RequestID || r.Claim.Digest != first.Claim.Digest {
		t.Errorf("the record is %+v", r)
	}
	mustClaim(t, keys, k, r.Seq)
}

func TestWaitReturnsWhenTheKeyRecordChanges(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	keys, other := newKeys(t, broker.Connect(mesh), settings), store.NewKeys(broker.Connect(mesh), settings)
	for i := range 20 {
		k := keyOf(fmt.Sprint(i))
		r := mustClaim(t, keys, k, 0)
		changed := make(chan error, 1)
		go func() { changed <- other.Wait(t.Context(), k, r.Seq) }()
		begin := time.Now()
		if err := keys.Release(t.Context(), k, r); err != nil {
			t.Fatal(err)
		}
		if err := testbed.Receive(t, "the change", changed); err != nil {
			t.Error(err)
		}
		if took := time.Since(begin); took > 4*time.Second {
			t.Errorf("received after %s", took)
		}
		if err := other.Wait(t.Context(), k, r.Seq); err != nil {
			t.Errorf("a record that was replaced before: %v", err)
		}
	}
	k := keyOf("held")
	r := mustClaim(t, keys, k, 0)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := other.Wait(ctx, k, r.Seq); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a record that stays: %v", err)
	}
}

// Bytes that anybody may have published, and claims that are another key's.
func TestBytesThatAreNoClaimStay(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh)
	keys := newKeys(t, b, settings)
	another, err := claimOf(request.Key{Tenant: "another"}).Encode()
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"garbage": []byte("\xff\xff"), "nothing": nil, "another's": another} {
		k := keyOf(name)
		if _, err := b.JetStream().Publish(t.Context(), b.Claim(k.Tenant, k.Pipeline, k.Key), data); err != nil {
			t.Fatal(err)
		}
		r, err := keys.Get(t.Context(), k)
		if !errors.Is(err, envelope.ErrMalformed) || r.Seq == 0 {
			t.Errorf("%s: the record is %+v, %v", name, r, err)
		}
		if _, err := keys.Claim(t.Context(), k, claimOf(k), 0); !errors.Is(err, store.ErrKeyTaken) {
			t.Errorf("%s: a claim as if there was none: %v", name, err)
		}
	}
}

func TestKeysWithoutAStream(t *testing.T) {
	t.Parallel()
	keys := store.NewKeys(testbed.StartBroker(t).Connect(mesh), settings)
	k := keyOf("key")
	if r := mustGet(t, keys, k); r != (store.KeyRecord{}) {
		t.Errorf("the record is %+v", r)
	}
	if _, err := keys.Claim(t.Context(), k, claimOf(k), 0); !errors.Is(err, bus.ErrNoClaims) {
		t.Errorf("a claim: %v, want %v", err, bus.ErrNoClaims)
	}
}

func TestKeysFailAtOnceWithoutTheBroker(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	keys := newKeys(t, b, settings)
	k := keyOf("key")
	broker.Stop()
	testbed.Eventually(t, "the connection is lost", func() bool { return !b.Connected() })
	if _, err := keys.Get(t.Context(), k); !errors.Is(err, bus.ErrDisconnected) {
		t.Errorf("get: %v", err)
	}
	if _, err := keys.Claim(t.Context(), k, claimOf(k), 0); !errors.Is(err, bus.ErrDisconnected) {
		t.Errorf("claim: %v", err)
	}
	broker.Restore()
}

func TestReleaseRetriesUntilTheBrokerIsBack(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	keys := newKeys(t, b, settings)
	k := keyOf("key")
	r := mustClaim(t, keys, k, 0)
	broker.Stop()
	testbed.Eventually(t, "the connection is lost", func() bool { return !b.Connected() })
	done := make(chan error, 1)
	go func() { done <- keys.Release(t.Context(), k, r) }()
	broker.Restore()
	if err := testbed.Receive(t, "end of the release", done); err != nil && !errors.Is(err, store.ErrKeyTaken) {
		t.Error(err)
	}
	testbed.Eventually(t, "the key is free", func() bool {
		r, err := keys.Get(t.Context(), k)
		return err == nil && r.Claim.Released
	})
}

// The broker ends at any moment of a claim.
func TestClaimWithALostAcknowledgementIsFound(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	keys := newKeys(t, b, settings)
	for round := range 10 {
		k := keyOf(fmt.Sprint(round))
		back(t, keys, k)
		mine := claimOf(k)
		got := make(chan error, 1)
		var r store.KeyRecord
		go func() {
			var err error
			r, err = keys.Claim(t.Context(), k, mine, 0)
			got <- err
		}()
		if round%2 == 0 {
			testbed.Eventually(t, "the claim is stored", func() bool {
				at, err := store.NewKeys(b, settings).Get(t.Context(), k)
				return err == nil && at.Claim != nil
			})
		}
		broker.Stop()
		broker.Restore()
		err := testbed.Receive(t, "end of the claim", got)
		if errors.Is(err, bus.ErrDisconnected) || errors.Is(err, bus.ErrNoClaims) {
			continue // it was not sent, or came to a broker that had ended its streams
		}
		if err != nil {
			t.Fatal(err)
		}
		if at := back(t, keys, k); at.Seq != r.Seq || at.Claim == nil || at.Claim.RequestID != mine.RequestID {
			t.Errorf("the record is %+v, the claim says %+v", at, r)
		}
	}
}

// back returns the key's record once the broker answers.
func back(t *testing.T, s *store.Keys, k request.Key) (r store.KeyRecord) {
	t.Helper()
	testbed.Eventually(t, "the broker is back", func() bool {
		var err error
		r, err = s.Get(t.Context(), k)
		return err == nil
	})
	return r
}

func TestUnansweredClaimEndsWithItsContext(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh, func(s *bus.Settings) { s.AckTimeout = 50 * time.Millisecond })
	keys := store.NewKeys(b, settings)
	k := keyOf("key")
	// A subscriber takes the claim and does not answer: there is no stream.
	ctx, cancel := context.WithTimeout(t.Context(), testbed.Patience)
	defer cancel()
	nc, sent := broker.Client(), 0
	if _, err := nc.Subscribe(b.Claims(), func(*nats.Msg) {
		if sent++; sent == 2 {
			cancel()
		}
	}); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if _, err := keys.Claim(ctx, k, claimOf(k), 0); !errors.Is(err, bus.ErrUnknown) || !errors.Is(err, context.Canceled) {
		t.Errorf("the claim sent twice: %v", err)
	}
}

func TestFullKeyStreamForgetsNoKey(t *testing.T) {
	t.Parallel()
	keys := newKeys(t, testbed.StartBroker(t).Connect(mesh), store.Settings{MaxBytes: 64 << 10})
	var kept []store.KeyRecord
	for {
		k := keyOf(fmt.Sprint(len(kept)))
		r, err := keys.Claim(t.Context(), k, claimOf(k), 0)
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
		if at := mustGet(t, keys, k); at.Claim == nil || at.Claim.RequestID != r.Claim.RequestID {
			t.Fatalf("key %d was forgotten: %+v", i, at)
		}
		if err := keys.Release(t.Context(), k, r); err != nil {
			t.Fatalf("key %d: %v", i, err)
		}
	}
}

func TestKeysSurviveTheBroker(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	keys := newKeys(t, broker.Connect(mesh), settings)
	k := keyOf("key")
	want := mustClaim(t, keys, k, 0)
	broker.Stop()
	broker.Restore()
	testbed.Eventually(t, "the record is there again", func() bool {
		r, err := keys.Get(t.Context(), k)
		return err == nil && r.Seq == want.Seq && *r.Claim == *want.Claim
	})
}

func TestKeysExpire(t *testing.T) {
	t.Parallel()
	s := settings
	s.Retention = time.Second
	keys := newKeys(t, testbed.StartBroker(t).Connect(mesh), s)
	k := keyOf("key")
	mustClaim(t, keys, k, 0)
	testbed.Eventually(t, "the key is forgotten", func() bool { return mustGet(t, keys, k) == store.KeyRecord{} })
	mustClaim(t, keys, k, 0)
}
