package worker

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/stagehost/runner/worker/spawn"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker/supervise"
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

	machine *supervise.Machine
	// current is nil where the worker is DEAD.
	current *incarnation
	// exits are how the ranks exited; lastOutputs is the last output of the first that
	// wrote any.
	exits       []error
	lastOutputs []string
	// began is when the incarnation did.
	began time.Time
	// starting is the transition to STARTUP until it is reported with its processes.
	starting *Transition
	// killAt is when a process is killed that closed its connection and did not exit.
	killAt time.Time
}

// event is something that happened; it returns the actions that follow.
type event func(now time.Time) []supervise.Action

func newWorker(r *Runner, index int) *worker {
	s := r.settings
	w := &worker{
		runner: r, index: index, ranks: max(1, s.Replicas[index].Ranks),
		log:    s.Logger.With("worker", index),
		events: make(chan event, eventBuffer), ended: make(chan struct{}),
	}
	w.machine = supervise.New(supervise.Settings{
		Ranks: w.ranks, Limits: s.Limits, Jitter: rand.Float64, OnTransition: w.onTransition,
	})
	return w
}

func (w *worker) settings() *Settings { return &w.runner.settings }

func (w *worker) pool() *pool { return w.runner.pool }

// post sends the loop an event. It does not block once the loop has ended.
func (w *worker) post(e event) {
	select {
	case w.events <- e:
	case <-w.ended:
	}
}

// wake makes the loop report the worker's work to the machine.
func (w *worker) wake() { w.post(func(time.Time) []supervise.Action { return nil }) }

// run is the loop. It ends when the worker was stopped and no process is left.
func (w *worker) run() {
	defer close(w.ended)
	timer := time.NewTimer(0)
	defer timer.Stop()
	w.do(w.machine.Start(time.Now()))
	for !w.machine.Stopped() {
		w.publishStatus()
		var due <-chan time.Time
		if at := w.nextTick(); !at.IsZero() {
			timer.Reset(time.Until(at))
			due = timer.C
		}
		select {
		case e := <-w.events:
			w.handle(e)
		case <-due:
			w.handle(w.tick)
		}
	}
	w.publishStatus()
}

// handle handles an event. The machine gets the work of the worker first.
func (w *worker) handle(e event) {
	now := time.Now()
	if w.current != nil {
		w.do(w.machine.Work(w.current.number, w.current.work(), now))
	}
	w.do(e(now))
}

func (w *worker) nextTick() time.Time {
	at := w.machine.Wake()
	if !w.killAt.IsZero() && (at.IsZero() || w.killAt.Before(at)) {
		return w.killAt
	}
	return at
}

func (w *worker) tick(now time.Time) []supervise.Action {
	if !w.killAt.IsZero() && !now.Before(w.killAt) {
		w.killAt = time.Time{}
		return w.machine.Fail(w.machine.Incarnation(), ErrDisconnected, now)
	}
	return w.machine.Tick(now)
}

// do does the actions, and those that follow from them.
func (w *worker) do(actions []supervise.Action) {
	for len(actions) > 0 {
		a := actions[0]
		actions = append(actions[1:], w.act(a)...)
	}
	if w.machine.State() == supervise.Dead && w.current != nil {
		w.current.end(w.cause())
		w.current, w.killAt = nil, time.Time{}
	}
}

func (w *worker) act(a supervise.Action) []supervise.Action {
	switch a.Do {
	case supervise.Spawn:
		return w.spawn(a.Incarnation)
	case supervise.WarmUp:
		w.warmUp(w.current)
	case supervise.Offer:
		w.current.offer()
	case supervise.Withdraw:
		w.current.withdraw()
	case supervise.Ping:
		w.forEachRank((*rank).ping)
	case supervise.Ask:
		w.forEachRank((*rank).ask)
	case supervise.Kill:
		for _, r := range w.current.started() {
			r.process.Kill()
		}
		w.current.end(w.cause())
	}
	return nil
}

// forEachRank calls do for every rank on a goroutine of its own, because a write to a
// worker may have to wait.
func (w *worker) forEachRank(do func(r *rank)) {
	for _, r := range w.current.started() {
		w.tasks.Go(func() { do(r) })
	}
}

