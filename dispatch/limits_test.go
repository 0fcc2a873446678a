package dispatch

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestConcurrencyLimitIsPerKey(t *testing.T) {
	t.Parallel()
	l := newConcurrencyLimit(2)
	l.start("x")
	l.start("x")
	if l.permits("x") || !l.permits("y") {
		t.Error("x has two jobs in flight, y none")
	}
	l.end("x")
	if !l.permits("x") {
		t.Error("x may not start another job after one ended")
	}
	l.end("x")
	l.end("x")
	if len(l.inFlight) != 0 {
		t.Errorf("keys without jobs are kept: %v", l.inFlight)
	}
}

func TestRateHoldsInEveryWindow(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		most := rapid.IntRange(1, 5).Draw(t, "most")
		now := epoch
		l := newRateLimit(most, time.Minute, now)
		var starts []time.Time
		for _, step := range rapid.SliceOfN(rapid.IntRange(0, 40), 10, 60).Draw(t, "steps") {
			now = now.Add(time.Duration(step) * time.Second)
			inWindow := 0
			for _, at := range starts {
				if now.Sub(at) < time.Minute {
					inWindow++
				}
			}
			ok, at := l.permits("x", now)
			if want := inWindow < most && now.Sub(epoch) >= time.Minute; ok != want {
				t.Fatalf("%d starts in a window of %d, permitted %t", inWindow, most, ok)
			}
			if !ok && !at.After(now) {
				t.Fatalf("not permitted until %s, which has passed", at)
			}
			if early, _ := l.permits("x", at.Add(-1)); early {
				t.Fatalf("permitted before %s", at)
			}
			if later, _ := l.permits("x", at); !later {
				t.Fatalf("not permitted at %s", at)
			}
			if ok {
				l.start("x", now)
				starts = append(starts, now)
			}
		}
		if n := len(l.starts["x"]); n > most {
			t.Fatalf("%d starts are kept for a limit of %d", n, most)
		}
	})
}

func TestRateForgetsIdleKeys(t *testing.T) {
	t.Parallel()
	now := epoch
	l := newRateLimit(1, time.Second, now)
	for i := range 10 * minSwept {
		now = now.Add(100 * time.Millisecond)
		l.start(fmt.Sprint(i), now)
	}
	if len(l.starts) > minSwept {
		t.Errorf("%d keys are kept", len(l.starts))
	}
}
