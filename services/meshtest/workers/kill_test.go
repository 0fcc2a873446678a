package workers_test

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/services/meshtest/workers"
)

// load is callers that each ask again when they have their answer.
type load struct {
	callers sync.WaitGroup
	stop    atomic.Bool
	next    atomic.Int64

	mu      sync.Mutex
	answers []workers.Answer
}

func begin(b *workers.Bed, callers int) *load {
	l := &load{}
	for range callers {
		l.callers.Go(func() {
			for !l.stop.Load() {
				l.book(b.Ask(fmt.Sprint("load ", l.next.Add(1))))
			}
		})
	}
	return l
}

func (l *load) book(a workers.Answer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answers = append(l.answers, a)
}

// end returns all answers.
func (l *load) end() []workers.Answer {
	l.stop.Store(true)
	l.callers.Wait()
	return l.answers
}

const (
	kills = 50
	// killBound is for the median of what a kill costs those in the batch.
	killBound = 500 * time.Millisecond
)

func TestKilledWorkersCostNoAnswer(t *testing.T) {
	t.Parallel()
	bed := workers.New(t, workers.Spec{File: "obedient.py", Workers: 2, Worker: pause("0.005")})
	l := begin(bed, 8)
	killed := map[string]time.Time{}
	for i := range kills {
		// The worker that gets the first waits in the middle of the batch that it is in.
		order := fmt.Sprintf("kill-%d", i)
		victims := []<-chan workers.Answer{bed.Send(t.Context(), "wait "+order)}
		for _, text := range echoes("beside "+order, 7) {
			victims = append(victims, bed.Send(t.Context(), text))
		}
		entry := bed.AwaitEntry("run", "wait "+order)
		at := time.Now()
		if err := syscall.Kill(entry.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		bed.SetFlag(order)
		for _, text := range entry.Texts {
			killed[text] = at
		}
		for _, from := range victims {
			l.book(bed.Received(from))
		}
		bed.AwaitRestart(entry.PID)
	}
	answers := l.end()
	var extra []time.Duration
	for _, a := range answers {
		a.Succeeds(t)
		if at, ok := killed[a.Text]; ok {
			extra = append(extra, a.At.Sub(at))
			delete(killed, a.Text)
		}
	}
	if len(killed) > 0 {
		t.Errorf("no answer to %v", killed)
	}
	slices.Sort(extra)
	median := extra[len(extra)/2]
	t.Logf("%d kills, %d requests, %d of them in batches that were killed: median %s more, longest %s",
		kills, len(answers), len(extra), median, extra[len(extra)-1])
	if len(extra) < 2*kills {
		t.Errorf("%d requests were in %d batches: they had no neighbours", len(extra), kills)
	}
	if median > killBound {
		t.Errorf("the median of them took %s more", median)
	}
	if n := bed.Exits(); n != kills {
		t.Errorf("%d processes ended", n)
	}
	checkRuns(t, bed, extra)
	if n := bed.Count("stagemesh_gateway_dropped_replies_total"); n != 0 {
		t.Errorf("%d replies came to nobody: requests were answered twice", n)
	}
}

// checkRuns makes sure that what was in no batch that was killed ran once, and
// everything else once more.
func checkRuns(t *testing.T, bed *workers.Bed, affected []time.Duration) {
	t.Helper()
	runs := map[string]int{}
	for _, e := range bed.Entries("run") {
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
	bed := workers.New(t, workers.Spec{File: "obedient.py", Batch: full(callers)})
	var answers []<-chan workers.Answer
	for i := range callers {
		answers = append(answers, bed.Send(t.Context(), fmt.Sprintf("wait order %d", i)))
	}
	entry := bed.AwaitEntry("run", "wait order 0")
	for i := range answers {
		bed.SetFlag(fmt.Sprintf("order %d", i))
	}
	if err := syscall.Kill(entry.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for _, from := range answers {
		bed.Received(from).Succeeds(t)
	}
	for _, a := range bed.AskAll(echoes("next", callers)) {
		a.Succeeds(t)
	}
}
