package supervise

import (
	"errors"
	"fmt"
	"time"
)

// State is where a worker is.
type State uint8

// The states of a worker.
const (
	Dead State = iota
	Startup
	Ready
	Error
	Shutdown
)

// String returns the state's name.
func (s State) String() string {
	switch s {
	case Startup:
		return "STARTUP"
	case Ready:
		return "READY"
	case Error:
		return "ERROR"
	case Shutdown:
		return "SHUTDOWN"
	default:
		return "DEAD"
	}
}

// Incarnation counts the starts of a worker, from 1.
type Incarnation uint64

// Do is what is to be done.
type Do uint8

// The actions.
const (
	// Spawn starts the processes of all ranks.
	Spawn Do = iota
	// WarmUp runs the examples, and then calls Warm or Fail.
	WarmUp
	// Offer offers the worker's slots.
	Offer
	// Withdraw takes its slots back: no more batches go to it.
	Withdraw
	// Ping asks every rank whether it is there.
	Ping
	// Ask tells every rank to finish and leave.
	Ask
	// Kill ends every process group at once.
	Kill
)

// Action is one thing to be done for an incarnation. What comes of it is told by
// events.
type Action struct {
	Do          Do
	Incarnation Incarnation
}

// Edge is a transition.
type Edge struct {
	At          time.Time
	Incarnation Incarnation
	From, To    State
	// Cause says why, for a person; nil where it was asked for.
	Cause error
}

// Settings of a worker. Durations of 0 mean that nothing is bounded or asked,
// where not said otherwise.
type Settings struct {
	// Ranks is how many processes the worker has; 0 means 1.
	Ranks int
	// StartLimit bounds the time from Spawn to READY.
	StartLimit time.Duration
	// RunLimit bounds a batch.
	RunLimit time.Duration
	// Heartbeat is how often an idle worker is asked whether it is there, and
	// HeartbeatLimit how long it may take to answer.
	Heartbeat, HeartbeatLimit time.Duration
	// StopLimit is how long a worker has to leave that was asked to.
	StopLimit time.Duration
	// Backoff is the pause before the first restart; it doubles up to MaxBackoff.
	Backoff, MaxBackoff time.Duration
	// Settled is how long a worker has to be ready for what was before to be
	// forgotten; CrashLoop is how many deaths in a row without that are too many.
	Settled   time.Duration
	CrashLoop int
	// Jitter returns how much of a pause to add, from 0 to 1; nil adds none.
	Jitter func() float64
	// Edge hears of every transition; nil hears of none.
	Edge func(Edge)
}

// Causes that the machine finds by itself.
var (
	ErrStartLimit = errors.New("it was not ready in time")
	ErrRunLimit   = errors.New("a batch took too long")
	ErrSilent     = errors.New("it does not answer")
	ErrStopLimit  = errors.New("it did not leave in time")
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
	cause error

	ranks []rank
	since time.Time
	// readySince is when it became READY, zero where it is not.
	readySince time.Time
	// batches are those that it has, with when they began.
	batches map[uint64]time.Time
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
	return &Machine{settings: s, batches: map[uint64]time.Time{}}
}

// State returns where the worker is.
func (m *Machine) State() State { return m.state }

// Incarnation returns the current, or last, incarnation.
func (m *Machine) Incarnation() Incarnation { return m.incarnation }

// Cause returns why the worker died last, or is about to; nil where nothing
// failed since it was ready for a while.
func (m *Machine) Cause() error { return m.cause }

// Looping reports whether the worker dies again and again.
func (m *Machine) Looping() bool {
	return m.settings.CrashLoop > 0 && m.deaths >= m.settings.CrashLoop && m.state != Ready
}

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
	m.startAt, m.killAt, m.asked, m.recycling = time.Time{}, time.Time{}, false, false
	clear(m.batches)
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
	m.readySince = now
	m.nextAsk = now.Add(m.settings.Heartbeat)
	m.move(Ready, nil, now)
	return m.do(Offer)
}

// Fail says that the worker cannot go on: it broke the protocol, a warm-up
// failed, it gave a result that is none. Its processes are ended.
func (m *Machine) Fail(of Incarnation, cause error, now time.Time) []Action {
	if of != m.incarnation || m.state == Dead || m.state == Error {
		return nil
	}
	if m.state == Shutdown {
		// It was leaving anyhow, and shall be quick now.
		return m.kill(cause, now)
	}
	return m.fail(cause, now)
}

func (m *Machine) fail(cause error, now time.Time) []Action {
	actions := m.withdraw()
	m.cause = cause
	m.move(Error, cause, now)
	return append(actions, m.do(Kill)...)
}

