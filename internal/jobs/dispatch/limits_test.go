package dispatch

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestLimitConfigNamesWhatIsWrong(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"{concurrency: 1}":                                  `pool:2:10: limits[0].by: ""; use tenant`,
		"{by: attributes., concurrency: 1}":                 `limits[0].by: "attributes."`,
		"{by: tenant}":                                      "pool:2:10: limits[0].concurrency: a limit has exactly one of",
		"{by: tenant, concurrency: 1, rate: 1, window: 1s}": "pool:2:23: limits[0].concurrency: a limit has exactly one of",
		"{by: tenant, rate: 1}":                             "limits[0].window: is required",
		"{by: tenant, concurrency: 1, window: 1s}":          "limits[0].window: is required",
		"{by: tenant, rate: 100001, window: 1s}":            "limits[0].rate: 100001",
		"{by: tenant, quota: -1, window: 1s}":               "limits[0].quota: ",
		"{by: tenant, quota: 1, unit: rows, window: 1s}":    `limits[0].unit: "rows"`,
		"{by: tenant, rate: 1, unit: bytes, window: 1s}":    `limits[0].unit: "bytes"`,
		"{by: tenant, quota: 1, window: 1s}, {by: tenant, quota: 2, unit: requests, window: 1s}": "pool:2:59: limits[1].quota: limits[0] is a quota by the same",
		"{by: tenant, of: 1}": `"of" is not a key here`,
		strings.Repeat("{by: tenant, concurrency: 1}, ", maxLimits-1) + "{by: tenant, rate: 1, window: 1s}": "limits: 9, at most 8",
	} {
		if _, err := poolOf("limits: [" + text + ", {by: tenant, concurrency: 1}]"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

func TestConcurrencyLimitIsPerKey(t *testing.T) {
	t.Parallel()
	o := newOrder(weighted)
	ls := newLimits([]LimitConfig{{By: "tenant", Concurrency: 2}, {By: "attributes.model", Concurrency: 3}}, epoch)
	job := func(tenant, model string) *entry {
		return &entry{line: o.line("q", pipeline.Low, tenant, ls.keysOf(tenant, map[string]string{"model": model})...), deadline: 1}
	}
	next := func() string {
		if e := o.next(func(l *line) bool { return ls.limitOf(l, epoch, true) != nil }); e != nil {
			return e.line.tenant + " " + e.line.keys[1]
		}
		return "none"
	}
	first, second, third := job("x", "a"), job("x", "a"), job("z", "a")
	ls.start(first, true, epoch)
	ls.start(second, false, epoch)
	waiting := []*entry{job("x", "b"), job("y", "a"), job("y", "b")}
	for _, e := range waiting {
		o.add(e, 0)
	}
	o.remove(waiting[0])
	o.add(waiting[0], 0)
	if got := next(); got != "y a" {
		t.Errorf("%s goes; x is at its limit", got)
	}
	ls.start(third, true, epoch)
	if got := next(); got != "y b" {
		t.Errorf("%s goes; model a is at its limit", got)
	}
	o.take(waiting[2])
	if got := next(); got != "none" {
		t.Errorf("%s goes; x and a are at their limits", got)
	}
	ls.end(first)
	if got := next(); got == "none" {
		t.Error("nothing goes after one ended")
	}
	ls.end(second)
	ls.end(third)
	if n := len(ls[0].inFlight) + len(ls[1].inFlight); n != 0 {
		t.Errorf("%d keys without jobs are kept", n)
	}
}

func TestRateHoldsInEveryWindow(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		most := rapid.IntRange(1, 5).Draw(t, "most")
		now := epoch
		l := newLimits([]LimitConfig{{By: "tenant", Rate: most, Window: time.Minute}}, now)[0].starts
		var starts []time.Time
		for _, step := range rapid.SliceOfN(rapid.IntRange(0, 40), 10, 60).Draw(t, "steps") {
			now = now.Add(time.Duration(step) * time.Second)
			inWindow := 0
			for _, at := range starts {
				if now.Sub(at) < time.Minute {
					inWindow++
				}
			}
			ok := l.permits("x", now)
			if want := inWindow < most && now.Sub(epoch) >= time.Minute; ok != want {
				t.Fatalf("%d starts in a window of %d, permitted %t", inWindow, most, ok)
			}
			if ok {
				l.start("x", now)
				starts = append(starts, now)
			}
			if ok && step%5 == 0 {
				l.undo("x", now)
				starts = starts[:len(starts)-1]
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
	l := newLimits([]LimitConfig{{By: "tenant", Rate: 1, Window: time.Second}}, now)[0].starts
	for i := range 10 * minSwept {
		now = now.Add(100 * time.Millisecond)
		l.start(fmt.Sprint(i), now)
	}
	if len(l.starts) > minSwept {
		t.Errorf("%d keys are kept", len(l.starts))
	}
}

// quotaOwner is an owner of a pool with one quota.
type quotaOwner struct {
	limits limits
	ahead  time.Duration // of its clock
}

// reservation returns quotas as an owner stores them after others.
func reservation(t rapid.TB, ls limits, stored []byte) []byte {
	t.Helper()
	before := storedQuotas{}
	if stored != nil {
		if err := json.Unmarshal(stored, &before); err != nil {
			t.Fatal(err)
		}
	}
	out, err := json.Marshal(ls.reserve(before))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestQuotaHoldsOverCrashes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		most := rapid.SampledFrom([]int64{1, 30, 1000}).Draw(t, "quota")
		start := func() *quotaOwner {
			return &quotaOwner{
				limits: newLimits([]LimitConfig{{By: "tenant", Quota: most, Unit: "bytes", Window: time.Hour}}, epoch),
				ahead:  time.Duration(rapid.IntRange(-9, 9).Draw(t, "clock")) * time.Minute,
			}
		}
		o, now, owners := newOrder(weighted), epoch.Add(10*time.Minute), []*quotaOwner{start(), start()}
		var stored []byte
		spent := map[string]int64{}
		add := func(e *entry, q *quotaOwner, n int64) {
			name := fmt.Sprint(e.line.tenant, " ", q.limits[0].quota.at)
			if spent[name] += n; spent[name] > most {
				t.Fatalf("%s: %d of %d", name, spent[name], most)
			}
		}
		reserve := func(q *quotaOwner, fate string) {
			value := reservation(t, q.limits, stored)
			if fate != "failed" {
				stored = value
			}
			if fate == "stored" {
				q.limits.grant()
			}
		}
		fates := rapid.SampledFrom([]string{"stored", "stored", "stored", "failed", "unknown"})
		owner := rapid.IntRange(0, 1)
		t.Repeat(map[string]func(*rapid.T){
			"start": func(t *rapid.T) {
				q, at := owners[owner.Draw(t, "owner")], now
				at = at.Add(q.ahead)
				tenant := rapid.SampledFrom([]string{"x", "x", "x", "y"}).Draw(t, "tenant")
				for range rapid.IntRange(1, 60).Draw(t, "jobs") {
					e := &entry{line: o.line("q", pipeline.Low, tenant, tenant), size: uint32(rapid.Int64Range(1, most/100+5).Draw(t, "size")), deadline: 1}
					o.add(e, 0)
					if q.limits.limitOf(e.line, at, true) != nil && q.limits.wants() {
						reserve(q, fates.Draw(t, "fate"))
					}
					if q.limits.limitOf(e.line, at, false) == nil {
						q.limits.start(e, true, at)
						add(e, q, int64(e.size))
						if rapid.IntRange(0, 9).Draw(t, "refused") == 0 {
							began := q.limits[0].quota.windowOf(at) == q.limits[0].quota.at
							if q.limits.correct(e, at, true, 0); began {
								add(e, q, -int64(e.size))
							}
						}
					}
					o.remove(e)
				}
			},
			"crash": func(t *rapid.T) { owners[owner.Draw(t, "owner")] = start() },
			"wait": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.SampledFrom([]int{0, 0, 0, 10, 40}).Draw(t, "minutes")) * time.Minute)
			},
		})
	})
}

