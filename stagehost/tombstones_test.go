package stagehost

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/mesh/envelope"
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

// The loop may be behind, or the whole process stopped, while a crowd leaves.
func TestNoticesThatComeAtOnceAreAllHeard(t *testing.T) {
	t.Parallel()
	h := &Host{settings: Settings{Mesh: "test"}, events: make(chan event, 1), looped: make(chan struct{})}
	h.settings.Queue.MaxAge = time.Hour
	const crowd = 10_000
	for range crowd {
		notice := envelope.Cancel{Mesh: "test", RequestID: pipeline.RequestID(uuid.NewString()), Deadline: time.Now().Add(time.Minute)}
		data, err := notice.Encode()
		if err != nil {
			t.Fatal(err)
		}
		h.heard(data)
	}
	l := &loop{host: h, tombs: tombstones{}}
	for len(h.events) > 0 {
		(<-h.events).apply(l)
	}
	if len(l.tombs) != crowd {
		t.Errorf("%d of %d notices were heard", len(l.tombs), crowd)
	}
}

func TestNoticesThatWaitAreBounded(t *testing.T) {
	t.Parallel()
	var n notices
	for i := range maxTombstones + 10 {
		if first := n.add(&envelope.Cancel{}); first != (i == 0) {
			t.Fatalf("the loop is told of notice %d: %v", i, first)
		}
	}
	if got := len(n.take()); got != maxTombstones {
		t.Errorf("%d notices wait, want %d", got, maxTombstones)
	}
	if !n.add(&envelope.Cancel{}) {
		t.Error("the loop is not told of what comes after it took them")
	}
}
