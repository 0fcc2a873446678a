package admission

import (
	"math"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// estimator estimates, for one queue, how long an item that is queued now will be
// with its stage, and whether the queue has space for it. It knows what the broker
// reports a few times a second, and what this gateway has done since. It is pure,
// with time as an argument, and not safe for concurrent use. The zero estimator
// knows nothing and rejects nothing.
//
// It measures the stage's rate where the queue is drained as fast as its hosts
// can: between two samples at which hosts had items waiting for them. Between
// other samples only a higher rate than the known one says anything. An item's
// wait is then the work ahead of it, in the queue and in flight, divided by the
// rate (Little's law).
//
// Hosts also drain expired items, and faster than others. So the rate counts only
// as far as this gateway's own items were in time. Otherwise the gateway would
// admit more the more of them are late.
type estimator struct {
	last     sample
	observed bool
	own      counters
	// entering items of this gateway are admitted and not yet sent.
	entering int64
	// others is what other gateways and stages queue, in items a second.
	others float64
	// drained items left the queue in so many seconds in which hosts were busy;
	// learned is when that was confirmed last.
	drained, seconds float64
	learned          time.Time
	// inTime and late are of this gateway's items within about the last second.
	inTime, late float64
}

// perClass is a number for each class, the first served first.
type perClass [pipeline.ClassCount]uint64

// upTo is the sum of the classes that are served no later than this one.
func (p perClass) upTo(class int) uint64 {
	var n uint64
	for _, of := range p[:class+1] {
		n += of
	}
	return n
}

// counters count what this gateway has done.
type counters struct {
	// sent items were put into the queue. Of those, answered ones were answered in
	// time, late ones were not, and deleted ones were deleted from the queue before a
	// host received them.
	sent                    perClass
	answered, late, deleted uint64
}

// left is how many items are in no queue any more.
func (c counters) left() uint64 { return c.answered + c.late + c.deleted }

// sample is what the broker, and a host, report about a queue.
type sample struct {
	// at is when the broker was asked, taken when it looked, by its own clock.
	at, taken time.Time
	// own are the estimator's counters when the broker was asked, after those when
	// it had answered.
	own, after counters
	// epoch distinguishes a queue from its replacement.
	epoch string
	// total items wait or are in flight, bytes are theirs; last counts all that ever
	// came. They are of one moment; items, by class, may be of another.
	total, bytes, last uint64
	items              perClass
	// maxItems and maxBytes bound the queue; less than 1 means no bound.
	maxItems, maxBytes int64
	// busy is true when a host has items that wait for a slot.
	busy bool
}

const (
	// freshAge is how old a sample may be where another can be had.
	freshAge = time.Second
	// validAge is how old a sample may be to say anything about now: a broker that
	// answers slowly is no reason to admit everything.
	validAge = 5 * time.Second
	// minDrained is how many items make a rate.
	minDrained = 4
	// The evidence for a rate is of the last maxDrained items, or of the last
	// minSeconds where those are more items.
	maxDrained = 64
	minSeconds = 1
	// rateAge is how long a rate holds that nothing confirms: hosts come and go.
	rateAge = time.Minute
	// minJudged is how many items tell how many are late.
	minJudged = 8
	// minUseful keeps a stage that is late with everything from being taken for one
	// that does nothing.
	minUseful = .1
	// othersSeconds is for how long others are taken to go on at their rate.
	othersSeconds = .3
	// maxWait bounds every estimate.
	maxWait = time.Hour
)

// fresh reports whether another sample is not needed yet.
func (e *estimator) fresh(now time.Time) bool {
	return e.observed && now.Sub(e.last.at) < freshAge
}

// valid reports whether the last sample still says something.
func (e *estimator) valid(now time.Time) bool {
	return e.observed && now.Sub(e.last.at) < validAge
}

// observe takes a sample. One that was asked for before the last one is too late.
func (e *estimator) observe(s sample) {
	before, observed := e.last, e.observed
	if observed && s.at.Before(before.at) {
		return
	}
	e.last, e.observed = s, true
	took := s.taken.Sub(before.taken).Seconds()
	if !observed || before.epoch != s.epoch || took <= 0 || s.last < before.last {
		e.others = 0
		return
	}
	e.judge(before.own, s.own, took)
	came := float64(s.last - before.last)
	e.others = max(0, came-float64(s.after.sent.upTo(pipeline.ClassCount-1)-before.own.sent.upTo(pipeline.ClassCount-1))) / took
	deleted := float64(s.after.deleted - before.own.deleted)
	drained := max(0, came-deleted-(float64(s.total)-float64(before.total)))
	e.learn(drained, took, isSaturated(before, s, drained, took), s.at)
}

// isSaturated reports whether the queue was drained as fast as its hosts can: they
// had enough to do at both ends, of this queue too, and it cannot have run dry in
// between.
func isSaturated(before, s sample, drained, seconds float64) bool {
	had := float64(before.total)
	return before.busy && s.busy && had > 0 && s.total > 0 && (seconds <= freshAge.Seconds() || drained < had)
}

// judge takes how many items were in time, and how many late.
func (e *estimator) judge(before, now counters, seconds float64) {
	keep := math.Exp(-seconds)
	e.late = e.late*keep + float64(now.late-before.late)
	e.inTime = e.inTime*keep + float64(now.answered-before.answered)
}

// useful is the part of the drained items that is in time.
func (e *estimator) useful() float64 {
	if e.inTime+e.late < minJudged {
		return 1
	}
	return max(minUseful, e.inTime/(e.inTime+e.late))
}

// learn takes how many items were drained in how many seconds.
func (e *estimator) learn(drained, seconds float64, saturated bool, now time.Time) {
	if now.Sub(e.learned) >= rateAge {
		e.drained, e.seconds = 0, 0
	}
	switch rate, known := e.rate(now); {
	case saturated:
		e.drained, e.seconds = e.drained+drained, e.seconds+seconds
	case known && drained/seconds > rate:
		e.drained = drained / seconds * e.seconds
	default:
		return
	}
	e.learned = now
	if keep := max(minSeconds/e.seconds, maxDrained/e.drained); keep < 1 {
		e.drained, e.seconds = e.drained*keep, e.seconds*keep
	}
}

// rate is how many items a second the stage takes off the queue when it has
// enough to do, where that is known.
func (e *estimator) rate(now time.Time) (perSecond float64, known bool) {
	known = e.drained >= minDrained && now.Sub(e.learned) < rateAge
	if !known {
		return 0, false
	}
	return e.drained / e.seconds, true
}

// items is how many items of the class, and of those served before it, the queue
// has by now: what the last sample had, what has come and left since, and what is about to come.
func (e *estimator) items(class pipeline.Class, now time.Time) float64 {
	since := now.Sub(e.last.at).Seconds()
	i := class.Index()
	came := float64(e.own.sent.upTo(i)-e.last.own.sent.upTo(i)) + e.others*min(since, othersSeconds)
	left := float64(e.own.left() - e.last.own.left())
	if rate, known := e.rate(now); known {
		left = max(left, rate*since)
	}
	return max(0, float64(e.last.items.upTo(i))+came-left) + float64(e.entering)
}

// wait is how long an item of the class will be with the stage, where that is
// known and hosts have items that wait for them: else it runs at once.
func (e *estimator) wait(class pipeline.Class, now time.Time) (wait time.Duration, known bool) {
	rate, known := e.rate(now)
	if !known || !e.last.busy || !e.valid(now) {
		return 0, false
	}
	return durationOf(e.items(class, now) / (rate * e.useful())), true
}

// full reports whether the class may fill no more of the queue, and how long it
// takes until it may: 0 where that is not known.
func (e *estimator) full(class pipeline.Class, now time.Time) (full bool, free time.Duration) {
	excess := e.excess(class, now)
	if excess <= 0 {
		return false, 0
	}
	rate, known := e.rate(now)
	if !known {
		return true, 0
	}
	return true, durationOf(excess / rate)
}

// isGreedy reports whether a tenant with so many items, one more included, leaves too little of
// the queue to others. Some of them may have left the queue.
func (e *estimator) isGreedy(own int64, class pipeline.Class, now time.Time) bool {
	own = min(own, int64(e.items(pipeline.Low, now))+1)
	return budget.IsGreedy(own, int64(min(-e.excess(class, now), math.MaxInt32)))
}

// excess is how many items are too many for one more; with room for more it is negative.
func (e *estimator) excess(class pipeline.Class, now time.Time) float64 {
	if !e.valid(now) {
		return math.Inf(-1)
	}
	return max(e.excessItems(class, now), e.excessBytes(class, now))
}

func (e *estimator) excessItems(class pipeline.Class, now time.Time) float64 {
	if e.last.maxItems < 1 {
		return math.Inf(-1)
	}
	return e.items(pipeline.Low, now) + 1 - shareOf(e.last.maxItems, class)
}

// excessBytes is the same by bytes, in items of the mean size.
func (e *estimator) excessBytes(class pipeline.Class, now time.Time) float64 {
	items := float64(e.last.total)
	if e.last.maxBytes < 1 || e.last.bytes == 0 || items == 0 {
		return math.Inf(-1)
	}
	size := float64(e.last.bytes) / items
	return e.items(pipeline.Low, now) + 1 - shareOf(e.last.maxBytes, class)/size
}

// shareOf is what a class may fill of a bound: nine, eight or seven tenths. The
// rest is for the classes above, and for items that stages forward to each other,
// which nobody rejects. It rounds up, so that a small queue can be used.
func shareOf(bound int64, class pipeline.Class) float64 {
	return float64(bound - bound*int64(class.Index()+1)/10)
}

func durationOf(seconds float64) time.Duration {
	return time.Duration(min(seconds, maxWait.Seconds()) * float64(time.Second))
}
