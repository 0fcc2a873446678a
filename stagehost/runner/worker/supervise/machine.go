// Package supervise decides the lifecycle of one worker: a process, or the ranks of a
// gang, which live and die together.
//
//	m := supervise.New(settings)
//	actions := m.Start(now)                 // events in, actions out
//	actions = m.Ready(incarnation, rank, now)
//	...
//	m.Work(incarnation, work, now)          // before every Tick
//	actions = m.Tick(now)                   // whenever m.Wake() is due
//
// A worker is in one of five states:
//
//	STARTUP  its processes are being started, and load
//	READY    every rank is ready and the warm-up succeeded: it takes batches
//	ERROR    something failed; it cleans up, or is being killed
//	SHUTDOWN it is leaving, on request or by itself
//	DEAD     no process is left
//
// Settings.OnTransition gets each transition with its cause. From DEAD a worker starts
// again, after a pause that grows, until it is stopped. A worker that crashed several
// times in a row is in a crash loop; it still starts again. A batch that it finishes,
// or being READY for a while, ends the row.
//
// A worker that can no longer be trusted is killed at once (Fail, and the limits). One
// that reports itself that it failed or leaves has the time of one that was stopped.
//
// Every event carries its incarnation, and an event of an earlier incarnation changes
// nothing, because processes, connections and timers race. Batches are too frequent to
// be events: Work reports them when the machine has to know.
//
// The machine is pure: no process, goroutine, lock or clock. Time is an argument, and
// must not go back. It is not safe for concurrent use.
package supervise

import (
	"errors"
	"fmt"
	"time"
)

// Causes that the machine finds by itself.
var (
	ErrStartLimit = errors.New("it was not ready in time")
	ErrRunLimit   = errors.New("a batch took too long")
	ErrSilent     = errors.New("it does not answer")
	ErrStopLimit  = errors.New("it did not leave in time")
	// ErrLeft means that a process exited by itself with exit code 0.
	ErrLeft = errors.New("it left without having been asked to")
)

// Settings of a worker.
type Settings struct {
	// Ranks is the number of processes of the worker; 0 means 1.
	Ranks int
	// Limits are used as they are: a limit of 0 bounds nothing, and a CrashLoop of 0 is
	// never reached.
	Limits
	// Jitter returns how much of the second half of a pause to leave out, from 0 to 1;
	// nil leaves out nothing.
	Jitter func() float64
	// OnTransition is called for every transition; it may be nil.
	OnTransition func(Transition)
}

// State is the state of a worker.
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
	return [...]string{"DEAD", "STARTUP", "READY", "ERROR", "SHUTDOWN"}[s]
}

// Incarnation counts the starts of a worker, from 1.
type Incarnation uint64

// Transition is a change of the state.
type Transition struct {
	At          time.Time
	Incarnation Incarnation
	From, To    State
	// Cause is the reason in words; nil where the transition was requested and went
	// well.
	Cause error
}

// Do is a kind of action.
type Do uint8

// The actions.
const (
	// Spawn starts the processes of all ranks.
	Spawn Do = iota
	// WarmUp runs the examples, and then calls Warm or Fail.
	WarmUp
	// Offer offers the worker's slots.
	Offer
	// Withdraw takes its slots back: it gets no more batches.
	Withdraw
	// Ping sends a ping to every rank.
	Ping
	// Ask asks every rank to finish and exit.
	Ask
	// Kill kills every process group.
	Kill
)

// String returns the action's name.
func (d Do) String() string {
	return [...]string{"spawn", "warm up", "offer", "withdraw", "ping", "ask", "kill"}[d]
}

// Action is one thing to do for an incarnation. Events report its results.
type Action struct {
	Do          Do
	Incarnation Incarnation
}