func (w *worker) warmUp(of *incarnation) {
	w.tasks.Go(func() {
		err := of.warmUp()
		w.post(func(now time.Time) []supervise.Action {
			if err != nil {
				// Its fault is for no caller: later batches fail with this cause.
				return w.machine.Fail(of.number, errors.New(err.Error()), now)
			}
			return w.machine.Warm(of.number, now)
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

// lastOutput returns the last output of the first rank that has written any.
func (w *worker) lastOutput() []string {
	lines := make(chan []string, 1)
	w.post(func(time.Time) []supervise.Action {
		out := w.lastOutputs
		if w.current != nil {
			for _, r := range w.current.started() {
				if last := r.process.Last(); len(last) > 0 {
					out = last
					break
				}
			}
		}
		lines <- out
		return nil
	})
	select {
	case got := <-lines:
		return got
	case <-w.ended:
		return nil
	}
}

// disconnected is the event that a connection ended by itself. The process has likely
// exited too, which is reported soon. A worker that is leaving answers nothing more.
func (w *worker) disconnected(of *incarnation) {
	w.post(func(now time.Time) []supervise.Action {
		switch state := w.machine.State(); {
		case w.current != of:
		case state == supervise.Startup || state == supervise.Ready:
			w.killAt = now.Add(w.settings().ExitGrace)
		default:
			of.end(w.cause())
		}
		return nil
	})
}

// exited is the event that the process of a rank has exited.
func (w *worker) exited(r *rank) {
	exit, last := r.process.Exit(), r.process.Last()
	w.post(func(now time.Time) []supervise.Action {
		if r.of == w.current {
			w.exits[r.index] = exit
			if len(w.lastOutputs) == 0 {
				w.lastOutputs = last
			}
		}
		return w.machine.Exited(r.of.number, r.index, exit, now)
	})
}

// onTransition reports a transition. The one to STARTUP waits for its processes.
func (w *worker) onTransition(t supervise.Transition) {
	out := Transition{At: t.At, Worker: w.index, Incarnation: t.Incarnation, From: t.From, To: t.To, Cause: t.Cause}
	w.runner.metrics.recordTransition(out, w.began)
	if t.To == supervise.Startup {
		w.began, w.starting = t.At, &out
		return
	}
	if t.To == supervise.Dead {
		out.Exits = w.exits
	}
	w.report(out)
}

func (w *worker) report(t Transition) {
	for _, r := range w.current.started() {
		t.PIDs = append(t.PIDs, r.process.PID())
	}
	w.logTransition(t)
	if w.settings().OnTransition != nil {
		w.settings().OnTransition(t)
	}
}

func (w *worker) logTransition(t Transition) {
	log := w.log.With("incarnation", t.Incarnation, "from", t.From.String(), "pids", t.PIDs)
	if t.To == supervise.Dead {
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
	w.runner.board.set(w.index, status{
		state: w.machine.State(), incarnation: w.machine.Incarnation(), progress: w.machine.Progress(),
		looping: w.machine.CrashLooping(), cause: w.machine.Cause(), lastOutput: w.lastOutputs,
	})
}

// spawn starts the processes of an incarnation. If one cannot be started, the others
// are killed.
func (w *worker) spawn(number supervise.Incarnation) []supervise.Action {
	of := &incarnation{worker: w, number: number, running: map[uint64]*running{}}
	w.current, w.lastOutputs, w.exits = of, nil, make([]error, w.ranks)
	err := w.startRanks(of)
	w.report(*w.starting)
	for _, r := range of.started() {
		w.watch(r)
	}
	if err == nil {
		return nil
	}
	now := time.Now()
	actions := w.machine.Fail(number, err, now)
	for i := len(of.started()); i < w.ranks; i++ {
		w.exits[i] = err
		actions = append(actions, w.machine.Exited(number, i, err, now)...)
	}
	return actions
}

// watch reads the connection of a rank, and waits for the exit of its process.
func (w *worker) watch(r *rank) {
	w.tasks.Go(r.serve)
	w.tasks.Go(func() {
		<-r.process.Done()
		r.awaitRead()
		w.exited(r)
	})
}

func (w *worker) startRanks(of *incarnation) error {
	s := w.settings()
	program, err := s.program(w.index)
	if err != nil {
		return fmt.Errorf("command: %w", err)
	}
	env, err := w.environment(of.number)
	if err != nil {
		return err
	}
	cpus, err := s.Replicas[w.index].cpus()
	if err != nil {
		return err
	}
	if err := copyFiles(w.runner.files, s.Files); err != nil {
		return fmt.Errorf("files for the workers: %w", err)
	}
	for i := range w.ranks {
		r := &rank{of: of, index: i, readDone: make(chan struct{}), log: w.log.With("rank", i, "incarnation", of.number)}
		if r.listener, err = w.runner.spawner.Listen(fmt.Sprintf("%d-%d-%d", w.index, i, of.number)); err != nil {
			return err
		}
		of.ranks = append(of.ranks, r)
		env["RANK"], env["LOCAL_RANK"] = strconv.Itoa(i), strconv.Itoa(i)
		env["STAGEMESH_SOCKET"] = r.listener.Addr().String()
		if r.process, err = w.runner.spawner.Start(spawn.Command{
			Args: append([]string{program}, s.Command[1:]...),
			Dir:  s.Dir, Env: pairs(env), CPUs: cpus, Log: r.log,
		}); err != nil {
			return fmt.Errorf("command: %w", errors.Join(err, r.listener.Close()))
		}
	}
	return nil
}

// environment returns the environment that all ranks of an incarnation share.
func (w *worker) environment(number supervise.Incarnation) (map[string]string, error) {
	s := w.settings()
	env := s.environment(w.index)
	if s.Files != nil {
		env[s.FilesPath] = strings.TrimPrefix(env[s.FilesPath]+string(filepath.ListSeparator)+w.runner.files, string(filepath.ListSeparator))
	}
	env["STAGEMESH_STAGE"] = s.Stage
	env["STAGEMESH_WORKER"] = strconv.Itoa(w.index)
	env["STAGEMESH_INCARNATION"] = strconv.FormatUint(uint64(number), 10)
	env["WORLD_SIZE"] = strconv.Itoa(w.ranks)
	if w.ranks == 1 {
		return env, nil
	}
	port, err := freePort()
	if err != nil {
		return nil, fmt.Errorf("a port for the gang: %w", err)
	}
	env["MASTER_ADDR"], env["MASTER_PORT"] = "127.0.0.1", port
	return env, nil
}

// freePort returns a port that is free now. If another process takes it before the
// gang does, the gang fails and gets another one at its next start.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, errors.Join(err, l.Close())
}

func pairs(env map[string]string) []string {
	out := make([]string, 0, len(env))
	for _, name := range slices.Sorted(maps.Keys(env)) {
		out = append(out, name+"="+env[name])
	}
	return out
}
