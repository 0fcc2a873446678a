package store_test

import (
	"context"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const mesh pipeline.MeshName = "test"

var settings = store.Settings{Retention: time.Hour, MaxBytes: 64 << 20, Version: 1}

// ensured is a store of any kind.
type ensured interface{ Ensure(context.Context) error }

func ensure[S ensured](t *testing.T, s S) S {
	t.Helper()
	if err := s.Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

func newResults(t *testing.T, b *bus.Bus, s store.Settings) *store.Results {
	t.Helper()
	return ensure(t, store.NewResults(b, s))
}

func newKeys(t *testing.T, b *bus.Bus, s store.Settings) *store.Keys {
	t.Helper()
	return ensure(t, store.NewKeys(b, s))
}

func newRuns(t *testing.T, broker *testbed.Broker) *store.Runs {
	t.Helper()
	return ensure(t, store.NewRuns(broker.Connect(mesh), store.Settings{}))
}

func TestOnlyAHigherVersionChangesTheStream(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh)
	for stream, newStore := range map[string]func(store.Settings) ensured{
		b.ResultStream():     func(s store.Settings) ensured { return store.NewResults(b, s) },
		b.ClaimStream():      func(s store.Settings) ensured { return store.NewKeys(b, s) },
		b.RunRecordStream():  func(s store.Settings) ensured { return store.NewRuns(b, s) },
		b.DeadLetterStream(): func(s store.Settings) ensured { return store.NewDeadLetters(b, s) },
	} {
		retention := func() time.Duration {
			stream, err := b.JetStream().Stream(t.Context(), stream)
			if err != nil {
				t.Fatal(err)
			}
			return stream.CachedInfo().Config.MaxAge
		}
		s := settings
		ensure(t, newStore(s))
		s.Retention = 2 * time.Hour
		ensure(t, newStore(s))
		if got := retention(); got != time.Hour {
			t.Errorf("%s: the same version changed the retention to %s", stream, got)
		}
		s.Version++
		ensure(t, newStore(s))
		if got := retention(); got != 2*time.Hour {
			t.Errorf("%s: retention %s after a higher version, want 2h", stream, got)
		}
	}
}
