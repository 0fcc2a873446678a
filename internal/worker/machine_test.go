package worker

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

var (
	errBroke  = errors.New("it broke")
	errSignal = errors.New("signal: killed")
)

// plain are settings in which every limit is another round number.
func plain() *machine {
	return &machine{size: 1, jitter: func() float64 { return 0 }, Limits: Limits{
		StartLimit: 600 * time.Second, RunLimit: 300 * time.Second,
		Heartbeat: 5 * time.Second, HeartbeatLimit: 10 * time.Second, StopLimit: 4 * time.Second,
		Backoff: time.Second, MaxBackoff: 8 * time.Second, StableAfter: 20 * time.Second, CrashLoop: 3,
	}}
}

// life is a worker and a clock. What is done is written down as "verb number",
// and every edge as "FROM-TO: cause".
type life struct {
	*testing.T
	*machine
	now   time.Time
	done  []string
	edges []string
}

func newLife(t *testing.T, edit ...func(*machine)) *life {
	l := &life{T: t, now: time.Unix(1_000_000, 0)}
	s := plain()
	for _, e := range edit {
		e(s)
	}
	s.onTransition = func(e Transition) {
		if !e.At.Equal(l.now) {
			t.Errorf("an edge happened at %s, it is %s", e.At, l.now)
		}
		text := fmt.Sprintf("%s-%s", e.From, e.To)
		if e.Cause != nil {
			text += ": " + e.Cause.Error()
		}
		l.edges = append(l.edges, text)
	}
	l.machine = s
	return l
}

func ranks(n int) func(*machine) { return func(m *machine) { m.size = n } }

func (l *life) did(actions []action) {
	names := [...]string{"spawn", "warm up", "offer", "withdraw", "ping", "ask", "kill"}
	for _, a := range actions {
		l.done = append(l.done, fmt.Sprintf("%s %d", names[a], l.incarnation))
	}
}

// pass lets time pass, in the steps that the machine asks for.
func (l *life) pass(d time.Duration) {
	end := l.now.Add(d)
	for range 1000 {
		at := l.Wake()
		if at.IsZero() || at.After(end) {
			l.now = end
			return
		}
		if at.After(l.now) {
			l.now = at
		}
		l.did(l.Tick(l.now))
	}
	l.Fatalf("the machine wakes up again and again at %s in state %s", l.now, l.state)
}

// want holds what was done and which edges there were since the last look.
func (l *life) want(done string, edges ...string) {
	l.Helper()
	if got := strings.Join(l.done, ", "); got != done {
		l.Errorf("did %q, want %q", got, done)
	}
	if !slices.Equal(l.edges, edges) {
		l.Errorf("edges %q, want %q", l.edges, edges)
	}
	l.done, l.edges = nil, nil
}

// up brings a worker of one rank to READY.
func (l *life) up() {
	l.Helper()
	if l.state == Dead && l.incarnation == 0 {
		l.did(l.Start(l.now))
	}
	l.did(l.Ready(0))
	l.did(l.Warm(l.now))
	if l.state != Ready {
		l.Fatalf("it is %s and not READY", l.state)
	}
	l.done, l.edges = nil, nil
}

func (l *life) exit(how error) { l.did(l.Exited(0, how, l.now)) }

// busy gives it a batch now.
func (l *life) busy() { l.did(l.Work(workload{Oldest: l.now}, l.now)) }

func (l *life) idle() { l.did(l.Work(workload{Ended: l.now}, l.now)) }

func TestWorkerIsReadyAfterWarmUp(t *testing.T) {
	t.Parallel()
	l := newLife(t)
	l.did(l.Start(l.now))
	l.want("spawn 1", "DEAD-STARTUP")
	l.did(l.Ready(0))
	l.want("warm up 1")
	l.did(l.Warm(l.now))
	l.want("offer 1", "STARTUP-READY")
	if l.Cause() != nil || l.CrashLooping() || l.Stopped() {
		t.Errorf("cause %v, looping %t, over %t", l.Cause(), l.CrashLooping(), l.Stopped())
	}
}

