package workers

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// load is callers that each send the next text when they have their answer.
type load struct {
	callers sync.WaitGroup
	stop    atomic.Bool
	next    atomic.Int64

	mu      sync.Mutex
	answers []answer
}

func startLoad(m *mesh, callers int) *load {
	l := &load{}
	for range callers {
		l.callers.Go(func() {
			for !l.stop.Load() {
				l.add(m.infer(fmt.Sprint("load ", l.next.Add(1))))
			}
		})
	}
	return l
}

func (l *load) add(a answer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answers = append(l.answers, a)
}

// finish stops the callers and returns all answers.
func (l *load) finish() []answer {
	l.stop.Store(true)
	l.callers.Wait()
	return l.answers
}

const (
	kills = 50
	// killBound bounds the median time that a kill costs the requests in the batch, beside a restart.
	killBound = 500 * time.Millisecond
)

func TestKilledWorkersCostNoAnswer(t *testing.T) {
	t.Parallel()
	m := start(t, spec{file: "obedient.py", workers: 2, worker: func(s *worker.Settings) { s.Env["PAUSE"] = "0.005" }})
	l := startLoad(m, 8)
	killed := map[string]time.Time{}
	var restarts []time.Duration
	for i := range kills {
		// The worker that gets the first waits in the middle of the batch that it is in.
		order := fmt.Sprintf("kill-%d", i)
		victims := []<-chan answer{m.send(t.Context(), "wait "+order)}
		for _, text := range texts("beside "+order, 7) {
			victims = append(victims, m.send(t.Context(), text))
		}
		entry := m.files.await("run", "wait "+order)
		at := time.Now()
		if err := syscall.Kill(entry.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		m.files.setFlag(order)
		for _, text := range entry.Texts {
			killed[text] = at
		}
		for _, from := range victims {
			l.add(m.receive(from))
		}
		restarts = append(restarts, m.awaitRestart(entry.PID).At.Sub(at))
	}
	answers := l.finish()
	var extra []time.Duration
	for _, a := range answers {
		a.checkEcho(t)
		if at, ok := killed[a.text]; ok {
			extra = append(extra, a.at.Sub(at))
			delete(killed, a.text)
		}
	}
	if len(killed) > 0 {
		t.Errorf("no answer to %v", killed)
	}
	slices.Sort(extra)
	slices.Sort(restarts)
	median, restart := extra[len(extra)/2], restarts[len(restarts)/2]
	t.Logf("%d kills, %d requests, %d of them in batches that were killed: median %s more, longest %s; a restart takes %s",
		kills, len(answers), len(extra), median, extra[len(extra)-1], restart)
	if len(extra) < 2*kills {
		t.Errorf("%d requests were in %d batches: they had no neighbours", len(extra), kills)
	}
	if median > killBound+restart {
		t.Errorf("the median of them took %s more, a restart %s", median, restart)
	}
	if n := m.exits(); n != kills {
		t.Errorf("%d processes ended", n)
	}
	checkRuns(t, m, extra)
	if n := m.count("stagemesh_gateway_dropped_replies_total"); n != 0 {
		t.Errorf("%d replies were dropped: requests were answered twice", n)
	}
}

// checkRuns fails the test unless the requests in killed batches ran twice, and all others
// once.
func checkRuns(t *testing.T, m *mesh, affected []time.Duration) {
	t.Helper()
	runs := map[string]int{}
	for _, e := range m.files.all("run") {
		for _, text := range e.Texts {
			runs[text]++
		}
	}
	twice := 0
	for text, n := range runs {
		if n > 2 {
			t.Errorf("%q ran %d times", text, n)
		}
		if n == 2 {
			twice++
		}
	}
	if twice != len(affected) {
		t.Errorf("%d requests ran twice, %d were in batches that were killed", twice, len(affected))
	}
}

func TestCallersWaitForTheOnlyWorker(t *testing.T) {
	t.Parallel()
	const callers = 8
	m := start(t, spec{file: "obedient.py", batch: full(callers)})
	var answers []<-chan answer
	for i := range callers {
		answers = append(answers, m.send(t.Context(), fmt.Sprintf("wait order %d", i)))
	}
	entry := m.files.await("run", "wait order 0")
	for i := range answers {
		m.files.setFlag(fmt.Sprintf("order %d", i))
	}
	if err := syscall.Kill(entry.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for _, from := range answers {
		m.receive(from).checkEcho(t)
	}
	for _, a := range m.inferAll(texts("next", callers)) {
		a.checkEcho(t)
	}
}

// slack is what a busy machine adds to a limit.
const slack = 3 * time.Second

func TestBatchOfFrozenWorkerIsAnswered(t *testing.T) {
	t.Parallel()
	const limit, items = time.Second, 4
	m := start(t, spec{
		file: "obedient.py", workers: 2, batch: full(items),
		worker: func(s *worker.Settings) { s.RunLimit = limit },
	})
	texts := append(texts("beside", items-1), "freeze me")
	begin := time.Now()
	answers := m.inferAll(texts)
	frozen := m.files.await("run", "freeze me")
	if len(frozen.Texts) != items {
		t.Errorf("it froze with %q", frozen.Texts)
	}
	for _, a := range answers {
		a.checkEcho(t)
		if a.took < limit || a.took > limit+slack {
			t.Errorf("%q is answered after %s", a.text, a.took)
		}
		// Its successor may be faster than the other worker.
		if pid := a.response.Metadata["pid"]; pid == "" || pid == fmt.Sprint(frozen.PID) {
			t.Errorf("%q is answered by process %q; %d was frozen", a.text, pid, frozen.PID)
		}
	}
	failed := m.awaitTransition("the frozen worker fails", func(e worker.Transition) bool { return e.To == worker.Error && e.Worker == frozen.Worker })
	if !errors.Is(failed.Cause, worker.ErrRunLimit) {
		t.Errorf("it fails with %v", failed.Cause)
	}
	back := m.awaitRestart(frozen.PID)
	t.Logf("answered after %s; replaced after %s; the limit is %s", answers[0].took, back.At.Sub(begin), limit)
	if testbed.IsRunning(frozen.PID) {
		t.Errorf("process %d is left", frozen.PID)
	}
}

func TestFrozenIdleWorkerIsReplaced(t *testing.T) {
	t.Parallel()
	const heartbeat, limit = 200 * time.Millisecond, 1500 * time.Millisecond
	m := start(t, spec{
		file: "obedient.py", workers: 2,
		worker: func(s *worker.Settings) { s.Heartbeat, s.HeartbeatLimit = heartbeat, limit },
	})
	ready := m.awaitTransition("a worker is ready", func(e worker.Transition) bool { return e.To == worker.Ready })
	frozen := time.Now()
	if err := syscall.Kill(ready.PIDs[0], syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	failed := m.awaitTransition("the frozen worker fails", func(e worker.Transition) bool { return e.To == worker.Error })
	took := failed.At.Sub(frozen)
	if !errors.Is(failed.Cause, worker.ErrSilent) || failed.Worker != ready.Worker || took > heartbeat+limit+slack {
		t.Errorf("worker %d fails after %s with %v", failed.Worker, took, failed.Cause)
	}
	back := m.awaitRestart(ready.PIDs[0])
	t.Logf("noticed after %s, replaced after %s; the limits are %s and %s", took, back.At.Sub(frozen), heartbeat, limit)
	for _, a := range m.inferAll(texts("after", 8)) {
		a.checkEcho(t)
	}
}

// One worker that does not move is none that holds others up.
func TestFrozenWorkerBlocksNoOther(t *testing.T) {
	t.Parallel()
	m := start(t, spec{file: "obedient.py", workers: 2})
	frozen := m.send(t.Context(), "freeze me")
	entry := m.files.await("run", "freeze me")
	for _, a := range m.inferAll(texts("beside", 64)) {
		a.checkEcho(t)
		if a.worker() == fmt.Sprint(entry.Worker) {
			t.Errorf("%q is answered by the worker that is frozen", a.text)
		}
	}
	if err := syscall.Kill(entry.PID, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	m.receive(frozen).checkEcho(t)
}

// Models take long to load. An item that crashes its worker is found all the same, and
// costs the others no more than a few loads.
func TestCrashingPoisonTakesNoStageDown(t *testing.T) {
	t.Parallel()
	var cases sync.WaitGroup
	defer cases.Wait()
	// They mostly wait: many at a time, those first that take longest.
	running := make(chan struct{}, 8)
	for _, load := range []int{20, 5, 1, 0} {
		for _, hosts := range []int{1, 2} {
			for _, d := range []pipeline.Durability{pipeline.Memory, pipeline.File} {
				running <- struct{}{}
				cases.Go(func() {
					defer func() { <-running }()
					t.Run(fmt.Sprintf("%d s, %d hosts, %s", load, hosts, d), func(t *testing.T) {
						crashWhileLoading(t, load, hosts, d)
					})
				})
			}
		}
	}
}

func crashWhileLoading(t *testing.T, seconds, hosts int, d pipeline.Durability) {
	const neighbours, crashes, patience = 7, stagehost.DefaultCrashLimit + 1, 3 * time.Minute
	m := start(t, spec{
		file: "obedient.py", hosts: hosts, options: map[string]any{"load": seconds},
		batch:  batch.Settings{Mode: batch.Window, MaxSize: neighbours + 1, MaxBytes: 1 << 20, MaxWait: 200 * time.Millisecond},
		worker: func(s *worker.Settings) { s.Env["PAUSE"] = "0.05" },
		gateway: func(s *gateway.Settings) {
			s.Timeout, s.HostGrace = patience, patience
		},
	})
	durable := func(r *request.Request) { r.Durability = d }
	poison := m.send(t.Context(), "die", durable)
	var others []<-chan answer
	send := func(prefix string) {
		for _, text := range texts(prefix, neighbours) {
			others = append(others, m.send(t.Context(), text, durable))
		}
	}
	if seconds < 20 {
		send("beside")
	}
	testbed.Eventually(t, "a worker dies", func() bool { return m.exits() > 0 })
	send("after")
	var callers *load
	if hosts > 1 {
		callers = startLoad(m, 2)
	}
	blamed := <-poison
	blamed.checkFault(t, fault.RunnerCrashed, "")
	longest := time.Duration(0)
	for _, from := range others {
		a := <-from
		a.checkEcho(t)
		longest = max(longest, a.took)
	}
	n := m.exits()
	t.Logf("%d crashes; the fault came after %s, the last of the others after %s", n, blamed.took, longest)
	if n > crashes {
		t.Errorf("%d processes ended, at most %d are allowed", n, crashes)
	}
	if most := time.Duration(crashes*seconds)*time.Second + 10*time.Second; longest > most {
		t.Errorf("an answer took %s, at most %s is allowed", longest, most)
	}
	// A second host serves meanwhile. What the first one has in flight goes there.
	if callers != nil {
		for _, a := range callers.finish() {
			if a.checkEcho(t); a.took > 10*time.Second {
				t.Errorf("%q took %s, and a second host served", a.text, a.took)
			}
		}
	}
	page, err := store.NewDeadLetters(m.Broker.Connect(meshtest.Mesh), store.Settings{}).List(t.Context(), store.DeadLetterQuery{})
	if err != nil {
		t.Fatal(err)
	}
	if want := map[pipeline.Durability]int{pipeline.File: 1}[d]; len(page.DeadLetters) != want {
		t.Errorf("%d dead letters, want %d", len(page.DeadLetters), want)
	}
}

func TestCrashingPoisonTakesOneWorkerAtATime(t *testing.T) {
	t.Parallel()
	const load = 5
	m := start(t, spec{
		file: "obedient.py", workers: 2, options: map[string]any{"load": load},
		worker: func(s *worker.Settings) { s.Env["PAUSE"] = "0.02" },
	})
	poison := m.send(t.Context(), "die")
	testbed.Eventually(t, "a worker dies", func() bool { return m.exits() > 0 })
	callers := startLoad(m, 2)
	m.receive(poison).checkFault(t, fault.RunnerCrashed, "")
	for _, a := range callers.finish() {
		if a.checkEcho(t); a.took > load*time.Second {
			t.Errorf("%q took %s, and a second worker served", a.text, a.took)
		}
	}
	if n := m.exits(); n != stagehost.DefaultCrashLimit {
		t.Errorf("%d processes ended", n)
	}
}
