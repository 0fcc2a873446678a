package batch

import (
	"cmp"
	"time"
)

// decision is what happens to a group while a slot is idle: it is
// dispatched for a reason, or else held until a time.
type decision struct {
	reason Reason
	until  time.Time
}

func dispatch(r Reason) decision { return decision{reason: r} }

// decide decides about a group that is not empty.
func (b *Batcher) decide(g *group, now time.Time, idle int) decision {
	switch {
	case !g.alone && b.full(g):
		return dispatch(Full)
	case b.draining:
		return dispatch(Drain)
	case g.alone:
		return dispatch(Idle)
	case b.settings.Mode == Window:
		return window(g, now, b.settings.MaxWait)
	case g.rows >= b.worth(g):
		return dispatch(Idle)
	default:
		return b.eager(g, now, idle)
	}
}

// full reports whether waiting could add nothing to the group's next batch: it
// either fills a limit or leaves an item over.
func (b *Batcher) full(g *group) bool {
	return g.rows >= b.settings.MaxSize || b.settings.MaxBytes > 0 && g.bytes >= b.settings.MaxBytes || b.overPadded(g.rows, g.longest()) < len(g.padded)
}

// window holds from the oldest item's arrival.
func window(g *group, now time.Time, maxWait time.Duration) decision {
	return hold(g, now, g.oldest().Add(maxWait), Timer)
}

// eager holds for returning callers, and in adaptive mode, while one slot alone is idle,
// for whatever is likely to come.
func (b *Batcher) eager(g *group, now time.Time, idle int) decision {
	until, holding := g.gather.hold(now, g.items, idle)
	if b.settings.Mode == Adaptive && idle == 1 {
		latest := cmp.Or(g.heldSince, now).Add(b.settings.MaxWait)
		until, holding = g.holdForMore(now, latest, b.settings.MaxSize-g.rows)
	}
	switch {
	case holding:
		g.heldSince = cmp.Or(g.heldSince, now)
		return hold(g, now, until, Gather)
	case !g.heldSince.IsZero():
		return dispatch(Gather)
	default:
		return dispatch(Idle)
	}
}

// hold holds the group until a time, or until it might be too late for one of
// its items.
func hold(g *group, now, until time.Time, reason Reason) decision {
	if latest, ok := g.latestStart(); ok && !latest.After(until) {
		until, reason = latest, Deadline
	}
	if !now.Before(until) {
		return dispatch(reason)
	}
	return decision{until: until}
}

const (
	// gatherShare is the part of a run's time that is spent waiting for the
	// first returning caller, and again for those that follow.
	gatherShare = 5
	// gatherLeast is the least time that is worth a timer.
	gatherLeast = 100 * time.Microsecond
	// minReturnRate is the share of callers that must have returned in time lately
	// for gather to hold items.
	minReturnRate = 0.7
	// returnFade is how many windows the rate is the fading mean of.
	returnFade = 8
)

// gather decides for one key whether to hold items for the returning callers of
// the batches that ended last. A returning caller is one that may send its next
// request soon because it got its reply. Every item of a batch stands for one,
// for as long as the batch ran.
//
// The observation window begins when a slot is idle and an item is queued. It
// lasts for limit, and for limit again from the first arrival. In the window,
// gather counts how many callers return, whether or not it holds items meanwhile.
// Callers that ask again as soon as they get a reply return nearly all. Arrivals
// at random do not, because the window is much shorter than the run in which as
// many arrived. So the share that returns tells the two apart at no cost, and
// gather holds no items where that would be in vain.
type gather struct {
	// expected callers have not returned yet; expectedAtStart is their number when the
	// window began.
	expected, expectedAtStart int
	limit                     time.Duration
	// staleAt is when expected callers are forgotten if no window has begun.
	staleAt time.Time
	// windowEnd is when the window ends; zero until it begins.
	windowEnd time.Time
	// returnRate is the fading mean of the share of callers that returned.
	returnRate float64
}

// finished counts the items of a batch that has ended as expected callers, unless
// traffic is single-file: one item ran and none is queued.
func (g *gather) finished(now time.Time, run Run, queued int, maxWait time.Duration) {
	g.refresh(now)
	// The limit applies twice, max_wait to both together.
	limit := min(run.Took/gatherShare, maxWait/2)
	if run.Items+queued < 2 || limit < gatherLeast {
		return
	}
	g.expected += run.Items
	g.expectedAtStart += run.Items
	g.limit = limit
	g.staleAt = now.Add(run.Took)
}

// recordArrival counts an item as one of a returning caller.
func (g *gather) recordArrival(now time.Time) {
	g.refresh(now)
	if g.expected == 0 {
		return
	}
	if g.observing() && g.expected == g.expectedAtStart {
		g.windowEnd = now.Add(g.limit)
	}
	g.expected--
	if g.expected == 0 {
		g.endWindow()
	}
}

// hold returns how long items may be held, with that many queued and that many
// slots idle. It is false where there is nothing to hold them for, also when each
// idle slot would get its part of all expected items.
func (g *gather) hold(now time.Time, queued, idle int) (time.Time, bool) {
	g.refresh(now)
	if g.expected == 0 {
		return time.Time{}, false
	}
	if !g.observing() {
		g.windowEnd = now.Add(g.limit)
		g.expectedAtStart = g.expected
	}
	complete := queued*idle >= queued+g.expected
	return g.windowEnd, !complete && g.returnRate >= minReturnRate
}

func (g *gather) observing() bool { return !g.windowEnd.IsZero() }

// refresh ends a window whose time has passed, and forgets callers that were
// expected for too long.
func (g *gather) refresh(now time.Time) {
	if g.observing() && !now.Before(g.windowEnd) || !g.observing() && now.After(g.staleAt) {
		g.endWindow()
	}
}

// endWindow ends the window, if there is one, and learns from it.
func (g *gather) endWindow() {
	if g.observing() {
		came := float64(g.expectedAtStart-g.expected) / float64(g.expectedAtStart)
		g.returnRate += (came - g.returnRate) / returnFade
	}
	g.expected, g.expectedAtStart, g.windowEnd = 0, 0, time.Time{}
}
