package stagehost

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/mesh/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestCancelledRequestsAreBoundedAndForgotten(t *testing.T) {
	t.Parallel()
	cancelledIDs := cancelledRequests{}
	now := time.Unix(1000, 0)
	has := func(key cancelKey) bool { _, ok := cancelledIDs[key]; return ok }
	id := func(i int) cancelKey { return cancelKey{request: pipeline.RequestID(fmt.Sprint(i))} }
	late, past := cancelKey{request: "late"}, cancelKey{request: "past"}
	for i := range maxCancelled + 10 {
		cancelledIDs.add(id(i), now.Add(time.Minute), now)
	}
	if len(cancelledIDs) != maxCancelled || !has(id(0)) || has(id(maxCancelled+1)) {
		t.Errorf("%d cancelled requests, want %d", len(cancelledIDs), maxCancelled)
	}
	cancelledIDs.expire(now.Add(time.Minute))
	cancelledIDs.add(late, now.Add(2*time.Minute), now.Add(time.Minute))
	if len(cancelledIDs) != 1 || !has(late) {
		t.Errorf("%d cancelled requests after their deadline, want the new one", len(cancelledIDs))
	}
	cancelledIDs.add(past, now, now)
	if has(past) {
		t.Error("a request is remembered that has ended")
	}
}

// The loop may be behind, or the whole process stopped, while many callers leave.
func TestCancelMessagesInABurstAllCount(t *testing.T) {
	t.Parallel()
	h := &Host{settings: Settings{Mesh: "test"}, events: make(chan event, 1), loopDone: make(chan struct{})}
	h.settings.Queue.MaxAge = time.Hour
	const burst = 10_000
	for range burst {
		notice := envelope.Cancel{Mesh: "test", RequestID: pipeline.RequestID(uuid.NewString()), Deadline: time.Now().Add(time.Minute)}
		data, err := notice.Encode()
		if err != nil {
			t.Fatal(err)
		}
		h.receiveCancel(data)
	}
	l := &loop{host: h, cancelledIDs: cancelledRequests{}}
	for len(h.events) > 0 {
		(<-h.events).apply(l)
	}
	if len(l.cancelledIDs) != burst {
		t.Errorf("%d of %d notices were received", len(l.cancelledIDs), burst)
	}
}

func TestWaitingCancelNoticesAreBounded(t *testing.T) {
	t.Parallel()
	var n pendingCancels
	for i := range maxCancelled + 10 {
		if first := n.add(&envelope.Cancel{}); first != (i == 0) {
			t.Fatalf("notice %d posts an event: %v", i, first)
		}
	}
	if got := len(n.take()); got != maxCancelled {
		t.Errorf("%d notices wait, want %d", got, maxCancelled)
	}
	if !n.add(&envelope.Cancel{}) {
		t.Error("no event after the loop took the notices")
	}
}
