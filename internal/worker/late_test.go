package worker

import (
	"context"
	"testing"
	"time"
)

func TestLateBatchIsGivenUpOnceUnwanted(t *testing.T) {
	t.Parallel()
	ended, end := context.WithCancel(t.Context())
	end()
	now := time.Now()
	ago := func(s int) time.Time { return now.Add(time.Duration(-s) * time.Second) }
	wanted := func(s int) *running { return &running{ctx: t.Context(), activeAt: ago(s)} }
	unwanted := func(active, since int) *running {
		return &running{ctx: ended, activeAt: ago(active), unwantedSince: ago(since)}
	}
	const late = 10 * time.Second
	for name, test := range map[string]struct {
		running []*running
		moved   time.Time
		isLate  bool
		// giveUp is in seconds from now, 0 for never.
		giveUp int
	}{
		"somebody waits":                 {running: []*running{wanted(100)}, isLate: true},
		"it is not late":                 {running: []*running{unwanted(1, 1)}, giveUp: 11},
		"it became late":                 {running: []*running{unwanted(11, 10)}, isLate: true, giveUp: 1},
		"it was late":                    {running: []*running{unwanted(100, 1)}, isLate: true, giveUp: 1},
		"another stream sends":           {running: []*running{unwanted(100, 50), wanted(1)}, moved: ago(3), isLate: true, giveUp: 9},
		"another batch has begun":        {running: []*running{unwanted(11, 1), wanted(0)}, isLate: true, giveUp: 1},
		"nobody waits for the later one": {running: []*running{wanted(11), unwanted(5, 5)}, isLate: true, giveUp: 7},
	} {
		n := &incarnation{running: map[uint64]*running{}, movedAt: test.moved}
		for i, b := range test.running {
			n.running[uint64(i)] = b
		}
		w := n.work(now, late)
		var want time.Time
		if test.giveUp > 0 {
			want = ago(-test.giveUp)
		}
		if !w.GiveUp.Equal(want) || w.IsLate != test.isLate {
			t.Errorf("%s: late = %t, given up in %s", name, w.IsLate, w.GiveUp.Sub(now))
		}
	}
}

func TestLateMeansFarLongerThanUsual(t *testing.T) {
	t.Parallel()
	var p pace
	check := func(when string, want time.Duration) {
		t.Helper()
		if got := p.lateAfter(10 * time.Second); got != want {
			t.Errorf("%s, a batch is late after %s, want %s", when, got, want)
		}
	}
	check("at first", time.Minute)
	p.giveUp(time.Minute)
	check("after the first was given up", 3*time.Minute)
	p.record(time.Millisecond)
	check("after a short one", 10*time.Second)
	p.record(8 * time.Second)
	check("after a long one", 24*time.Second)
	for range 2 * usualBatches {
		p.record(time.Millisecond)
	}
	check("after many short ones", 10*time.Second)
}
