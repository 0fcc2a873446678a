package supervise

import (
	"fmt"
	"time"
)

// Tick does what is due. Work has to be told before.
func (m *Machine) Tick(now time.Time) []Action {
	m.forgive(now)
	switch {
	case due(m.startAt, now):
		return m.spawn(now)
	case due(m.killAt, now):
		return m.fail(ErrStopLimit, now)
	case due(m.startLimit(), now):
		return m.fail(m.tooSlow(), now)
	case due(m.runLimit(), now) && !m.work.Oldest.IsZero():
		return m.fail(ErrRunLimit, now)
	case due(m.pingLimit(), now):
		return m.fail(ErrSilent, now)
	case due(m.askAt(), now):
		return m.ping(now)
	}
	return nil
}

// Wake returns when Tick has something to do; the zero time is never.
func (m *Machine) Wake() time.Time {
	var next time.Time
	for _, at := range []time.Time{m.startAt, m.killAt, m.startLimit(), m.runLimit(), m.pingLimit(), m.askAt(), m.settledAt()} {
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

func (m *Machine) tooSlow() error {
	if m.doing == "" {
		return ErrStartLimit
	}
	return fmt.Errorf("%w; it said last: %s", ErrStartLimit, m.doing)
}

// Work is what a worker has to do.
type Work struct {
	// Oldest is when the batch began, or showed last that it goes on, that has been
	// silent for longest; zero where it has none.
	Oldest time.Time
	// Ended is when it finished one last; zero where it has not.
	Ended time.Time
}

// Work says what the worker has to do. It is to be told before every Tick, and
// when a worker that is being recycled has finished its last batch.
func (m *Machine) Work(of Incarnation, w Work, now time.Time) []Action {
	if of != m.incarnation || m.state == Dead {
		return nil
	}
	m.work, m.looked = w, now
	if !w.Ended.IsZero() {
		m.deaths, m.cause = 0, nil
		if next := w.Ended.Add(m.settings.Heartbeat); next.After(m.nextAsk) {
			m.nextAsk = next
		}
	}
	return m.recycle(now)
}

// runLimit is when the oldest batch has been silent for too long; where there is
// none, when one that began since would have been.
func (m *Machine) runLimit() time.Time {
	switch {
	case m.state != Ready:
		return time.Time{}
	case m.work.Oldest.IsZero():
		return after(m.looked, m.settings.RunLimit)
	default:
		return after(m.work.Oldest, m.settings.RunLimit)
	}
}

// pingLimit is when a ping has been unanswered for too long. It holds also when a
// batch came after the ping, which is answered first.
func (m *Machine) pingLimit() time.Time {
	if m.state != Ready {
		return time.Time{}
	}
	return after(m.pinged, m.settings.HeartbeatLimit)
}

// askAt is when an idle worker is asked next, or looked at again whether it is idle.
func (m *Machine) askAt() time.Time {
	if m.state != Ready || m.settings.Heartbeat <= 0 || !m.pinged.IsZero() {
		return time.Time{}
	}
	return m.nextAsk
}

func (m *Machine) ping(now time.Time) []Action {
	if !m.work.Oldest.IsZero() {
		m.nextAsk = now.Add(m.settings.Heartbeat)
		return nil
	}
	m.pinged = now
	for i := range m.ranks {
		m.ranks[i].quiet = true
	}
	return m.do(Ping)
}

// Pong says that a rank has answered, or was not asked, as it has got a batch
// meanwhile.
func (m *Machine) Pong(of Incarnation, rank int, now time.Time) {
	if !m.current(of, rank) {
		return
	}
	m.ranks[rank].quiet = false
	for _, r := range m.ranks {
		if r.quiet {
			return
		}
	}
	m.answered(now)
}

// answered books that nobody owes an answer.
func (m *Machine) answered(now time.Time) {
	m.pinged = time.Time{}
	m.nextAsk = now.Add(m.settings.Heartbeat)
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