// Machine is one worker.
type Machine struct {
	settings    Settings
	state       State
	incarnation Incarnation
	// stopped is true once the worker was stopped for good, recycling while it is being
	// replaced.
	stopped, recycling bool
	// asked is true where the end of the incarnation is no crash.
	asked bool
	// failure is what failed in this incarnation, cause what failed in the last one that
	// crashed.
	failure, cause error
	// progress is the last progress message of a worker that starts.
	progress string

	ranks []rank
	// since is when the state began, readySince when the incarnation became READY, or
	// zero.
	since, readySince time.Time
	work              Work
	// workAt is when work was reported, pingedAt when an unanswered ping was sent.
	workAt, pingedAt time.Time
	// pingAt, killAt and startAt are when the next ping, kill and start are due.
	pingAt, killAt, startAt time.Time
	// crashes counts the crashes in a row.
	crashes int
}

// rank is one process of the worker.
type rank struct {
	alive, ready bool
	// pinged is true until the rank answers a ping.
	pinged bool
}

// New returns a worker that is DEAD and has never been started.
func New(s Settings) *Machine {
	s.Ranks = max(1, s.Ranks)
	return &Machine{settings: s}
}

// State returns the state of the worker.
func (m *Machine) State() State { return m.state }

// Incarnation returns the current, or last, incarnation.
func (m *Machine) Incarnation() Incarnation { return m.incarnation }

// Progress returns the last progress message of a worker that starts.
func (m *Machine) Progress() string { return m.progress }

// Cause returns why the worker crashed last, or is about to. It is nil where nothing
// failed since the worker was READY for a while or finished a batch.
func (m *Machine) Cause() error {
	if m.failure != nil {
		return m.failure
	}
	return m.cause
}

// CrashLooping reports whether the worker is in a crash loop.
func (m *Machine) CrashLooping() bool {
	return m.settings.CrashLoop > 0 && m.crashes >= m.settings.CrashLoop && m.state != Ready
}

// Stopped reports whether the worker was stopped and no process is left.
func (m *Machine) Stopped() bool { return m.stopped && m.state == Dead }

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
	m.asked, m.recycling, m.failure, m.progress = false, false, nil, ""
	m.startAt, m.killAt, m.pingedAt, m.readySince = time.Time{}, time.Time{}, time.Time{}, time.Time{}
	m.work = Work{}
	m.move(Startup, nil, now)
	return m.do(Spawn)
}

func (m *Machine) do(what Do) []Action {
	return []Action{{Do: what, Incarnation: m.incarnation}}
}

func (m *Machine) move(to State, cause error, now time.Time) {
	from := m.state
	m.state, m.since = to, now
	if m.settings.OnTransition != nil {
		m.settings.OnTransition(Transition{At: now, Incarnation: m.incarnation, From: from, To: to, Cause: cause})
	}
}

// SetProgress takes the progress message of a worker that starts.
func (m *Machine) SetProgress(of Incarnation, message string) {
	if of == m.incarnation && m.state == Startup {
		m.progress = message
	}
}

// Ready is the event that a rank has loaded.
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

// Warm is the event that the warm-up succeeded.
func (m *Machine) Warm(of Incarnation, now time.Time) []Action {
	if of != m.incarnation || m.state != Startup {
		return nil
	}
	m.readySince, m.workAt = now, now
	m.pingAt = now.Add(m.settings.Heartbeat)
	m.move(Ready, nil, now)
	return m.do(Offer)
}

// ReportError is the event that a rank reports that it failed. It cleans up and exits.
func (m *Machine) ReportError(of Incarnation, cause error, now time.Time) []Action {
	if of != m.incarnation || m.state != Startup && m.state != Ready {
		return nil
	}
	m.failure = cause
	return m.leave(Error, cause, now)
}

// ReportShutdown is the event that a rank reports that it exits.
func (m *Machine) ReportShutdown(of Incarnation, now time.Time) []Action {
	if of != m.incarnation {
		return nil
	}
	switch m.state {
	case Startup, Ready:
		return m.leave(Shutdown, ErrLeft, now)
	case Error:
		m.move(Shutdown, m.failure, now)
	case Shutdown, Dead:
	}
	return nil
}

// Fail is the event that the worker cannot go on: it broke the protocol, its warm-up
// failed, or its result was invalid. Its processes are killed.
func (m *Machine) Fail(of Incarnation, cause error, now time.Time) []Action {
	if of != m.incarnation || m.state == Dead {
		return nil
	}
	return m.fail(cause, now)
}

