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
	until, gathering := g.history.gather.hold(now, g.items, idle)
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
