package worker

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// Causes that the machine finds by itself.
var (
	ErrStartLimit = errors.New("it was not ready in time")
	ErrRunLimit   = errors.New("a batch took too long")
	ErrUnwanted   = errors.New("a batch that nobody waits for any more does not end")
	ErrSilent     = errors.New("it does not answer")
	ErrStopLimit  = errors.New("it did not exit in time")
	// ErrDisconnected means that a process closed its connection and did not exit.
	ErrDisconnected = errors.New("it closed its connection")
	// ErrExited means that a process exited by itself with exit code 0.
	ErrExited error = &runner.ExitError{}
	// errAsked is the cause of an exit that was requested.
	errAsked = errors.New("it was asked to leave")
)

// State is the state of a worker.
type State uint8

const (
	// Dead means that no process is left.
	Dead State = iota
	// Startup means that the processes are being started, and load.
	Startup
	// Ready means that every rank is ready and the warm-up succeeded: it takes batches.
	Ready
	// Error means that something failed: the worker cleans up, or is being killed.
	Error
	// Shutdown means that the worker is leaving, on request or by itself.
	Shutdown
)

// String returns the state's name.
func (s State) String() string {
	return [...]string{"DEAD", "STARTUP", "READY", "ERROR", "SHUTDOWN"}[s]
}

// action is one thing to do for the current incarnation. Events report its results.
type action uint8

const (
	// doSpawn starts the processes of all ranks.
	doSpawn action = iota
	// doWarmUp runs the examples, and then calls Warm or Fail.
	doWarmUp
	// doOffer offers the worker's slots.
	doOffer
	// doWithdraw takes its slots back: it gets no more batches.
	doWithdraw
	// doPing sends a ping to every rank.
	doPing
	// doAsk asks every rank to finish and exit.
	doAsk
	// doKill kills every process group.
	doKill
)

// machine decides the lifecycle of one worker: a process, or the ranks of a gang, which
// live and die together. Events go in, actions come out, and Tick is called whenever Wake
// is due:
//
//	actions := m.Start(now)
//	actions = m.Ready(rank)
//	m.Work(work, now)                       // before every Tick
//	actions = m.Tick(now)
//
// From DEAD a worker starts again, after a pause that grows, until it is stopped. A worker
// that can no longer be trusted is killed at once (Fail, and the limits). One that reports
// itself that it failed or leaves has the time of one that was stopped.
//
// Events concern the current incarnation: the worker's loop drops earlier ones. Batches
// are too frequent to be events: Work reports them when the machine has to know.
//
// The machine is pure: no process, goroutine, lock or clock. Time is an argument, and must
// not go back. It is not safe for concurrent use.
type machine struct {
	// Limits are used as they are: a limit of 0 bounds nothing, and a CrashLoop of 0 is
	// never reached.
	Limits
	// size is the number of ranks.
	size int
	// jitter returns how much of the second half of a pause to leave out, from 0 to 1.
	jitter func() float64
	// onTransition gets each transition with its cause.
	onTransition func(Transition)

	state State
	// incarnation counts the starts of the worker, from 1.
	incarnation uint64
	// stopped is true once the worker was stopped for good, recycling while it is being
	// replaced.
	stopped, recycling bool
	// asked is true where the end of the incarnation is not a crash.
	asked bool
	// failure is what failed in this incarnation, cause what failed in the last one that
	// crashed.
	failure, cause error
	// progress is the last progress message of a worker that starts.
	progress string

	ranks []rankState
	// since is when the state began, readySince when the incarnation became READY, or
	// zero.
	since, readySince time.Time
	work              workload
	// pingedAt is when an unanswered ping was sent.
	pingedAt time.Time
	// pingAt, killAt and startAt are when the next ping, kill and start are due, exitBy when
	// a process has to exit that closed its connection.
	pingAt, killAt, startAt, exitBy time.Time
	// crashes counts the crashes in a row; startFailed is true where the last incarnation
	// crashed before it was READY; wasReady is true where one was since the last restart.
	crashes               int
	startFailed, wasReady bool
}

// rankState is the state of one process of the worker.
type rankState struct {
	alive, ready bool
	// pinged is true until the rank answers a ping.
	pinged bool
}

