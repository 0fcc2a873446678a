package bus_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/filestream"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// jetStream looks at the broker past the bus.
func jetStream(t *testing.T, broker *testbed.Broker) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(broker.Client())
	if err != nil {
		t.Fatal(err)
	}
	return js
}

func TestConcurrentEnsureQueueCreatesOneQueue(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	const hosts = 8
	infos := make([]bus.QueueInfo, hosts)
	var starting sync.WaitGroup
	for i := range hosts {
		b := broker.Connect(mesh)
		starting.Go(func() {
			var err error
			if infos[i], err = b.EnsureQueue(t.Context(), queue()); err != nil {
				t.Errorf("host %d: %v", i, err)
			}
		})
	}
	starting.Wait()
	for i, info := range infos {
		if info.Epoch == "" || info.Epoch != infos[0].Epoch {
			t.Errorf("host %d uses epoch %q, host 0 %q", i, info.Epoch, infos[0].Epoch)
		}
	}
	b := broker.Connect(mesh)
	stream, err := jetStream(t, broker).Stream(t.Context(), b.Stream(stage, pipeline.Memory))
	if err != nil {
		t.Fatal(err)
	}
	if got := stream.CachedInfo().State.Consumers; got != len(pipeline.Classes()) {
		t.Errorf("%d consumers, want one for each of %v", got, pipeline.Classes())
	}
}

func TestOnlyAHigherVersionChangesAQueue(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b, js := broker.Connect(mesh), jetStream(t, broker)
	version := func(n int) bus.QueueSettings {
		return queue(func(s *bus.QueueSettings) {
			s.Version, s.MaxItems, s.AckWait = n, int64(1000*n), time.Duration(10*n)*time.Second
		})
	}
	made := ensure(t, b, version(2))
	publish(t, b, item("waits"))
	for _, test := range []struct {
		name string
		ask  int
		want int
	}{
		{"the same version", 2, 2},
		{"a lower version", 1, 2},
		{"a higher version", 3, 3},
		{"the version before", 2, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			info := ensure(t, b, version(test.ask))
			if info.Epoch != made.Epoch || info.Items != 1 || info.Version != test.want {
				t.Errorf("queue %+v: want epoch %s, 1 item, version %d", info, made.Epoch, test.want)
			}
			items, ackWait := configOf(t, js, b, info)
			if want := version(test.want); items != want.MaxItems || ackWait != want.AckWait {
				t.Errorf("holds %d items with an ack wait of %s, want %d and %s", items, ackWait, want.MaxItems, want.AckWait)
			}
		})
	}
}

func configOf(t *testing.T, js jetstream.JetStream, b *bus.Bus, info bus.QueueInfo) (maxItems int64, ackWait time.Duration) {
	t.Helper()
	stream, err := js.Stream(t.Context(), b.Stream(stage, pipeline.Memory))
	if err != nil {
		t.Fatal(err)
	}
	for _, class := range pipeline.Classes() {
		consumer, err := stream.Consumer(t.Context(), string(class)+"-"+string(info.Epoch))
		if err != nil {
			t.Fatal(err)
		}
		ackWait = consumer.CachedInfo().Config.AckWait
	}
	return stream.CachedInfo().Config.MaxMsgs, ackWait
}

// Hosts of two versions that reconcile side by side.
func TestRollingUpgradeSettlesOnTheHigherVersion(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	var hosts sync.WaitGroup
	for version := range 4 {
		b := broker.Connect(mesh)
		hosts.Go(func() {
			for range 10 {
				s := queue(func(s *bus.QueueSettings) { s.Version, s.MaxItems = version, int64(100+version) })
				if _, err := b.EnsureQueue(t.Context(), s); err != nil {
					t.Errorf("host of version %d: %v", version, err)
				}
			}
		})
	}
	hosts.Wait()
	b := broker.Connect(mesh)
	info := ensure(t, b, queue())
	if got, _ := configOf(t, jetStream(t, broker), b, info); got != 103 || info.Version != 3 {
		t.Errorf("the queue has version %d and holds %d items, want the highest version's", info.Version, got)
	}
}

