package dispatch

import (
	"errors"
	"math"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

// pool is a credit and a clock.
type pool struct {
	*credit
	now  time.Time
	last int
}

// newPool has B = .1 and 5 servers of 10, so a reading of .7 permits 30.
func newPool(change func(*BudgetConfig)) *pool {
	b := BudgetConfig{Baseline: new(.1), Each: 10}
	if change != nil {
		change(&b)
	}
	p := &pool{credit: newCredit(b, 0, epoch.Add(-time.Hour)), now: epoch}
	p.ready = 5
	return p
}

// poll takes a reading that is true now.
func (p *pool) poll(d float64) { p.take(reading{d: d, at: p.now}) }

func (p *pool) take(r reading) { p.credit.read(r, nil, p.now) }

// send sends as many jobs as it may, at most a thousand, and returns their IDs.
func (p *pool) send(cost int64) (ids [][16]byte) {
	for range 1000 {
		if ok, _ := p.room(p.now, cost); !ok {
			break
		}
		p.last++
		id := [16]byte{byte(p.last), byte(p.last >> 8)}
		p.start(id, cost, p.now)
		ids = append(ids, id)
	}
	return ids
}

func (p *pool) finishAll(ids [][16]byte, o outcome) {
	for _, id := range ids {
		p.finish(id, o, 0, p.now)
	}
}

func (p *pool) expect(t *testing.T, what string, jobs int, why reason) {
	t.Helper()
	ids := p.send(1)
	if _, got := p.room(p.now, 1); len(ids) != jobs || got != why {
		t.Errorf("%s: sent %d jobs, then %q; want %d, then %q", what, len(ids), got, jobs, why)
	}
	p.finishAll(ids, succeeded)
}

func TestGoldenTable(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		d, b, ready, each float64
		want              float64 // 0 is closed
	}{
		"F=.3 B=.1 5x10":   {1 - .3, .1, 5, 10, 30},
		"F=.3 B=.05 5x100": {1 - .3, .05, 5, 100, 325},
		"F=.9 B=.05 1x100": {1 - .9, .05, 1, 100, 5},
		"F=.3 B=.1 3x10":   {1 - .3, .1, 3, 10, 18},
		"F=.7 B=.3 5x10":   {1 - .7, .3, 5, 10, 0},
		"F=.95 B=.05 5x10": {1 - .95, .05, 5, 10, 0},
		"D-B=.004 5x10":    {.304, .3, 5, 10, 1},
		"D=B":              {.1, .1, 5, 10, 0},
		"D<B":              {.05, .1, 5, 10, 0},
		"no server":        {1, 0, 0, 10, 0},
		"everything":       {1, 0, 5, 10, 50},
		"NaN servers":      {1, 0, math.NaN(), 10, 0},
		"NaN":              {math.NaN(), 0, 5, 10, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, open := (&credit{BudgetConfig: BudgetConfig{Baseline: &test.b, Each: test.each, Unit: unitRequests}, ready: test.ready}).size(test.d)
			if n != test.want || open != (test.want > 0) {
				t.Errorf("got N = %v, open %t", n, open)
			}
		})
	}
}

func TestWholeJobsInBytes(t *testing.T) {
	t.Parallel()
	const kib = 1024
	p := newPool(func(b *BudgetConfig) { b.Unit, b.Each = unitBytes, 1024*kib })
	p.ready = 1
	p.poll(.7)
	if n, _ := p.size(1 - .3); n < 614.3*kib || n > 614.5*kib {
		t.Fatalf("N = %v, not 614.4 KiB", n)
	}
	p.start([16]byte{1}, 600*kib, p.now)
	if ok, why := p.room(p.now, 100*kib); ok || why != budgetSpent {
		t.Errorf("a job of 100 KiB follows one of 600 KiB: %t, %q", ok, why)
	}
	if ok, _ := p.room(p.now, 14*kib); !ok {
		t.Error("a job of 14 KiB does not fit")
	}
	if ok, why := p.room(p.now, 700*kib); ok || why != headTooLarge {
		t.Errorf("a job larger than N does not wait to go alone: %t, %q", ok, why)
	}
	p.finish([16]byte{1}, succeeded, 0, p.now)
	if ok, why := p.room(p.now, 700*kib); !ok {
		t.Errorf("a job larger than N does not go alone: %q", why)
	}
	p.start([16]byte{2}, 700*kib, p.now)
	if ok, _ := p.room(p.now, 1); ok {
		t.Error("a job follows one larger than N")
	}
}

