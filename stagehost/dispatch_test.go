package stagehost

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/stagehost/batch"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// A batch is committed late, so that what arrives while another runs may still come first.
func TestPrefetchFollowsTheRunThatEndsFirst(t *testing.T) {
	t.Parallel()
	now := time.Now()
	l := newLoop(&Host{settings: ownSettings("", nil)})
	l.batcher.Finished(now, batch.Run{Key: "k", Items: 1, Rows: 1, Took: prefetchLongest})
	for i := range 2 {
		r := &run{items: []*item{{key: "k"}}, started: now.Add(time.Duration(i) * time.Millisecond)}
		r.batch.Rows = 1
		l.begin(r)
	}
	if l.endsFirst() != nil {
		t.Error("a run is followed though the runner prefetches nothing")
	}
	l.prefetchSlots = []runner.Slot{nil}
	if got, want := l.endsFirst(), l.begun[0]; got != want || !got.nearEnd.Equal(now.Add(prefetchLongest-prefetchLead)) {
		t.Errorf("got the run %+v", got)
	}
	long := &run{items: []*item{{key: "unknown"}}, started: now.Add(-time.Hour)}
	l.begin(long)
	l.begun[0].isFollowed = true
	if got := l.endsFirst(); got != l.begun[1] {
		t.Errorf("got the run %+v", got)
	}
	l.slots = []runner.Slot{nil}
	if l.endsFirst() != nil {
		t.Error("a run is followed though a slot is idle")
	}
}
