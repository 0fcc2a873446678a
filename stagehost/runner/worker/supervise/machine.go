package supervise

import (
	"fmt"
	"time"
)

// Machine is one worker.
type Machine struct {
	settings    Settings
	state       State
	incarnation Incarnation
	// stopped says that the worker was told to stop for good, recycling that it
	// is to be replaced.
	stopped, recycling bool
	// asked says that its death is no failure.
	asked bool
	// why is what failed in this incarnation, cause in the last that died of it.
	why, cause error
	// doing is what it said last while it started.
	doing string

	ranks []rank
	// since is when it came to the state, readySince when it became READY: zero
	// where it has not.
	since, readySince time.Time
	work              Work
	// looked is when work was looked at last.
	looked  time.Time
	pinged  time.Time
	nextAsk time.Time
	killAt  time.Time
	startAt time.Time
	// deaths in a row.
	deaths int
}

// rank is one process of the worker.
type rank struct {
	alive, ready bool
	// quiet says that a ping is not answered yet.
	quiet bool
}

// New returns a worker that is DEAD and has never been started.
func New(s Settings) *Machine {
	s.Ranks = max(1, s.Ranks)
	return &Machine{settings: s}
}

// State returns where the worker is.
func (m *Machine) State() State { return m.state }

// Incarnation returns the current, or last, incarnation.
func (m *Machine) Incarnation() Incarnation { return m.incarnation }

// Doing returns what a worker said last while it started.
func (m *Machine) Doing() string { return m.doing }

// Cause returns why the worker died last, or is about to; nil where nothing
// failed since it was ready for a while or finished a batch.
func (m *Machine) Cause() error {
	if m.why != nil {
		return m.why
	}
	return m.cause
}

// Looping reports whether the worker dies again and again.
func (m *Machine) Looping() bool {
	return m.settings.CrashLoop > 0 && m.deaths >= m.settings.CrashLoop && m.state != Ready
}

// Over reports whether the worker was told to stop and no process is left.
func (m *Machine) Over() bool { return m.stopped && m.state == Dead }

// Start starts the worker for the first time, or again at once.
func (m *Machine) Start(now time.Time) []Action {
	if m.state != Dead || m.stopped {
		return nil
	}
	return m.spawn(now)
}

func (m *Machine) spawn(now time.Time) []Action {
	m.incarnation++
	m.ranks = make([]rank, m.settings.Ranks)
	for i := range m.ranks {
		m.ranks[i].alive = true
	}
	m.asked, m.recycling, m.why, m.doing = false, false, nil, ""
	m.startAt, m.killAt, m.pinged, m.readySince = time.Time{}, time.Time{}, time.Time{}, time.Time{}
	m.work = Work{}
	m.move(Startup, nil, now)
	return m.do(Spawn)
}

func (m *Machine) do(what ...Do) []Action {
	out := make([]Action, len(what))
	for i, w := range what {
		out[i] = Action{Do: w, Incarnation: m.incarnation}
	}
	return out
}

func (m *Machine) move(to State, cause error, now time.Time) {
	from := m.state
	m.state, m.since = to, now
	if m.settings.Edge != nil {
		m.settings.Edge(Edge{At: now, Incarnation: m.incarnation, From: from, To: to, Cause: cause})
	}
}

// Progress says what a worker does that starts.
func (m *Machine) Progress(of Incarnation, doing string) {
	if of == m.incarnation && m.state == Startup {
		m.doing = doing
	}
}

// Ready says that a rank has loaded.
func (m *Machine) Ready(of Incarnation, rank int, _ time.Time) []Action {
	if !m.current(of, rank) || m.state != Startup || m.ranks[rank].ready {
		return nil
	}
	m.ranks[rank].ready = true
	for _, r := range m.ranks {
		if !r.ready {
			return nil
		}
	}
	return m.do(WarmUp)
}

