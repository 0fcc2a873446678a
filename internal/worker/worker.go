package worker

import (
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// worker is one replica. Its loop owns the machine and the fields below it; all others
// post events.
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

	machine *machine
	// current is nil where the worker is DEAD.
	current *incarnation
	// exits are how the ranks exited; lastOutputs is the last output of the first that
	// wrote any.
	exits       []error
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
	w := &worker{
		runner: r, index: index, ranks: max(1, s.Replicas[index].Ranks),
		log:    s.Logger.With("worker", index),
		events: make(chan event, eventBuffer), ended: make(chan struct{}),
	}
	w.machine = &machine{Limits: s.Limits, size: w.ranks, jitter: rand.Float64, onTransition: w.onTransition}
	return w
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
	timer := time.NewTimer(0)
	defer timer.Stop()
	w.do(w.machine.Start(time.Now()))
	for !w.machine.Stopped() {
		w.publishStatus()
		var due <-chan time.Time
		at := w.machine.Wake()
		if look := time.Now().Add(lookInterval); w.machine.state == Ready && (at.IsZero() || look.Before(at)) {
			at = look
		}
		if !at.IsZero() {
			timer.Reset(time.Until(at))
			due = timer.C
		}
		select {
		case e := <-w.events:
			w.handle(e)
		case <-due:
			w.handle(event{do: (*machine).Tick})
		}
		w.checkExample(time.Now())
	}
	w.publishStatus()
}

// handle handles an event. The machine gets the work of the worker first. An event of an
// earlier incarnation is dropped, because processes, connections and timers race.
func (w *worker) handle(e event) {
	now := time.Now()
	if w.current != nil {
		w.do(w.machine.Work(w.current.work(now, w.runner.pace.lateAfter(w.settings().HeartbeatLimit)), now))
	}
	if e.of == nil || e.of == w.current {
		w.do(e.do(w.machine, now))
	}
}

// do does the actions, and those that follow from them.
func (w *worker) do(actions []action) {
	for len(actions) > 0 {
		a := actions[0]
		actions = append(actions[1:], w.act(a)...)
	}
	if w.machine.state == Dead && w.current != nil {
		w.current.end(w.cause())
		w.current = nil
	}
}

func (w *worker) act(a action) []action {
	switch a {
	case doSpawn:
		return w.spawn()
	case doWarmUp:
		w.warmUp(w.current)
	case doOffer:
		w.current.offer()
	case doWithdraw:
		w.current.withdraw()
	case doPing:
		w.forEachRank((*rank).ping)
	case doAsk:
		w.forEachRank((*rank).ask)
	case doKill:
		for _, r := range w.current.startedRanks() {
			r.process.Kill()
		}
		w.current.end(w.cause())
	}
	return nil
}

// forEachRank calls do for every rank on a goroutine of its own, because a write to a
// worker may have to wait.
func (w *worker) forEachRank(do func(r *rank)) {
	for _, r := range w.current.startedRanks() {
		w.tasks.Go(func() { do(r) })
	}
}

func (w *worker) warmUp(of *incarnation) {
	w.tasks.Go(func() {
		err := of.warmUp()
		w.postOf(of, func(m *machine, now time.Time) []action {
			if err != nil {
				// Its fault is for no caller: later batches fail with this cause.
				return m.Fail(errors.New(err.Error()), now)
			}
			return m.Warm(now)
		})
	})
}

// cause is the cause for batches that the worker cannot finish.
func (w *worker) cause() error {
	if cause := w.machine.Cause(); cause != nil {
		return cause
	}
	return errAsked
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
func (w *worker) onTransition(t Transition) {
	t.Worker = w.index
	w.runner.metrics.recordTransition(t, w.began)
	switch t.To {
	case Startup:
		w.began, w.starting = t.At, t
		return
	case Dead:
		t.Exits = w.exits
	default:
	}
	w.report(t)
}

func (w *worker) report(t Transition) {
	for _, r := range w.current.startedRanks() {
		t.PIDs = append(t.PIDs, r.process.PID())
	}
	w.logTransition(t)
	if w.settings().OnTransition != nil {
		w.settings().OnTransition(t)
	}
}

func (w *worker) logTransition(t Transition) {
	log := w.log.With("incarnation", t.Incarnation, "from", t.From.String(), "pids", t.PIDs)
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

func (w *worker) publishStatus() {
	late := w.machine.LateSince()
	if !late.IsZero() && !late.Equal(w.lateSince) {
		w.log.Warn(lateText(late), "incarnation", w.current.number, "longest", w.runner.pace.usual(w.settings().HeartbeatLimit), "requests", w.current.requestsSince(late))
	}
	w.lateSince = late
	w.runner.board.set(w.index, status{
		state: w.machine.state, lateSince: late, incarnation: w.machine.incarnation, progress: w.machine.progress,
		looping: w.machine.CrashLooping(), startFailed: w.machine.startFailed, cause: w.machine.Cause(), lastOutput: w.lastOutputs,
	})
}

// spawn starts the processes of an incarnation. If one cannot be started, the others
// are killed.
func (w *worker) spawn() []action {
	of := &incarnation{worker: w, number: w.machine.incarnation, running: map[uint64]*running{}, requests: map[uint64]*modelRequest{}}
	w.current, w.lastOutputs, w.exits = of, nil, make([]error, w.ranks)
	err := w.startRanks(of)
	w.latest.Store(of)
	w.report(w.starting)
	for _, r := range of.startedRanks() {
		w.watch(r)
	}
	if err == nil {
		return nil
	}
	now := time.Now()
	actions := w.machine.Fail(err, now)
	for i := len(of.startedRanks()); i < w.ranks; i++ {
		w.exits[i] = err
		actions = append(actions, w.machine.Exited(i, err, now)...)
	}
	return actions
}

// watch reads the connection of a rank, and waits for the exit of its process.
func (w *worker) watch(r *rank) {
	w.tasks.Go(r.serve)
	w.tasks.Go(func() {
		<-r.process.Done()
		r.awaitRead()
		exit, last := r.process.Exit(), r.process.Last()
		w.postOf(r.of, func(m *machine, now time.Time) []action {
			w.exits[r.index] = exit
			if len(w.lastOutputs) == 0 {
				w.lastOutputs = last
			}
			return m.Exited(r.index, exit, now)
		})
	})
}