// Every edge that there is, by what causes it.
func TestEachTransitionHasItsCause(t *testing.T) {
	t.Parallel()
	const startup, ready = false, true
	for name, test := range map[string]struct {
		ready bool
		event func(l *life)
		done  string
		edges []string
	}{
		"starting, it fails": {
			startup, func(l *life) { l.did(l.machine.Fail(errBroke, l.now)) },
			"kill 1",
			[]string{"STARTUP-ERROR: it broke"},
		},
		"starting, it reports that it failed, leaves and is gone": {startup, func(l *life) {
			l.did(l.ReportError(errBroke, l.now))
			l.did(l.ReportShutdown(l.now))
			l.exit(errors.New("exit code 1"))
		}, "ask 1", []string{"STARTUP-ERROR: it broke", "ERROR-SHUTDOWN: it broke", "SHUTDOWN-DEAD: it broke"}},
		"starting, it is stopped": {startup, func(l *life) {
			l.did(l.Stop(l.now))
			l.exit(nil)
		}, "ask 1", []string{"STARTUP-SHUTDOWN", "SHUTDOWN-DEAD"}},
		"starting, it is killed": {
			startup, func(l *life) { l.exit(errSignal) },
			"",
			[]string{"STARTUP-DEAD: signal: killed"},
		},
		"starting, it ends": {
			startup, func(l *life) { l.exit(nil) },
			"",
			[]string{"STARTUP-DEAD: it exited unexpectedly with code 0"},
		},
		"starting, it takes too long": {startup, func(l *life) {
			l.SetProgress("loading shard 3 of 12")
			l.pass(599 * time.Second)
			l.pass(time.Second)
			l.exit(errSignal)
		}, "kill 1", []string{
			"STARTUP-ERROR: it was not ready in time; its last progress: loading shard 3 of 12",
			"ERROR-DEAD: it was not ready in time; its last progress: loading shard 3 of 12",
		}},
		"ready, it fails": {ready, func(l *life) {
			l.did(l.machine.Fail(errBroke, l.now))
			l.exit(errSignal)
		}, "withdraw 1, kill 1", []string{"READY-ERROR: it broke", "ERROR-DEAD: it broke"}},
		"ready, it reports that it failed": {ready, func(l *life) {
			l.did(l.ReportError(errBroke, l.now))
			l.did(l.ReportShutdown(l.now))
			l.exit(nil)
		}, "withdraw 1, ask 1", []string{"READY-ERROR: it broke", "ERROR-SHUTDOWN: it broke", "SHUTDOWN-DEAD: it broke"}},
		"ready, it is stopped": {ready, func(l *life) {
			l.did(l.Stop(l.now))
			l.exit(nil)
		}, "withdraw 1, ask 1", []string{"READY-SHUTDOWN", "SHUTDOWN-DEAD"}},
		"ready, it gets a signal from somebody": {ready, func(l *life) {
			l.did(l.ReportShutdown(l.now))
			l.exit(nil)
		}, "withdraw 1, ask 1", []string{
			"READY-SHUTDOWN: it exited unexpectedly with code 0",
			"SHUTDOWN-DEAD: it exited unexpectedly with code 0",
		}},
		"ready, it is killed": {
			ready, func(l *life) { l.exit(errSignal) },
			"withdraw 1",
			[]string{"READY-DEAD: signal: killed"},
		},
		"stopped, it has another exit code": {ready, func(l *life) {
			l.did(l.Stop(l.now))
			l.exit(errSignal)
		}, "withdraw 1, ask 1", []string{"READY-SHUTDOWN", "SHUTDOWN-DEAD: signal: killed"}},
		"stopped, it does not": {ready, func(l *life) {
			l.did(l.Stop(l.now))
			l.pass(3 * time.Second)
			l.pass(time.Hour)
			l.exit(errSignal)
		}, "withdraw 1, ask 1, kill 1", []string{"READY-SHUTDOWN", "SHUTDOWN-DEAD: it did not exit in time"}},
		"it reports that it failed and stays": {ready, func(l *life) {
			l.did(l.ReportError(errBroke, l.now))
			l.pass(4 * time.Second)
			l.exit(errSignal)
		}, "withdraw 1, ask 1, kill 1", []string{"READY-ERROR: it broke", "ERROR-DEAD: it broke"}},
		"it is given up on": {ready, func(l *life) {
			l.did(l.Kill(l.now))
			l.exit(errSignal)
		}, "withdraw 1, kill 1", []string{"READY-SHUTDOWN", "SHUTDOWN-DEAD: signal: killed"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLife(t)
			l.did(l.Start(l.now))
			l.done, l.edges = nil, nil
			if test.ready {
				l.up()
			}
			test.event(l)
			l.want(test.done, test.edges...)
		})
	}
}

func TestBackoffGrows(t *testing.T) {
	t.Parallel()
	l := newLife(t)
	l.did(l.Start(l.now))
	for i, pause := range []int{1, 2, 4, 8, 8, 8} {
		l.exit(errBroke)
		l.pass(time.Duration(pause)*time.Second - 1)
		if l.state != Dead {
			t.Errorf("restart %d came before %d s", i+1, pause)
		}
		l.pass(1)
		if l.state != Startup || l.incarnation != uint64(i)+2 {
			t.Errorf("after %d s it is %s, incarnation %d", pause, l.state, l.incarnation)
		}
	}
}