// withdraw takes back what was offered.
func (m *Machine) withdraw() []Action {
	if m.state != Ready {
		return nil
	}
	return m.do(Withdraw)
}

func (m *Machine) kill(cause error, _ time.Time) []Action {
	m.cause, m.killAt = cause, time.Time{}
	return m.do(Kill)
}

// Exited says that a rank's process has ended, and how; nil is exit code 0. It is
// DEAD when all have.
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
	if left == 0 {
		return m.died(how, now)
	}
	if m.state == Shutdown || m.state == Error {
		return nil // the others are leaving
	}
	return m.fail(fmt.Errorf("rank %d: %w", rank, ended(how)), now)
}

// ErrLeft says that a process ended by itself with exit code 0.
var ErrLeft = errors.New("it left without having been asked to")

func ended(how error) error {
	if how == nil {
		return ErrLeft
	}
	return how
}

// died books that no process is left, and when the next is due.
func (m *Machine) died(how error, now time.Time) []Action {
	actions := m.withdraw()
	if !m.asked {
		if m.state != Error {
			m.cause = ended(how)
		}
		m.deaths++
		if m.wasSettled(now) {
			m.deaths = 1
		}
	}
	cause := m.cause
	if m.asked {
		cause = nil
	}
	m.readySince, m.killAt = time.Time{}, time.Time{}
	clear(m.batches)
	m.move(Dead, cause, now)
	if m.stopped {
		return actions
	}
	m.startAt = now
	if !m.asked {
		m.startAt = now.Add(m.pause())
	}
	return actions
}

func (m *Machine) wasSettled(now time.Time) bool {
	return !m.readySince.IsZero() && now.Sub(m.readySince) >= m.settings.Settled
}

// pause is how long to wait before the next start.
func (m *Machine) pause() time.Duration {
	pause := m.settings.Backoff
	for range m.deaths - 1 {
		if pause *= 2; pause >= m.settings.MaxBackoff {
			break
		}
	}
	pause = min(pause, m.settings.MaxBackoff)
	if m.settings.Jitter != nil {
		pause += time.Duration(m.settings.Jitter() * float64(pause))
	}
	return pause
}

// Stop tells the worker to leave for good. Told again it changes nothing.
func (m *Machine) Stop(now time.Time) []Action {
	if m.stopped {
		return nil
	}
	m.stopped, m.startAt = true, time.Time{}
	return m.leave(now)
}

// Recycle has the worker finish what it has, leave, and start again.
func (m *Machine) Recycle(now time.Time) []Action {
	if m.stopped || m.recycling {
		return nil
	}
	if m.state == Dead {
		m.startAt = now
		return nil
	}
	m.recycling = true
	return m.leave(now)
}

func (m *Machine) leave(now time.Time) []Action {
	if m.state != Startup && m.state != Ready {
		return nil
	}
	actions := m.withdraw()
	m.asked = true
	if m.settings.StopLimit > 0 {
		m.killAt = now.Add(m.settings.StopLimit)
	}
	m.move(Shutdown, nil, now)
	return append(actions, m.do(Ask)...)
}

// Abandon ends the worker for good, and at once.
func (m *Machine) Abandon(now time.Time) []Action {
	m.stopped, m.startAt = true, time.Time{}
	switch m.state {
	case Dead:
		return nil
	case Startup, Ready:
		actions := m.withdraw()
		m.asked = true
		m.move(Shutdown, nil, now)
		return append(actions, m.do(Kill)...)
	}
	m.killAt = time.Time{}
	return m.do(Kill)
}

// Began says that the worker has been given a batch.
func (m *Machine) Began(of Incarnation, batch uint64, now time.Time) {
	if of == m.incarnation && m.state != Dead {
		m.batches[batch] = now
		m.hear()
	}
}

// Ended says that a batch is over.
func (m *Machine) Ended(of Incarnation, batch uint64, now time.Time) {
	if of != m.incarnation {
		return
	}
	delete(m.batches, batch)
	if len(m.batches) == 0 {
		m.nextAsk = now.Add(m.settings.Heartbeat)
	}
}

// Pong says that a rank has answered.
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
	m.hear()
	m.nextAsk = now.Add(m.settings.Heartbeat)
}

// hear books that nobody owes an answer.
func (m *Machine) hear() {
	m.pinged = time.Time{}
	for i := range m.ranks {
		m.ranks[i].quiet = false
	}
}

func (m *Machine) current(of Incarnation, rank int) bool {
	return of == m.incarnation && m.state != Dead && rank >= 0 && rank < len(m.ranks)
}