func TestQuotaIsUsedUpAndCorrected(t *testing.T) {
	t.Parallel()
	ls := newLimits([]LimitConfig{{By: "tenant", Quota: 1000, Unit: "tokens", Window: time.Hour}}, epoch)
	o := newOrder(weighted)
	e := &entry{line: o.line("q", pipeline.Low, "x", "x"), tokens: 100, deadline: 1}
	o.add(e, 0)
	var stored []byte
	run := func(now time.Time) (n int) {
		for range 50 {
			if ls.limitOf(e.line, now, false); ls.wants() {
				t.Fatal("to look at a limit asks for a reservation")
			}
			if ls.limitOf(e.line, now, true) == nil {
				ls.start(e, true, now)
				n++
			}
			if ls.wants() {
				stored = reservation(t, ls, stored)
				ls.grant()
			}
		}
		return n
	}
	if n := run(epoch); n != 10 {
		t.Errorf("%d jobs of 100 ran, not 10", n)
	}
	ls.correct(e, epoch, false, 20)
	ls.correct(e, epoch, false, 80)
	ls.correct(e, epoch.Add(-time.Hour), false, 1)
	if n := run(epoch); n != 1 {
		t.Errorf("%d more ran after two took 100 less than estimated", n)
	}
	if n := run(epoch.Add(time.Hour)); n != 10 {
		t.Errorf("%d ran in the next window", n)
	}
	for i := range 2 * maxQuotaKeys {
		e.line.keys[0] = fmt.Sprint(i)
		if ls.limitOf(e.line, epoch.Add(time.Hour), true) == nil {
			t.Fatalf("key %d started without a reservation", i)
		}
	}
	if n := len(reservation(t, ls, stored)); n > 32<<10 {
		t.Errorf("%d bytes are stored", n)
	}
	if n := len(ls[0].quota.keys); n > 2*maxQuotaKeys {
		t.Errorf("%d keys are kept", n)
	}
}