func TestJitterShortensPausesByHalfAtMost(t *testing.T) {
	t.Parallel()
	for jitter, want := range map[float64]time.Duration{0: time.Second, 0.5: 750 * time.Millisecond, 1: 500 * time.Millisecond} {
		l := newLife(t, func(s *machine) { s.jitter = func() float64 { return jitter } })
		l.did(l.Start(l.now))
		l.exit(errBroke)
		if got := l.Wake().Sub(l.now); got != want {
			t.Errorf("jitter %g makes a pause of %s, want %s", jitter, got, want)
		}
	}
}

func TestCrashesInARowAreACrashLoop(t *testing.T) {
	t.Parallel()
	l := newLife(t)
	l.did(l.Start(l.now))
	for i := range 3 {
		if l.CrashLooping() {
			t.Errorf("a crash loop after %d crashes", i)
		}
		if i > 0 {
			l.pass(time.Minute)
		}
		l.exit(fmt.Errorf("exit code %d", i))
	}
	if !l.CrashLooping() || l.Cause() == nil || l.Cause().Error() != "exit code 2" {
		t.Errorf("looping %t, cause %v", l.CrashLooping(), l.Cause())
	}
	// It goes on trying, and is in the loop until it is ready.
	l.pass(time.Minute)
	if l.state != Startup || !l.CrashLooping() {
		t.Errorf("%s, looping %t", l.state, l.CrashLooping())
	}
	l.up()
	if l.CrashLooping() {
		t.Error("a worker that is ready is in a crash loop")
	}
	l.exit(errSignal)
	if !l.CrashLooping() {
		t.Error("it died soon after it was ready, and is in no crash loop")
	}
}

func TestSettledWorkerHasNoCrashes(t *testing.T) {
	t.Parallel()
	for name, live := range map[string]func(l *life){
		"by a worker that was ready for a while": func(l *life) { l.pass(20 * time.Second) },
		"by a worker that finished a batch":      func(l *life) { l.idle() },
		"when somebody recycles it": func(l *life) {
			l.did(l.Recycle(l.now))
			l.exit(nil)
			l.did(l.Tick(l.now))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLife(t, func(s *machine) { s.Heartbeat = 0 })
			l.did(l.Start(l.now))
			for range 2 {
				l.exit(errBroke)
				l.pass(time.Minute)
			}
			l.up()
			if l.Cause() == nil {
				t.Error("the cause is forgotten at once")
			}
			live(l)
			if l.Cause() != nil {
				t.Errorf("the cause is still %v", l.Cause())
			}
			l.exit(errSignal)
			if pause := l.Wake().Sub(l.now); pause != time.Second || l.CrashLooping() {
				t.Errorf("it starts in %s, looping %t", pause, l.CrashLooping())
			}
		})
	}
}

// The worker leaves READY before its process ends: that it was settled counts.
func TestSettledWorkerStartsNewRow(t *testing.T) {
	t.Parallel()
	l := newLife(t, func(s *machine) { s.Heartbeat = 0 })
	l.did(l.Start(l.now))
	for range 2 {
		l.exit(errBroke)
		l.pass(time.Minute)
	}
	l.up()
	l.now = l.now.Add(time.Minute) // no Tick comes in between
	l.did(l.machine.Fail(errBroke, l.now))
	l.exit(errSignal)
	if pause := l.Wake().Sub(l.now); pause != time.Second {
		t.Errorf("it starts in %s", pause)
	}
}

func TestIdleWorkersArePinged(t *testing.T) {
	t.Parallel()
	l := newLife(t)
	l.up()
	l.pass(5*time.Second - 1)
	l.want("")
	l.pass(1)
	l.want("ping 1")
	l.pass(9 * time.Second)
	l.Pong(0, l.now)
	l.pass(5*time.Second - 1)
	l.want("")
	l.pass(1)
	l.want("ping 1")
	l.pass(10*time.Second - 1)
	l.want("")
	l.pass(1)
	l.want("withdraw 1, kill 1", "READY-ERROR: it does not answer")
}

func TestBusyWorkersAreNotPinged(t *testing.T) {
	t.Parallel()
	l := newLife(t)
	l.up()
	l.pass(4 * time.Second)
	l.busy()
	l.pass(100 * time.Second)
	l.want("")
	l.idle()
	l.pass(5*time.Second - 1)
	l.want("")
	l.pass(1)
	l.want("ping 1")
	// It has got a batch before it could be asked.
	l.busy()
	l.Pong(0, l.now)
	l.pass(100 * time.Second)
	l.want("")
}