// A host that slept through the loss of a queue made its consumer on the next.
func TestConsumerOfAnotherEpochIsReplaced(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b, js, s := broker.Connect(mesh), jetStream(t, broker), queue()
	info := ensure(t, b, s)
	stream := b.Stream(stage, pipeline.Memory)
	if err := js.DeleteConsumer(t.Context(), stream, "normal-"+string(info.Epoch)); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateConsumer(t.Context(), stream, jetstream.ConsumerConfig{
		Durable: "normal-another", FilterSubject: b.Stage(stage, pipeline.Memory, pipeline.Normal), AckPolicy: jetstream.AckExplicitPolicy,
	}); err != nil {
		t.Fatal(err)
	}
	publish(t, b, item("waits"))
	h := pull(t, b, s, 8)
	h.Use(ensure(t, b, s).Epoch)
	h.ack(t, h.next(t))
}

// A consumer is deleted by hand while a host creates it again: the broker removes the files of both.
func TestConsumerWithoutFilesServes(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	broker := testbed.StartBroker(t, func(o *server.Options) { o.StoreDir = folder })
	b, s := broker.Connect(mesh), queue(func(s *bus.QueueSettings) { s.Durability = pipeline.File })
	info := ensure(t, b, s)
	files, err := filepath.Glob(filepath.Join(folder, "jetstream", "*", "streams", b.Stream(stage, pipeline.File), "obs", "normal-*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("the consumer is in %q, %v", files, err)
	}
	if err := os.RemoveAll(files[0]); err != nil {
		t.Fatal(err)
	}
	onFile := item("x", func(e *envelope.Envelope) { e.Durability = pipeline.File })
	h := pull(t, b, s, 8)
	h.Use(ensure(t, b, s).Epoch)
	publish(t, b, onFile)
	h.ack(t, h.next(t))
	h.Use("")
	publish(t, b, item("y", func(e *envelope.Envelope) { e.Durability = pipeline.File }))
	broker.Stop()
	broker.Restore()
	testbed.Eventually(t, "the connection is back", b.Connected)
	// A host's period is as short: the broker never answers what comes while it prepares its first answer.
	var next bus.QueueInfo
	testbed.Eventually(t, "the queue is there", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		var err error
		next, err = b.EnsureQueue(ctx, s)
		return err == nil
	})
	if next.Epoch != info.Epoch {
		t.Errorf("the queue is another one")
	}
	h.Use(next.Epoch)
	h.ack(t, h.next(t))
}

func TestFileStreamsWaitAfterADeletion(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b, s := broker.Connect(mesh), queue(func(s *bus.QueueSettings) { s.Durability = pipeline.File })
	config := jetstream.StreamConfig{Name: "own", Subjects: []string{"own"}, Storage: jetstream.FileStorage}
	for name, create := range map[string]func() error{
		b.Stream(stage, pipeline.File): func() error { _, err := b.EnsureQueue(t.Context(), s); return err },
		config.Name:                    func() error { return b.EnsureStream(t.Context(), config, 1) },
	} {
		if err := create(); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if err := jetStream(t, broker).DeleteStream(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		if err := create(); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took < filestream.DeleteWait {
			t.Errorf("%s was created again %s after its deletion", name, took)
		}
	}
}

func TestPullerReportsALostQueue(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	js := jetStream(t, broker)
	for _, test := range []struct {
		name   string
		remove func(context.Context, string, bus.Epoch) error
	}{
		{"stream", func(ctx context.Context, stream string, _ bus.Epoch) error { return js.DeleteStream(ctx, stream) }},
		{"consumer", func(ctx context.Context, stream string, epoch bus.Epoch) error {
			return js.DeleteConsumer(ctx, stream, "normal-"+string(epoch))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			b := broker.Connect(pipeline.MeshName("gone-" + test.name))
			s := queue()
			info := ensure(t, b, s)
			h := pull(t, b, s, 8)
			h.Use(info.Epoch)
			if err := test.remove(t.Context(), b.Stream(stage, pipeline.Memory), info.Epoch); err != nil {
				t.Fatal(err)
			}
			testbed.Receive(t, "report that the queue is gone", h.missing)
			h.Use(ensure(t, b, s).Epoch)
			publish(t, b, item("after"))
			h.ack(t, h.next(t))
		})
	}
}

func TestPullerReportsAMissingQueue(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t).Connect(mesh)
	h := pull(t, b, queue(), 8)
	h.Use("never")
	testbed.Receive(t, "report that the queue is missing", h.missing)
}

