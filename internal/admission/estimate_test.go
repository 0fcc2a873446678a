package admission

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestUnknownQueueHasSpaceAndNoWait(t *testing.T) {
	t.Parallel()
	var q estimator
	now := time.Unix(1000, 0)
	if wait, known := q.wait(pipeline.Normal, now); known || wait != 0 {
		t.Errorf("wait %s, %t", wait, known)
	}
	if full, free := q.full(pipeline.Normal, now); full || free != 0 {
		t.Errorf("full %t, free in %s", full, free)
	}
}

func TestWaitIsWorkAheadByRate(t *testing.T) {
	t.Parallel()
	for name, others := range map[string]float64{"one gateway": 0, "several": 300} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStage(100)
			s.here, s.other = 500-others, others
			s.pass(2 * time.Second)
			// 400 a second more than it can: 800 are ahead.
			s.wantWait(t, 8*time.Second, .1)
		})
	}
}

// Between two samples the estimate has to go on: at five times what a stage can,
// a tenth of a second is half a second of work.
func TestEstimateCountsItemsSinceTheSample(t *testing.T) {
	t.Parallel()
	s := newStage(1000)
	s.here, s.other = 2500, 2500
	s.pass(time.Second + every - step)
	s.wantWait(t, time.Duration(s.items/1000*float64(time.Second)), .05)
	s.burst(500)
	s.wantWait(t, time.Duration(s.items/1000*float64(time.Second)), .05)
}

func TestIdleStageHasNoWait(t *testing.T) {
	t.Parallel()
	s := newStage(1000)
	s.here = 5000
	s.pass(time.Second)
	s.here = 100
	s.pass(10 * time.Second)
	if wait, known := s.wait(); known {
		t.Errorf("the wait is %s", wait)
	}
}

// A trickle says nothing about what a stage can do: a burst after it is admitted.
func TestBurstAfterATrickleIsAdmitted(t *testing.T) {
	t.Parallel()
	s := newStage(1000)
	s.here, s.atOnce = 2, 10
	s.pass(20 * time.Second)
	s.burst(500)
	if wait, known := s.wait(); known {
		t.Errorf("the wait is %s", wait)
	}
	s.pass(300 * time.Millisecond)
	s.wantWait(t, 200*time.Millisecond, .2)
}

func TestRateFollowsTheHosts(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct{ before, after float64 }{
		"hosts leave": {1000, 250}, "hosts come": {250, 1000},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStage(row.before)
			s.here = 5000
			s.pass(2 * time.Second)
			s.rate = row.after
			s.pass(4 * time.Second)
			if rate, known := s.estimator.rate(s.now); !known || rate < row.after*.9 || rate > row.after*1.2 {
				t.Errorf("rate %f (%t), want %f", rate, known, row.after)
			}
		})
	}
}

// Hosts came while there was no work. Items admitted by the old rate run faster
// than that, and so tell the new one.
func TestRateRisesWhileTheStageIsIdle(t *testing.T) {
	t.Parallel()
	s := newStage(10)
	s.here = 50
	s.pass(5 * time.Second)
	s.here, s.items = 0, 0
	s.pass(time.Second)
	s.rate, s.here = 1000, 400
	s.pass(time.Second)
	if rate, known := s.estimator.rate(s.now); !known || rate < 350 {
		t.Errorf("rate %f (%t), 400 a second are done", rate, known)
	}
}

func TestStalledStageHasALongWait(t *testing.T) {
	t.Parallel()
	s := newStage(1000)
	s.here = 2000
	s.pass(time.Second)
	s.rate, s.here = 0, 0
	s.pass(10 * time.Second)
	if wait, known := s.wait(); !known || wait < 30*time.Second {
		t.Errorf("the wait is %s (%t); nothing was done for 10 s and %f items wait", wait, known, s.items)
	}
}

