package workers_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/services/meshtest/workers"
)

func TestCancelledRequestsNeverReachTheWorker(t *testing.T) {
	t.Parallel()
	const many = 20
	bed := workers.New(t, workers.Spec{File: "obedient.py"})
	first := bed.Send(t.Context(), "wait go")
	bed.AwaitEntry("run", "wait go")
	ctx, leave := context.WithCancel(t.Context())
	var left, stayed []<-chan workers.Answer
	for i := range many {
		left = append(left, bed.Send(ctx, fmt.Sprintf("left %d", i)))
		stayed = append(stayed, bed.Send(t.Context(), fmt.Sprintf("stayed %d", i)))
	}
	held(t, bed, 1+2*many)
	leave()
	for _, from := range left {
		bed.Received(from).Fails(t, fault.Cancelled, "")
	}
	testbed.Eventually(t, "the host knows", func() bool { return bed.Count("stagemesh_stage_cancelled_total") == many })
	bed.SetFlag("go")
	for _, from := range append(stayed, first) {
		bed.Received(from).Succeeds(t)
	}
	for _, e := range bed.Entries("run") {
		if at := slices.IndexFunc(e.Texts, func(text string) bool { return strings.HasPrefix(text, "left ") }); at >= 0 {
			t.Errorf("%q ran although its caller had gone", e.Texts[at])
		}
	}
}

func TestCancelReachesRunningItem(t *testing.T) {
	t.Parallel()
	bed := workers.New(t, workers.Spec{File: "obedient.py", Batch: full(2)})
	ctx, leave := context.WithCancel(t.Context())
	beside := bed.Send(t.Context(), "beside it")
	gone := bed.Send(ctx, "hold me")
	bed.AwaitEntry("run", "hold me")
	leave()
	bed.Received(gone).Fails(t, fault.Cancelled, "")
	bed.AwaitEntry("cancelled", "me")
	bed.Received(beside).Succeeds(t)
	if n := bed.Exits(); n > 0 {
		t.Errorf("%d processes ended", n)
	}
}