// Cause returns why the worker crashed last, or is about to. It is nil where nothing
// failed since the worker was READY for a while or finished a batch.
func (m *machine) Cause() error { return cmp.Or(m.failure, m.cause) }

// endCause is the cause for batches that the worker cannot finish.
func (m *machine) endCause() error { return cmp.Or(m.Cause(), errAsked) }

// CrashLooping reports whether the worker is in a crash loop.
func (m *machine) CrashLooping() bool {
	return m.CrashLoop > 0 && m.crashes >= m.CrashLoop && m.state != Ready
}

// Stopped reports whether the worker was stopped and no process is left.
func (m *machine) Stopped() bool { return m.stopped && m.state == Dead }

// Start starts the worker for the first time, or again at once.
func (m *machine) Start(now time.Time) []action {
	if m.state != Dead || m.stopped {
		return nil
	}
	return m.spawn(now)
}

func (m *machine) spawn(now time.Time) []action {
	m.incarnation++
	m.ranks = make([]rankState, m.size)
	for i := range m.ranks {
		m.ranks[i].alive = true
	}
	m.asked, m.recycling, m.failure, m.progress = false, false, nil, ""
	m.startAt, m.killAt, m.exitBy, m.pingedAt, m.readySince = time.Time{}, time.Time{}, time.Time{}, time.Time{}, time.Time{}
	m.work = workload{}
	m.move(Startup, nil, now)
	return []action{doSpawn}
}

func (m *machine) move(to State, cause error, now time.Time) {
	from := m.state
	m.state, m.since = to, now
	m.onTransition(Transition{At: now, Incarnation: m.incarnation, From: from, To: to, Cause: cause})
}

// SetProgress takes the progress message of a worker that starts.
func (m *machine) SetProgress(message string) {
	if m.state == Startup {
		m.progress = message
	}
}

// Ready is the event that a rank has loaded.
func (m *machine) Ready(rank int) []action {
	if m.state != Startup || m.ranks[rank].ready {
		return nil
	}
	m.ranks[rank].ready = true
	if slices.ContainsFunc(m.ranks, func(r rankState) bool { return !r.ready }) {
		return nil
	}
	return []action{doWarmUp}
}

// Warm is the event that the warm-up succeeded.
func (m *machine) Warm(now time.Time) []action {
	if m.state != Startup {
		return nil
	}
	m.readySince, m.startFailed, m.wasReady = now, false, true
	m.pingAt = now.Add(m.Heartbeat)
	m.move(Ready, nil, now)
	return []action{doOffer}
}

// ReportError is the event that a rank reports that it failed. It cleans up and exits.
func (m *machine) ReportError(cause error, now time.Time) []action {
	if m.state != Startup && m.state != Ready {
		return nil
	}
	m.failure = cause
	return m.leave(Error, cause, now)
}

// ReportShutdown is the event that a rank reports that it exits.
func (m *machine) ReportShutdown(now time.Time) []action {
	switch m.state {
	case Startup, Ready:
		return m.leave(Shutdown, ErrExited, now)
	case Error:
		m.move(Shutdown, m.failure, now)
	case Shutdown, Dead:
	}
	return nil
}

// Fail is the event that the worker cannot go on: it broke the protocol, its warm-up
// failed, its result was invalid, or it exceeded a limit. Its processes are killed. The
// first failure is the cause.
func (m *machine) Fail(cause error, now time.Time) []action {
	if m.state == Dead {
		return nil
	}
	m.resetCrashes(now)
	actions := m.withdraw()
	if m.failure == nil {
		m.failure = cause
	}
	m.killAt, m.exitBy = time.Time{}, time.Time{}
	if m.state == Startup || m.state == Ready {
		m.move(Error, cause, now)
	}
	return append(actions, doKill)
}

// withdraw takes back the slots that were offered.
func (m *machine) withdraw() []action {
	if m.state != Ready || m.recycling {
		return nil
	}
	return []action{doWithdraw}
}

// Disconnected is the event that a connection ended by itself. The process has likely
// exited too, which is reported soon.
func (m *machine) Disconnected(now time.Time) {
	if m.state == Startup || m.state == Ready {
		m.exitBy = now.Add(exitGrace)
	}
}