func TestFewItemsTellASlowRate(t *testing.T) {
	t.Parallel()
	s := newStage(.5)
	s.items, s.came = 20, 20
	s.pass(12 * time.Second)
	s.wantWait(t, 28*time.Second, .25)
}

func TestOldRateIsForgotten(t *testing.T) {
	t.Parallel()
	s := newStage(100)
	s.here = 200
	s.pass(2 * time.Second)
	s.here, s.items = 0, 0
	s.pass(2 * time.Minute)
	if rate, known := s.estimator.rate(s.now); known {
		t.Errorf("a rate of %f from two minutes ago", rate)
	}
}

func TestOldSampleRejectsNothing(t *testing.T) {
	t.Parallel()
	s := newStage(100)
	s.here, s.bounds = 500, 1000
	s.pass(2 * time.Second)
	later := s.now.Add(6 * time.Second)
	if wait, known := s.estimator.wait(pipeline.Normal, later); known {
		t.Errorf("the wait is %s", wait)
	}
	if full, _ := s.full(pipeline.Normal, later); full {
		t.Error("full, by a sample that is six seconds old")
	}
}

func TestReplacedQueueBeginsAnew(t *testing.T) {
	t.Parallel()
	s := newStage(100)
	s.here = 500
	s.pass(2 * time.Second)
	s.epoch, s.items, s.came = "second", 0, 0
	s.pass(time.Second)
	s.wantWait(t, 4*time.Second, .2)
	if rate, _ := s.estimator.rate(s.now); rate < 90 || rate > 110 {
		t.Errorf("rate %f, it is 100", rate)
	}
}

func TestClassesLeaveSpaceForHigherOnes(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		items             uint64
		high, normal, low bool
	}{
		{699, false, false, false}, {700, false, false, true}, {800, false, true, true}, {900, true, true, true}, {1000, true, true, true},
	} {
		var q estimator
		now := time.Unix(1000, 0)
		q.observe(sample{at: now, taken: now, items: perClass{0, row.items, 0}, maxItems: 1000})
		for class, want := range map[pipeline.Class]bool{pipeline.High: row.high, pipeline.Normal: row.normal, pipeline.Low: row.low} {
			if full, _ := q.full(class, now); full != want {
				t.Errorf("%d of 1000, %s: full %t", row.items, class, full)
			}
		}
	}
}

func TestQueueIsFullByBytes(t *testing.T) {
	t.Parallel()
	var q estimator
	now := time.Unix(1000, 0)
	q.observe(sample{at: now, taken: now, items: perClass{0, 8, 0}, total: 8, bytes: 799, maxBytes: 1000, maxItems: 1000})
	if full, _ := q.full(pipeline.Normal, now); !full {
		t.Error("eight items of 100 bytes leave no space in eight tenths of 1000 bytes")
	}
	if full, _ := q.full(pipeline.High, now); full {
		t.Error("high has nine tenths")
	}
}

func TestSmallQueueCanBeUsed(t *testing.T) {
	t.Parallel()
	var q estimator
	now := time.Unix(1000, 0)
	q.observe(sample{at: now, taken: now, items: perClass{0, 3, 0}, maxItems: 4})
	if full, _ := q.full(pipeline.Normal, now); full {
		t.Error("three of four, and full")
	}
	q.own.sent[1]++
	if full, _ := q.full(pipeline.Normal, now); !full {
		t.Error("four of four, and not full")
	}
	q.own.answered++
	if full, _ := q.full(pipeline.Normal, now); full {
		t.Error("one is answered, and it is full")
	}
}

func TestFullQueueReportsWhenSpaceIsFree(t *testing.T) {
	t.Parallel()
	s := newStage(100)
	s.here, s.bounds = 500, 1000
	s.pass(2 * time.Second)
	full, free := s.full(pipeline.Normal, s.now)
	// 800 wait, of which one is too many.
	if !full || free > 600*time.Millisecond {
		t.Errorf("full %t, free in %s", full, free)
	}
	s.pass(time.Second)
	if full, free = s.full(pipeline.Normal, s.now); !full || free < 3500*time.Millisecond || free > 4500*time.Millisecond {
		t.Errorf("full %t, free in %s: 400 of 100 a second are too many", full, free)
	}
}

