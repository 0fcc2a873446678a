package worker

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/stagemesh/stagemesh/stagehost/runner/worker/supervise"
)

const (
	// eventRoom is how many events may wait for a worker's loop.
	eventRoom = 64
	// exitPatience is how long a process has to end that closed its connection,
	// before it is ended: how it ended says more than that the connection is over. It
	// is also how long one is heard out that has ended.
	exitPatience = 250 * time.Millisecond
)

// worker is one replica. Its loop owns the machine that decides about it and what
// is below it; everybody else posts events.
type worker struct {
	runner  *Runner
	index   int
	replica Replica
	log     *slog.Logger

	events chan event
	// over is closed when the loop has ended.
	over chan struct{}
	// tasks are the goroutines of its lives.
	tasks sync.WaitGroup

	machine *supervise.Machine
	// life is nil where it is DEAD.
	life *life
	// exits are how the ranks of the life have ended, last what they wrote.
	exits []error
	last  []string
	// began is when the incarnation did.
	began time.Time
	// starting is the edge to STARTUP that nobody has heard of yet.
	starting *Edge
	// hangUpAt is when a process is ended that closed its connection.
	hangUpAt time.Time
}

// event is something that happened; it returns what is to be done.
type event func(now time.Time) []supervise.Action

func newWorker(r *Runner, index int) *worker {
	s := r.settings
	w := &worker{
		runner: r, index: index, replica: s.Replicas[index],
		log:    s.Logger.With("worker", index),
		events: make(chan event, eventRoom), over: make(chan struct{}),
	}
	w.replica.Ranks = max(1, w.replica.Ranks)
	w.machine = supervise.New(supervise.Settings{
		Ranks: w.replica.Ranks, StartLimit: s.StartLimit, RunLimit: s.RunLimit,
		Heartbeat: s.Heartbeat, HeartbeatLimit: s.HeartbeatLimit, StopLimit: s.StopLimit,
		Backoff: s.Backoff, MaxBackoff: s.MaxBackoff, Settled: s.Settled, CrashLoop: s.CrashLoop,
		Jitter: rand.Float64, Edge: w.edge,
	})
	return w
}

func (w *worker) pool() *pool { return w.runner.pool }

// post tells the loop of an event. It does not block once the loop has ended.
func (w *worker) post(e event) {
	select {
	case w.events <- e:
	case <-w.over:
	}
}

// look has the loop see what the worker has to do.
func (w *worker) look() { w.post(func(time.Time) []supervise.Action { return nil }) }

// run is the loop. It ends when the worker was told to stop and no process is left.
func (w *worker) run() {
	defer close(w.over)
	timer := time.NewTimer(0)
	defer timer.Stop()
	w.do(w.machine.Start(time.Now()))
	for !w.machine.Over() {
		w.publish()
		var wake <-chan time.Time
		if at := w.wake(); !at.IsZero() {
			timer.Reset(time.Until(at))
			wake = timer.C
		}
		select {
		case e := <-w.events:
			w.step(e)
		case <-wake:
			w.step(w.tick)
		}
	}
	w.publish()
}

// step is one event. What the worker has to do is looked at first.
func (w *worker) step(e event) {
	now := time.Now()
	if w.life != nil {
		w.do(w.machine.Work(w.life.of, w.life.work(), now))
	}
	w.do(e(now))
}

func (w *worker) wake() time.Time {
	at := w.machine.Wake()
	if !w.hangUpAt.IsZero() && (at.IsZero() || w.hangUpAt.Before(at)) {
		return w.hangUpAt
	}
	return at
}

func (w *worker) tick(now time.Time) []supervise.Action {
	if !w.hangUpAt.IsZero() && !now.Before(w.hangUpAt) {
		w.hangUpAt = time.Time{}
		return w.machine.Fail(w.machine.Incarnation(), ErrDisconnected, now)
	}
	return w.machine.Tick(now)
}

// do does what the machine asks for, and what it asks for then.
func (w *worker) do(actions []supervise.Action) {
	for len(actions) > 0 {
		a := actions[0]
		actions = append(actions[1:], w.act(a)...)
	}
	if w.machine.State() == supervise.Dead {
		w.bury()
	}
}

func (w *worker) act(a supervise.Action) []supervise.Action {
	switch a.Do {
	case supervise.Spawn:
		return w.spawn(a.Incarnation)
	case supervise.WarmUp:
		w.warmUp(w.life)
	case supervise.Offer:
		w.life.warmedUp()
		w.life.offer()
	case supervise.Withdraw:
		w.life.withdraw()
	case supervise.Ping:
		w.each(func(r *rank) { r.ping() })
	case supervise.Ask:
		w.each(func(r *rank) { r.ask(w.runner.settings.StopLimit) })
	case supervise.Kill:
		w.kill()
	}
	return nil
}

