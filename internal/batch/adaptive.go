package batch

import (
	"math"
	"math/bits"
	"slices"
	"time"
)

const (
	// shortestDelay and delayEdges are the resolution and the extent of a histogram: 29
	// edges from 50 us to 819 ms, two for each doubling.
	shortestDelay = 50 * time.Microsecond
	delayEdges    = 30
	// recentDelays is how many delays a histogram holds before they count for half.
	recentDelays = 512
	// recentRuns is how many ended batches callers are expected of.
	recentRuns = 8
)

// traffic is what the arrivals of one key have taught the adaptive mode: how fast
// callers return after a batch, and how closely requests follow each other.
type traffic struct {
	// answered are the batches that ended last with callers who have not returned, the
	// latest last; expected is the sum of these callers.
	answered []answered
	expected int
	// returns are the delays from the end of a batch to the return of a caller. gaps
	// are those between arrivals: while no caller was expected, and while one was.
	returns     delays
	gaps        [2]delays
	lastArrival time.Time
	// arrivals are those since the last dispatch. lone is true where the last run had
	// one item, and no other arrived meanwhile.
	arrivals int
	lone     bool
	// held is the fading mean time, in seconds, for which batches were held.
	held float64
}

// answered is a batch that has ended.
type answered struct {
	at   time.Time
	left int
}

// recordArrival counts an item as one of a caller of the latest batch that expects one.
// Arrivals at random count so too. They look like callers that return after random
// delays, which is as good a prediction as any.
func (t *traffic) recordArrival(now time.Time) {
	t.arrivals++
	if !t.lastArrival.IsZero() {
		t.gapsNow().record(now.Sub(t.lastArrival), 1)
	}
	t.lastArrival = now
	if t.expected == 0 {
		return
	}
	t.expected--
	last := len(t.answered) - 1
	t.returns.record(now.Sub(t.answered[last].at), 1)
	if t.answered[last].left--; t.answered[last].left == 0 {
		t.answered = t.answered[:last]
	}
}

// recordFinish expects the callers of a batch that has ended.
func (t *traffic) recordFinish(now time.Time, items int) {
	if t.expected == 0 {
		t.gaps[0].record(never, 1)
	}
	t.lone = items == 1 && t.arrivals == 0
	t.answered = append(t.answered, answered{now, items})
	t.expected += items
	for len(t.answered) > recentRuns || now.Sub(t.answered[0].at) > edge(delayEdges-1) {
		t.expected -= t.answered[0].left
		t.returns.record(never, t.answered[0].left)
		t.answered = slices.Delete(t.answered, 0, 1)
	}
}

// gapsNow returns the gaps that the next arrival adds to.
func (t *traffic) gapsNow() *delays { return &t.gaps[min(1, t.expected)] }

// returning returns how many callers are likely to return within d.
func (t *traffic) returning(now time.Time, d time.Duration) float64 {
	sum := 0.0
	for _, a := range t.answered {
		sum += float64(a.left) * t.returns.within(now.Sub(a.at), d)
	}
	return sum
}

// recordDispatch counts how long a batch was held.
func (t *traffic) recordDispatch(now, heldSince time.Time) {
	t.arrivals = 0
	held := 0.0
	if !heldSince.IsZero() {
		held = now.Sub(heldSince).Seconds()
	}
	t.held += (held - t.held) / recent
}

// holdForMore returns until when, at most, it pays to hold the group for more items, of
// which there is room for that many. It is false where it does not pay.
//
// The items that join save a run the time that it takes to start. All that wait lose the
// time of the hold: the items, those that join them, and those that come while they run.
// The hold that saves the most is the answer. How many join is predicted from the callers
// that are expected, or from how closely requests follow each other.
func (g *group) holdForMore(now, latest time.Time, room int) (until time.Time, holding bool) {
	t, run := &g.traffic, g.estimate.of(g.rows)
	if t.lone && g.items == 1 || run < gatherShare*gatherLeast {
		return now, false
	}
	start, _ := g.estimate.cautious()
	n, age, gaps, later := float64(g.items), now.Sub(t.lastArrival), t.gapsNow(), t.returning(now, run)
	var best, wait, last float64
	until = now
	for k := 1; k < delayEdges && until.Before(latest); k++ {
		d := min(edge(k), latest.Sub(now))
		joining := min(t.returning(now, d), float64(room))
		gain := joining*start - (n+t.returning(now, d+run))*d.Seconds()
		// The next arrival ends the hold, so items wait until then at most.
		next := gaps.within(age, d)
		wait += (1 - (next+last)/2) * max(0, d-edge(k-1)).Seconds()
		last = next
		gain = max(gain, next*start-(n+next+later)*wait)
		if gain > best {
			best, until = gain, now.Add(d)
		}
		if n*d.Seconds() > float64(max(1, t.expected))*start {
			break // a longer hold cannot pay
		}
	}
	return until, best > 0
}

