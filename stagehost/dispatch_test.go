package stagehost

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
	l := newLoop(&pumps{models: oneModel{}})
	l.batcher.Finished(now, batch.Run{Key: "k", Items: 1, Rows: 1, Took: prefetchLongest})
	l.batcher.Finished(now, batch.Run{Key: "long", Items: 1, Rows: 1, Took: prefetchLongest + time.Millisecond})
	type prefetcher struct{ runner.Prefetcher }
	for _, r := range []*run{
		{slot: prefetcher{}, items: []*item{{arrival: arrival{itemInputs: itemInputs{key: "k"}}}}, started: now.Add(time.Millisecond)},
		{slot: prefetcher{}, items: []*item{{arrival: arrival{itemInputs: itemInputs{key: "k"}}}}, started: now},
		{slot: prefetcher{}, items: []*item{{arrival: arrival{itemInputs: itemInputs{key: "long"}}}}, started: now},
		{slot: prefetcher{}, items: []*item{{arrival: arrival{itemInputs: itemInputs{key: "unknown"}}}}, started: now},
		{items: []*item{{arrival: arrival{itemInputs: itemInputs{key: "k"}}}}, started: now},
	} {
		r.batch.Rows = 1
		l.begin(r)
	}
	for i, r := range l.begun {
		want := time.Time{}
		if i >= 3 {
			want = now.Add(prefetchLongest - prefetchLead + time.Duration(i-3)*time.Millisecond)
		}
		if !r.prefetchAt.Equal(want) {
			t.Errorf("run %d is followed at %s, want %s", i, r.prefetchAt, want)
		}
	}
}