// Warm says that the warm-up went well.
func (m *Machine) Warm(of Incarnation, now time.Time) []Action {
	if of != m.incarnation || m.state != Startup {
		return nil
	}
	m.readySince, m.looked = now, now
	m.nextAsk = now.Add(m.settings.Heartbeat)
	m.move(Ready, nil, now)
	return m.do(Offer)
}

// Erring says that a rank says itself that it failed. It cleans up and leaves.
func (m *Machine) Erring(of Incarnation, cause error, now time.Time) []Action {
	if of != m.incarnation || m.state != Startup && m.state != Ready {
		return nil
	}
	m.why = cause
	return m.leave(Error, cause, now)
}

// Leaving says that a rank says itself that it leaves.
func (m *Machine) Leaving(of Incarnation, now time.Time) []Action {
	if of != m.incarnation {
		return nil
	}
	switch m.state {
	case Startup, Ready:
		return m.leave(Shutdown, ErrLeft, now)
	case Error:
		m.move(Shutdown, m.why, now)
	case Shutdown, Dead:
	}
	return nil
}

// Fail says that the worker cannot go on: it broke the protocol, a warm-up
// failed, it gave a result that is none. Its processes are ended.
func (m *Machine) Fail(of Incarnation, cause error, now time.Time) []Action {
	if of != m.incarnation || m.state == Dead {
		return nil
	}
	return m.fail(cause, now)
}

// fail ends the processes at once. What failed first is the cause.
func (m *Machine) fail(cause error, now time.Time) []Action {
	m.forgive(now)
	actions := m.withdraw()
	if m.why == nil {
		m.why = cause
	}
	m.killAt = time.Time{}
	if m.state == Startup || m.state == Ready {
		m.move(Error, cause, now)
	}
	return append(actions, m.do(Kill)...)
}

// withdraw takes back what was offered.
func (m *Machine) withdraw() []Action {
	if m.state != Ready || m.recycling {
		return nil
	}
	return m.do(Withdraw)
}

// Exited says that a rank's process has ended, and how; nil is exit code 0. The
// worker is DEAD when all have.
func (m *Machine) Exited(of Incarnation, rank int, how error, now time.Time) []Action {
	if !m.current(of, rank) || !m.ranks[rank].alive {
		return nil
	}
	m.ranks[rank].alive = false
	left := 0
	for _, r := range m.ranks {
		if r.alive {
			left++
		}
	}
	switch {
	case left == 0:
		return m.died(how, now)
	case m.state == Shutdown || m.state == Error:
		return nil // the others are leaving
	default:
		return m.fail(fmt.Errorf("rank %d: %w", rank, ended(how)), now)
	}
}

func ended(how error) error {
	if how == nil {
		return ErrLeft
	}
	return how
}

// died books that no process is left, and when the next is due.
func (m *Machine) died(how error, now time.Time) []Action {
	m.forgive(now)
	actions := m.withdraw()
	cause := m.why
	switch {
	case cause != nil:
	case m.asked:
		cause = how
	default:
		cause = ended(how)
	}
	again := m.asked || m.recycling
	if !again {
		m.cause = cause
		m.deaths++
	}
	m.why, m.killAt = nil, time.Time{}
	m.move(Dead, cause, now)
	if m.stopped {
		return actions
	}
	m.startAt = now
	if !again {
		m.startAt = now.Add(m.pause())
	}
	return actions
}

// pause is how long to wait before the next start.
func (m *Machine) pause() time.Duration {
	pause := min(m.settings.Backoff, m.settings.MaxBackoff)
	for i := 1; i < m.deaths && pause > 0 && pause < m.settings.MaxBackoff; i++ {
		pause = min(2*pause, m.settings.MaxBackoff)
	}
	if m.settings.Jitter != nil {
		pause -= time.Duration(m.settings.Jitter() * float64(pause/2))
	}
	return pause
}

func (m *Machine) current(of Incarnation, rank int) bool {
	return of == m.incarnation && m.state != Dead && rank >= 0 && rank < len(m.ranks)
}
