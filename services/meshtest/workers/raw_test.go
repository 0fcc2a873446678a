package workers_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/services/meshtest/workers"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker"
)

// What becomes of a batch of three whose worker misbehaves for one of them, every
// time that it sees it. The runner's own tests have more ways; here it is what the
// callers get.
func TestMisbehavingWorkerFailsItsCallers(t *testing.T) {
	t.Parallel()
	for text, test := range map[string]struct {
		// reason of the item's own fault, or "" for the right answer, and of its
		// neighbours'.
		reason, beside fault.Reason
		// crashes is how many workers are replaced.
		crashes int
		cause   string
	}{
		"bytewise":      {"", "", 0, ""},
		"garbage":       {fault.RunnerCrashed, "", 3, "a frame begins with 48 54 54 50"},
		"half":          {fault.RunnerCrashed, "", 3, "a batch took too long"},
		"more items":    {fault.RunnerOutputInvalid, fault.RunnerOutputInvalid, 1, "there is no item 3"},
		"fewer items":   {fault.RunnerOutputInvalid, fault.RunnerOutputInvalid, 1, "neither outputs nor a fault"},
		"unknown batch": {fault.RunnerOutputInvalid, fault.RunnerOutputInvalid, 1, "does not have"},
		"twice":         {"", "", 1, "does not have"},
	} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			bed := workers.New(t, workers.Spec{
				File: "raw.py", Workers: 2, Batch: full(3),
				Worker: func(s *worker.Settings) { s.RunLimit = time.Second },
			})
			for _, a := range bed.AskAll([]string{"beside", text, "beside too"}) {
				want := test.beside
				if a.Text == text {
					want = test.reason
				}
				if want == "" {
					a.Succeeds(t)
					continue
				}
				a.Fails(t, want, "")
			}
			for range 4 {
				for _, a := range bed.AskAll(echoes("after", 3)) {
					a.Succeeds(t)
				}
			}
			causes := crashCauses(t, bed, test.crashes)
			if !strings.Contains(causes, test.cause) {
				t.Errorf("they died of %s, want %q", causes, test.cause)
			}
		})
	}
}

// crashCauses waits for so many crashes, and returns their causes.
func crashCauses(t *testing.T, bed *workers.Bed, n int) string {
	t.Helper()
	bed.AwaitExits(n)
	if got := bed.Exits(); got != n {
		t.Errorf("%d processes ended, want %d", got, n)
	}
	var causes []string
	for _, e := range bed.Transitions() {
		if e.Cause != nil {
			causes = append(causes, e.Cause.Error())
		}
	}
	return strings.Join(causes, "; ")
}

// The one that is silent in the middle of a frame has only its own batch.
func TestWorkerSilentInFrameBlocksNoOther(t *testing.T) {
	t.Parallel()
	const limit = 2 * time.Second
	bed := workers.New(t, workers.Spec{
		File: "raw.py", Workers: 2, Worker: func(s *worker.Settings) { s.RunLimit = limit },
	})
	ctx, leave := context.WithCancel(t.Context())
	silent := bed.Send(ctx, "half")
	bed.Log.Line(t, "msg=silent")
	for _, a := range bed.AskAll(echoes("meanwhile", 32)) {
		a.Succeeds(t)
		if a.Took > limit/2 {
			t.Errorf("%q waited %s for one that is silent", a.Text, a.Took)
		}
	}
	select {
	case a := <-silent:
		t.Errorf("the silent one is answered with %v, %v", a.Response, a.Fault)
	default:
	}
	leave()
	bed.Received(silent).Fails(t, fault.Cancelled, "")
}