func TestLargeJobSpendsReading(t *testing.T) {
	t.Parallel()
	p := newPool(func(b *BudgetConfig) { b.Unit, b.Refill = unitTokens, refillReading })
	p.poll(.7)
	for range 3 {
		if ids := p.send(40); len(ids) != 1 {
			t.Fatalf("sent %d jobs of 40 tokens at N = 30", len(ids))
		} else {
			p.finishAll(ids, succeeded)
		}
		if ids := p.send(40); len(ids) != 0 {
			t.Fatal("another job goes alone by the same reading")
		}
		p.now = p.now.Add(time.Second)
		p.poll(.7)
	}
}

func TestClosedPoolSendsNothing(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func(*pool)
		want   reason
	}{
		"no reading":      {func(p *pool) { p.credit = newCredit(p.BudgetConfig, 0, p.now); p.ready = 5 }, noReading},
		"error":           {func(p *pool) { p.read(reading{}, errors.New("timeout"), p.now) }, unreadable},
		"NaN":             {func(p *pool) { p.poll(math.NaN()) }, invalid},
		"infinite":        {func(p *pool) { p.poll(math.Inf(1)) }, invalid},
		"negative":        {func(p *pool) { p.poll(-.1) }, invalid},
		"more than 1":     {func(p *pool) { p.poll(1.1) }, invalid},
		"no time":         {func(p *pool) { p.take(reading{d: 1}) }, noReading},
		"too old":         {func(p *pool) { p.now = p.now.Add(30*time.Second + 1) }, stale},
		"no server":       {func(p *pool) { p.ready = 0 }, noServers},
		"NaN servers":     {func(p *pool) { p.ready = math.NaN() }, noServers},
		"D at B":          {func(p *pool) { p.poll(.1) }, belowBudget},
		"D above B by ε":  {func(p *pool) { p.poll(math.Nextafter(.1, 1)) }, belowBudget},
		"breaker is open": {func(p *pool) { p.finishAll(p.send(1), retried) }, breakerOpen},
		"refused": {func(p *pool) {
			p.start([16]byte{1}, 1, p.now)
			p.finish([16]byte{1}, latched, 0, p.now)
		}, refused},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPool(nil)
			p.poll(.7)
			test.change(p)
			p.expect(t, name, 0, test.want)
			if s := p.report(p.now); s.GetState() != "closed" || s.GetN() != 0 || s.GetWhy() == "" {
				t.Errorf("report %v", s)
			}
		})
	}
}

func TestReadingIsSpentOnce(t *testing.T) {
	t.Parallel()
	p := newPool(nil)
	sample := reading{d: .7, at: p.now}
	p.take(sample)
	first := p.send(1)
	for range 5 {
		p.now = p.now.Add(5 * time.Second)
		p.take(sample)
		p.expect(t, "the same sample", 0, budgetSpent)
	}
	if len(first) != 30 {
		t.Fatalf("sent %d jobs", len(first))
	}
	p.finishAll(first[:4], succeeded)
	p.expect(t, "four jobs ended", 4, budgetSpent)
	p.now = p.now.Add(time.Second)
	p.poll(.7)
	p.expect(t, "a reading with 26 jobs in it", 30, budgetSpent)
}

func TestEndedJobMakesRoomInReadingThatCountsIt(t *testing.T) {
	t.Parallel()
	p := newPool(nil)
	p.poll(.7)
	first := p.send(1)
	p.now = p.now.Add(time.Second)
	p.take(reading{d: .1, at: p.now, counts: true}) // B: they fill the target
	p.expect(t, "a full target", 0, belowBudget)
	p.take(reading{d: .2, at: p.now.Add(time.Millisecond), counts: true})
	p.finishAll(first[:4], succeeded)
	p.expect(t, "room for 5, and for 4 that ended", 9, budgetSpent)
}

func TestRefillByReadingGivesNothingBack(t *testing.T) {
	t.Parallel()
	p := newPool(func(b *BudgetConfig) { b.Refill = refillReading })
	p.poll(.7)
	p.expect(t, "first reading", 30, budgetSpent)
	p.expect(t, "all ended", 0, budgetSpent)
	// True before the jobs were sent, and late.
	at := p.now
	p.now = p.now.Add(time.Second)
	p.take(reading{d: .8, at: at})
	p.expect(t, "a reading that was late", 5, budgetSpent)
	p.now = p.now.Add(time.Second)
	p.poll(.7)
	p.expect(t, "next reading", 30, budgetSpent)
}

