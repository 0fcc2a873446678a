package batch_test

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func drawSettings(t *rapid.T) batch.Settings {
	return batch.Settings{
		Mode:     rapid.SampledFrom([]batch.Mode{batch.Adaptive, batch.Eager, batch.Window}).Draw(t, "mode"),
		MaxSize:  rapid.IntRange(1, 8).Draw(t, "max size"),
		MaxBytes: rapid.SampledFrom([]int{0, 50, 100}).Draw(t, "max bytes"),
		MaxWait:  time.Duration(rapid.IntRange(1, 20).Draw(t, "max wait")) * ms,
	}
}

func drawItem(t *rapid.T, now time.Time) batch.Item {
	it := batch.Item{
		Key:     rapid.SampledFrom([]batch.Key{"a", "b", "c"}).Draw(t, "key"),
		Rows:    rapid.IntRange(1, 4).Draw(t, "rows"),
		Bytes:   rapid.IntRange(0, 60).Draw(t, "bytes"),
		Arrival: now.Add(-time.Duration(rapid.SampledFrom([]int{0, 0, 0, 0, 1, 5, 3000}).Draw(t, "age")) * ms),
		Class:   rapid.SampledFrom([]pipeline.Class{pipeline.High, pipeline.Normal, pipeline.Normal, pipeline.Low, ""}).Draw(t, "class"),
		Alone:   rapid.IntRange(0, 9).Draw(t, "alone") == 0,
	}
	if it.Key == "b" {
		padded(int64(rapid.IntRange(0, 12).Draw(t, "length")), int64(rapid.IntRange(0, 4).Draw(t, "width")))(&it)
		padded(int64(rapid.IntRange(1, 3).Draw(t, "other length")))(&it)
	}
	if left := rapid.IntRange(-1, 40).Draw(t, "time left"); left >= 0 {
		it.Deadline = now.Add(time.Duration(left) * ms)
	}
	return it
}

// TestEveryItemLeavesOnce drives a Batcher at random; the driver checks that
// limits, keys, order, reasons and wake-up times are right at every step.
func TestEveryItemLeavesOnce(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		settings := drawSettings(t)
		if settings.Mode != batch.Window && rapid.Bool().Draw(t, "no gathering") {
			settings.MaxWait = 0
		}
		d := newDriver(t, settings, rapid.IntRange(1, 3).Draw(t, "slots"))
		if shared := (&batch.Limit{Most: rapid.IntRange(1, 2).Draw(t, "limit")}); rapid.Bool().Draw(t, "limited") {
			d.limits["b"], d.limits["c"] = shared, shared
		}
		t.Repeat(map[string]func(*rapid.T){
			"add":    func(t *rapid.T) { d.add(drawItem(t, d.now)) },
			"burst":  func(t *rapid.T) { burst(t, d) },
			"remove": func(t *rapid.T) { d.remove(batch.ID(rapid.IntRange(1, d.added+1).Draw(t, "id"))) },
			"expire": func(*rapid.T) { d.expire() },
			"next":   func(*rapid.T) { d.dispatch() },
			"settle": func(*rapid.T) { d.settle() },
			"wait": func(t *rapid.T) {
				d.now = d.now.Add(time.Duration(rapid.IntRange(0, 8000).Draw(t, "µs")) * time.Microsecond)
			},
			"sleep": func(*rapid.T) { d.sleep() },
			"finish": func(t *rapid.T) {
				if len(d.running) == 0 {
					t.Skip("nothing runs")
				}
				took := rapid.SampledFrom([]time.Duration{0, 20 * time.Microsecond, ms, 10 * ms, 30 * ms}).Draw(t, "took")
				d.finish(rapid.IntRange(0, len(d.running)-1).Draw(t, "which"), took)
			},
			"drain": func(t *rapid.T) {
				if rapid.IntRange(0, 20).Draw(t, "really") == 0 {
					d.drain()
				}
			},
		})
		d.empty()
	})
}

// burst adds alike items, as callers that were answered together do.
func burst(t *rapid.T, d *driver) {
	for range rapid.IntRange(1, 6).Draw(t, "items") {
		d.add(batch.Item{Key: "a", Rows: 1, Arrival: d.now, Deadline: d.now.Add(time.Minute)})
	}
}

// TestHoldsAreBounded lets closed loops of callers run and checks that no item
// waits beside an idle worker for longer than it may.
func TestHoldsAreBounded(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		settings := drawSettings(t)
		settings.MaxBytes = 0
		run := time.Duration(rapid.IntRange(1, 40).Draw(t, "run")) * ms
		d := newDriver(t, settings, 1)
		most := settings.MaxWait
		if settings.Mode == batch.Eager {
			most = min(most, 2*run/5)
		}
		for range rapid.IntRange(1, 30).Draw(t, "rounds") {
			for range rapid.IntRange(1, 12).Draw(t, "callers") {
				d.add(batch.Item{Key: "a", Rows: 1, Arrival: d.now})
			}
			idleSince := d.now
			d.settle()
			for len(d.running) == 0 {
				d.sleep()
			}
			if held := d.now.Sub(idleSince); held > most {
				t.Fatalf("held for %s with an idle worker, at most %s is allowed", held, most)
			}
			d.now = d.now.Add(run)
			d.finish(0, run)
		}
		d.empty()
	})
}