// The end of a batch is not an event: whoever looked while there was one has to look again
// soon.
func TestWorkerIsPingedAfterItsBatch(t *testing.T) {
	t.Parallel()
	l := newLife(t)
	l.up()
	l.busy()
	l.pass(60 * time.Second)
	if wake := l.Wake().Sub(l.now); wake > plain().Heartbeat {
		t.Errorf("nobody looks at it for %s", wake)
	}
	// It is idle now, and nobody reports it before the next look.
	l.did(l.Work(workload{}, l.now))
	l.pass(plain().Heartbeat)
	l.want("ping 1")
}

// A worker that froze while it was idle is noticed in time though it has got a
// batch since.
func TestBatchDoesNotHideUnansweredPing(t *testing.T) {
	t.Parallel()
	l := newLife(t)
	l.up()
	l.pass(5 * time.Second)
	l.want("ping 1")
	l.pass(time.Second)
	l.busy()
	l.pass(9 * time.Second)
	l.want("withdraw 1, kill 1", "READY-ERROR: it does not answer")
}

func TestOldestBatchIsBounded(t *testing.T) {
	t.Parallel()
	l := newLife(t, func(s *machine) { s.Heartbeat = 0 })
	l.up()
	began := l.now.Add(-10 * time.Second)
	l.did(l.Work(workload{Oldest: began}, l.now))
	l.did(l.Tick(l.now))
	if wake := l.Wake(); !wake.Equal(began.Add(300 * time.Second)) {
		t.Fatalf("it wakes %s after the batch began", wake.Sub(began))
	}
	l.want("")
	l.pass(300 * time.Second)
	l.want("withdraw 1, kill 1", "READY-ERROR: a batch took too long")
}

func TestUnwantedBatchIsGivenUp(t *testing.T) {
	t.Parallel()
	l := newLife(t, func(s *machine) { s.Heartbeat = 0 })
	l.up()
	l.did(l.Work(workload{Oldest: l.now, GiveUp: l.now.Add(40 * time.Second)}, l.now))
	l.pass(39 * time.Second)
	l.want("")
	l.pass(time.Second)
	l.want("withdraw 1, kill 1", "READY-ERROR: a batch that nobody waits for any more does not end")
}

func TestZeroLimitsBoundNothing(t *testing.T) {
	t.Parallel()
	l := newLife(t, func(s *machine) { s.Limits = Limits{} })
	l.did(l.Start(l.now))
	if wake := l.Wake(); !wake.IsZero() {
		t.Errorf("it wakes in %s", wake.Sub(l.now))
	}
	l.up()
	l.busy()
	l.did(l.Stop(l.now))
	if wake := l.Wake(); !wake.IsZero() {
		t.Errorf("it wakes in %s", wake.Sub(l.now))
	}
	for range 100 {
		l.exit(errBroke)
	}
	if l.CrashLooping() {
		t.Error("without a crash limit there is no loop")
	}
}

func TestGangIsReadyWithEveryRank(t *testing.T) {
	t.Parallel()
	l := newLife(t, ranks(3))
	l.did(l.Start(l.now))
	l.want("spawn 1", "DEAD-STARTUP")
	l.did(l.Ready(2))
	l.did(l.Ready(0))
	l.did(l.Ready(0)) // twice is once
	l.want("")
	l.did(l.Ready(1))
	l.want("warm up 1")
}

func TestGangDiesTogether(t *testing.T) {
	t.Parallel()
	l := newLife(t, ranks(2))
	l.did(l.Start(l.now))
	l.did(l.Ready(1))
	l.up()
	l.did(l.Exited(1, errSignal, l.now))
	l.want("withdraw 1, kill 1", "READY-ERROR: rank 1: signal: killed")
	l.did(l.Exited(1, errSignal, l.now))
	l.want("")
	l.did(l.Exited(0, errSignal, l.now))
	l.want("", "ERROR-DEAD: rank 1: signal: killed")
	l.pass(time.Second)
	l.want("spawn 2", "DEAD-STARTUP")
}

func TestEveryRankMustAnswerPing(t *testing.T) {
	t.Parallel()
	l := newLife(t, ranks(2))
	l.did(l.Start(l.now))
	l.did(l.Ready(1))
	l.up()
	l.pass(5 * time.Second)
	l.want("ping 1")
	l.Pong(0, l.now)
	l.pass(10 * time.Second)
	l.want("withdraw 1, kill 1", "READY-ERROR: it does not answer")
}

