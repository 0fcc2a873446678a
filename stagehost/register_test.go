package stagehost_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/internal/testbed"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// store returns a registry on the broker.
func (b *bed) store(url string) *natskv.Store {
	b.t.Helper()
	s, err := natskv.New(natskv.Settings{Mesh: string(mesh), URL: url, Logger: discard()})
	if err != nil {
		b.t.Fatal(err)
	}
	testbed.Background(b.t, s.Run)
	return s
}

func registered(s *natskv.Store) func(*stagehost.Settings) {
	return func(settings *stagehost.Settings) {
		settings.Registry = &stagehost.Registry{Announcer: s, Table: s}
		settings.Labels = map[string]string{"zone": "a"}
	}
}

// staffed is a runner that reports a worker and an engine.
type staffed struct{ runner.Runner }

// Engine implements runner.EngineReporter.
func (staffed) Engine() string { return "abacus 1.0, CPU" }

// Workers implements runner.WorkerReporter.
func (staffed) Workers() []runner.WorkerStatus {
	return []runner.WorkerStatus{{State: "DEAD", Incarnation: 7, Cause: "signal: killed"}}
}

func TestHostIsMemberFromWarmUpToDrain(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	s := b.store(b.broker.URL())
	members := discovery.NewMembership(s, s, string(mesh), discard())
	testbed.Background(b.t, members.Run)
	r := staffed{inproc.Each(inproc.Settings{Concurrency: 3}, echo)}
	h := b.host(r, registered(s), func(settings *stagehost.Settings) { settings.Runner, settings.Listen = r, "127.0.0.1:0" })
	testbed.Eventually(t, "the host is alive", func() bool {
		hosts := members.Hosts()
		return len(hosts) == 1 && hosts[0].Alive
	})
	checkEcho(t, b.ask("one"))
	got := members.Hosts()[0].Record
	if got.GetHost() != string(h.Record().GetHost()) || got.GetStage() != string(stage) || got.GetVersion() != "v1" || got.GetSlots() != 3 ||
		got.GetAddress() != h.Addr().String() || got.GetLabels()["zone"] != "a" || len(got.GetDurabilities()) != 2 || got.GetMaxInFlight() == 0 {
		t.Errorf("its record is %v", got)
	}
	if w := got.GetWorkers(); len(w) != 1 || w[0].GetState() != "DEAD" || w[0].GetIncarnation() != 7 || w[0].GetCause() == "" {
		t.Errorf("its workers are %v", w)
	}
	described, err := stagev1.NewStageServiceClient(dial(t, h)).Describe(t.Context(), &stagev1.DescribeRequest{})
	if err != nil || described.GetEngine() != "abacus 1.0, CPU" || got.GetEngine() != described.GetEngine() {
		t.Errorf("its engine is %s, described as %v, %v", got.GetEngine(), described, err)
	}
	h.stop()
	testbed.Eventually(t, "the host is no member any more", func() bool { return len(members.Hosts()) == 0 })
}

// strict is a registry that rejects the credentials at first.
type strict struct {
	discovery.Announcer
	rejections atomic.Int32
}

func (s *strict) Announce(ctx context.Context, i discovery.Instance, state func(error)) error {
	if s.rejections.Add(-1) >= 0 {
		return discovery.ErrDenied
	}
	return s.Announcer.Announce(ctx, i, state)
}

func TestRecordShowsWhatBatchesTaught(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	h := b.host(inproc.Each(inproc.Settings{}, echo))
	checkEcho(t, b.ask("x"))
	testbed.Eventually(t, "the batch is in the record", func() bool {
		return h.Record().GetBatchEstimate().GetStart().AsDuration() > 0
	})
}

func TestHostRetriesRejectedRegistration(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	store := b.store(b.broker.URL())
	s := &strict{Announcer: store}
	s.rejections.Store(1)
	h := b.start(inproc.Each(inproc.Settings{}, echo), func(settings *stagehost.Settings) {
		settings.Registry = &stagehost.Registry{Announcer: s, Table: store}
	})
	testbed.Eventually(t, "it reports what it waits for", func() bool {
		err := h.Ready()
		return errors.Is(err, stagehost.ErrNotRegistered) && errors.Is(err, discovery.ErrDenied)
	})
	b.waitReady(h)
	checkEcho(t, b.ask("once it is taken"))
}

// A host is not ready before its first registration, and serves during an outage.
func TestHostWaitsForRegistryOnce(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	other := testbed.StartBroker(t)
	other.Stop()
	s := b.store(other.URL())
	h := b.start(inproc.Each(inproc.Settings{}, echo), registered(s))
	testbed.Eventually(t, "it reports what it waits for", func() bool {
		err := h.Ready()
		return errors.Is(err, stagehost.ErrNotRegistered) && errors.Is(err, discovery.ErrUnavailable)
	})
	waiting, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := h.WaitReady(waiting); !errors.Is(err, stagehost.ErrNotRegistered) {
		t.Errorf("waiting for it ends with %v", err)
	}
	other.Restore()
	b.waitReady(h)
	// A broker that stops while it creates a stream leaves goroutines behind.
	testbed.Eventually(t, "its record is there", func() bool {
		_, err := s.Get(t.Context(), discovery.HostKey(string(stage), h.Record().GetHost()))
		return err == nil
	})
	other.Stop()
	checkEcho(t, b.ask("without the registry"))
	if err := h.Ready(); err != nil {
		t.Errorf("without the registry it is %v", err)
	}
}