// fail kills the processes. The first failure is the cause.
func (m *Machine) fail(cause error, now time.Time) []Action {
	m.settle(now)
	actions := m.withdraw()
	if m.failure == nil {
		m.failure = cause
	}
	m.killAt = time.Time{}
	if m.state == Startup || m.state == Ready {
		m.move(Error, cause, now)
	}
	return append(actions, m.do(Kill)...)
}

// withdraw takes back the slots that were offered.
func (m *Machine) withdraw() []Action {
	if m.state != Ready || m.recycling {
		return nil
	}
	return m.do(Withdraw)
}

// Exited is the event that a rank's process has exited; nil is exit code 0. The worker
// is DEAD when all have.
func (m *Machine) Exited(of Incarnation, rank int, exit error, now time.Time) []Action {
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
		return m.die(exit, now)
	case m.state == Shutdown || m.state == Error:
		return nil // the others are leaving
	default:
		return m.fail(fmt.Errorf("rank %d: %w", rank, unrequested(exit)), now)
	}
}

// unrequested returns the cause of an exit that nobody asked for.
func unrequested(exit error) error {
	if exit == nil {
		return ErrLeft
	}
	return exit
}

// die makes the worker DEAD, and sets the time of the next start.
func (m *Machine) die(exit error, now time.Time) []Action {
	m.settle(now)
	actions := m.withdraw()
	cause := m.failure
	switch {
	case cause != nil:
	case m.asked:
		cause = exit
	default:
		cause = unrequested(exit)
	}
	crashed := !m.asked && !m.recycling
	if crashed {
		m.cause = cause
		m.crashes++
	}
	m.failure, m.killAt = nil, time.Time{}
	m.move(Dead, cause, now)
	switch {
	case m.stopped:
	case crashed:
		m.startAt = now.Add(m.pause())
	default:
		m.startAt = now
	}
	return actions
}

// pause returns how long to wait before the next start.
func (m *Machine) pause() time.Duration {
	pause := min(m.settings.Backoff, m.settings.MaxBackoff)
	for i := 1; i < m.crashes && pause > 0 && pause < m.settings.MaxBackoff; i++ {
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

// Stop stops the worker for good. A second call changes nothing.
func (m *Machine) Stop(now time.Time) []Action {
	if m.stopped {
		return nil
	}
	m.stopped, m.startAt = true, time.Time{}
	return m.ask(now)
}

// Kill stops the worker for good, and at once.
func (m *Machine) Kill(now time.Time) []Action {
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

// Recycle makes the worker finish its batches, exit, and start again at once. It ends
// a crash loop, because the program may have been mended.
func (m *Machine) Recycle(now time.Time) []Action {
	if m.stopped || m.recycling {
		return nil
	}
	m.crashes, m.cause = 0, nil
	switch m.state {
	case Dead:
		m.startAt = now
		return nil
	case Ready:
		actions := m.withdraw()
		m.recycling = true
		return append(actions, m.askIfIdle(now)...)
	default:
		m.recycling = true
		return m.ask(now)
	}
}

// askIfIdle asks a worker to exit that is recycling and has no batch any more.
func (m *Machine) askIfIdle(now time.Time) []Action {
	if !m.recycling || m.state != Ready || !m.work.Oldest.IsZero() {
		return nil
	}
	return m.ask(now)
}

// ask asks a worker to exit that is not leaving yet.
func (m *Machine) ask(now time.Time) []Action {
	if m.state != Startup && m.state != Ready {
		return nil
	}
	m.asked = true
	return m.leave(Shutdown, nil, now)
}

// leave gives the worker StopLimit to exit by itself.
func (m *Machine) leave(as State, cause error, now time.Time) []Action {
	m.settle(now)
	actions := m.withdraw()
	m.killAt = after(now, m.settings.StopLimit)
	m.move(as, cause, now)
	return append(actions, m.do(Ask)...)
}
