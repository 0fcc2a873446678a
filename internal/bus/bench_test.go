package bus_test

import (
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// BenchmarkHop publishes items of 1 KiB, pulls and acknowledges them; each is
// one item through one queue, with its envelope encoded. In flight are the items
// between publish and ack.
func BenchmarkHop(b *testing.B) {
	for _, bench := range []struct {
		name     string
		inFlight int
	}{{"one in flight", 1}, {"pipelined", 256}} {
		b.Run(bench.name, func(b *testing.B) { benchmarkHop(b, bench.inFlight) })
	}
}

func benchmarkHop(b *testing.B, inFlight int) {
	broker := testbed.StartBroker(b)
	sender, receiver, s := broker.Connect(mesh), broker.Connect(mesh), queue()
	info := ensure(b, sender, s)
	tokens := make(chan struct{}, inFlight)
	var onTheWay sync.WaitGroup
	var p *bus.Puller
	p, err := receiver.Pull(bus.PullSettings{
		Stage: stage, Durabilities: []pipeline.Durability{s.Durability}, Bound: 1024, AckWait: s.AckWait,
		Malformed: func(err error) { b.Error(err) }, QueueMissing: func() { b.Error("no queue") },
	}, func(d bus.Delivery) {
		if err := d.Ack(); err != nil {
			b.Error(err)
		}
		d.Release()
		<-tokens
		onTheWay.Done()
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(p.Close)
	p.Use(s.Durability, info.Epoch)
	payload := string(make([]byte, 1024))
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		tokens <- struct{}{}
		onTheWay.Add(2)
		m, err := sender.Item(item(payload))
		if err != nil {
			b.Fatal(err)
		}
		sender.Publish(m, func(_ bus.Receipt, err error) {
			if err != nil {
				b.Error(err)
			}
			onTheWay.Done()
		})
	}
	onTheWay.Wait()
}
