package item

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// queuedItem returns an item of the memory queue of an epoch.
func queuedItem(id batch.ID, epoch bus.Epoch) *Item {
	return &Item{id: id, delivery: bus.Delivery{Durability: pipeline.Memory, Epoch: epoch}}
}

func TestDisallowedEventsChangeNothing(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		prepare []itemState
		event   func(*ledger, *Item) error
	}{
		"second outcome":           {[]itemState{running, sending}, func(l *ledger, it *Item) error { return l.move(it, sending, queued, running) }},
		"acknowledged before sent": {nil, func(l *ledger, it *Item) error { return l.forget(it, sending) }},
		"dispatched twice":         {[]itemState{running}, func(l *ledger, it *Item) error { return l.move(it, running, queued) }},
		"requeued while sending":   {[]itemState{sending}, func(l *ledger, it *Item) error { return l.move(it, queued, running) }},
		"admitted twice":           {nil, func(l *ledger, it *Item) error { return l.admit(it) }},
		"another item of its id":   {nil, func(l *ledger, it *Item) error { return l.move(queuedItem(it.id, "e"), sending, queued) }},
		"over the bound": {nil, func(l *ledger, _ *Item) error {
			l.bound = 1
			return l.admit(queuedItem(2, "e"))
		}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, it := newLedger(2), queuedItem(1, "e")
			if err := l.admit(it); err != nil {
				t.Fatal(err)
			}
			want := queued
			for _, next := range test.prepare {
				if err := l.move(it, next, want); err != nil {
					t.Fatal(err)
				}
				want = next
			}
			if err := test.event(&l, it); err == nil {
				t.Fatal("the event is allowed")
			}
			if it.state != want || len(l.items) != 1 || l.counts[want] != 1 {
				t.Fatalf("state is %v, %d items, %v", it.state, len(l.items), l.counts)
			}
		})
	}
}

func TestItemsOfAReplacedQueueAreOrphans(t *testing.T) {
	t.Parallel()
	l := newLedger(4)
	other := queuedItem(4, "old")
	other.delivery.Durability = pipeline.File
	want := map[*Item]bool{queuedItem(1, "old"): true, queuedItem(2, "new"): false, queuedItem(3, ""): true, other: false}
	for it := range want {
		if err := l.admit(it); err != nil {
			t.Fatal(err)
		}
	}
	if n := l.ReplaceQueue(QueueKey{"", pipeline.Memory}, "new"); n != 1 {
		t.Fatalf("%d new orphans, want 1", n)
	}
	for it, orphan := range want {
		if it.noQueue != orphan {
			t.Errorf("item %d: orphan is %t", it.id, it.noQueue)
		}
	}
}

func TestAnySequenceSettlesEachItemOnce(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		const bound = 8
		l := newLedger(bound)
		state, settled := map[*Item]itemState{}, map[*Item]int{}
		var items []*Item
		anyItem := func(t *rapid.T) *Item {
			if len(items) == 0 {
				t.Skip("no item yet")
			}
			return rapid.SampledFrom(items).Draw(t, "item")
		}
		move := func(to itemState, from ...itemState) func(*rapid.T) {
			return func(t *rapid.T) {
				it := anyItem(t)
				was, held := state[it]
				allowed := held && (was == from[0] || was == from[len(from)-1])
				if err := l.move(it, to, from...); (err == nil) != allowed {
					t.Fatalf("%v to %v: %v", was, to, err)
				} else if err == nil {
					state[it] = to
				}
			}
		}
		forget := func(from ...itemState) func(*rapid.T) {
			return func(t *rapid.T) {
				it := anyItem(t)
				if l.forget(it, from...) == nil {
					settled[it]++
					delete(state, it)
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"admit": func(t *rapid.T) {
				it := queuedItem(batch.ID(len(items)+1), "e")
				if err := l.admit(it); (err == nil) != (len(state) < bound) {
					t.Fatal(err)
				} else if err == nil {
					items, state[it] = append(items, it), queued
				}
			},
			"dispatch":  move(running, queued),
			"requeue":   move(queued, running),
			"send":      move(sending, queued, running),
			"sent":      forget(sending),
			"give back": forget(queued, running, sending),
			"": func(t *rapid.T) {
				if len(l.items) != len(state) || l.counts[queued]+l.counts[running]+l.counts[sending] != len(state) {
					t.Fatalf("the ledger holds %d, states add up to %v, the model holds %d", len(l.items), l.counts, len(state))
				}
				for it, want := range state {
					if it.state != want {
						t.Fatalf("item %d is %v, want %v", it.id, it.state, want)
					}
				}
				for it, n := range settled {
					if n != 1 {
						t.Fatalf("item %d was settled %d times", it.id, n)
					}
				}
			},
		})
	})
}
