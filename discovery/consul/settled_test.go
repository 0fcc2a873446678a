package consul_test

import (
	"context"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// firstUpdate is an observer that keeps the first update.
type firstUpdate struct {
	entries int
	updated bool
	stop    context.CancelFunc
}

func (f *firstUpdate) OnUpdate(c discovery.Change) {
	if !f.updated {
		f.entries, f.updated = len(c.Entries), true
	}
	f.stop()
}

func (f *firstUpdate) OnDisconnect(error) { f.stop() }

// A server that restarts leads before it has applied everything that it had committed,
// and answers in between.
func TestFirstReadAfterRestartIsComplete(t *testing.T) {
	t.Parallel()
	const entries, readers = 800, 32
	a := testbed.StartConsul(t)
	r, below := client(t, a.Addr()), discovery.KeyOf("many")
	for i := range entries {
		if _, err := r.Put(t.Context(), discovery.KeyOf("many", strconv.Itoa(i)), []byte("one"), 0); err != nil {
			t.Fatal(err)
		}
	}
	// read returns how many entries there are, and whether there was an answer.
	read := func(ctx context.Context) (int, bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		f := &firstUpdate{stop: cancel}
		if err := r.Observe(ctx, below, f); err != nil {
			t.Error(err)
		}
		return f.entries, f.updated
	}
	a.Kill()
	patient, enough := context.WithTimeout(t.Context(), patience)
	defer enough()
	var reading sync.WaitGroup
	for range readers {
		reading.Go(func() {
			tick := time.NewTicker(time.Millisecond)
			defer tick.Stop()
			for n := 0; n != entries && patient.Err() == nil; <-tick.C {
				var answered bool
				if n, answered = read(patient); answered && n != entries {
					t.Errorf("the first update has %d entries, want %d", n, entries)
				}
			}
		})
	}
	if err := a.Start(); err != nil {
		enough()
		t.Error(err)
	}
	reading.Wait()
	if err := patient.Err(); err != nil {
		t.Errorf("not everything is read again: %v", err)
	}
}
