package stagehost_test

import (
	"context"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// goroutine is what the runtime calls the one that asks.
func goroutine() string {
	trace := make([]byte, 64)
	name, _, _ := strings.Cut(string(trace[:runtime.Stack(trace, false)]), " [")
	return name
}

func TestBatchesReuseGoroutines(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		const items = 50
		var mu sync.Mutex
		seen := map[string]int{}
		h := b.host(inproc.Each(inproc.Settings{}, func(ctx context.Context, item runner.Item) ([]payload.Part, error) {
			mu.Lock()
			defer mu.Unlock()
			seen[goroutine()]++
			return echo(ctx, item)
		}))
		for range items {
			b.ask("x").output()
		}
		h.stop()
		// Now and then the next batch comes before the goroutine is idle.
		if len(seen) > items/2 {
			t.Errorf("%d batches ran on %d goroutines", items, len(seen))
		}
	})
}
