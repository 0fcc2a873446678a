package consul_test

import (
	"context"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/consul/consultest"
)

// glance is an observer that looks once.
type glance struct {
	entries int
	seen    bool
	enough  context.CancelFunc
}

func (g *glance) See(c discovery.Change) {
	if !g.seen {
		g.entries, g.seen = len(c.Entries), true
	}
	g.enough()
}

func (g *glance) Lose(error) { g.enough() }

// A server that begins again leads before it has made once more all that it had
// committed, and answers in between.
func TestATableIsWholeWhereItIsReadAgain(t *testing.T) {
	t.Parallel()
	const entries, readers = 800, 16
	a := consultest.Start(t)
	r, below := client(t, a.Addr()), discovery.KeyOf("many")
	for i := range entries {
		if _, err := r.Commit(t.Context(), discovery.Put(discovery.KeyOf("many", strconv.Itoa(i)), []byte("one"), 0)); err != nil {
			t.Fatal(err)
		}
	}
	// Each returns how many entries there are, and whether it was told.
	reads := map[string]func(ctx context.Context) (int, bool){
		"listed": func(ctx context.Context) (int, bool) {
			all, err := r.List(ctx, below)
			return len(all), err == nil
		},
		"observed": func(ctx context.Context) (int, bool) {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			g := &glance{enough: cancel}
			if err := r.Observe(ctx, below, g); err != nil {
				t.Error(err)
			}
			return g.entries, g.seen
		},
	}
	a.Kill()
	patient, enough := context.WithTimeout(t.Context(), patience)
	defer enough()
	var reading sync.WaitGroup
	for what, read := range reads {
		for range readers {
			reading.Go(func() {
				tick := time.NewTicker(time.Millisecond)
				defer tick.Stop()
				for n := 0; n != entries && patient.Err() == nil; <-tick.C {
					var told bool
					if n, told = read(patient); told && n != entries {
						t.Errorf("%d entries are %s, want %d", n, what, entries)
					}
				}
			})
		}
	}
	if err := a.Start(); err != nil {
		enough()
		t.Error(err)
	}
	reading.Wait()
	if err := patient.Err(); err != nil {
		t.Errorf("not all is read again: %v", err)
	}
}
