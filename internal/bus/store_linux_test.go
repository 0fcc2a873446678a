package bus_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

func TestBrokerOfItsOwnWithAFullDiskIsNoticed(t *testing.T) {
	t.Parallel()
	folder := testbed.SmallDisk(t, 48<<20)
	if folder == "" {
		return
	}
	broker := testbed.StartBroker(t, func(o *server.Options) { o.StoreDir = folder })
	b := broker.Connect(mesh, func(s *bus.Settings) { s.AckTimeout = 200 * time.Millisecond })
	write := func(size int) error {
		id := uuid.NewString()
		_, err := b.PublishAndWait(t.Context(), bus.Message{Subject: b.FileData(id), Stream: b.FileDataStream(), Data: make([]byte, size)})
		return err
	}
	if err := b.EnsureStream(t.Context(), jetstream.StreamConfig{Name: b.FileDataStream(), Subjects: []string{b.FileData("*")}, MaxBytes: 1 << 30}, 1); err != nil {
		t.Fatal(err)
	}
	if err := write(1); err != nil || b.StoreError() != nil {
		t.Fatalf("%v, %v", err, b.StoreError())
	}
	b.ProbeStore(t.Context()) // none is needed
	if _, err := b.JetStream().Stream(t.Context(), b.StoreProbeStream()); !errors.Is(err, jetstream.ErrStreamNotFound) {
		t.Errorf("a probe beside a write: %v", err)
	}
	free := testbed.FillDisk(t, folder)
	testbed.Eventually(t, "a write is refused at once", func() bool { return errors.Is(write(1<<20), bus.ErrStoreFull) })
	began := time.Now()
	err := write(1)
	if f := bus.StoreFault(err); f == nil || f.Reason != fault.StoreFull || f.RetryAfter <= 0 || time.Since(began) > 100*time.Millisecond {
		t.Errorf("after %s: %v", time.Since(began), err)
	}
	if b.StoreError() == nil || b.StoreErrors() == 0 {
		t.Error("the store counts as ready")
	}
	free()
	broker.Stop()
	broker.Restore() // what an operator does
	testbed.Eventually(t, "the store is ready", func() bool { return b.Connected() && write(1<<20) == nil && b.StoreError() == nil })
}

func TestProbeNoticesAFullDiskAndItsEnd(t *testing.T) {
	t.Parallel()
	folder := testbed.SmallDisk(t, 48<<20)
	if folder == "" {
		return
	}
	broker := testbed.StartBroker(t, func(o *server.Options) { o.StoreDir = folder })
	b := broker.Connect(mesh, func(s *bus.Settings) { s.AckTimeout = 200 * time.Millisecond })
	b.ProbeStore(t.Context())
	if err := b.StoreError(); err != nil {
		t.Fatal(err)
	}
	b.ProbeStore(t.Context()) // not so soon again
	free := testbed.FillDisk(t, folder)
	testbed.Eventually(t, "the full disk is noticed", func() bool {
		b.ProbeStore(t.Context())
		return errors.Is(b.StoreError(), bus.ErrStoreFull)
	})
	free()
	testbed.Eventually(t, "the space is noticed", func() bool {
		b.ProbeStore(t.Context())
		return b.StoreError() == nil
	})
}