func TestTimelessGateBoundsJobsInFlight(t *testing.T) {
	t.Parallel()
	p := newPool(nil)
	p.take(reading{d: .7, at: p.now, timeless: true})
	ids := p.send(1)
	p.now = p.now.Add(time.Hour)
	p.take(reading{d: .7, at: p.now, timeless: true})
	p.expect(t, "an hour later", 0, budgetSpent)
	p.finishAll(ids[:3], succeeded)
	p.expect(t, "three jobs ended", 3, budgetSpent)
}

func TestEndedJobsAreForgottenWithoutANewReading(t *testing.T) {
	t.Parallel()
	p := newPool(func(b *BudgetConfig) { b.Refill = refillReading })
	p.take(reading{d: .7, at: p.now, timeless: true})
	for range 1000 {
		p.now = p.now.Add(DefaultMaxAge / 10)
		p.finishAll(p.send(1), succeeded)
		if n := len(p.ended); n > 4*11*30 { // 30 in each of 11 steps count; as many more may wait to be dropped
			t.Fatalf("%d ended jobs are kept", n)
		}
	}
}

func TestMaxInFlightBoundsEveryReading(t *testing.T) {
	t.Parallel()
	p := newPool(nil)
	p.maxInFlight = 8
	p.poll(.7)
	p.send(1)
	p.now = p.now.Add(time.Second)
	p.poll(.7)
	p.expect(t, "a newer reading", 0, allInFlight)
}

func TestClockAheadGivesNoNewCredit(t *testing.T) {
	t.Parallel()
	p := newPool(nil)
	sample := reading{d: .7, at: p.now.Add(time.Minute)}
	p.take(sample)
	p.send(1)
	p.now = p.now.Add(time.Second)
	p.take(sample)
	p.expect(t, "the same sample", 0, budgetSpent)
	p.now = p.now.Add(DefaultMaxAge)
	p.take(sample)
	p.expect(t, "the same sample much later", 0, stale)
}

func TestEarlierOwnersJobsCount(t *testing.T) {
	t.Parallel()
	p := newPool(nil)
	for n := range 12 {
		p.start([16]byte{1, byte(n)}, 1, p.now.Add(time.Duration(n-5)*time.Second))
	}
	p.poll(.7)
	p.expect(t, "five were sent before the reading", 23, budgetSpent)
}

func TestRefusalWaitsForNewerReading(t *testing.T) {
	t.Parallel()
	p := newPool(nil)
	sample := reading{d: .7, at: p.now}
	p.take(sample)
	ids := p.send(1)
	p.now = p.now.Add(time.Second)
	if p.finish(ids[0], latched, 0, p.now) {
		t.Error("a refusal is an attempt")
	}
	for range 5 {
		p.now = p.now.Add(5 * time.Second)
		p.take(sample)
		p.expect(t, "frozen metric", 0, refused)
	}
	p.finish(ids[1], latched, time.Minute, p.now)
	p.now = p.now.Add(time.Minute - 1)
	p.poll(.7)
	p.expect(t, "Retry-After", 0, refused)
	p.now = p.now.Add(1)
	p.expect(t, "after both", 30, budgetSpent)
}

func TestNewOwnerWaitsForNewerReading(t *testing.T) {
	t.Parallel()
	p := newPool(nil)
	p.from = p.now
	p.take(reading{d: .7, at: p.now.Add(-1)})
	p.expect(t, "an owner before may have spent it, or was refused", 0, noReading)
	p.take(reading{d: .7, timeless: true, at: p.now.Add(-1)})
	p.expect(t, "no reading of the target", 30, budgetSpent)
	p.poll(.7)
	p.expect(t, "a newer reading", 30, budgetSpent)
}

func TestRefusalsPauseTimelessGate(t *testing.T) {
	t.Parallel()
	p := newPool(nil)
	p.take(reading{d: .7, at: p.now, timeless: true})
	for _, pause := range []time.Duration{1e9, 2e9, 4e9, 8e9, 16e9, 32e9, 60e9, 60e9} {
		ids := p.send(1)
		if len(ids) == 0 {
			t.Fatalf("nothing goes before a pause of %s", pause)
		}
		p.now = p.now.Add(time.Millisecond)
		p.finishAll(ids, latched) // all at once count as one
		p.now = p.now.Add(pause - 1)
		p.expect(t, "within the pause", 0, refused)
		p.now = p.now.Add(1)
	}
	p.expect(t, "after the pause", 30, budgetSpent)
	ids := p.send(1)
	p.finishAll(ids, latched)
	p.now = p.now.Add(time.Second)
	p.expect(t, "after a success, the first pause", 30, budgetSpent)
}

