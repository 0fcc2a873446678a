package consul_test

import (
	"context"
	"strconv"
	"sync"
	"testing"

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
	const commits, each = 400, 5
	a := consultest.Start(t)
	r, below := client(t, a.Addr()), discovery.KeyOf("many")
	for i := range commits {
		puts := make([]discovery.Operation, each)
		for j := range puts {
			puts[j] = discovery.Put(discovery.KeyOf("many", strconv.Itoa(i*each+j)), make([]byte, 4096), 0)
		}
		if _, err := r.Commit(t.Context(), puts...); err != nil {
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
	reading, enough := context.WithCancel(t.Context())
	var readers sync.WaitGroup
	for what, read := range reads {
		for range 16 {
			readers.Go(func() {
				for reading.Err() == nil {
					if n, told := read(reading); told && n != commits*each {
						t.Errorf("%d entries are %s, want %d", n, what, commits*each)
					}
				}
			})
		}
	}
	if err := a.Start(); err != nil {
		t.Error(err)
	}
	eventually(t, "all is there", func() bool {
		all, err := r.List(reading, below)
		return err == nil && len(all) == commits*each
	})
	enough()
	readers.Wait()
}
