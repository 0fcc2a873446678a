package load_test

import (
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/gateway/load"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestAQueueOfWhichNothingIsKnownHasRoomAndNoWait(t *testing.T) {
	t.Parallel()
	var q load.Queue
	now := time.Unix(1000, 0)
	if wait, known := q.Wait(pipeline.Normal, now); known || wait != 0 {
		t.Errorf("wait %s, %t", wait, known)
	}
	if full, free := q.Full(pipeline.Normal, now); full || free != 0 {
		t.Errorf("full %t, free in %s", full, free)
	}
}

func TestWaitOfAnOverloadedStageIsWhatIsAheadByItsRate(t *testing.T) {
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
func TestEstimateKnowsWhatCameSinceTheSample(t *testing.T) {
	t.Parallel()
	s := newStage(1000)
	s.here, s.other = 2500, 2500
	s.pass(time.Second + every - step)
	s.wantWait(t, time.Duration(s.items/1000*float64(time.Second)), .05)
	s.burst(500)
	s.wantWait(t, time.Duration(s.items/1000*float64(time.Second)), .05)
}

func TestStageThatIsNotBusyHasNoWait(t *testing.T) {
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

// A trickle says nothing about what a stage can do: a burst after it is let in.
func TestBurstAfterATrickleIsNotRefused(t *testing.T) {
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
			if rate, known := s.Rate(s.now); !known || rate < row.after*.9 || rate > row.after*1.2 {
				t.Errorf("rate %f (%t), want %f", rate, known, row.after)
			}
		})
	}
}