func TestAskedRanksExitInAnyOrder(t *testing.T) {
	t.Parallel()
	l := newLife(t, ranks(2))
	l.did(l.Start(l.now))
	l.did(l.Stop(l.now))
	l.did(l.Exited(1, nil, l.now))
	l.pass(time.Second)
	l.did(l.Exited(0, nil, l.now))
	l.want("spawn 1, ask 1", "DEAD-STARTUP", "STARTUP-SHUTDOWN", "SHUTDOWN-DEAD")
	if !l.Stopped() || !l.Wake().IsZero() {
		t.Error("it is not over")
	}
}

func TestRecycleFinishesBatchesFirst(t *testing.T) {
	t.Parallel()
	l := newLife(t)
	l.up()
	l.busy()
	l.did(l.Recycle(l.now))
	l.did(l.Recycle(l.now))
	l.want("withdraw 1")
	l.pass(100 * time.Second)
	l.want("")
	l.idle()
	l.want("ask 1", "READY-SHUTDOWN")
	l.exit(nil)
	l.pass(0)
	l.want("spawn 2", "SHUTDOWN-DEAD", "DEAD-STARTUP")
}

func TestRecycleNeedsNoPause(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		before func(l *life)
		dies   bool
	}{
		"of a worker that is dead":   {func(l *life) { l.exit(errBroke) }, false},
		"of a worker that starts":    {func(*life) {}, true},
		"of a worker that failed":    {func(l *life) { l.did(l.machine.Fail(errBroke, l.now)) }, true},
		"of a worker that leaves":    {func(l *life) { l.did(l.ReportShutdown(l.now)) }, true},
		"of an idle worker":          {func(l *life) { l.up() }, true},
		"of a worker that is killed": {func(l *life) { l.up(); l.busy() }, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLife(t)
			l.did(l.Start(l.now))
			test.before(l)
			l.did(l.Recycle(l.now))
			if test.dies {
				l.exit(errSignal)
			}
			l.pass(0)
			if l.state != Startup || l.incarnation != 2 || l.Cause() != nil {
				t.Errorf("%s, incarnation %d, cause %v", l.state, l.incarnation, l.Cause())
			}
		})
	}
}

func TestStoppedWorkerStaysDead(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]func(l *life){
		"never started":     func(*life) {},
		"dead":              func(l *life) { l.did(l.Start(l.now)); l.exit(errBroke) },
		"failed":            func(l *life) { l.up(); l.did(l.machine.Fail(errBroke, l.now)) },
		"being recycled":    func(l *life) { l.up(); l.busy(); l.did(l.Recycle(l.now)) },
		"leaving by itself": func(l *life) { l.up(); l.did(l.ReportShutdown(l.now)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLife(t)
			before(l)
			l.did(l.Stop(l.now))
			l.did(l.Stop(l.now))
			l.did(l.Recycle(l.now))
			l.exit(nil)
			incarnation := l.incarnation
			l.pass(time.Hour)
			l.did(l.Start(l.now))
			if !l.Stopped() || l.incarnation != incarnation {
				t.Errorf("%s, incarnation %d after %d", l.state, l.incarnation, incarnation)
			}
		})
	}
}

func TestKillIsSafeInEveryState(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		before func(l *life)
		done   string
	}{
		"dead":     {func(*life) {}, ""},
		"starting": {func(l *life) { l.did(l.Start(l.now)) }, "kill 1"},
		"leaving":  {func(l *life) { l.up(); l.did(l.Stop(l.now)) }, "kill 1"},
		"failed":   {func(l *life) { l.up(); l.did(l.machine.Fail(errBroke, l.now)) }, "kill 1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLife(t)
			test.before(l)
			l.done, l.edges = nil, nil
			l.did(l.Kill(l.now))
			if got := strings.Join(l.done, ", "); got != test.done {
				t.Errorf("did %q, want %q", got, test.done)
			}
		})
	}
}

// Processes, connections and timers race.
func TestEarlierIncarnationsChangeNothing(t *testing.T) {
	t.Parallel()
	for name, current := range map[string]*incarnation{"another runs": {}, "none runs": nil} {
		w := &workerLoop{worker: &worker{runner: &Runner{}}, machine: plain(), current: current}
		w.machine.state = Ready
		w.handle(event{of: &incarnation{}, do: func(*machine, time.Time) []action {
			t.Errorf("%s: an event of an earlier incarnation is handled", name)
			return nil
		}})
	}
}