// each does something for every rank, on a goroutine of its own: what is written
// to a worker may have to wait.
func (w *worker) each(do func(r *rank)) {
	for _, r := range w.life.ranks {
		if r.process != nil {
			w.tasks.Go(func() { do(r) })
		}
	}
}

func (w *worker) warmUp(l *life) {
	w.tasks.Go(func() {
		err := l.warmUp()
		w.post(func(now time.Time) []supervise.Action {
			if err != nil {
				// What its callers would hear is not for those of later batches.
				return w.machine.Fail(l.of, errors.New(err.Error()), now)
			}
			return w.machine.Warm(l.of, now)
		})
	})
}

func (w *worker) kill() {
	for _, r := range w.life.ranks {
		if r.process != nil {
			r.process.Kill()
		}
	}
	w.life.end(w.cause())
}

// cause is what batches fail with that the worker has still.
func (w *worker) cause() error {
	if cause := w.machine.Cause(); cause != nil {
		return cause
	}
	return errAsked
}

// bury ends what is left of a life whose processes have all ended.
func (w *worker) bury() {
	if w.life == nil {
		return
	}
	w.life.end(w.cause())
	w.life, w.hangUpAt = nil, time.Time{}
}

// wrote returns what the first rank has written last that has written anything.
func (w *worker) wrote() []string {
	lines := make(chan []string, 1)
	w.post(func(time.Time) []supervise.Action {
		lines <- w.lastLines()
		return nil
	})
	select {
	case got := <-lines:
		return got
	case <-w.over:
		return nil
	}
}

func (w *worker) lastLines() []string {
	if w.life != nil {
		for _, r := range w.life.ranks {
			if r.process != nil && len(r.process.Last()) > 0 {
				return r.process.Last()
			}
		}
	}
	return w.last
}

// disconnected says that a connection ended by itself. The process is likely to
// have ended too, and is heard of at once then. What a worker that leaves has not
// answered by now it will not answer.
func (w *worker) disconnected(l *life) {
	w.post(func(now time.Time) []supervise.Action {
		switch state := w.machine.State(); {
		case w.life != l:
		case state == supervise.Startup || state == supervise.Ready:
			w.hangUpAt = now.Add(exitPatience)
		default:
			l.end(w.cause())
		}
		return nil
	})
}

// exited says that the process of a rank has ended.
func (w *worker) exited(l *life, r *rank) {
	how, last := r.process.Exit(), r.process.Last()
	w.post(func(now time.Time) []supervise.Action {
		w.ended(l.of, r.index, how, last)
		return w.machine.Exited(l.of, r.index, how, now)
	})
}

// ended books how a process ended. What the first has written is kept.
func (w *worker) ended(of supervise.Incarnation, rank int, how error, last []string) {
	if of != w.machine.Incarnation() || w.life == nil {
		return
	}
	w.exits[rank] = how
	if len(w.last) == 0 {
		w.last = last
	}
}

// edge tells the log and whoever else listens of a transition.
func (w *worker) edge(e supervise.Edge) {
	out := Edge{At: e.At, Worker: w.index, Incarnation: e.Incarnation, From: e.From, To: e.To, Cause: e.Cause}
	w.runner.metrics.moved(out, w.began)
	if e.To == supervise.Startup {
		w.began = e.At
		w.starting = &out // it is told when there are processes
		return
	}
	out.PIDs = w.life.pids()
	if e.To == supervise.Dead {
		out.Exits = w.exits
	}
	w.tell(out)
}

func (w *worker) tell(out Edge) {
	w.logEdge(out)
	if tell := w.runner.settings.Edge; tell != nil {
		tell(out)
	}
}

func (w *worker) logEdge(e Edge) {
	log := w.log.With("incarnation", e.Incarnation, "from", e.From.String(), "pids", e.PIDs)
	if e.To == supervise.Dead {
		exits := make([]string, len(e.Exits))
		for i, how := range e.Exits {
			exits[i] = "exit code 0"
			if how != nil {
				exits[i] = how.Error()
			}
		}
		log = log.With("exits", exits)
	}
	if e.Cause == nil {
		log.Info("the worker is " + e.To.String())
		return
	}
	log.Warn("the worker is "+e.To.String(), "cause", e.Cause)
}

// publish tells the runner how the worker is.
func (w *worker) publish() {
	s := status{
		state: w.machine.State(), incarnation: w.machine.Incarnation(), doing: w.machine.Doing(),
		looping: w.machine.Looping(), cause: w.machine.Cause(), last: w.last,
	}
	w.runner.board.set(w.index, s)
}

func (w *worker) name(of supervise.Incarnation, rank int) string {
	return fmt.Sprintf("%d-%d-%d", w.index, rank, of)
}
