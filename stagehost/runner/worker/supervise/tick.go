package supervise

import (
	"fmt"
	"time"
)

// Tick does what is due. Report the work before it.
func (m *Machine) Tick(now time.Time) []Action {
	m.settle(now)
	switch {
	case due(m.startAt, now):
		return m.spawn(now)
	case due(m.killAt, now):
		return m.fail(ErrStopLimit, now)
	case due(m.startLimit(), now):
		return m.fail(m.startError(), now)
	case due(m.runLimit(), now) && !m.work.Oldest.IsZero():
		return m.fail(ErrRunLimit, now)
	case due(m.pongLimit(), now):
		return m.fail(ErrSilent, now)
	case due(m.nextPing(), now):
		return m.ping(now)
	}
	return nil
}

// Wake returns when Tick has something to do; the zero time is never.
func (m *Machine) Wake() time.Time {
	var next time.Time
	for _, at := range []time.Time{m.startAt, m.killAt, m.startLimit(), m.runLimit(), m.pongLimit(), m.nextPing(), m.settledAt()} {
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next
}

func due(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }

// after returns the time of a limit. The zero time is never, and so is a limit of 0.
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

func (m *Machine) startError() error {
	if m.progress == "" {
		return ErrStartLimit
	}
	return fmt.Errorf("%w; its last progress: %s", ErrStartLimit, m.progress)
}

// Work is the work of a worker.
type Work struct {
	// Oldest is when the batch that has been silent for longest began, or last showed
	// progress; zero without a batch.
	Oldest time.Time
	// Ended is when the worker last finished a batch; zero where it has not.
	Ended time.Time
}

// Work reports the work of the worker: before every Tick, and when a worker that is
// recycling has finished its last batch.
func (m *Machine) Work(of Incarnation, w Work, now time.Time) []Action {
	if of != m.incarnation || m.state == Dead {
		return nil
	}
	m.work, m.workAt = w, now
	if !w.Ended.IsZero() {
		m.crashes, m.cause = 0, nil
		if next := w.Ended.Add(m.settings.Heartbeat); next.After(m.pingAt) {
			m.pingAt = next
		}
	}
	return m.askIfIdle(now)
}

// runLimit returns when the oldest batch has been silent for too long. Without one, it
// returns when a batch that began since would have been.
func (m *Machine) runLimit() time.Time {
	switch {
	case m.state != Ready:
		return time.Time{}
	case m.work.Oldest.IsZero():
		return after(m.workAt, m.settings.RunLimit)
	default:
		return after(m.work.Oldest, m.settings.RunLimit)
	}
}

// pongLimit returns when a ping has been unanswered for too long. It holds for a worker
// that got a batch since, too: the worker answers the ping first.
func (m *Machine) pongLimit() time.Time {
	if m.state != Ready {
		return time.Time{}
	}
	return after(m.pingedAt, m.settings.HeartbeatLimit)
}

// nextPing returns when to ping a worker, or to look whether it is idle.
func (m *Machine) nextPing() time.Time {
	if m.state != Ready || m.settings.Heartbeat <= 0 || !m.pingedAt.IsZero() {
		return time.Time{}
	}
	return m.pingAt
}

func (m *Machine) ping(now time.Time) []Action {
	if !m.work.Oldest.IsZero() {
		m.pingAt = now.Add(m.settings.Heartbeat)
		return nil
	}
	m.pingedAt = now
	for i := range m.ranks {
		m.ranks[i].pinged = true
	}
	return m.do(Ping)
}

// Pong is the event that a rank answered its ping, or was not pinged because it has got
// a batch.
func (m *Machine) Pong(of Incarnation, rank int, now time.Time) {
	if !m.current(of, rank) {
		return
	}
	m.ranks[rank].pinged = false
	for _, r := range m.ranks {
		if r.pinged {
			return
		}
	}
	m.pingedAt = time.Time{}
	m.pingAt = now.Add(m.settings.Heartbeat)
}

// settledAt returns when a worker that crashed before has been READY for long enough.
func (m *Machine) settledAt() time.Time {
	if m.crashes == 0 || m.state != Ready {
		return time.Time{}
	}
	return m.readySince.Add(m.settings.Settled)
}

// settle ends the row of crashes of a worker that has been READY for long enough.
func (m *Machine) settle(now time.Time) {
	if due(m.settledAt(), now) {
		m.crashes, m.cause = 0, nil
	}
}
