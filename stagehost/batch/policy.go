package batch

import "time"

// decision is what happens to a group while a worker is idle: it is
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
	default:
		return eager(g, now, idle)
	}
}

// full reports whether waiting could add nothing to the group's next batch: it
// either fills a limit or leaves an item over.
func (b *Batcher) full(g *group) bool {
	return g.rows >= b.settings.MaxSize || b.settings.MaxBytes > 0 && g.bytes >= b.settings.MaxBytes
}

// window holds from the oldest item's arrival.
func window(g *group, now time.Time, maxWait time.Duration) decision {
	return hold(g, now, g.oldest().Add(maxWait), Timer)
}

// eager holds only for stragglers.
func eager(g *group, now time.Time, idle int) decision {
	until, gathering := g.gather.hold(now, g.items, idle)
	switch {
	case gathering:
		g.gathered = true
		return hold(g, now, until, Gather)
	case g.gathered:
		return dispatch(Gather)
	default:
		return dispatch(Idle)
	}
}

// hold holds the group until a time, or until it might be too late for one of
// its items.
func hold(g *group, now, until time.Time, reason Reason) decision {
	if latest, ok := g.latestStart(); ok && latest.Before(until) {
		until, reason = latest, Deadline
	}
	if !now.Before(until) {
		return dispatch(reason)
	}
	return decision{until: until}
}

const (
	// gatherShare is the part of a run's time that is spent waiting for the
	// first straggler, and again for those that follow it.
	gatherShare = 5
	// gatherLeast is the least time that is worth a timer.
	gatherLeast = 100 * time.Microsecond
	// returnShare is the share of stragglers that must be known to come back
	// in time for them to be waited for.
	returnShare = 0.7
	// returnFade is how many watches the share is the fading mean of.
	returnFade = 8
)

// gather decides for one key whether the stragglers of the batches that ended
// last are worth waiting for. A straggler is an item that may arrive soon
// because a caller got its answer: every item of a batch stands for one, for
// as long as the batch ran.
//
// From the moment when a worker is idle and an item is there, gather watches
// how many stragglers come: for limit, and for limit again from when the first
// of them came. It watches whether or not the items there are held meanwhile.
// Callers that ask again as soon as they are answered come back nearly all.
// Arrivals at random do not, as the watch is so much shorter than the run in
// which as many came. So the share that came tells the two apart at no cost,
// and holding ends where it is in vain.
type gather struct {
	// owed stragglers are still out; asked were when the watch began.
	owed, asked int
	limit       time.Duration
	// stale is when those out are forgotten if no watch has begun.
	stale time.Time
	// until is when the watch ends; zero until it begins.
	until time.Time
	// returning is the share that came back lately.
	returning float64
}

// finished counts the items of a batch that has ended as stragglers, unless
// traffic is single-file: one item ran and none is queued.
func (g *gather) finished(now time.Time, run Run, queued int, maxWait time.Duration) {
	g.refresh(now)
	// The limit applies twice, max_wait to both together.
	limit := min(run.Took/gatherShare, maxWait/2)
	if run.Items+queued < 2 || limit < gatherLeast {
		return
	}
	g.owed += run.Items
	g.asked += run.Items
	g.limit = limit
	g.stale = now.Add(run.Took)
}

// arrived counts an item as a straggler that came back.
func (g *gather) arrived(now time.Time) {
	g.refresh(now)
	if g.owed == 0 {
		return
	}
	if g.watching() && g.owed == g.asked {
		g.until = now.Add(g.limit)
	}
	g.owed--
	if g.owed == 0 {
		g.close()
	}
}

// hold returns how long items may be held, with that many queued and that many
// workers idle. It is false where there is nothing to hold them for, which is
// also when each of the idle workers would get its part of all that is
// expected.
func (g *gather) hold(now time.Time, queued, idle int) (time.Time, bool) {
	g.refresh(now)
	if g.owed == 0 {
		return time.Time{}, false
	}
	if !g.watching() {
		g.until = now.Add(g.limit)
		g.asked = g.owed
	}
	complete := queued*idle >= queued+g.owed
	return g.until, !complete && g.returning >= returnShare
}

func (g *gather) watching() bool { return !g.until.IsZero() }

// refresh ends a watch whose time is over and forgets stragglers that are out
// for too long.
func (g *gather) refresh(now time.Time) {
	if g.watching() && !now.Before(g.until) || !g.watching() && now.After(g.stale) {
		g.close()
	}
}

// close ends the watch, if there is one, and learns from it.
func (g *gather) close() {
	if g.watching() {
		came := float64(g.asked-g.owed) / float64(g.asked)
		g.returning += (came - g.returning) / returnFade
	}
	g.owed, g.asked, g.until = 0, 0, time.Time{}
}
