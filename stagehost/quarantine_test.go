package stagehost_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// poisoned is a runner whose process ends with each batch that has one of the
// items, and which counts how many lone batches run at a time after that.
type poisoned struct {
	poison []string
	died   atomic.Bool

	mu    sync.Mutex
	runs  map[string]int
	alone int
	most  int
	// trusted says that one of them was not said to be a suspect.
	trusted bool
}

func newPoisoned(poison ...string) *poisoned {
	return &poisoned{poison: poison, runs: map[string]int{}}
}

func (m *poisoned) runner() runner.Runner {
	return inproc.New(inproc.Settings{Concurrency: 4}, m.run)
}

func (m *poisoned) run(_ context.Context, batch runner.Batch, sink runner.Sink) error {
	m.enter(batch)
	defer m.leave(batch)
	for _, item := range batch.Items {
		if slices.Contains(m.poison, first(item.Inputs)) {
			m.died.Store(true)
			return fmt.Errorf("%w: signal: killed", runner.ErrCrashed)
		}
	}
	return settleAll(batch, sink)
}

func (m *poisoned) enter(batch runner.Batch) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, item := range batch.Items {
		m.runs[first(item.Inputs)]++
	}
	if len(batch.Items) == 1 && m.died.Load() {
		m.trusted = m.trusted || !batch.Suspect
		m.alone++
		m.most = max(m.most, m.alone)
	}
}

func (m *poisoned) ran(text string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.runs[text]
}

func (m *poisoned) leave(batch runner.Batch) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(batch.Items) == 1 && m.alone > 0 {
		m.alone--
	}
}

func TestPoisonItemIsDeadLetteredAlone(t *testing.T) {
	t.Parallel()
	for name, poison := range map[string][]string{"one": {"7"}, "two": {"0", "31"}} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(t *testing.T, b *bed) {
				m := newPoisoned(poison...)
				b.host(m.runner(), together(batchSize))
				for i, c := range b.askMany(batchSize) {
					if !slices.Contains(poison, strconv.Itoa(i)) {
						checkEcho(t, c)
						continue
					}
					c.fails(fault.RunnerCrashed)
					if got := m.ran(strconv.Itoa(i)); got != 3 {
						t.Errorf("item %d ran %d times, want once with the others and twice alone", i, got)
					}
				}
				b.emptied()
				m.mu.Lock()
				defer m.mu.Unlock()
				if m.trusted {
					t.Error("one in quarantine was not said to be a suspect")
				}
				if m.most != 1 {
					t.Errorf("%d in quarantine ran at a time", m.most)
				}
			})
		})
	}
}

// A process may be ended by anybody: its batch has done nothing wrong.
func TestBatchThatCrashedOnceIsAnswered(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed) {
		var ended atomic.Bool
		b.host(batches(func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
			if !ended.Swap(true) {
				return runner.ErrCrashed
			}
			return settleAll(batch, sink)
		}), together(batchSize))
		checkEcho(t, b.askMany(batchSize)...)
		b.emptied()
	})
}

// dying is a runner whose only process dies of every batch, and does not return.
type dying struct{ moody }

func newDying() *dying {
	d := &dying{moody{changed: make(chan struct{})}}
	d.Runner = batches(func(context.Context, runner.Batch, runner.Sink) error {
		d.outcomeOf(errLoop)
		return runner.ErrCrashed
	})
	return d
}

func (d *dying) Acquire(ctx context.Context) (runner.Slot, error) {
	slot, err := d.Runner.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	if err := d.healed(ctx); err != nil {
		slot.Release()
		return nil, err
	}
	return slot, nil
}

func TestCrashesOfAllHostsAddUp(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	var hosts []pipeline.HostID
	for range stagehost.DefaultCrashLimit {
		d := newDying()
		b.host(d, ackWait(time.Second), func(s *stagehost.Settings) {
			s.Runner = d
			hosts = append(hosts, s.Host)
		})
	}
	c := b.ask("poison", durable)
	c.fails(fault.RunnerCrashed)
	letters := b.letters()
	if len(letters) != 1 {
		t.Fatalf("%d dead letters", len(letters))
	}
	for _, run := range letters[0].Runs {
		hosts = slices.DeleteFunc(hosts, func(h pipeline.HostID) bool { return h == run.Host })
	}
	if len(hosts) != 0 {
		t.Errorf("%d hosts are not on record: %+v", len(hosts), letters[0].Runs)
	}
}

func TestDurablePoisonItemLeavesADeadLetter(t *testing.T) {
	t.Parallel()
	b, m := newBed(t), newPoisoned("poison")
	h := b.host(m.runner())
	c := b.ask("poison", func(e *envelope.Envelope) { e.Durability = pipeline.File })
	c.fails(fault.RunnerCrashed)
	h.awaitCount("stagemesh.stage.dead_lettered", 1)
	letters := b.letters()
	if len(letters) != 1 || len(letters[0].Runs) != stagehost.DefaultCrashLimit {
		t.Fatalf("dead letters: %+v", letters)
	}
	for _, run := range letters[0].Runs {
		if !run.Died {
			t.Errorf("the process of a run is not known to have died: %+v", run)
		}
	}
}