func TestItemsOfASilentHostAreRedelivered(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b, s := broker.Connect(mesh), queue(func(s *bus.QueueSettings) { s.AckWait = time.Second })
	info := ensure(t, b, s)
	const count = 20
	for i := range count {
		publish(t, b, item(strconv.Itoa(i)))
	}
	silent := pull(t, broker.Connect(mesh), s, 64)
	silent.Use(info.Epoch)
	for range count {
		silent.next(t)
	}
	silent.Use("")
	next := pull(t, b, s, 64)
	next.Use(info.Epoch)
	for range count {
		d := next.next(t)
		if d.Deliveries < 2 {
			t.Errorf("item %d comes for the %d-th time", d.Seq, d.Deliveries)
		}
		next.ack(t, d)
	}
	awaitItems(t, b, s, 0)
}

func TestItemForAHostWaitsInItsOwnQueue(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	b := broker.Connect(mesh)
	own := queue(func(s *bus.QueueSettings) { s.Stage = pipeline.HostQueue(stage, "host") })
	shared := queue()
	pullers := map[*host]string{}
	for s, text := range map[*bus.QueueSettings]string{&own: "for one", &shared: "for any"} {
		h := pull(t, b, *s, bus.LeastBound(1))
		h.Use(ensure(t, b, *s).Epoch)
		pullers[h] = text
	}
	publish(t, b, item("for any"))
	publish(t, b, item("for one", func(e *envelope.Envelope) { e.Route[0].Host = "host" }))
	for h, want := range pullers {
		d := h.next(t)
		if got := textOf(t, d); got != want || (d.Stage == own.Stage) != (want == "for one") {
			t.Errorf("the queue has the item %q, want %q", got, want)
		}
		h.ack(t, d)
	}
	stop, err := b.ServeAlive(own.Stage, "host", nil, "", func() bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Alive(t.Context(), own.Stage); err != nil {
		t.Errorf("the host is alive: %v", err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Alive(t.Context(), own.Stage); !errors.Is(err, bus.ErrNoHost) {
		t.Errorf("the host is gone: %v", err)
	}
}

// The broker's streams on file refuse records over 32 MiB, with the code of a full stream.
func TestLargeItemOnFileIsTooLargeAndNotAFullQueue(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t, func(o *server.Options) { o.MaxPayload, o.MaxPending = 64<<20, 128<<20 }).Connect(mesh)
	for _, d := range []pipeline.Durability{pipeline.Memory, pipeline.File} {
		ensure(t, b, queue(func(s *bus.QueueSettings) { s.Durability, s.MaxBytes = d, 256<<20 }))
		for _, size := range []int{40 << 20, 32<<20 - 96<<10} {
			e := item(strings.Repeat("x", size), func(e *envelope.Envelope) { e.Durability = d })
			m, err := b.Item(e)
			if err == nil {
				_, err = b.PublishAndWait(t.Context(), m)
			}
			if isRefused := d == pipeline.File && size > 32<<20; isRefused != errors.Is(err, bus.ErrTooLarge) || !isRefused && err != nil {
				t.Errorf("%d bytes, %s: %v", size, d, err)
			}
		}
	}
	if _, err := b.JetStream().Publish(t.Context(), b.Stage(stage, pipeline.File, pipeline.Normal), make([]byte, 40<<20)); err == nil || !strings.Contains(err.Error(), "message too large") {
		t.Errorf("the broker: %v", err)
	}
}
