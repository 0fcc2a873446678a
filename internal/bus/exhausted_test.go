package bus_test

import (
	"testing"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestExhaustedItemsArePassedToAHost(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	info := ensure(t, b, queue())
	name := b.Stream(stage, pipeline.Memory)
	js := jetStream(t, broker)
	consumer, err := js.Consumer(t.Context(), name, string(pipeline.Normal)+"-"+string(info.Epoch))
	if err != nil {
		t.Fatal(err)
	}
	config := consumer.CachedInfo().Config
	config.MaxDeliver = 2
	if _, err := js.UpdateConsumer(t.Context(), name, config); err != nil {
		t.Fatal(err)
	}
	handed := make(chan bus.Exhausted, 4)
	for range 2 {
		stop, err := broker.Connect(mesh).ServeExhausted(stage, func(g bus.Exhausted) { handed <- g })
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = stop() }()
	}
	publish(t, b, item("unlucky"))
	h := pull(t, b, queue(), 8)
	h.Use(info.Epoch)
	for range 2 {
		d := h.next(t)
		if err := d.Nak(0); err != nil {
			t.Fatal(err)
		}
		d.Release()
	}
	g := testbed.Receive(t, "item that was given up on", handed)
	if text(t, g.Data) != "unlucky" || g.Deliveries != 2 {
		t.Errorf("got %+v", g)
	}
	awaitItems(t, b, queue(), 1)
	if err := b.Remove(t.Context(), g); err != nil {
		t.Fatal(err)
	}
	awaitItems(t, b, queue(), 0)
	if len(handed) > 0 {
		t.Errorf("%d more were handed over", len(handed))
	}
}