// Exited is the event that a rank's process has exited; nil is exit code 0. The worker
// is DEAD when all have.
func (m *machine) Exited(rank int, exit error, now time.Time) []action {
	if m.state == Dead || !m.ranks[rank].alive {
		return nil
	}
	m.ranks[rank].alive = false
	switch {
	case !slices.ContainsFunc(m.ranks, func(r rankState) bool { return r.alive }):
		return m.die(exit, now)
	case m.state == Shutdown || m.state == Error:
		return nil // the others are leaving
	default:
		return m.Fail(fmt.Errorf("rank %d: %w", rank, cmp.Or(exit, ErrExited)), now)
	}
}

// die makes the worker DEAD, and sets the time of the next start.
func (m *machine) die(exit error, now time.Time) []action {
	m.resetCrashes(now)
	actions := m.withdraw()
	cause := m.failure
	if cause == nil {
		if cause = exit; !m.asked {
			cause = cmp.Or(exit, ErrExited)
		}
	}
	crashed := !m.asked && !m.recycling
	if crashed {
		m.cause = cause
		m.crashes++
		m.startFailed = m.readySince.IsZero()
	}
	m.failure, m.killAt, m.exitBy = nil, time.Time{}, time.Time{}
	m.move(Dead, cause, now)
	switch {
	case m.stopped, m.startFailed && !m.wasReady && m.HoldFailedStarts:
	case crashed:
		m.startAt = now.Add(m.pause())
	default:
		m.startAt = now
	}
	return actions
}

// pause returns how long to wait before the next start.
func (m *machine) pause() time.Duration {
	pause := min(m.Backoff, m.MaxBackoff)
	for i := 1; i < m.crashes && pause > 0 && pause < m.MaxBackoff; i++ {
		pause = min(2*pause, m.MaxBackoff)
	}
	return pause - time.Duration(m.jitter()*float64(pause/2))
}

// Stop stops the worker for good. A second call changes nothing.
func (m *machine) Stop(now time.Time) []action {
	if m.stopped {
		return nil
	}
	m.stopped, m.startAt = true, time.Time{}
	return m.ask(now)
}

// Kill stops the worker for good, and at once.
func (m *machine) Kill(now time.Time) []action {
	m.stopped, m.startAt, m.killAt = true, time.Time{}, time.Time{}
	switch m.state {
	case Dead:
		return nil
	case Startup, Ready:
		actions := m.withdraw()
		m.asked = true
		m.move(Shutdown, nil, now)
		return append(actions, doKill)
	default:
		return []action{doKill}
	}
}

