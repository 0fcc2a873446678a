package scale

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// every is the time between two polls.
const every = 2 * time.Second

// simulation is a stage whose hosts start in startup, and whose load is a function of time.
type simulation struct {
	load    func(time.Duration) float64
	startup time.Duration
	// cost is in slot-seconds an item.
	cost   float64
	slots  int
	target Target
	random *rand.Rand

	state          State
	now            time.Duration
	ready          int
	starts         []time.Duration
	waiting, owed  float64
	done           uint64
	busy           time.Duration
	oldestSince    time.Duration
	wanted         []int
	perfect, least []float64
}

const tick = 100 * time.Millisecond

// run simulates the stage, and records after each poll what is wanted, and what a scaler wants
// that knows the load.
func (s *simulation) run(total time.Duration) {
	for s.now < total {
		for next := s.now + every; s.now < next; s.now += tick {
			s.pass()
		}
		s.poll()
	}
}

// pass lets a tick pass: items arrive, hosts start and work.
func (s *simulation) pass() {
	for len(s.starts) > 0 && s.starts[0] <= s.now {
		s.ready, s.starts = s.ready+1, s.starts[1:]
	}
	arrived := s.load(s.now) * tick.Seconds()
	if s.random != nil {
		arrived = float64(poisson(s.random, arrived))
	}
	s.waiting += arrived
	most := float64(s.ready*s.slots) * tick.Seconds() / s.cost
	worked := min(s.waiting, most)
	s.waiting -= worked
	s.owed += worked
	s.done += uint64(s.owed)
	s.owed -= math.Floor(s.owed)
	s.busy += time.Duration(worked * s.cost * float64(time.Second))
	if s.waiting < 1 {
		s.oldestSince = s.now
	}
}

func (s *simulation) poll() {
	running := min(int(s.waiting), s.ready*s.slots)
	s.state = s.state.Next(Observation{
		At: time.Unix(1000, 0).Add(s.now), Hosts: map[string]Counters{"all": {Items: s.done, Busy: s.busy}}, Ready: s.ready, Slots: s.ready * s.slots,
		Items: int(s.waiting), Running: running, Oldest: s.now - s.oldestSince,
		PerRow: time.Duration(s.cost * float64(time.Second)), MaxRows: 1,
	}, s.target, Bounds{})
	for s.ready+len(s.starts) < s.state.Wanted {
		s.starts = append(s.starts, s.now+s.startup)
	}
	for s.ready+len(s.starts) > s.state.Wanted {
		if n := len(s.starts); n > 0 {
			s.starts = s.starts[:n-1]
		} else {
			s.ready--
		}
	}
	share, patience := s.target.share()
	within := max(patience, drainTime, s.state.Startup)
	if !s.state.Asked.IsZero() {
		within = max(within, s.state.At.Sub(s.state.Asked))
	}
	perHost := s.cost / float64(s.slots)
	excess := max(0, s.waiting-float64(running)-s.load(s.now)*patience.Seconds())
	s.wanted = append(s.wanted, s.state.Wanted)
	s.least = append(s.least, s.load(s.now)*perHost)
	// What runs is not taken away.
	s.perfect = append(s.perfect, max(float64(running)/float64(s.slots), s.load(s.now)*perHost/share+excess*perHost/within.Seconds()))
}

func poisson(r *rand.Rand, mean float64) int {
	n, limit := 0, math.Exp(-mean)
	for p := r.Float64(); p > limit; p *= r.Float64() {
		n++
	}
	return n
}

// check compares with a perfect scaler: it has what the load needs within two polls, and no more
// than the most that was perfect within the stable window. A fall takes two polls, beside the one
// within which it begins, and the one that ends the window.
func (s *simulation) check(t *testing.T, slack float64) {
	t.Helper()
	window := int(StableWindow/every) + 4
	for i, wanted := range s.wanted {
		least, most := math.Inf(1), 0.0
		for _, n := range s.least[max(0, i-2) : i+1] {
			least = min(least, n)
		}
		for _, n := range s.perfect[max(0, i-window) : i+1] {
			most = max(most, n)
		}
		if i >= 2 && float64(wanted) < math.Floor(least) {
			t.Errorf("at %s: %d hosts, the load of the last two polls needs %.2f (%s)", time.Duration(i+1)*every, wanted, least, s.state.Reason)
		}
		if float64(wanted) > math.Ceil(most*(1+hysteresis+slack))+1 {
			t.Errorf("at %s: %d hosts, perfect are at most %.2f", time.Duration(i+1)*every, wanted, most)
		}
		if t.Failed() {
			t.Logf("wanted %v", s.wanted[max(0, i-20):i+1])
			t.FailNow()
		}
	}
}