func TestHighClassWaitsForHighClassOnly(t *testing.T) {
	t.Parallel()
	s := newStage(100)
	s.here = 500
	s.alter = func(s *sample) { s.items = perClass{10, 10, s.items[1] - 20} }
	s.items, s.came = 20, 20
	s.pass(2 * time.Second)
	high, _ := s.estimator.wait(pipeline.High, s.now)
	low, _ := s.estimator.wait(pipeline.Low, s.now)
	if high > 200*time.Millisecond || low < 6*time.Second {
		t.Errorf("high waits %s, low %s", high, low)
	}
}

// Hosts drop late items faster than they run others.
func TestLateItemsDoNotCountForTheRate(t *testing.T) {
	t.Parallel()
	s := newStage(400)
	s.here = 2000
	s.pass(time.Second)
	before, _ := s.wait()
	for range 20 {
		for range 10 {
			s.own.answered++
		}
		for range 30 {
			s.own.late++
		}
		s.pass(every)
	}
	after, _ := s.wait()
	if want := 4 * s.items / 400; after.Seconds() < .8*want || after < before {
		t.Errorf("three of four are late, and the wait is %s, not %f s", after, want)
	}
	for range 50 {
		s.own.answered++
		s.pass(every)
	}
	s.wantWait(t, time.Duration(s.items/400*float64(time.Second)), .2)
}

// A forgotten rate does not mix with the next that is learned.
func TestForgottenRateDoesNotReturn(t *testing.T) {
	t.Parallel()
	s := newStage(1)
	s.here = 2
	s.pass(30 * time.Second)
	s.here, s.items = 0, 0
	s.pass(2 * time.Minute)
	s.rate = 50
	s.burst(100)
	s.pass(500 * time.Millisecond)
	if wait, known := s.wait(); known && wait > 4*time.Second {
		t.Errorf("the wait is %s, of %f items at 50 a second", wait, s.items)
	}
}

// Samples come with requests, and to a slow stage requests come seldom.
func TestRareRequestsTellASlowRate(t *testing.T) {
	t.Parallel()
	s := newStage(.05)
	s.items, s.came = 50, 50
	for range 60 {
		s.next = s.now
		s.burst(1)
		s.pass(2 * time.Second)
		s.next = s.now.Add(time.Hour)
	}
	if _, known := s.estimator.rate(s.now); !known {
		t.Error("nothing is known of a stage that has been busy for two minutes")
	}
}

func TestDeletedItemsAreNotDrained(t *testing.T) {
	t.Parallel()
	s := newStage(10)
	s.items, s.came = 2000, 2000
	s.pass(2 * time.Second)
	for range 1000 {
		s.own.deleted++
		s.items--
	}
	s.pass(time.Second)
	if rate, known := s.estimator.rate(s.now); !known || rate > 12 {
		t.Errorf("rate %f (%t), it is 10", rate, known)
	}
}

// Items that this gateway sends while the broker is asked are not others'.
func TestOwnBurstIsNotOthersRate(t *testing.T) {
	t.Parallel()
	var q estimator
	now := time.Unix(1000, 0)
	q.observe(sample{at: now, taken: now, maxItems: 10_000})
	before := q.own
	for range 1000 {
		q.own.sent[1]++
	}
	now = now.Add(every)
	q.observe(sample{at: now, taken: now, own: before, after: q.own, items: perClass{0, 1000, 0}, total: 1000, last: 1000, maxItems: 10_000})
	for range 1000 {
		q.own.answered++
	}
	now = now.Add(900 * time.Millisecond)
	if items := q.items(pipeline.Low, now); items > 1000 {
		t.Errorf("%f items, all of which are answered", items)
	}
	if full, _ := q.full(pipeline.Normal, now); full {
		t.Error("full")
	}
}