// Hosts came while nothing was to do. What is let in by the old rate is done
// sooner than that, and so says what the new one is.
func TestRateRisesThoughTheStageIsNotBusy(t *testing.T) {
	t.Parallel()
	s := newStage(10)
	s.here = 50
	s.pass(5 * time.Second)
	s.here, s.items = 0, 0
	s.pass(time.Second)
	s.rate, s.here = 1000, 400
	s.pass(time.Second)
	if rate, known := s.Rate(s.now); !known || rate < 350 {
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

func TestSlowStageIsKnownByFewItems(t *testing.T) {
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
	if rate, known := s.Rate(s.now); known {
		t.Errorf("a rate of %f from two minutes ago", rate)
	}
}

func TestOldSampleRefusesNobody(t *testing.T) {
	t.Parallel()
	s := newStage(100)
	s.here, s.bounds = 500, 1000
	s.pass(2 * time.Second)
	later := s.now.Add(6 * time.Second)
	if wait, known := s.Queue.Wait(pipeline.Normal, later); known {
		t.Errorf("the wait is %s", wait)
	}
	if full, _ := s.Full(pipeline.Normal, later); full {
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
	if rate, _ := s.Rate(s.now); rate < 90 || rate > 110 {
		t.Errorf("rate %f, it is 100", rate)
	}
}

func TestClassesLeaveRoomForThoseAbove(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		items             uint64
		high, normal, low bool
	}{
		{699, false, false, false}, {700, false, false, true}, {800, false, true, true}, {900, true, true, true}, {1000, true, true, true},
	} {
		var q load.Queue
		now := time.Unix(1000, 0)
		q.Observe(load.Sample{At: now, Taken: now, Items: load.PerClass{0, row.items, 0}, MaxItems: 1000})
		for class, want := range map[pipeline.Class]bool{pipeline.High: row.high, pipeline.Normal: row.normal, pipeline.Low: row.low} {
			if full, _ := q.Full(class, now); full != want {
				t.Errorf("%d of 1000, %s: full %t", row.items, class, full)
			}
		}
	}
}

func TestQueueIsFullByBytesToo(t *testing.T) {
	t.Parallel()
	var q load.Queue
	now := time.Unix(1000, 0)
	q.Observe(load.Sample{At: now, Taken: now, Items: load.PerClass{0, 8, 0}, Total: 8, Bytes: 799, MaxBytes: 1000, MaxItems: 1000})
	if full, _ := q.Full(pipeline.Normal, now); !full {
		t.Error("eight items of 100 bytes leave no room in eight tenths of 1000 bytes")
	}
	if full, _ := q.Full(pipeline.High, now); full {
		t.Error("high has nine tenths")
	}
}

func TestSmallQueueCanBeUsed(t *testing.T) {
	t.Parallel()
	var q load.Queue
	now := time.Unix(1000, 0)
	q.Observe(load.Sample{At: now, Taken: now, Items: load.PerClass{0, 3, 0}, MaxItems: 4})
	if full, _ := q.Full(pipeline.Normal, now); full {
		t.Error("three of four, and full")
	}
	q.Sent(pipeline.Normal)
	if full, _ := q.Full(pipeline.Normal, now); !full {
		t.Error("four of four, and not full")
	}
	q.Done()
	if full, _ := q.Full(pipeline.Normal, now); full {
		t.Error("one is answered, and it is full")
	}
}

func TestFullQueueSaysWhenItHasRoom(t *testing.T) {
	t.Parallel()
	s := newStage(100)
	s.here, s.bounds = 500, 1000
	s.pass(2 * time.Second)
	full, free := s.Full(pipeline.Normal, s.now)
	// 800 wait, of which one is too many.
	if !full || free > 600*time.Millisecond {
		t.Errorf("full %t, free in %s", full, free)
	}
	s.pass(time.Second)
	if full, free = s.Full(pipeline.Normal, s.now); !full || free < 3500*time.Millisecond || free > 4500*time.Millisecond {
		t.Errorf("full %t, free in %s: 400 of 100 a second are too many", full, free)
	}
}

func TestHighClassWaitsForItsOwnOnly(t *testing.T) {
	t.Parallel()
	s := newStage(100)
	s.here = 500
	s.askedOtherwise = func(sample *load.Sample) { sample.Items = load.PerClass{10, 10, sample.Items[1] - 20} }
	s.items, s.came = 20, 20
	s.pass(2 * time.Second)
	high, _ := s.Queue.Wait(pipeline.High, s.now)
	low, _ := s.Queue.Wait(pipeline.Low, s.now)
	if high > 200*time.Millisecond || low < 6*time.Second {
		t.Errorf("high waits %s, low %s", high, low)
	}
}

// Late items are thrown away faster than others are done.
func TestRateOfWhatIsLateDoesNotCount(t *testing.T) {
	t.Parallel()
	s := newStage(400)
	s.here = 2000
	s.pass(time.Second)
	before, _ := s.wait()
	for range 20 {
		for range 10 {
			s.Done()
		}
		for range 30 {
			s.Late()
		}
		s.pass(every)
	}
	after, _ := s.wait()
	if want := 4 * s.items / 400; after.Seconds() < .8*want || after < before {
		t.Errorf("three of four are late, and the wait is %s, not %f s", after, want)
	}
	for range 50 {
		s.Done()
		s.pass(every)
	}
	s.wantWait(t, time.Duration(s.items/400*float64(time.Second)), .2)
}

// A rate that is forgotten does not come back with the next that is learnt.
func TestForgottenRateIsForgotten(t *testing.T) {
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
func TestSlowStageIsKnownBySeldomRequests(t *testing.T) {
	t.Parallel()
	s := newStage(.05)
	s.items, s.came = 50, 50
	for range 60 {
		s.next = s.now
		s.burst(1)
		s.pass(2 * time.Second)
		s.next = s.now.Add(time.Hour)
	}
	if _, known := s.Rate(s.now); !known {
		t.Error("nothing is known of a stage that has been busy for two minutes")
	}
}

func TestWhatIsTakenBackIsNotDrained(t *testing.T) {
	t.Parallel()
	s := newStage(10)
	s.items, s.came = 2000, 2000
	s.pass(2 * time.Second)
	for range 1000 {
		s.Withdrawn()
		s.items--
	}
	s.pass(time.Second)
	if rate, known := s.Rate(s.now); !known || rate > 12 {
		t.Errorf("rate %f (%t), it is 10", rate, known)
	}
}

// What this gateway has sent while the broker was asked is nobody else's.
func TestBurstDuringAQuestionIsNotTheOthersPace(t *testing.T) {
	t.Parallel()
	var q load.Queue
	now := time.Unix(1000, 0)
	q.Observe(load.Sample{At: now, Taken: now, MaxItems: 10_000})
	before := q.Own()
	for range 1000 {
		q.Sent(pipeline.Normal)
	}
	now = now.Add(every)
	q.Observe(load.Sample{At: now, Taken: now, Own: before, After: q.Own(), Items: load.PerClass{0, 1000, 0}, Total: 1000, Last: 1000, MaxItems: 10_000})
	for range 1000 {
		q.Done()
	}
	now = now.Add(900 * time.Millisecond)
	if items := q.Items(pipeline.Low, now); items > 1000 {
		t.Errorf("%f items, all of which are answered", items)
	}
	if full, _ := q.Full(pipeline.Normal, now); full {
		t.Error("full")
	}
}

// The items by class are counted a moment after the others: what came in between
// has not been drained.
func TestBurstWhileTheBrokerCountsIsNotDrained(t *testing.T) {
	t.Parallel()
	s := newStage(0)
	s.here = 2000
	s.askedOtherwise = func(sample *load.Sample) { sample.Items[1] += 150 }
	s.pass(3 * time.Second)
	if rate, known := s.Rate(s.now); known {
		t.Errorf("a rate of %f of a stage that does nothing", rate)
	}
}

// Whatever the broker says, the estimate stays a number.
func FuzzObserve(f *testing.F) {
	f.Add(uint64(1), uint64(5), int64(1), int64(100), true)
	f.Add(uint64(0), uint64(1<<63), int64(-1), int64(-1), false)
	f.Fuzz(func(t *testing.T, items, last uint64, maxItems, millis int64, busy bool) {
		var q load.Queue
		now := time.Unix(1000, 0)
		for i := range 3 {
			q.Observe(load.Sample{At: now, Taken: now, Items: load.PerClass{items, items / 2, items}, Total: items, Last: last * uint64(i), MaxItems: maxItems, MaxBytes: maxItems, Bytes: last, Busy: busy})
			now = now.Add(time.Duration(millis%5000) * time.Millisecond)
		}
		if wait, _ := q.Wait(pipeline.Low, now); wait < 0 || wait > time.Hour {
			t.Errorf("wait %s", wait)
		}
		if _, free := q.Full(pipeline.Low, now); free < 0 || free > time.Hour {
			t.Errorf("free in %s", free)
		}
	})
}
