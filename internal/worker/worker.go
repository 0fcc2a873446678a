package worker

import (
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// worker is one replica. Any goroutine may use it, and posts events to its loop.
type worker struct {
	runner *Runner
	index  int
	ranks  int
	log    *slog.Logger

	events chan event
	// ended is closed when the loop has ended.
	ended chan struct{}
	// tasks are the goroutines of its incarnations.
	tasks sync.WaitGroup
	// latest is the last incarnation whose processes were started.
	latest atomic.Pointer[incarnation]
}

// workerLoop is the loop of a worker, and what only that may use.
type workerLoop struct {
	*worker

	machine *machine
	// current is nil where the worker is DEAD.
	current *incarnation
	// exits are how the ranks exited. exited is the last incarnation of which one has, and lastOutputs the
	// last output of its first rank that wrote any.
	exits       []error
	exited      uint64
	lastOutputs []string
	// began is when the incarnation did.
	began time.Time
	// checks counts the examples that idle incarnations ran.
	checks int
	// lateSince is since when it has a late batch; zero without one.
	lateSince time.Time
	// starting is the transition to STARTUP until it is reported with its processes.
	starting Transition
}

// event is something that happened to an incarnation, or to the worker where of is nil. It
// returns the actions that follow.
type event struct {
	of *incarnation
	do func(m *machine, now time.Time) []action
}

func newWorker(r *Runner, index int) *worker {
	s := r.settings
	return &worker{
		runner: r, index: index, ranks: max(1, s.Replicas[index].Ranks),
		log:    s.Logger.With("worker", index),
		events: make(chan event, eventBuffer), ended: make(chan struct{}),
	}
}

func (w *worker) settings() *Settings { return &w.runner.settings }

func (w *worker) pool() *pool { return w.runner.pool }

// post sends the loop an event. It does not block once the loop has ended.
func (w *worker) post(do func(m *machine, now time.Time) []action) { w.postOf(nil, do) }

// postOf posts an event of an incarnation.
func (w *worker) postOf(of *incarnation, do func(m *machine, now time.Time) []action) {
	select {
	case w.events <- event{of, do}:
	case <-w.ended:
	}
}

// run is the loop. It ends when the worker was stopped and no process is left.
func (w *worker) run() {
	defer close(w.ended)
	l := &workerLoop{worker: w}
	l.machine = &machine{Limits: w.settings().Limits, size: w.ranks, jitter: rand.Float64, onTransition: l.onTransition}
	timer := time.NewTimer(0)
	defer timer.Stop()
	l.do(l.machine.Start(time.Now()))
	for !l.machine.Stopped() {
		l.publishStatus()
		var due <-chan time.Time
		at := l.machine.Wake()
		if look := time.Now().Add(lookInterval); l.machine.state == Ready && (at.IsZero() || look.Before(at)) {
			at = look
		}
		if !at.IsZero() {
			timer.Reset(time.Until(at))
			due = timer.C
		}
		select {
		case e := <-l.events:
			l.handle(e)
		case <-due:
			l.handle(event{do: (*machine).Tick})
		}
		l.checkExample(time.Now())
	}
	l.publishStatus()
}

// handle handles an event. The machine gets the work of the worker first. An event of an
// earlier incarnation is dropped, because processes, connections and timers race.
func (l *workerLoop) handle(e event) {
	now := time.Now()
	if l.current != nil {
		l.do(l.machine.Work(l.current.work(now, l.runner.pace.lateAfter(l.settings().HeartbeatLimit)), now))
	}
	if e.of == nil || e.of == l.current {
		l.do(e.do(l.machine, now))
	}
}

// do does the actions, and those that follow from them.
func (l *workerLoop) do(actions []action) {
	for len(actions) > 0 {
		a := actions[0]
		actions = append(actions[1:], l.act(a)...)
	}
	if l.machine.state == Dead && l.current != nil {
		l.current.end(l.machine.endCause())
		l.current = nil
	}
}

func (l *workerLoop) act(a action) []action {
	switch a {
	case doSpawn:
		return l.spawn()
	case doWarmUp:
		l.warmUp(l.current)
	case doOffer:
		l.current.offer()
	case doWithdraw:
		l.current.withdraw()
	case doPing:
		l.forEachRank((*rank).ping)
	case doAsk:
		l.forEachRank((*rank).ask)
	case doKill:
		for _, r := range l.current.startedRanks() {
			r.process.Kill()
		}
		l.current.end(l.machine.endCause())
	}
	return nil
}

// forEachRank calls do for every rank on a goroutine of its own, because a write to a
// worker may have to wait.
func (l *workerLoop) forEachRank(do func(r *rank)) {
	for _, r := range l.current.startedRanks() {
		l.tasks.Go(func() { do(r) })
	}
}

func (l *workerLoop) warmUp(of *incarnation) {
	l.tasks.Go(func() {
		err := of.warmUp()
		l.postOf(of, func(m *machine, now time.Time) []action {
			if err != nil {
				// Its fault is for no caller: later batches fail with this cause.
				return m.Fail(errors.New(err.Error()), now)
			}
			return m.Warm(now)
		})
	})
}

// lastOutput returns the last output of the first rank that has written any. It is safe
// for concurrent use.
func (w *worker) lastOutput() []string {
	if of := w.latest.Load(); of != nil {
		for _, r := range of.startedRanks() {
			if last := r.process.Last(); len(last) > 0 {
				return last
			}
		}
	}
	return nil
}

// onTransition reports a transition. The one to STARTUP waits for its processes.
func (l *workerLoop) onTransition(t Transition) {
	t.Worker = l.index
	l.runner.metrics.recordTransition(t, l.began)
	switch t.To {
	case Startup:
		l.began, l.starting = t.At, t
		return
	case Dead:
		t.Exits = l.exits
	default:
	}
	l.report(t)
}

func (l *workerLoop) report(t Transition) {
	for _, r := range l.current.startedRanks() {
		t.PIDs = append(t.PIDs, r.process.PID())
	}
	l.logTransition(t)
	if l.settings().OnTransition != nil {
		l.settings().OnTransition(t)
	}
}

func (l *workerLoop) logTransition(t Transition) {
	log := l.log.With("incarnation", t.Incarnation, "from", t.From.String(), "pids", t.PIDs)
	if t.To == Dead {
		exits := make([]string, len(t.Exits))
		for i, exit := range t.Exits {
			exits[i] = "exit code 0"
			if exit != nil {
				exits[i] = exit.Error()
			}
		}
		log = log.With("exits", exits)
	}
	if t.Cause == nil {
		log.Info("the worker is " + t.To.String())
		return
	}
	log.Warn("the worker is "+t.To.String(), "cause", t.Cause)
}

func (l *workerLoop) publishStatus() {
	late := l.machine.LateSince()
	if !late.IsZero() && !late.Equal(l.lateSince) {
		l.log.Warn(lateText(late), "incarnation", l.current.number, "longest", l.runner.pace.usual(l.settings().HeartbeatLimit), "requests", l.current.requestsSince(late))
	}
	l.lateSince = late
	l.runner.board.set(l.index, status{
		state: l.machine.state, lateSince: late, incarnation: l.machine.incarnation, progress: l.machine.progress,
		looping: l.machine.CrashLooping(), startFailed: l.machine.startFailed, cause: l.machine.Cause(), lastOutput: l.lastOutputs,
	})
}

// spawn starts the processes of an incarnation. If one cannot be started, the others
// are killed.
func (l *workerLoop) spawn() []action {
	of := &incarnation{worker: l.worker, number: l.machine.incarnation, running: map[uint64]*running{}, requests: map[uint64]*modelRequest{}}
	l.current, l.exits = of, make([]error, l.ranks)
	err := l.startRanks(of)
	l.latest.Store(of)
	l.report(l.starting)
	for _, r := range of.startedRanks() {
		l.watch(r)
	}
	if err == nil {
		return nil
	}
	now := time.Now()
	actions := l.machine.Fail(err, now)
	for i := len(of.startedRanks()); i < l.ranks; i++ {
		l.exits[i] = err
		actions = append(actions, l.machine.Exited(i, err, now)...)
	}
	return actions
}

// watch reads the connection of a rank, and waits for the exit of its process.
func (l *workerLoop) watch(r *rank) {
	l.tasks.Go(r.serve)
	l.tasks.Go(func() {
		<-r.process.Done()
		r.awaitRead()
		exit, last := r.process.Exit(), r.process.Last()
		l.postOf(r.of, func(m *machine, now time.Time) []action {
			l.exits[r.index] = exit
			if l.exited != r.of.number || len(l.lastOutputs) == 0 {
				l.exited, l.lastOutputs = r.of.number, last
			}
			return m.Exited(r.index, exit, now)
		})
	})
}
