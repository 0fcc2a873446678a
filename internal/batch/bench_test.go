package batch_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
)

// BenchmarkBatch is of one batch's whole way: its items are added, with the
// decision after each that a host makes while its workers are busy, dispatched
// and finished.
func BenchmarkBatch(b *testing.B) {
	for _, size := range []int{1, 32} {
		for _, mode := range []batch.Mode{batch.Adaptive, batch.Eager, batch.Window} {
			b.Run(fmt.Sprintf("%s of %d", mode, size), func(b *testing.B) {
				b.ReportAllocs()
				fillAndDispatch(b, batch.Settings{Mode: mode, MaxSize: size, MaxWait: 10 * ms}, size)
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*size), "ns/item")
			})
		}
	}
}

func fillAndDispatch(b *testing.B, s batch.Settings, size int) {
	batcher, now, id := batch.New(s), epoch, batch.ID(0)
	for b.Loop() {
		now = now.Add(time.Millisecond)
		for range size {
			id++
			it := batch.Item{ID: id, Key: "k", Rows: 1, Bytes: 100, Arrival: now, Deadline: now.Add(time.Second)}
			if err := batcher.Add(now, it); err != nil {
				b.Fatal(err)
			}
			batcher.Next(now, 0)
			batcher.Wake(0)
		}
		got, ok := batcher.Next(now, 1)
		if !ok || len(got.Items) != size {
			b.Fatalf("a batch of %d", len(got.Items))
		}
		batcher.Finished(now, batch.Run{Key: got.Key, Items: size, Rows: size, Took: 5 * ms})
	}
}

// BenchmarkBacklog adds to and takes from a long backlog of many keys.
func BenchmarkBacklog(b *testing.B) {
	b.ReportAllocs()
	batcher, now, id := batch.New(batch.Settings{MaxSize: 1}), epoch, batch.ID(0)
	add := func() {
		id++
		now = now.Add(time.Microsecond)
		key := batch.Key("0123456789abcdefghijklmnopqrstuv"[id%32 : id%32+1])
		if err := batcher.Add(now, batch.Item{ID: id, Key: key, Rows: 1, Arrival: now, Deadline: now.Add(time.Hour)}); err != nil {
			b.Fatal(err)
		}
	}
	for range 4096 {
		add()
	}
	for b.Loop() {
		add()
		if _, ok := batcher.Next(now, 1); !ok {
			b.Fatal("nothing to dispatch")
		}
	}
}
