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

func TestQuotaReservesAhead(t *testing.T) {
	t.Parallel()
	now := epoch.Truncate(24 * time.Hour).Add(time.Hour)
	q := newQuota(100, 24*time.Hour, 40)
	expect := func(cost int64, want quotaState, reserved int64) quotaUse {
		t.Helper()
		state, use := q.permits("x", cost, now)
		if state != want || use.reserved != reserved || !use.window.Equal(now.Truncate(24*time.Hour)) {
			t.Fatalf("a job of %d: got %d, %+v, want %d, %d reserved", cost, state, use, want, reserved)
		}
		return use
	}
	_, other := q.permits("y", 90, now)
	q.stored("y", other)
	q.use("y", 90)
	q.stored("x", expect(10, reserve, 40))
	expect(40, within, 40)
	q.use("x", 10)
	expect(30, within, 40)
	q.stored("x", expect(50, reserve, 80))
	window := q.use("x", 50)
	expect(20, within, 80)
	q.stored("x", expect(40, reserve, 100))
	expect(41, exhausted, 100)
	q.correct("x", window, -5)
	expect(45, within, 100)
	q.correct("x", window, 10)
	expect(36, exhausted, 100)
	expect(101, exhausted, 100)

	// Another owner takes over: what was reserved is lost.
	q = newQuota(100, 24*time.Hour, 40)
	q.load("x", quotaUse{window: window, reserved: 80})
	q.stored("x", expect(20, reserve, 100))
	q.use("x", 20)
	expect(1, exhausted, 100)

	now = now.Add(24 * time.Hour)
	q.stored("x", expect(100, reserve, 100))
	q.correct("x", window, -50)
	expect(101, exhausted, 100)
	q.drop(now)
	if len(q.keys) != 1 {
		t.Error("a key is dropped within its window")
	}
	now = now.Add(24 * time.Hour)
	q.drop(now)
	expect(1, reserve, 40)
	if len(q.keys) != 0 {
		t.Errorf("keys are kept after their window: %v", q.keys)
	}
}

// TestQuotaIsNeverExceeded has owners that die at random, before and after the store has
// confirmed.
func TestQuotaIsNeverExceeded(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		most := rapid.Int64Range(1, 200).Draw(t, "most")
		block := rapid.Int64Range(1, 50).Draw(t, "block")
		now := epoch
		q := newQuota(most, time.Hour, block)
		var store quotaUse
		used := map[time.Time]int64{}
		takeOver := func() {
			q = newQuota(most, time.Hour, block)
			if !store.window.IsZero() {
				q.load("x", store)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"wait":      func(t *rapid.T) { now = now.Add(time.Duration(rapid.IntRange(0, 40).Draw(t, "minutes")) * time.Minute) },
			"take over": func(*rapid.T) { takeOver() },
			"drop":      func(*rapid.T) { q.drop(now) },
			"start": func(t *rapid.T) {
				cost := rapid.Int64Range(1, 60).Draw(t, "cost")
				state, use := q.permits("x", cost, now)
				if state == reserve {
					store = use
					if rapid.IntRange(0, 4).Draw(t, "die") == 0 {
						takeOver()
						return
					}
					q.stored("x", use)
					state, _ = q.permits("x", cost, now)
				}
				switch state {
				case within:
					used[q.use("x", cost)] += cost
				case reserve:
					t.Fatal("a reservation does not suffice")
				}
				if window := now.Truncate(time.Hour); used[window] > most {
					t.Fatalf("%d of %d used", used[window], most)
				}
			},
		})
	})
}
