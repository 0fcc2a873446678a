package bus_test

import (
	"errors"
	"maps"
	"strconv"
	"testing"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestBacklogCountsItemsByClass(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	if _, err := b.Backlog(t.Context(), stage, pipeline.Memory); !errors.Is(err, bus.ErrNoQueue) {
		t.Fatalf("without a queue: %v", err)
	}
	info := ensure(t, b, queue())
	for i, priority := range []int32{1, 0, 0, -1, -1, -1} {
		publish(t, b, item(strconv.Itoa(i), func(e *envelope.Envelope) { e.Priority = priority }))
	}
	got := backlog(t, b)
	want := map[pipeline.Class]uint64{pipeline.High: 1, pipeline.Normal: 2, pipeline.Low: 3}
	if !maps.Equal(got.Classes, want) || got.Last != 6 || got.Items != 6 || got.Epoch != info.Epoch || got.Bytes == 0 || got.MaxItems != queue().MaxItems || got.MaxBytes != queue().MaxBytes {
		t.Errorf("got %+v, want %v", got, want)
	}
	h := pull(t, broker.Connect(mesh), queue(), 16)
	h.Use(info.Epoch)
	var in []bus.Delivery
	for range 6 {
		in = append(in, h.next(t))
	}
	if got := backlog(t, b); !maps.Equal(got.Classes, want) {
		t.Errorf("in flight: %+v, want %v", got, want)
	}
	for _, d := range in {
		h.ack(t, d)
	}
	testbed.Eventually(t, "what is acknowledged is gone", func() bool {
		got := backlog(t, b)
		return got.Classes[pipeline.High]+got.Classes[pipeline.Normal]+got.Classes[pipeline.Low] == 0 && got.Last == 6
	})
}

func backlog(t *testing.T, b *bus.Bus) bus.Backlog {
	t.Helper()
	got, err := b.Backlog(t.Context(), stage, pipeline.Memory)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func TestBacklogFailsWithoutTheBroker(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	ensure(t, b, queue())
	broker.Stop()
	disconnected(t, b)
	if _, err := b.Backlog(t.Context(), stage, pipeline.Memory); !errors.Is(err, bus.ErrDisconnected) {
		t.Errorf("without a broker: %v", err)
	}
	broker.Restore()
}