// reversals is how often the hosts wanted change their direction from a time on.
func (s *simulation) reversals(from time.Duration) (n int) {
	direction := 0
	for i := max(1, int(from/every)); i < len(s.wanted); i++ {
		d := min(1, max(-1, s.wanted[i]-s.wanted[i-1]))
		if d != 0 && direction != 0 && d != direction {
			n++
		}
		if d != 0 {
			direction = d
		}
	}
	return n
}

func TestScalerFollowsTheLoadLikeAPerfectOne(t *testing.T) {
	t.Parallel()
	const stepAt = 5 * time.Minute
	step := func(before, after float64) func(time.Duration) float64 {
		return func(at time.Duration) float64 {
			if at < stepAt {
				return before
			}
			return after
		}
	}
	loads := map[string]struct {
		load func(time.Duration) float64
		// reversals are how many may follow from the step on.
		reversals int
	}{
		"step up":   {step(10, 100), 1},
		"first":     {step(0, 200), 1},
		"step down": {step(100, 10), 1},
		"stop":      {step(100, 0), 1},
		"ramp":      {func(at time.Duration) float64 { return 10 + 290*min(1, at.Minutes()/20) }, 1},
		"burst": {func(at time.Duration) float64 {
			if at >= 10*time.Minute && at < 10*time.Minute+20*time.Second {
				return 200
			}
			return 20
		}, 3},
		"night and day": {func(at time.Duration) float64 { return 100 + 90*math.Sin(at.Hours()*2*math.Pi) }, 5},
	}
	for name, row := range loads {
		for _, startup := range []time.Duration{time.Second, 30 * time.Second, 5 * time.Minute} {
			for _, target := range []Target{{Wait: 200 * time.Millisecond}, {Busy: .7}, {Oldest: 5 * time.Second}} {
				t.Run(fmt.Sprintf("%s, start in %s, %s", name, startup, target), func(t *testing.T) {
					t.Parallel()
					s := &simulation{load: row.load, startup: startup, cost: .05, slots: 1, target: target}
					s.run(time.Hour)
					s.check(t, 0)
					if n := s.reversals(stepAt); n > row.reversals {
						t.Errorf("%d reversals: %v", n, s.wanted)
					}
				})
			}
		}
	}
}

// A steady load of random arrivals, cheap and costly ones, is no reason to grow and shrink.
func TestNoiseIsNotFollowed(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		load, cost float64
		slots      int
	}{{100, .05, 1}, {1, 5, 1}, {.5, .1, 2}, {1000, .02, 4}} {
		t.Run(fmt.Sprintf("%g/s of %gs", row.load, row.cost), func(t *testing.T) {
			t.Parallel()
			s := &simulation{load: func(time.Duration) float64 { return row.load }, startup: 30 * time.Second, cost: row.cost, slots: row.slots, target: Target{Wait: 200 * time.Millisecond}, random: rand.New(rand.NewPCG(1, 2))}
			s.run(time.Hour)
			steady, least, most := s.wanted[150:], math.MaxInt, 0
			for _, n := range steady {
				least, most = min(least, n), max(most, n)
			}
			perfect := row.load * row.cost / waitBusy / float64(row.slots)
			if float64(most) > perfect*1.7+2 || float64(least) < math.Floor(perfect*.8) {
				t.Errorf("between %d and %d hosts, perfect are %.2f", least, most, perfect)
			}
			if n := s.reversals(0); n > 40 {
				t.Errorf("%d reversals in an hour: %v", n, s.wanted)
			}
		})
	}
}
