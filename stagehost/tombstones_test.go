package stagehost

import (
	"fmt"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestTombstonesAreBoundedAndForgotten(t *testing.T) {
	t.Parallel()
	tombs := tombstones{}
	now := time.Unix(1000, 0)
	id := func(i int) pipeline.RequestID { return pipeline.RequestID(fmt.Sprint(i)) }
	for i := range maxTombstones + 10 {
		tombs.add(id(i), now.Add(time.Minute), now)
	}
	if len(tombs) != maxTombstones || !tombs.has(id(0)) || tombs.has(id(maxTombstones+1)) {
		t.Errorf("%d tombstones, want %d", len(tombs), maxTombstones)
	}
	tombs.sweep(now.Add(time.Minute))
	tombs.add("late", now.Add(2*time.Minute), now.Add(time.Minute))
	if len(tombs) != 1 || !tombs.has("late") {
		t.Errorf("%d tombstones after their deadline, want the new one", len(tombs))
	}
	tombs.add("past", now, now)
	if tombs.has("past") {
		t.Error("a request is remembered that has ended")
	}
}