func TestStatusSaysWhySinceWhen(t *testing.T) {
	t.Parallel()
	p := newPool(nil)
	p.take(reading{d: .7, at: p.now, source: "prometheus 1"})
	p.send(1)
	if s := p.report(p.now); s.GetState() != "open" || s.GetN() != 30 || s.GetOut() != 30 || s.GetWhy() != "N is spent" || !s.GetSince().AsTime().Equal(p.now) {
		t.Errorf("open: %v", s)
	}
	for range 9 {
		p.now = p.now.Add(5 * time.Second)
		p.take(reading{d: .04, at: p.now.Add(-3 * time.Second), source: "prometheus 1"})
	}
	p.now = p.now.Add(time.Second)
	want := &meshv1.PoolReport{State: "closed", D: .04, B: .1, Out: 30, Source: "prometheus 1", ReadAt: timestampOf(p.now.Add(-4 * time.Second)), Why: "D <= B", Since: timestampOf(p.now.Add(-41 * time.Second))}
	if s := p.report(p.now); !proto.Equal(s, want) {
		t.Errorf("closed: %v, not %v", s, want)
	}
	p.read(reading{}, errors.New("connection refused"), p.now)
	if s := p.report(p.now); s.GetWhy() != "gate is unreadable: connection refused" {
		t.Errorf("unreadable: %v", s)
	}
}

// TestCreditAgreesWithModel sends what there is room for, with random readings and ends,
// and adds up anew each time.
func TestCreditAgreesWithModel(t *testing.T) {
	t.Parallel()
	type job struct {
		cost  float64
		at    time.Time
		alive bool
	}
	rapid.Check(t, func(t *rapid.T) {
		p := newPool(func(b *BudgetConfig) {
			b.Unit = rapid.SampledFrom([]string{unitRequests, unitBytes, unitTokens}).Draw(t, "unit")
			b.Refill = rapid.SampledFrom([]string{refillEnd, refillReading}).Draw(t, "refill")
		})
		p.maxInFlight = rapid.IntRange(0, 30).Draw(t, "max in flight")
		jobs := map[[16]byte]*job{}
		var current reading
		t.Repeat(map[string]func(*rapid.T){
			"reading": func(t *rapid.T) {
				current = reading{
					d: rapid.Float64Range(0, 1).Draw(t, "d"), timeless: rapid.IntRange(0, 4).Draw(t, "timeless") == 0,
					at: p.now.Add(-time.Duration(rapid.IntRange(0, 20).Draw(t, "age")) * time.Second),
				}
				p.take(current)
			},
			"wait": func(t *rapid.T) {
				p.now = p.now.Add(time.Duration(rapid.IntRange(0, 15).Draw(t, "wait")) * time.Second)
			},
			"send": func(t *rapid.T) {
				cost := rapid.Int64Range(1, 40).Draw(t, "cost")
				ok, why := p.room(p.now, cost)
				if ok != (why == "") {
					t.Fatalf("room is %t, and %q", ok, why)
				}
				inFlight, spent := 0, 0.
				for _, j := range jobs {
					if j.alive {
						inFlight++
					}
					since := !j.at.Before(current.at)
					if current.timeless && j.alive || !current.timeless && since && (j.alive || p.Refill == refillReading) {
						spent += j.cost
					}
				}
				price := p.costOf(cost)
				n, open := p.size(current.d)
				fits := spent+price <= n+margin || price > n+margin && inFlight == 0 && spent == 0
				fresh := current.timeless || p.now.Sub(current.at) <= DefaultMaxAge
				want := open && fits && fresh && (p.maxInFlight == 0 || inFlight < p.maxInFlight)
				if ok != want {
					t.Fatalf("room is %t (%q): %g of %g spent, cost %g, %d in flight, open %t, fresh %t", ok, why, spent, n, price, inFlight, open, fresh)
				}
				if ok {
					p.last++
					id := [16]byte{byte(p.last)}
					p.start(id, cost, p.now)
					jobs[id] = &job{price, p.now, true}
				}
			},
			"end": func(*rapid.T) {
				for n := range p.last {
					id := [16]byte{byte(n + 1)}
					if j := jobs[id]; j.alive {
						p.finish(id, succeeded, 0, p.now)
						p.finish(id, succeeded, 0, p.now)
						j.alive = false
						return
					}
				}
			},
		})
	})
}