// Items by class are counted a moment after the total: items that came in between
// have not been drained.
func TestBurstDuringACountIsNotDrained(t *testing.T) {
	t.Parallel()
	s := newStage(0)
	s.here = 2000
	s.alter = func(s *sample) { s.items[1] += 150 }
	s.pass(3 * time.Second)
	if rate, known := s.estimator.rate(s.now); known {
		t.Errorf("a rate of %f of a stage that does nothing", rate)
	}
}

// Whatever the broker reports, the estimate stays a number.
func FuzzObserve(f *testing.F) {
	f.Add(uint64(1), uint64(5), int64(1), int64(100), true)
	f.Add(uint64(0), uint64(1<<63), int64(-1), int64(-1), false)
	f.Fuzz(func(t *testing.T, items, last uint64, maxItems, millis int64, busy bool) {
		var q estimator
		now := time.Unix(1000, 0)
		for i := range 3 {
			q.observe(sample{at: now, taken: now, items: perClass{items, items / 2, items}, total: items, last: last * uint64(i), maxItems: maxItems, maxBytes: maxItems, bytes: last, busy: busy})
			now = now.Add(time.Duration(millis%5000) * time.Millisecond)
		}
		if wait, _ := q.wait(pipeline.Low, now); wait < 0 || wait > time.Hour {
			t.Errorf("wait %s", wait)
		}
		if _, free := q.full(pipeline.Low, now); free < 0 || free > time.Hour {
			t.Errorf("free in %s", free)
		}
	})
}

const (
	step  = 10 * time.Millisecond
	every = 100 * time.Millisecond
)

// stage is a simulated stage with one queue, whose gateway asks about it ten
// times a second.
type stage struct {
	estimator
	now time.Time
	// rate is what its hosts take off the queue, in items a second; here and
	// other are what this gateway and others send.
	rate, here, other float64
	// atOnce is how many items the hosts run at once, without waiting.
	atOnce float64
	bounds int64

	items, came float64
	unsent      float64
	next        time.Time
	epoch       string
	alter       func(*sample)
}

func newStage(rate float64) *stage {
	return &stage{now: time.Unix(1000, 0), rate: rate, epoch: "first"}
}

// pass advances the time.
func (s *stage) pass(d time.Duration) {
	for end := s.now.Add(d); s.now.Before(end); s.now = s.now.Add(step) {
		if !s.now.Before(s.next) {
			s.ask()
			s.next = s.now.Add(every)
		}
		s.unsent += s.here * step.Seconds()
		for ; s.unsent >= 1; s.unsent-- {
			s.own.sent[1]++
		}
		came := (s.here + s.other) * step.Seconds()
		s.came += came
		s.items = max(0, s.items+came-s.rate*step.Seconds())
	}
}

func (s *stage) ask() {
	observed := sample{
		at: s.now, taken: s.now, own: s.own, after: s.own, epoch: s.epoch, items: perClass{0, uint64(s.items), 0}, total: uint64(s.items),
		bytes: uint64(s.items) * 100, last: uint64(s.came), maxItems: s.bounds, busy: s.items > s.atOnce,
	}
	if s.alter != nil {
		s.alter(&observed)
	}
	s.observe(observed)
}

// burst puts items into the queue at once.
func (s *stage) burst(items int) {
	for range items {
		s.own.sent[1]++
	}
	s.items += float64(items)
	s.came += float64(items)
}

func (s *stage) wait() (time.Duration, bool) { return s.estimator.wait(pipeline.Normal, s.now) }

func (s *stage) wantWait(t *testing.T, want time.Duration, within float64) {
	t.Helper()
	got, known := s.wait()
	if !known || got.Seconds() < want.Seconds()*(1-within) || got.Seconds() > want.Seconds()*(1+within) {
		t.Errorf("the wait is %s (known: %t), want %s", got, known, want)
	}
}
