package ledger_test

import (
	"errors"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/stagehost/ledger"
)

func TestItemIsAckedAfterItsOutcomeIs(t *testing.T) {
	t.Parallel()
	l := ledger.New(4)
	steps := []func() error{
		func() error { return l.Admit(1, "q", "e") },
		func() error { return l.Dispatch(1) },
		func() error { return l.Send(1) },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	if verb, err := l.Sent(1); err != nil || verb != ledger.Ack {
		t.Fatalf("Sent = %v, %v", verb, err)
	}
	if l.Len() != 0 {
		t.Fatalf("%d items left", l.Len())
	}
}

func TestDisallowedEventsChangeNothing(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		prepare func(*ledger.Ledger) error
		event   func(*ledger.Ledger) error
		want    error
		state   ledger.State
	}{
		"second outcome": {
			func(l *ledger.Ledger) error { return errors.Join(l.Dispatch(1), l.Send(1)) },
			func(l *ledger.Ledger) error { return l.Send(1) },
			ledger.ErrState, ledger.Sending,
		},
		"acknowledged before sent": {
			func(*ledger.Ledger) error { return nil },
			func(l *ledger.Ledger) error { _, err := l.Sent(1); return err },
			ledger.ErrState, ledger.Queued,
		},
		"dispatched twice": {
			func(l *ledger.Ledger) error { return l.Dispatch(1) },
			func(l *ledger.Ledger) error { return l.Dispatch(1) },
			ledger.ErrState, ledger.Running,
		},
		"requeued while sending": {
			func(l *ledger.Ledger) error { return l.Send(1) },
			func(l *ledger.Ledger) error { return l.Requeue(1) },
			ledger.ErrState, ledger.Sending,
		},
		"admitted twice": {
			func(*ledger.Ledger) error { return nil },
			func(l *ledger.Ledger) error { return l.Admit(1, "q", "e") },
			ledger.ErrTwice, ledger.Queued,
		},
		"over the bound": {
			func(l *ledger.Ledger) error { return l.Admit(2, "q", "e") },
			func(l *ledger.Ledger) error { return l.Admit(3, "q", "e") },
			ledger.ErrFull, ledger.Queued,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := ledger.New(2)
			if err := errors.Join(l.Admit(1, "q", "e"), test.prepare(l)); err != nil {
				t.Fatal(err)
			}
			held := l.Len()
			if err := test.event(l); !errors.Is(err, test.want) {
				t.Fatalf("got %v, want %v", err, test.want)
			}
			if state, ok := l.State(1); !ok || state != test.state || l.Len() != held {
				t.Fatalf("state is %v, %d items", state, l.Len())
			}
		})
	}
}

func TestItemsOfAReplacedQueueAreDiscarded(t *testing.T) {
	t.Parallel()
	l := ledger.New(4)
	if err := errors.Join(l.Admit(1, "q", "old"), l.Admit(2, "q", "new"), l.Admit(3, "", ""), l.Admit(4, "other", "old")); err != nil {
		t.Fatal(err)
	}
	if n := l.QueueReplaced("q", "new"); n != 1 {
		t.Fatalf("%d orphans, want 1", n)
	}
	want := map[ledger.ID]ledger.Verb{1: ledger.Discard, 2: ledger.Nak, 3: ledger.Discard, 4: ledger.Nak}
	for id, verb := range want {
		if got, err := l.GiveBack(id); err != nil || got != verb {
			t.Errorf("item %d: %v, %v, want %v", id, got, err, verb)
		}
	}
}

// model is what the ledger must agree with after any sequence of events.
type model struct {
	state   map[ledger.ID]ledger.State
	epoch   map[ledger.ID]string
	settled map[ledger.ID]int
	current string
}

func TestAnySequenceSettlesEachItemOnce(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		const bound = 8
		l := ledger.New(bound)
		m := model{map[ledger.ID]ledger.State{}, map[ledger.ID]string{}, map[ledger.ID]int{}, "a"}
		settle := func(id ledger.ID, want ledger.Verb, verb ledger.Verb, err error) {
			if err != nil {
				return
			}
			if m.epoch[id] != m.current {
				want = ledger.Discard
			}
			if verb != want {
				t.Fatalf("item %d settled by %v, want %v", id, verb, want)
			}
			m.settled[id]++
			delete(m.state, id)
		}
		anyID := rapid.Uint64Range(1, 20)
		t.Repeat(map[string]func(*rapid.T){
			"admit": func(t *rapid.T) {
				id := ledger.ID(anyID.Draw(t, "id"))
				if m.settled[id] > 0 {
					return // a host never gives an id twice
				}
				if err := l.Admit(id, "q", m.current); err == nil {
					m.state[id], m.epoch[id] = ledger.Queued, m.current
				}
			},
			"dispatch": func(t *rapid.T) {
				id := ledger.ID(anyID.Draw(t, "id"))
				was, held := m.state[id]
				if ok := l.Dispatch(id) == nil; ok != (held && was == ledger.Queued) {
					t.Fatalf("dispatch of %d in %v: %v", id, was, ok)
				} else if ok {
					m.state[id] = ledger.Running
				}
			},
			"requeue": func(t *rapid.T) {
				id := ledger.ID(anyID.Draw(t, "id"))
				if l.Requeue(id) == nil {
					m.state[id] = ledger.Queued
				}
			},
			"send": func(t *rapid.T) {
				id := ledger.ID(anyID.Draw(t, "id"))
				if l.Send(id) == nil {
					m.state[id] = ledger.Sending
				}
			},
			"sent": func(t *rapid.T) {
				id := ledger.ID(anyID.Draw(t, "id"))
				verb, err := l.Sent(id)
				settle(id, ledger.Ack, verb, err)
			},
			"give back": func(t *rapid.T) {
				id := ledger.ID(anyID.Draw(t, "id"))
				verb, err := l.GiveBack(id)
				settle(id, ledger.Nak, verb, err)
			},
			"queue replaced": func(t *rapid.T) {
				m.current += "a"
				l.QueueReplaced("q", m.current)
			},
			"": func(t *rapid.T) { agree(t, l, m, bound) },
		})
		drain(t, l, m, settle)
	})
}

func agree(t *rapid.T, l *ledger.Ledger, m model, bound int) {
	if l.Len() != len(m.state) || l.Len() > bound {
		t.Fatalf("ledger holds %d, model %d, bound %d", l.Len(), len(m.state), bound)
	}
	if sum := l.Count(ledger.Queued) + l.Count(ledger.Running) + l.Count(ledger.Sending); sum != l.Len() {
		t.Fatalf("states add up to %d of %d", sum, l.Len())
	}
	for id, want := range m.state {
		if got, ok := l.State(id); !ok || got != want {
			t.Fatalf("item %d is %v, want %v", id, got, want)
		}
	}
	for id, n := range m.settled {
		if n != 1 {
			t.Fatalf("item %d was settled %d times", id, n)
		}
	}
}

func drain(t *rapid.T, l *ledger.Ledger, m model, settle func(ledger.ID, ledger.Verb, ledger.Verb, error)) {
	held := slices.Collect(maps.Keys(m.state))
	for _, id := range held {
		verb, err := l.GiveBack(id)
		if err != nil {
			t.Fatal(err)
		}
		settle(id, ledger.Nak, verb, err)
	}
	agree(t, l, m, len(held))
	if l.Len() != 0 {
		t.Fatalf("%d items left", l.Len())
	}
}
