package bus_test

import (
	"bytes"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestAliveFindsTheStagesHosts(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	asker, first, second := broker.Connect(mesh), broker.Connect(mesh), broker.Connect(mesh)
	if _, err := asker.Alive(t.Context(), stage); !errors.Is(err, bus.ErrNoHost) {
		t.Fatalf("no host yet: %v", err)
	}
	stopFirst := serveAlive(t, first)
	stopSecond := serveAlive(t, second)
	testbed.Eventually(t, "the hosts are found", func() bool { return found(t, asker) })
	if _, err := asker.Alive(t.Context(), "another"); !errors.Is(err, bus.ErrNoHost) {
		t.Errorf("a stage without hosts: %v", err)
	}
	stopFirst()
	for range 20 {
		if _, err := asker.Alive(t.Context(), stage); err != nil {
			t.Fatalf("one of two hosts is left: %v", err)
		}
	}
	stopSecond()
	testbed.Eventually(t, "the last host is missed", func() bool {
		_, err := asker.Alive(t.Context(), stage)
		return errors.Is(err, bus.ErrNoHost)
	})
}

func found(t *testing.T, asker *bus.Bus) bool {
	_, err := asker.Alive(t.Context(), stage)
	return err == nil
}

func TestAliveReturnsTheHostsAvailability(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	asker, b := broker.Connect(mesh), broker.Connect(mesh)
	var busy atomic.Bool
	end, err := b.ServeAlive(stage, "host", []pipeline.Durability{pipeline.File}, "", busy.Load)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := end(); err != nil {
			t.Error(err)
		}
	}()
	for _, want := range []bool{false, true, false} {
		busy.Store(want)
		got, err := asker.Alive(t.Context(), stage)
		if err != nil || got.Busy != want || !slices.Equal(got.Durabilities, []pipeline.Durability{pipeline.File}) {
			t.Errorf("got %+v, %v; it is busy: %t", got, err, want)
		}
	}
}

// Anybody may answer, with anything.
func TestMalformedAliveAnswerCountsAsAHost(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b, nc := broker.Connect(mesh), broker.Client()
	for _, answer := range [][]byte{{0xff, 0xff}, {0x1a, 0x01, 0x63}, bytes.Repeat([]byte{0x18, 0x02}, 1000)} {
		sub, err := nc.Subscribe(b.Subjects.Alive(stage), func(m *nats.Msg) { _ = m.Respond(answer) })
		if err != nil {
			t.Fatal(err)
		}
		if err := nc.FlushTimeout(testbed.Patience); err != nil {
			t.Fatal(err)
		}
		if got, err := b.Alive(t.Context(), stage); err != nil || len(got.Durabilities) > 2 {
			t.Errorf("got %+v, %v", got, err)
		}
		if err := sub.Unsubscribe(); err != nil {
			t.Fatal(err)
		}
	}
}

func serveAlive(t *testing.T, b *bus.Bus) (stop func()) {
	t.Helper()
	end, err := b.ServeAlive(stage, "host", nil, "", func() bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := end(); err != nil {
			t.Errorf("end of alive: %v", err)
		}
	}
}

// A host that is there and does not get to answer is no missing host.
func TestSlowHostIsAlive(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	swallow(t, broker, b.Subjects.Alive(stage))
	if _, err := b.Alive(t.Context(), stage); err != nil {
		t.Errorf("a host that says nothing: %v", err)
	}
}

func TestAliveEndsWithItsContextAndItsBroker(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	swallow(t, broker, b.Subjects.Alive(stage))
	broker.Stop()
	disconnected(t, b)
	begin := time.Now()
	if _, err := b.Alive(t.Context(), stage); !errors.Is(err, bus.ErrDisconnected) {
		t.Errorf("without a broker: %v", err)
	}
	t.Logf("took %s", time.Since(begin))
	broker.Restore()
}

// Whatever is sent to the subject, the host answers the next question.
func TestAliveSurvivesGarbage(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b, nc := broker.Connect(mesh), broker.Client()
	serveAlive(t, b)
	subject := b.Subjects.Alive(stage)
	for _, data := range [][]byte{nil, {0xff}, make([]byte, b.MaxPayload())} {
		if err := nc.Publish(subject, data); err != nil {
			t.Fatal(err)
		}
		if err := nc.PublishRequest(subject, subject+".nobody", data); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.FlushTimeout(testbed.Patience); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Alive(t.Context(), stage); err != nil {
		t.Errorf("after garbage: %v", err)
	}
}
