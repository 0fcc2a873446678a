package workers_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/services/meshtest/workers"
)

const size = 32

// wave returns the texts of one batch: the nth, with one that is poison.
func wave(n int, poison string) []string {
	out := echoes(fmt.Sprint("good ", n), size)
	out[(n*7)%size] = fmt.Sprint(poison, " ", n)
	return out
}

// check holds the answers to a wave: a fault of that reason for the poison, and the
// right answer to everything else. It returns how many faults there were.
func check(t *testing.T, answers []workers.Answer, poison string, reason fault.Reason) (faults int) {
	t.Helper()
	for _, a := range answers {
		if strings.HasPrefix(a.Text, poison+" ") {
			a.Fails(t, reason, "")
			faults++
			continue
		}
		a.Succeeds(t)
	}
	return faults
}

func TestCrashingPoisonFailsAlone(t *testing.T) {
	t.Parallel()
	const batches = 50
	bed := workers.New(t, workers.Spec{File: "obedient.py", Workers: 2, Batch: full(size)})
	faults := 0
	for i := range batches {
		faults += check(t, bed.AskAll(wave(i, "die")), "die", fault.RunnerCrashed)
	}
	if faults != batches {
		t.Errorf("%d of %d poisonous items were blamed", faults, batches)
	}
	whole := 0
	for _, e := range bed.Entries("run") {
		if len(e.Texts) == size {
			whole++
		}
	}
	if whole != batches {
		t.Errorf("%d batches of %d items ran", whole, size)
	}
	t.Logf("%d items in %d batches, %d processes ended", batches*size, batches, bed.Exits())
	// Once with its neighbours, twice alone.
	if n := bed.Exits(); n != 3*batches {
		t.Errorf("%d processes ended for %d poisonous items", n, batches)
	}
}

func TestRaisingPoisonFailsAlone(t *testing.T) {
	t.Parallel()
	const batches, atOnce = 200, 4
	bed := workers.New(t, workers.Spec{File: "obedient.py", Workers: 2, Batch: full(size)})
	var mu sync.Mutex
	var waves sync.WaitGroup
	faults, next := 0, make(chan int)
	for range atOnce {
		waves.Go(func() {
			for i := range next {
				n := check(t, bed.AskAll(wave(i, "raise")), "raise", fault.RunnerFailed)
				mu.Lock()
				faults += n
				mu.Unlock()
			}
		})
	}
	for i := range batches {
		next <- i
	}
	close(next)
	waves.Wait()
	if faults != batches {
		t.Errorf("%d of %d poisonous items failed", faults, batches)
	}
	if n := bed.Exits(); n != 0 {
		t.Errorf("%d processes ended of exceptions", n)
	}
}
