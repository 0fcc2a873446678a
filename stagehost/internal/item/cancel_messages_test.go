package item

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestCancelledRequestsAreBoundedAndForgotten(t *testing.T) {
	t.Parallel()
	for name, known := range map[string]bool{"deadline known": true, "deadline unknown": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var cancelled cancelledRequests
			now := time.Unix(1000, 0)
			id := func(i int) cancelKey { return cancelKey{request: pipeline.RequestID(fmt.Sprint(i))} }
			for i := range maxCancelled + 10 {
				// A repeated cancel does not prolong the first.
				for range 2 {
					cancelled.add(id(i), now.Add(time.Minute+time.Duration(i)), known)
				}
			}
			for i, want := range map[int]bool{0: false, 9: false, 10: true, maxCancelled + 9: true} {
				if cancelled.has(id(i)) != want {
					t.Errorf("cancel %d is remembered: %v, want %v", i, !want, want)
				}
			}
			cancelled.add(cancelKey{request: "late"}, now.Add(2*time.Minute), known)
			cancelled.expire(now.Add(time.Minute + maxCancelled + 10))
			if cancelled.has(id(maxCancelled+9)) || !cancelled.has(cancelKey{request: "late"}) {
				t.Error("a request is remembered after its deadline, or forgotten before")
			}
		})
	}
}

func TestCancelsOfMadeUpIDsDisplaceNoOthers(t *testing.T) {
	t.Parallel()
	const requests = 1000
	var cancelled cancelledRequests
	now := time.Unix(1000, 0)
	flood := func() {
		for range maxCancelled {
			cancelled.add(cancelKey{request: pipeline.RequestID(uuid.NewString())}, now.Add(10*time.Minute), false)
		}
	}
	flood()
	for i := range requests {
		cancelled.add(cancelKey{request: pipeline.RequestID(fmt.Sprint(i))}, now.Add(30*time.Second), true)
	}
	flood()
	for i := range requests {
		if !cancelled.has(cancelKey{request: pipeline.RequestID(fmt.Sprint(i))}) {
			t.Fatalf("cancel %d of %d is forgotten", i, requests)
		}
	}
	cancelled.add(cancelKey{request: "durable"}, now.Add(10*time.Minute), false)
	if !cancelled.has(cancelKey{request: "durable"}) {
		t.Error("a cancel by ID is ignored after a flood of others")
	}
}

// The loop may be behind, or the whole process stopped, while many callers leave.
func TestCancelMessagesInABurstAllCount(t *testing.T) {
	t.Parallel()
	p := &Items{Settings: Settings{Mesh: "test", MaxAge: time.Hour}, events: make(chan Event, 1), loopDone: make(chan struct{})}
	const burst = 10_000
	for range burst {
		notice := envelope.Cancel{Mesh: "test", RequestID: pipeline.RequestID(uuid.NewString()), Deadline: time.Now().Add(time.Minute)}
		data, err := notice.Encode()
		if err != nil {
			t.Fatal(err)
		}
		p.ReceiveCancel(data)
	}
	l := &Loop{Items: p}
	for len(p.events) > 0 {
		(<-p.events).Apply(l)
	}
	if got := len(l.cancelledIDs.known.order); got != burst {
		t.Errorf("%d of %d notices were received", got, burst)
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
