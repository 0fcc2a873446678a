package supervise

import "time"

// Tick does what is due.
func (m *Machine) Tick(now time.Time) []Action {
	m.forgive(now)
	switch {
	case due(m.startAt, now):
		return m.spawn(now)
	case due(m.killAt, now):
		return m.kill(ErrStopLimit, now)
	case due(m.startLimit(), now):
		return m.fail(ErrStartLimit, now)
	case due(m.runLimit(), now):
		return m.fail(ErrRunLimit, now)
	case due(m.pingLimit(), now):
		return m.fail(ErrSilent, now)
	case due(m.ask(), now):
		return m.ping(now)
	}
	return nil
}

// Wake returns when Tick has something to do; the zero time is never.
func (m *Machine) Wake() time.Time {
	var next time.Time
	for _, at := range []time.Time{m.startAt, m.killAt, m.startLimit(), m.runLimit(), m.pingLimit(), m.ask(), m.settledAt()} {
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next
}

func due(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }

// after is never where the limit is none.
func after(at time.Time, limit time.Duration) time.Time {
	if limit <= 0 || at.IsZero() {
		return time.Time{}
	}
	return at.Add(limit)
}

func (m *Machine) startLimit() time.Time {
	if m.state != Startup {
		return time.Time{}
	}
	return after(m.since, m.settings.StartLimit)
}

// runLimit is when the batch that began first has taken too long.
func (m *Machine) runLimit() time.Time {
	if m.state != Ready {
		return time.Time{}
	}
	var first time.Time
	for _, began := range m.batches {
		if first.IsZero() || began.Before(first) {
			first = began
		}
	}
	return after(first, m.settings.RunLimit)
}

func (m *Machine) pingLimit() time.Time {
	if m.state != Ready {
		return time.Time{}
	}
	return after(m.pinged, m.settings.HeartbeatLimit)
}

// ask is when an idle worker is asked next.
func (m *Machine) ask() time.Time {
	if m.state != Ready || m.settings.Heartbeat <= 0 || len(m.batches) > 0 || !m.pinged.IsZero() {
		return time.Time{}
	}
	return m.nextAsk
}

func (m *Machine) ping(now time.Time) []Action {
	m.pinged = now
	for i := range m.ranks {
		m.ranks[i].quiet = true
	}
	return m.do(Ping)
}

// settledAt is when a worker that died before has been ready for long enough.
func (m *Machine) settledAt() time.Time {
	if m.deaths == 0 || m.state != Ready {
		return time.Time{}
	}
	return m.readySince.Add(m.settings.Settled)
}

// forgive forgets earlier deaths of a worker that has been ready for a while.
func (m *Machine) forgive(now time.Time) {
	if due(m.settledAt(), now) {
		m.deaths, m.cause = 0, nil
	}
}
