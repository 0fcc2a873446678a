// Package load estimates how long an item that is queued now will be with its
// stage, and whether its queue has room for it, from what the broker says about
// the queue every now and then.
//
//	var q load.Queue
//	q.Observe(sample)             // what the broker said, a few times a second
//	q.Sent(class)                 // after each item that this gateway queued
//	q.Done()                      // after each that is answered
//	q.Late()                      // after each whose time was over before
//	wait, ok := q.Wait(class, now)
//	full, free := q.Full(class, now)
//
// The rate is measured where a queue is drained as fast as its hosts can, that
// is between two samples at which hosts had items waiting for them; between
// others only a higher rate than was known says anything. The time that an item
// is with the stage is then what is ahead of it by that rate (Little's law), with
// what is in the hosts' hands.
//
// Items whose time is over are drained, too, and faster than others. So the rate
// counts only as far as this gateway's own items were in time: else the more of
// them are late the more would be let in.
//
// A Queue is pure, with time as an argument, and not safe for concurrent use.
package load

import (
	"math"
	"time"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// classes is how many there are; they are in the order of pipeline.Classes.
const classes = 3

// PerClass is a number for each class, the first served first.
type PerClass [classes]uint64

// upTo is the sum of the classes that are served no later than this one.
func (p PerClass) upTo(class int) uint64 {
	var n uint64
	for _, of := range p[:class+1] {
		n += of
	}
	return n
}

func (p PerClass) total() uint64 { return p.upTo(classes - 1) }

// Sample is what the broker, and a host, say about a queue.
type Sample struct {
	// At is when the broker was asked, Taken when it looked, by its own clock.
	At, Taken time.Time
	// Own is what the queue's Own was when the broker was asked, After when it had
	// answered.
	Own, After Own
	// Epoch tells a queue from its replacement.
	Epoch string
	// Total items wait or are in hand, Bytes are theirs; Last counts all that ever
	// came. They are of one moment; Items, by class, may be of another.
	Total, Bytes, Last uint64
	Items              PerClass
	// MaxItems and MaxBytes bound the queue; less than 1 means that nothing does.
	MaxItems, MaxBytes int64
	// Busy says that a host has items that wait for a slot.
	Busy bool
}

const (
	// Fresh is how old a sample may be where another can be had.
	Fresh = time.Second
	// valid is how old one may be to say anything about now: a broker that is slow
	// to answer is no reason to let everybody in.
	valid = 5 * time.Second
	// leastDrained is how many items make a rate.
	leastDrained = 4
	// The evidence for a rate is of the last drainedKept items, or of the last
	// second where those are more.
	drainedKept = 64
	secondsKept = 1
	// remembered is how long a rate holds that nothing confirms: hosts come and
	// go.
	remembered = time.Minute
)

// Queue is what is known of one queue. The zero Queue knows nothing.
type Queue struct {
	last Sample
	seen bool
	own  Own
	// others is what other gateways and stages queue, in items a second.
	others float64
	// drained items in so many seconds in which hosts were busy; learned is when
	// that was confirmed last.
	drained, seconds float64
	learned          time.Time
	// inTime and late are of this gateway's items within about the last second.
	inTime, late float64
}

// Own counts what this gateway has done.
type Own struct {
	// Sent items were put into the queue. Done ones have been answered in time
	// since, and Late ones were not, so neither are in a queue. Withdrawn ones were
	// taken back: nobody has drained them.
	Sent                  PerClass
	Done, Late, Withdrawn uint64
}

// Own returns what this gateway has done so far.
func (q *Queue) Own() Own { return q.own }

// Sent says that this gateway has queued an item.
func (q *Queue) Sent(class pipeline.Class) { q.own.Sent[indexOf(class)]++ }

// Done says that an item has been answered in time whose route has the queue.
func (q *Queue) Done() { q.own.Done++ }

// Late says that an item had no answer in time which was expected to wait in the
// queue for longer than in any other.
func (q *Queue) Late() { q.own.Late++ }

// Withdrawn says that an item has been taken back.
func (q *Queue) Withdrawn() { q.own.Withdrawn++ }

// Seen reports whether the broker has ever said anything of the queue.
func (q *Queue) Seen() bool { return q.seen }

// Fresh reports whether another sample is not needed yet.
func (q *Queue) Fresh(now time.Time) bool { return q.seen && now.Sub(q.last.At) < Fresh }

// knows reports whether the last sample still says something.
func (q *Queue) knows(now time.Time) bool { return q.seen && now.Sub(q.last.At) < valid }

// Observe takes what the broker says. What it said before it was asked last comes
// too late.
func (q *Queue) Observe(s Sample) {
	before, seen := q.last, q.seen
	if seen && s.At.Before(before.At) {
		return
	}
	q.last, q.seen = s, true
	took := s.Taken.Sub(before.Taken).Seconds()
	if !seen || before.Epoch != s.Epoch || took <= 0 || s.Last < before.Last {
		q.others = 0
		return
	}
	q.judge(before.Own, s.Own, took)
	came := float64(s.Last - before.Last)
	q.others = max(0, came-float64(s.After.Sent.total()-before.Own.Sent.total())) / took
	withdrawn := float64(s.After.Withdrawn - before.Own.Withdrawn)
	drained := max(0, came-withdrawn-(float64(s.Total)-float64(before.Total)))
	q.learn(drained, took, saturated(before, s, drained, took), s.At)
}

// saturated reports whether the queue was drained as fast as its hosts can: they
// had enough to do at both ends, of this queue too, and it cannot have run dry in
// between.
func saturated(before, s Sample, drained, seconds float64) bool {
	had := float64(before.Total)
	return before.Busy && s.Busy && had > 0 && s.Total > 0 && (seconds <= Fresh.Seconds() || drained < had)
}

// leastJudged is how many items tell how many are late.
const leastJudged = 8

// judge takes how many items were in time, and how many late.
func (q *Queue) judge(before, now Own, seconds float64) {
	keep := math.Exp(-seconds)
	q.late = q.late*keep + float64(now.Late-before.Late)
	q.inTime = q.inTime*keep + float64(now.Done-before.Done)
}

// useful is the part of what is drained that is in time.
func (q *Queue) useful() float64 {
	if q.inTime+q.late < leastJudged {
		return 1
	}
	return max(leastUseful, q.inTime/(q.inTime+q.late))
}

// leastUseful keeps a stage that is late with everything from being taken for one
// that does nothing.
const leastUseful = .1

// learn takes how many items were drained in how many seconds.
func (q *Queue) learn(drained, seconds float64, busy bool, now time.Time) {
	if now.Sub(q.learned) >= remembered {
		q.drained, q.seconds = 0, 0
	}
	switch rate, known := q.Rate(now); {
	case busy:
		q.drained, q.seconds = q.drained+drained, q.seconds+seconds
	case known && drained/seconds > rate:
		q.drained = drained / seconds * q.seconds
	default:
		return
	}
	q.learned = now
	if keep := max(secondsKept/q.seconds, drainedKept/q.drained); keep < 1 {
		q.drained, q.seconds = q.drained*keep, q.seconds*keep
	}
}

// Rate is how many items a second the stage takes off the queue when it has
// enough to do, where that is known.
func (q *Queue) Rate(now time.Time) (float64, bool) {
	known := q.drained >= leastDrained && now.Sub(q.learned) < remembered
	if !known {
		return 0, false
	}
	return q.drained / q.seconds, true
}

// left is how many items are in no queue any more.
func (o Own) left() uint64 { return o.Done + o.Late + o.Withdrawn }

// othersKept is for how many seconds others are taken to go on as they did.
const othersKept = .3

// Items is how many items of the class, and of those before it, the queue has by
// now: what the broker said, and what has come and gone since.
func (q *Queue) Items(class pipeline.Class, now time.Time) float64 {
	since := now.Sub(q.last.At).Seconds()
	i := indexOf(class)
	came := float64(q.own.Sent.upTo(i)-q.last.Own.Sent.upTo(i)) + q.others*min(since, othersKept)
	gone := float64(q.own.left() - q.last.Own.left())
	if rate, known := q.Rate(now); known {
		gone = max(gone, rate*since)
	}
	return max(0, float64(q.last.Items.upTo(i))+came-gone)
}

// Wait is how long an item of the class will be with the stage, where that is
// known and hosts have items that wait for them: else it runs at once.
func (q *Queue) Wait(class pipeline.Class, now time.Time) (time.Duration, bool) {
	rate, known := q.Rate(now)
	if !known || !q.last.Busy || !q.knows(now) {
		return 0, false
	}
	return seconds(q.Items(class, now) / (rate * q.useful())), true
}

// Full reports whether the class may fill no more of the queue, and how long it
// takes until it may: 0 where that is not known.
func (q *Queue) Full(class pipeline.Class, now time.Time) (full bool, free time.Duration) {
	if !q.knows(now) {
		return false, 0
	}
	over := max(q.overItems(class, now), q.overBytes(class, now))
	if over <= 0 {
		return false, 0
	}
	rate, known := q.Rate(now)
	if !known {
		return true, 0
	}
	return true, seconds(over / rate)
}

// overItems is how many items are too many for one more.
func (q *Queue) overItems(class pipeline.Class, now time.Time) float64 {
	if q.last.MaxItems < 1 {
		return 0
	}
	return q.Items(pipeline.Low, now) + 1 - most(q.last.MaxItems, class)
}

// overBytes is the same by bytes, in items of the mean size.
func (q *Queue) overBytes(class pipeline.Class, now time.Time) float64 {
	items := float64(q.last.Total)
	if q.last.MaxBytes < 1 || q.last.Bytes == 0 || items == 0 {
		return 0
	}
	size := float64(q.last.Bytes) / items
	return q.Items(pipeline.Low, now) + 1 - most(q.last.MaxBytes, class)/size
}

// most is what a class may fill of a bound: nine, eight or seven tenths. The rest
// is for the classes above, and for what stages pass on to each other, which
// nobody refuses. It is rounded down, so that a small queue can be used.
func most(bound int64, class pipeline.Class) float64 {
	return float64(bound - bound*int64(indexOf(class)+1)/10)
}

func indexOf(class pipeline.Class) int {
	switch class {
	case pipeline.High:
		return 0
	case pipeline.Low:
		return 2
	default:
		return 1
	}
}

const longest = time.Hour

func seconds(s float64) time.Duration {
	return time.Duration(min(s, longest.Seconds()) * float64(time.Second))
}
