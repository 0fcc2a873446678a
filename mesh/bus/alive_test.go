package bus_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
)

func TestAliveSaysWhetherAnybodyServes(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
	asker, first, second := broker.Connect(mesh), broker.Connect(mesh), broker.Connect(mesh)
	if err := asker.Alive(t.Context(), stage); !errors.Is(err, bus.ErrNoHost) {
		t.Fatalf("no host yet: %v", err)
	}
	stopFirst := serveAlive(t, first)
	stopSecond := serveAlive(t, second)
	bustest.Eventually(t, "the hosts are found", func() bool { return asker.Alive(t.Context(), stage) == nil })
	if err := asker.Alive(t.Context(), "another"); !errors.Is(err, bus.ErrNoHost) {
		t.Errorf("a stage without hosts: %v", err)
	}
	stopFirst()
	for range 20 {
		if err := asker.Alive(t.Context(), stage); err != nil {
			t.Fatalf("one of two hosts is left: %v", err)
		}
	}
	stopSecond()
	bustest.Eventually(t, "the last host is missed", func() bool {
		return errors.Is(asker.Alive(t.Context(), stage), bus.ErrNoHost)
	})
}

func serveAlive(t *testing.T, b *bus.Bus) (stop func()) {
	t.Helper()
	end, err := b.ServeAlive(stage, "host")
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
	broker := bustest.Start(t)
	b := broker.Connect(mesh)
	swallow(t, broker, b.Subjects.Alive(stage))
	if err := b.Alive(t.Context(), stage); err != nil {
		t.Errorf("a host that says nothing: %v", err)
	}
}

func TestAliveEndsWithItsContextAndItsBroker(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
	b := broker.Connect(mesh)
	swallow(t, broker, b.Subjects.Alive(stage))
	broker.Stop()
	disconnected(t, b)
	begin := time.Now()
	if err := b.Alive(t.Context(), stage); !errors.Is(err, bus.ErrDisconnected) {
		t.Errorf("without a broker: %v", err)
	}
	t.Logf("took %s", time.Since(begin))
	broker.Restore()
}

// Whatever is sent to the subject, the host answers the next question.
func TestAliveSurvivesGarbage(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
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
	if err := nc.FlushTimeout(bustest.Patience); err != nil {
		t.Fatal(err)
	}
	if err := b.Alive(t.Context(), stage); err != nil {
		t.Errorf("after garbage: %v", err)
	}
}
