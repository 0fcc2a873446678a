package fleet

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// The disk of the broker in the process is filled and emptied at random times, under load.
func TestDiskFillsAndEmptiesUnderLoad(t *testing.T) {
	folder := testbed.SmallDisk(t, 64<<20)
	if folder == "" {
		return
	}
	took := pick(6*time.Second, 5*time.Minute)
	// Stored results would fill the disk too. There are no keys, and the results of ten seconds fit.
	settings := gateway.Settings{}
	settings.Limits.MaxTimeout = 8 * time.Second
	results, keys := store.Settings{Retention: 10 * time.Second, MaxBytes: 30 << 20}, store.Settings{Retention: 10 * time.Second, MaxBytes: 2 << 20}
	m, err := stagemesh.New(stagemesh.Settings{Mesh: "m", NATS: stagemesh.NATS{StoreDir: folder}, Gateway: settings, Results: results, Idempotency: keys, Logger: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.AddStage(stagemesh.Stage{Name: "echo", Runner: inproc.Each(inproc.Settings{}, func(_ context.Context, item runner.Item) ([]payload.Part, error) { return item.Inputs, nil })}); err != nil {
		t.Fatal(err)
	}
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Stop(); err != nil {
			t.Error(err)
		}
	}()
	infer := func(ctx context.Context, d pipeline.Durability) error {
		_, err := m.Infer(ctx, &request.Request{Pipeline: "stage:echo", Durability: d, Inputs: []payload.Part{payload.OfBlob("", "text/plain", make([]byte, rand.IntN(1<<7)))}})
		return err
	}
	ctx, cancel := context.WithTimeout(t.Context(), took)
	defer cancel()
	var mu sync.Mutex
	counts, last := map[string]int{}, map[string]error{}
	var callers sync.WaitGroup
	const callersOfEach = 4
	for i := range 2 * callersOfEach {
		durability := []pipeline.Durability{pipeline.Memory, pipeline.File}[i%2]
		callers.Go(func() {
			for ctx.Err() == nil {
				err := infer(t.Context(), durability)
				outcome := "answered"
				if err != nil {
					outcome = string(fault.From(err).Reason)
				}
				mu.Lock()
				counts[string(durability)+" "+outcome]++
				last[string(durability)+" "+outcome] = err
				mu.Unlock()
			}
		})
	}
	fills := 0
	for pause := func() { _ = process.Sleep(ctx, time.Duration(rand.Int64N(int64(2*time.Second)))) }; ctx.Err() == nil; fills++ {
		pause()
		free := testbed.FillDisk(t, folder)
		pause()
		free()
	}
	callers.Wait()
	t.Logf("the disk was full %d times in %s: %v", fills, took, counts)
	testbed.Eventually(t, "durable requests are answered again", func() bool { return infer(t.Context(), pipeline.File) == nil })
	for outcome, n := range counts {
		switch outcome {
		case "memory answered", "file answered", "file STORE_FULL":
		case "memory QUEUE_LOST", "memory NO_CAPACITY", "file NO_CAPACITY", "file BROKER_UNAVAILABLE": // while JetStream started again
			if n > callersOfEach*fills {
				t.Errorf("%d requests ended with %s, in %d fills", n, outcome, fills)
			}
		default:
			t.Errorf("%d requests ended with %s, the last with %v", n, outcome, last[outcome])
		}
	}
	if counts["memory answered"] == 0 || counts["file answered"] == 0 {
		t.Error("nothing was answered")
	}
}
