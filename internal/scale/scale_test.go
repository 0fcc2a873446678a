package scale

import (
	"math"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestTargetsAreParsed(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]Target{
		"wait=200ms": {Wait: 200 * time.Millisecond}, "busy=70%": {Busy: .7}, "oldest=5s": {Oldest: 5 * time.Second},
	} {
		got, err := ParseTarget(text)
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
		if got.String() != text {
			t.Errorf("%s is printed as %s", text, got)
		}
	}
}

func TestWrongTargetsAreNamed(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"wait=200": `"wait=200": 200 has no unit; add ms or s, as in wait=200ms`, "wait=0": "0 has no unit", "busy=70": "70 has no unit; add %, as in busy=70%",
		"oldest=5": "5 has no unit; add ms or s, as in oldest=5s", "busy=700%": "want busy=70%", "busy=70ms": "want busy=70%", "wait=-1s": "want wait=200ms",
		"wait": "want wait=200ms, busy=70% or oldest=5s", "": "want wait=200ms", "depth=5": `there is no "depth"`, "wait=NaN": "no unit", "busy=NaN%": "want busy",
	} {
		if _, err := ParseTarget(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %s", text, err, want)
		}
	}
}

// observations are of any numbers, one second or more apart.
func observations(t *rapid.T) []Observation {
	at := time.Unix(1000, 0)
	count := rapid.IntRange(0, 1000)
	busy := time.Duration(0)
	items := uint64(0)
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Observation {
		at = at.Add(time.Duration(rapid.IntRange(1, 90).Draw(t, "seconds")) * time.Second)
		ready := rapid.IntRange(0, 20).Draw(t, "ready")
		items += uint64(count.Draw(t, "done"))
		busy += time.Duration(count.Draw(t, "busy")) * time.Second
		o := Observation{
			At: at, Hosts: map[string]Counters{"a": {Items: items, Busy: busy}}, Ready: ready, Slots: ready * rapid.IntRange(1, 4).Draw(t, "slots"),
			Items: count.Draw(t, "items"), Waiting: rapid.IntRange(0, 3).Draw(t, "waiting"), Oldest: time.Duration(count.Draw(t, "oldest")) * time.Second,
			PerRow: time.Duration(count.Draw(t, "row")) * time.Millisecond, MaxRows: rapid.IntRange(0, 32).Draw(t, "rows"),
		}
		o.Running = min(o.Items, o.Slots*max(1, o.MaxRows), rapid.IntRange(0, 100).Draw(t, "running"))
		if rapid.Bool().Draw(t, "loads models") {
			o.Models = &Models{Waiting: rapid.IntRange(0, 9).Draw(t, "loads"), Slots: ready, Time: time.Second, IsFull: rapid.Bool().Draw(t, "full"), OldestUse: time.Duration(count.Draw(t, "age")) * time.Second}
		}
		return o
	}), 1, 60).Draw(t, "observations")
}

func TestDecisionKeepsItsPromises(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := Bounds{Min: rapid.IntRange(0, 2).Draw(t, "min"), Max: rapid.SampledFrom([]int{0, 5, 50}).Draw(t, "max")}
		target := rapid.SampledFrom([]Target{{Wait: 200 * time.Millisecond}, {Busy: .7}, {Oldest: 5 * time.Second}}).Draw(t, "target")
		var s State
		lastNeed := map[time.Time]int{}
		for _, o := range observations(t) {
			before := s
			s = s.Next(o, target, b)
			switch {
			case s.Wanted < b.Min || b.Max > 0 && s.Wanted > b.Max:
				t.Fatalf("%d hosts are outside of %+v", s.Wanted, b)
			case s.Reason == "":
				t.Fatal("no reason")
			case o.Items+o.Waiting > 0 && s.Wanted == 0:
				t.Fatalf("no host for %d items", o.Items+o.Waiting)
			case b.Max == 0 && s.PerHost > 0 && float64(s.Wanted)*s.PerHost*float64(max(1, o.MaxRows)) < float64(o.Running):
				t.Fatalf("%d hosts of %g slots for %d running items", s.Wanted, s.PerHost, o.Running)
			case len(s.Polls) > maxPolls || len(s.Peaks) > 64:
				t.Fatalf("the state grows: %d polls, %d peaks", len(s.Polls), len(s.Peaks))
			}
			lastNeed[o.At] = max(b.Min, int(math.Ceil(min(s.Peaks[len(s.Peaks)-1].Need, 1e9)-1e-9)))
			for at, need := range lastNeed {
				if bounded := min(need, before.Wanted); o.At.Sub(at) < StableWindow && s.Wanted < bounded {
					t.Fatalf("shrinks from %d to %d; %d were needed %s ago", before.Wanted, s.Wanted, need, o.At.Sub(at))
				}
			}
		}
	})
}