// Recycle makes the worker finish its batches, exit, and start again at once. It ends
// a crash loop, because the program may have been mended.
func (m *machine) Recycle(now time.Time) []action {
	if m.stopped || m.recycling {
		return nil
	}
	m.crashes, m.cause, m.startFailed, m.wasReady = 0, nil, false, false
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
func (m *machine) askIfIdle(now time.Time) []action {
	if !m.recycling || m.state != Ready || !m.work.Oldest.IsZero() {
		return nil
	}
	return m.ask(now)
}

// ask asks a worker to exit that is not leaving yet.
func (m *machine) ask(now time.Time) []action {
	if m.state != Startup && m.state != Ready {
		return nil
	}
	m.asked = true
	return m.leave(Shutdown, nil, now)
}

// leave gives the worker StopLimit to exit by itself.
func (m *machine) leave(as State, cause error, now time.Time) []action {
	m.resetCrashes(now)
	actions := m.withdraw()
	m.killAt = after(now, m.StopLimit)
	m.move(as, cause, now)
	return append(actions, doAsk)
}

// timer is when Tick does something. Without do, only the work has to be reported then.
type timer struct {
	at time.Time
	do func(now time.Time) []action
}

// timers returns all timers; the zero time is never. Of those that are due, the first
// counts.
func (m *machine) timers() []timer {
	fail := func(cause error) func(time.Time) []action {
		return func(now time.Time) []action { return m.Fail(cause, now) }
	}
	out := []timer{{m.startAt, m.spawn}, {m.killAt, fail(ErrStopLimit)}, {m.exitBy, fail(ErrDisconnected)}}
	switch m.state {
	case Startup:
		out = append(out, timer{after(m.since, m.StartLimit), fail(m.startError())})
	case Ready:
		out = append(out, timer{after(m.work.Oldest, m.RunLimit), fail(ErrRunLimit)}, timer{m.work.GiveUp, fail(ErrUnwanted)})
		// The limit of a ping holds for a worker that got a batch since, too: it answers
		// the ping first.
		out = append(out, timer{after(m.pingedAt, m.HeartbeatLimit), fail(ErrSilent)})
		if m.Heartbeat > 0 && m.pingedAt.IsZero() {
			out = append(out, timer{m.pingAt, m.ping})
		}
		out = append(out, timer{at: m.stableAt()})
	default:
	}
	return out
}

// Tick does what is due. Report the work before it.
func (m *machine) Tick(now time.Time) []action {
	m.resetCrashes(now)
	for _, t := range m.timers() {
		if t.do != nil && isDue(t.at, now) {
			return t.do(now)
		}
	}
	return nil
}

// Wake returns when Tick has something to do; the zero time is never.
func (m *machine) Wake() time.Time {
	var next time.Time
	for _, t := range m.timers() {
		if !t.at.IsZero() && (next.IsZero() || t.at.Before(next)) {
			next = t.at
		}
	}
	return next
}

func isDue(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }

// after returns the time of a limit. The zero time is never, and so is a limit of 0.
func after(at time.Time, limit time.Duration) time.Time {
	if limit <= 0 || at.IsZero() {
		return time.Time{}
	}
	return at.Add(limit)
}

func (m *machine) startError() error {
	if m.progress == "" {
		return ErrStartLimit
	}
	return fmt.Errorf("%w; its last progress: %s", ErrStartLimit, m.progress)
}

// workload is what a worker has to do.
type workload struct {
	// Oldest is when the batch that has been silent for longest began, or last showed
	// progress; zero without a batch.
	Oldest time.Time
	// IsLate is true where that is far longer ago than batches take.
	IsLate bool
	// GiveUp is when to give up on a batch that nobody waits for; zero without one.
	GiveUp time.Time
	// Ended is when the worker last finished a batch; zero where it has not.
	Ended time.Time
}

// LateSince returns when the batch began, or last showed progress, that runs far longer
// than batches do; zero without one.
func (m *machine) LateSince() time.Time {
	if m.state != Ready || !m.work.IsLate {
		return time.Time{}
	}
	return m.work.Oldest
}

// Work reports the work of the worker: before every Tick, every lookInterval while it is
// READY, and when a worker that is recycling has finished its last batch.
func (m *machine) Work(w workload, now time.Time) []action {
	m.work = w
	if !w.Ended.IsZero() {
		m.crashes, m.cause = 0, nil
		if next := w.Ended.Add(m.Heartbeat); next.After(m.pingAt) {
			m.pingAt = next
		}
	}
	return m.askIfIdle(now)
}

// ping pings an idle worker.
func (m *machine) ping(now time.Time) []action {
	if !m.work.Oldest.IsZero() {
		m.pingAt = now.Add(m.Heartbeat)
		return nil
	}
	m.pingedAt = now
	for i := range m.ranks {
		m.ranks[i].pinged = true
	}
	return []action{doPing}
}

// Pong is the event that a rank answered its ping, or was not pinged because it has got
// a batch.
func (m *machine) Pong(rank int, now time.Time) {
	m.ranks[rank].pinged = false
	if !slices.ContainsFunc(m.ranks, func(r rankState) bool { return r.pinged }) {
		m.pingedAt, m.pingAt = time.Time{}, now.Add(m.Heartbeat)
	}
}

// stableAt returns when a worker that crashed before has been READY for long enough.
func (m *machine) stableAt() time.Time {
	if m.crashes == 0 || m.state != Ready {
		return time.Time{}
	}
	return m.readySince.Add(m.StableAfter)
}

// resetCrashes ends the row of crashes of a worker that has been READY for long enough.
func (m *machine) resetCrashes(now time.Time) {
	if isDue(m.stableAt(), now) {
		m.crashes, m.cause = 0, nil
	}
}
