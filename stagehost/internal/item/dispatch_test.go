package item

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// A batch is committed late, so that what arrives while another runs may still come first.
func TestPrefetchFollowsTheRunThatEndsFirst(t *testing.T) {
	t.Parallel()
	now := time.Now()
	l := NewLoop(&Items{Settings: Settings{Models: OneModel(nil)}})
	l.batcher.Finished(now, batch.Run{Key: "k", Items: 1, Rows: 1, Took: prefetchLongest})
	l.batcher.Finished(now, batch.Run{Key: "long", Items: 1, Rows: 1, Took: prefetchLongest + time.Millisecond})
	type prefetcher struct{ runner.Prefetcher }
	for _, r := range []*run{
		{slot: prefetcher{}, items: []*Item{{arrival: arrival{Inputs: Inputs{key: "k"}}}}, started: now.Add(time.Millisecond)},
		{slot: prefetcher{}, items: []*Item{{arrival: arrival{Inputs: Inputs{key: "k"}}}}, started: now},
		{slot: prefetcher{}, items: []*Item{{arrival: arrival{Inputs: Inputs{key: "long"}}}}, started: now},
		{slot: prefetcher{}, items: []*Item{{arrival: arrival{Inputs: Inputs{key: "unknown"}}}}, started: now},
		{items: []*Item{{arrival: arrival{Inputs: Inputs{key: "k"}}}}, started: now},
	} {
		r.batch.Rows = 1
		l.begin(r)
	}
	for i, r := range l.begun {
		want := time.Time{}
		if i >= 3 {
			want = now.Add(prefetchLongest - prefetchLead + time.Duration(i-3)*time.Millisecond)
		}
		if !r.inLoop.prefetchAt.Equal(want) {
			t.Errorf("run %d is followed at %s, want %s", i, r.inLoop.prefetchAt, want)
		}
	}
}

// The wait for a model is no queue's.
func TestBatchWaitsForAllButItsModel(t *testing.T) {
	t.Parallel()
	start := time.Unix(1000, 0)
	r := &run{started: start}
	for _, wait := range []time.Duration{3 * time.Second, 0, time.Second} {
		r.items = append(r.items, &Item{arrival: arrival{arrived: start.Add(-wait), queueWait: time.Second}})
	}
	r.items[0].timing.ModelWait = 2 * time.Second
	if got := r.ran(time.Second); got.Waited != 5*time.Second || got.Requests != 3 || got.Took != time.Second {
		t.Errorf("got %+v", got)
	}
}
