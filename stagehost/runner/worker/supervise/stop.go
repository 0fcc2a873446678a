package supervise

import "time"

// Stop tells the worker to leave for good. Told again it changes nothing.
func (m *Machine) Stop(now time.Time) []Action {
	if m.stopped {
		return nil
	}
	m.stopped, m.startAt = true, time.Time{}
	return m.ask(now)
}

// Abandon ends the worker for good, and at once.
func (m *Machine) Abandon(now time.Time) []Action {
	m.stopped, m.startAt, m.killAt = true, time.Time{}, time.Time{}
	switch m.state {
	case Dead:
		return nil
	case Startup, Ready:
		actions := m.withdraw()
		m.asked = true
		m.move(Shutdown, nil, now)
		return append(actions, m.do(Kill)...)
	default:
		return m.do(Kill)
	}
}

// Recycle has the worker finish the batches that it has, leave, and start again
// at once. What failed before is forgotten: what starts may be something else.
func (m *Machine) Recycle(now time.Time) []Action {
	if m.stopped || m.recycling {
		return nil
	}
	m.deaths, m.cause = 0, nil
	switch m.state {
	case Dead:
		m.startAt = now
		return nil
	case Ready:
		actions := m.withdraw()
		m.recycling = true
		return append(actions, m.recycle(now)...)
	default:
		m.recycling = true
		return m.ask(now)
	}
}

// recycle asks a worker to leave that has no batch any more.
func (m *Machine) recycle(now time.Time) []Action {
	if !m.recycling || m.state != Ready || !m.work.Oldest.IsZero() {
		return nil
	}
	return m.ask(now)
}

// ask asks a worker to leave that is not leaving yet.
func (m *Machine) ask(now time.Time) []Action {
	if m.state != Startup && m.state != Ready {
		return nil
	}
	m.asked = true
	return m.leave(Shutdown, nil, now)
}

// leave gives the worker its time to leave by itself.
func (m *Machine) leave(as State, cause error, now time.Time) []Action {
	m.forgive(now)
	actions := m.withdraw()
	m.killAt = after(now, m.settings.StopLimit)
	m.move(as, cause, now)
	return append(actions, m.do(Ask)...)
}