const (
	// startShare is the part of its time that the start of a batch takes at least.
	startShare = 50
	// A batch of rows that run one after the other takes as long as leastInTurn, however little
	// it saves, and never longer than mostInTurn. It saves messages, some 0.2 ms for each item.
	leastInTurn, mostInTurn = 10 * time.Millisecond, 100 * time.Millisecond
	// probeEvery is the number of batches of which one is twice as large as worth says, to
	// learn whether that still holds.
	probeEvery = 32
)

// worth returns how many rows are worth running together in adaptive mode. A larger batch
// saves next to nothing, and its first item waits for its last.
func (b *Batcher) worth(g *group) int {
	e, most := &g.estimate, math.Inf(1)
	if start, row := e.cautious(); row > 0 {
		most = startShare * start / row
	}
	switch {
	case b.settings.Mode != Adaptive:
		return b.settings.MaxSize
	case b.settings.OneByOne && !e.known():
		return 1
	case b.settings.OneByOne && e.spread <= level:
		most = leastInTurn.Seconds() / e.perRow()
	case b.settings.OneByOne:
		most = max(leastInTurn.Seconds(), min(most*e.perRow(), mostInTurn.Seconds())) / e.perRow()
	}
	return max(1, int(min(most, float64(b.settings.MaxSize))))
}

// firstPart returns how many items of the group to run first. All is the rule. Where
// starting a run takes hardly any time, the first half need not wait for the second.
func (g *group) firstPart(now time.Time) int {
	start, row := g.estimate.cautious()
	run := g.estimate.of(g.rows)
	if row == 0 || run < gatherShare*gatherLeast {
		return g.items
	}
	// With this rest a split saves the most: each item of the first part saves the
	// rest's time, and all that wait lose one more start.
	n, each := float64(g.items), row*float64(g.rows)/float64(g.items)
	rest := (n - start/each) / 2
	if rest < 1 || each*rest*rest <= (n+g.traffic.returning(now, run))*start {
		return g.items
	}
	return g.items - int(rest)
}

// delays is a fading histogram of delays: how many are longer than each edge.
type delays [delayEdges]float64

// never is longer than every edge.
const never = time.Hour

// edge returns edge k: 0, then 2, 3, 4, 6, 8, 12 ... times half of shortestDelay.
func edge(k int) time.Duration {
	if k == 0 {
		return 0
	}
	return shortestDelay / 2 * time.Duration((2+(k-1)%2)<<((k-1)/2))
}

// edgeBefore returns the last edge that is not longer than a delay.
func edgeBefore(delay time.Duration) int {
	halves := uint64(delay / (shortestDelay / 2))
	if halves < 2 {
		return 0
	}
	doublings := bits.Len64(halves) - 2
	return min(delayEdges-1, 1+2*doublings+int(halves>>doublings&1))
}

func (d *delays) record(delay time.Duration, n int) {
	if d[0] > recentDelays {
		for k := range d {
			d[k] /= 2
		}
	}
	for k := range edgeBefore(delay) + 1 {
		d[k] += float64(n)
	}
}

// longer returns how many delays are longer than that.
func (d *delays) longer(than time.Duration) float64 {
	k := edgeBefore(than)
	if k == delayEdges-1 {
		return d[k]
	}
	return d[k] + (d[k+1]-d[k])*float64(than-edge(k))/float64(edge(k+1)-edge(k))
}

// within returns the share of the delays longer than age that end within d from there.
// It counts one of them less, so that one that was seen once proves nothing.
func (d *delays) within(age, next time.Duration) float64 {
	longer := d.longer(age)
	if longer < 1 {
		return 0
	}
	return max(0, longer-d.longer(age+next)-1) / longer
}