func TestStageWithoutWorkShrinksToItsLeast(t *testing.T) {
	t.Parallel()
	for _, least := range []int{0, 1} {
		var s State
		at := time.Unix(1000, 0)
		for i := range 60 {
			items := 0
			if i == 0 {
				items = 3
			}
			s = s.Next(Observation{At: at.Add(time.Duration(i) * 2 * time.Second), Items: items}, Target{Wait: time.Second}, Bounds{Min: least})
		}
		if s.Wanted != least {
			t.Errorf("%d hosts, want %d: %s", s.Wanted, least, s.Reason)
		}
	}
}

// A host that only comes back says nothing about those that are asked for.
func TestStartupIsThatOfFurtherHosts(t *testing.T) {
	t.Parallel()
	var s State
	for i, ready := range []int{1, 1, 4, 4, 3, 4, 5} {
		at := time.Unix(1000, 0).Add(time.Duration(i) * 10 * time.Second)
		s = s.Next(Observation{At: at, Ready: ready, Slots: ready, Items: 1, Models: &Models{Waiting: 60, Slots: 2, Time: 10 * time.Second}}, Target{Wait: time.Second}, Bounds{})
		if want := []int{0, 0, 20, 20, 20, 20, 60}[i]; s.Startup != time.Duration(want)*time.Second {
			t.Errorf("%s after %d polls, want %d s", s.Startup, i+1, want)
		}
	}
}

func TestModelsAskForHosts(t *testing.T) {
	t.Parallel()
	at := time.Unix(1000, 0)
	next := func(s State, after time.Duration, m Models) State {
		return s.Next(Observation{At: at.Add(after), Ready: 2, Slots: 2, Items: 1, Running: 1, Models: &m}, Target{Wait: time.Second}, Bounds{})
	}
	if s := next(State{}, 0, Models{Waiting: 60, Slots: 2, Time: 10 * time.Second}); s.Wanted != 20 || !strings.Contains(s.Reason, "60 loads") {
		t.Errorf("60 loads of 10 s in 30 s need %d hosts: %s", s.Wanted, s.Reason)
	}
	s := next(State{}, 0, Models{Slots: 2, IsFull: true, OldestUse: time.Minute})
	if s.Wanted != 3 || !strings.Contains(s.Reason, "memory for models is full") {
		t.Errorf("full memory needs %d hosts: %s", s.Wanted, s.Reason)
	}
	if s := next(s, 2*time.Second, Models{Slots: 2, IsFull: true, OldestUse: time.Minute}); s.Wanted != 3 {
		t.Errorf("%d hosts, before the third has come", s.Wanted)
	}
	if s := next(State{}, 0, Models{Slots: 2, IsFull: true, OldestUse: time.Hour}); s.Wanted != 2 || strings.Contains(s.Reason, "memory") {
		t.Errorf("old models need %d hosts: %s", s.Wanted, s.Reason)
	}
}

// What a host did before is not the work of the poll in which its answer comes again.
func TestMissedAnswerIsNoWork(t *testing.T) {
	t.Parallel()
	at, started := time.Unix(1000, 0), time.Unix(500, 0)
	next := func(s State, poll int, hosts map[string]Counters) State {
		return s.Next(Observation{At: at.Add(time.Duration(poll) * 2 * time.Second), Hosts: hosts, Ready: 2, Slots: 2}, Target{Wait: time.Second}, Bounds{})
	}
	count := func(n uint64) Counters {
		return Counters{Items: 10000 + n, Busy: time.Duration(n) * 10 * time.Millisecond, Started: started}
	}
	var s State
	for i := range 10 {
		hosts := map[string]Counters{"a": count(uint64(20 * i)), "b": count(uint64(20 * i))}
		if i == 5 {
			delete(hosts, "b")
		}
		s = next(s, i, hosts)
		if s.Parts.Rate > 25 {
			t.Errorf("poll %d: %g items a second, there are 20", i, s.Parts.Rate)
		}
	}
	hosts := map[string]Counters{"a": count(200), "b": count(200), "new": {Items: 100, Busy: time.Second, Started: at.Add(19 * time.Second)}}
	if s = next(s, 10, hosts); s.Parts.Rate < 50 {
		t.Errorf("%g items a second, of which 50 by a new host", s.Parts.Rate)
	}
}

// A broker that has lost its memory is no reason to end hosts.
func TestNewStateKeepsTheHosts(t *testing.T) {
	t.Parallel()
	at := time.Unix(1000, 0)
	observe := func(after time.Duration) Observation { return Observation{At: at.Add(after), Ready: 8, Slots: 8} }
	s := State{}.Next(observe(0), Target{Wait: time.Second}, Bounds{})
	for after := 2 * time.Second; after < StableWindow; after += 2 * time.Second {
		if s = s.Next(observe(after), Target{Wait: time.Second}, Bounds{}); s.Wanted != 8 {
			t.Fatalf("after %s %d hosts are wanted: %s", after, s.Wanted, s.Reason)
		}
	}
	if s = s.Next(observe(StableWindow), Target{Wait: time.Second}, Bounds{}); s.Wanted != 0 {
		t.Errorf("%d hosts are wanted: %s", s.Wanted, s.Reason)
	}
}
