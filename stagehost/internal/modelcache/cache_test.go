package modelcache_test

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost/internal/modelcache"
)

const mib = 1 << 20

func TestSettingsAreValidatedByKey(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func(*modelcache.Settings)
		want   string // empty: valid
	}{
		"as they are":                   {func(*modelcache.Settings) {}, ""},
		"ten default sizes":             {func(s *modelcache.Settings) { s.Capacity.Host = 10 * mib }, ""},
		"less than ten default sizes":   {func(s *modelcache.Settings) { s.Capacity.Host = 10*mib - 1 }, "models.capacity"},
		"512 MiB for two large models":  {func(s *modelcache.Settings) { s.DefaultSize.Host = 256 * mib; s.Capacity.Host = 512 * mib }, ""},
		"less than two default sizes":   {func(s *modelcache.Settings) { s.DefaultSize.Host = 300 * mib; s.Capacity.Host = 599 * mib }, "models.capacity"},
		"a device only":                 {func(s *modelcache.Settings) { *s = onDevice(*s) }, ""},
		"no memory of a kind that is":   {func(s *modelcache.Settings) { s.DefaultSize.Device = 1 }, "models.capacity"},
		"no default size":               {func(s *modelcache.Settings) { s.DefaultSize = model.Size{} }, "models.default_size"},
		"a negative default size":       {func(s *modelcache.Settings) { s.DefaultSize.Device = -1 }, "models.default_size"},
		"a default size that overflows": {func(s *modelcache.Settings) { s.DefaultSize.Host = 1 << 62 }, "models.default_size"},
		"a negative capacity":           {func(s *modelcache.Settings) { s.Capacity.Device = -1 }, "models.capacity"},
		"a capacity that overflows":     {func(s *modelcache.Settings) { s.Capacity.Host = 1 << 62 }, "models.capacity"},
		"no load slot":                  {func(s *modelcache.Settings) { s.LoadSlots = 0 }, "models.load_slots"},
		"too many load slots":           {func(s *modelcache.Settings) { s.LoadSlots = 257 }, "models.load_slots"},
		"no load timeout":               {func(s *modelcache.Settings) { s.LoadTimeout = 0 }, "models.load_timeout"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := modelcache.Settings{Capacity: model.Size{Host: 512 * mib}, DefaultSize: model.Size{Host: mib}, LoadSlots: 2, LoadTimeout: time.Second}
			test.change(&s)
			switch err := s.Validate(); {
			case test.want == "" && err != nil:
				t.Fatal(err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
				t.Fatalf("got %v, want an error with %s", err, test.want)
			}
		})
	}
}

func onDevice(s modelcache.Settings) modelcache.Settings {
	s.Capacity = model.Size{Device: s.Capacity.Host}
	s.DefaultSize = model.Size{Device: s.DefaultSize.Host}
	return s
}

func TestUnloadBufferAndReserve(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		capacity, size int64
		slots          int
		usable, full   int64 // full: the most used memory at which the cache is not full
	}{
		"half a model for one slot":    {capacity: 100, size: 4, slots: 1, usable: 98, full: 94},
		"a model for two slots":        {capacity: 100, size: 4, slots: 2, usable: 96, full: 88},
		"two models for eight slots":   {capacity: 100, size: 4, slots: 8, usable: 92, full: 84},
		"at least 1 %":                 {capacity: 1000, size: 1, slots: 2, usable: 990, full: 988},
		"at most 10 %":                 {capacity: 100, size: 10, slots: 64, usable: 90, full: 70},
		"the reserve is at most 1/20":  {capacity: 1000, size: 4, slots: 64, usable: 936, full: 886},
		"the reserve has two models":   {capacity: 1000, size: 40, slots: 4, usable: 960, full: 880},
		"the reserve is for all slots": {capacity: 1000, size: 4, slots: 10, usable: 990, full: 950},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, used := range []int64{test.full, test.full + 1} {
				h := newHost(t, modelcache.Settings{Capacity: units(test.capacity), DefaultSize: units(test.size), LoadSlots: test.slots, LoadTimeout: time.Second})
				if _, err := h.want(modelcache.Model{ID: "m", Size: units(used)}, modelcache.Waiting); err != nil {
					t.Fatal(err)
				}
				h.settle()
				f := h.c.Figures(h.now)
				if f.Capacity != units(test.usable) || f.Used != units(used) || f.Full != (used > test.full) {
					t.Errorf("with %d units used: %+v", used, f)
				}
			}
		})
	}
}

func TestModelsWeighAtLeast8KiB(t *testing.T) {
	t.Parallel()
	s := roomFor(100)
	s.Capacity.Device = 50 * unit
	for name, test := range map[string]struct{ size, want model.Size }{
		"unknown":           {model.Size{}, model.Size{Host: unit, Device: unit}},
		"a byte":            {model.Size{Host: 1}, model.Size{Host: unit, Device: unit}},
		"a unit and a byte": {model.Size{Host: unit + 1, Device: 2 * unit}, model.Size{Host: unit + 1, Device: 2 * unit}},
		"negative":          {model.Size{Host: -5, Device: -5}, model.Size{Host: unit, Device: unit}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, s)
			r, err := h.want(modelcache.Model{ID: "m", Size: test.size}, modelcache.Waiting)
			if err != nil || r.Size != test.want {
				t.Fatalf("got %v, %v; want %v", r, err, test.want)
			}
		})
	}
	h := newHost(t, roomFor(100))
	if r, err := h.want(modelcache.Model{ID: "m", Size: model.Size{Host: 1, Device: 1 << 62}}, modelcache.Waiting); err != nil || r.Size.Device != 0 {
		t.Fatalf("memory without capacity counts: %v, %v", r, err)
	}
}

func TestTooLargeModelEvictsNothing(t *testing.T) {
	t.Parallel()
	s := roomFor(20)
	s.Capacity.Device = 10 * unit
	h := newHost(t, s)
	h.load(ids("m", 9)...)
	h.now = h.now.Add(time.Hour)
	for _, size := range []model.Size{{Host: 23 * unit}, {Device: 10 * unit}, {Host: 1<<63 - 1}} {
		_, err := h.want(modelcache.Model{ID: "large", Size: size}, modelcache.Waiting)
		wantRefusal(t, err, modelcache.TooLarge, 0)
	}
	if actions := h.act(); len(actions) > 0 {
		t.Fatalf("got %v", describe(actions))
	}
}

func wantRefusal(t *testing.T, err error, reason modelcache.Reason, retry time.Duration) {
	t.Helper()
	var refusal *modelcache.Refusal
	if !errors.As(err, &refusal) || refusal.Reason != reason || refusal.RetryAfter != retry || !strings.Contains(err.Error(), string(reason)) {
		t.Fatalf("got %+v, want the reason %q and to retry after %s", err, reason, retry)
	}
}

func wantActions(t *testing.T, got []modelcache.Action, want ...string) {
	t.Helper()
	if lines := describe(got); !slices.Equal(lines, want) {
		t.Fatalf("got %q, want %q", lines, want)
	}
}

func TestOldestModelsAreEvicted(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(10))
	for _, id := range ids("m", 10) {
		h.now = h.now.Add(time.Second)
		h.load(id)
	}
	h.now = h.now.Add(time.Hour)
	h.load("m0") // used again
	if _, err := h.want(modelcache.Model{ID: "large", Size: units(3)}, modelcache.Waiting); err != nil {
		t.Fatal(err)
	}
	wantActions(t, h.act(), "unload m1", "unload m2", "unload m3")
	h.finish(0, model.Size{})
	wantActions(t, h.act()) // one unit is free, one can be borrowed
	h.finish(0, model.Size{})
	wantActions(t, h.act(), "load large")
}

func TestPinnedModelsAreNotEvicted(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(10))
	h.load(ids("m", 10)...)
	pinned := make([]*modelcache.Replica, 0, 10)
	for _, id := range ids("m", 9) {
		pinned = append(pinned, h.pin(id))
	}
	h.now = h.now.Add(time.Hour)
	if _, err := h.want(modelcache.Model{ID: "large", Size: units(2)}, modelcache.Waiting); err != nil {
		t.Fatal(err)
	}
	wantActions(t, h.act(), "refuse large: "+string(modelcache.Full)) // and m9 stays
	pinned = append(pinned, h.pin("m9"))
	_, err := h.want(modelcache.Model{ID: "small"}, modelcache.Waiting)
	wantRefusal(t, err, modelcache.Full, 0)
	h.unpin(pinned[0])
	h.now = h.now.Add(time.Hour)
	h.pin("small")
	wantActions(t, h.act(), "unload m0", "load small")
}

func TestLoadBorrowsUnloadBuffer(t *testing.T) {
	t.Parallel()
	s := roomFor(10)
	s.LoadSlots = 4 // and one unit of buffer
	h := newHost(t, s)
	h.load(ids("m", 10)...)
	h.now = h.now.Add(time.Hour)
	a, b, large := h.pin("a"), h.pin("b"), modelcache.Model{ID: "large", Size: units(2)}
	wantActions(t, h.act(), "unload m0", "load a", "unload m1")
	if _, err := h.want(large, modelcache.Waiting); err != nil {
		t.Fatal(err)
	}
	c := h.pin("c")
	wantActions(t, h.act(), "unload m2", "unload m3", "unload m4") // b waits for the loan of a, large and c for b
	h.now = h.now.Add(2 * time.Second)
	h.finish(h.indexOf(modelcache.Unload, h.memory["m4"]), model.Size{})
	wantActions(t, h.act(), "load b")
	h.finish(h.indexOf(modelcache.Unload, h.memory["m1"]), model.Size{})
	wantActions(t, h.act()) // there would be room for c, but large goes first
	h.finish(h.indexOf(modelcache.Unload, h.memory["m0"]), model.Size{})
	wantActions(t, h.act(), "load large")
	h.finish(h.indexOf(modelcache.Unload, h.memory["m3"]), model.Size{})
	wantActions(t, h.act(), "load c")
	for _, r := range []*modelcache.Replica{a, b, c} {
		h.loaded(r)
	}
	h.settle()
}

func TestLoadWaitsForMemoryAtMostThreeMinutes(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(10))
	h.load(ids("m", 10)...)
	h.now = h.now.Add(time.Hour)
	for _, id := range []model.ID{"a", "b"} {
		h.pin(id)
	}
	wantActions(t, h.act(), "unload m0", "load a")
	h.loaded(h.c.Replica("a"))
	wantActions(t, h.act(), "unload m1")
	if wake, ok := h.c.Wake(); !ok || wake.Sub(h.now) != 3*time.Minute {
		t.Fatalf("wakes at %s, %t", wake, ok)
	}
	h.now = h.now.Add(3*time.Minute - 1)
	wantActions(t, h.act())
	h.now = h.now.Add(1)
	wantActions(t, h.act(), "refuse b: "+string(modelcache.Full))
}

func TestChurnGuardKeepsRecentModels(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(10))
	for i, id := range ids("m", 10) { // loads of 1 s: the load time is 1 s
		r := h.pin(id)
		h.act()
		h.now = h.now.Add(time.Second)
		h.loaded(r)
		h.unpin(r)
		if got, want := h.c.LoadTime(""), []time.Duration{30 * time.Second, time.Second}[min(1, i/2)]; got != want {
			t.Fatalf("after %d loads: the load time is %s, want %s", i+1, got, want)
		}
	}
	used := h.now
	for _, id := range ids("m", 10) {
		h.unpin(h.pin(id))
		h.now = h.now.Add(1)
	}
	h.now = used.Add(10*time.Second - 1)
	_, err := h.want(modelcache.Model{ID: "next"}, modelcache.Waiting)
	wantRefusal(t, err, modelcache.Full, time.Second)
	h.now = h.now.Add(1)
	h.pin("next")
	wantActions(t, h.act(), "unload m0", "load next")
	h.settle()

	h.now = h.now.Add(-time.Second)
	other := modelcache.Model{ID: "other", Type: "new"} // no load time, so no guard
	if _, err := h.want(other, modelcache.Waiting); err != nil {
		t.Fatal(err)
	}
	wantActions(t, h.act(), "unload m1", "load other")
}

func TestLoadWithoutItemsEvictsOlderModelsOnly(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(10))
	h.load(ids("m", 10)...)
	h.now = h.now.Add(time.Hour)
	used := modelcache.Model{ID: "next", LastUse: epoch.Add(-1)}
	_, err := h.want(used, modelcache.Requested)
	wantRefusal(t, err, modelcache.Full, h.c.LoadTime(""))
	used.LastUse = epoch.Add(1)
	if _, err := h.want(used, modelcache.Requested); err != nil {
		t.Fatal(err)
	}
	wantActions(t, h.act(), "unload m0", "load next")
}

func TestQueueOrderAndPromotion(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(100))
	running := h.pin("running")
	h.act()
	for age, id := range ids("req", 6) {
		if _, err := h.want(modelcache.Model{ID: id, LastUse: epoch.Add(-time.Duration(age) * time.Hour)}, modelcache.Requested); err != nil {
			t.Fatal(err)
		}
	}
	first, gone := h.pin("item1"), h.pin("gone")
	h.pin("item2")
	h.pin("req5") // promoted
	h.pin("item1")
	h.unpin(first) // another item still waits
	h.now = h.now.Add(time.Second)
	again := h.pin("req3")
	h.unpin(again) // back among the requested
	if _, err := h.want(modelcache.Model{ID: "req4", LastUse: h.now.Add(1)}, modelcache.Requested); err != nil {
		t.Fatal(err)
	}
	h.unpin(gone) // nobody wants it
	wantActions(t, h.act(), "refuse gone: "+string(modelcache.Unwanted))
	var order []model.ID
	for h.loaded(running); ; h.loaded(running) {
		actions := h.act()
		if len(actions) == 0 {
			break
		}
		running = actions[0].Replica
		order = append(order, running.ID)
	}
	want := []model.ID{"item1", "item2", "req5", "req4", "req3", "req0", "req1", "req2"}
	if !slices.Equal(order, want) {
		t.Fatalf("got %q, want %q", order, want)
	}
}

func TestQueueIsBounded(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(1000))
	for i, id := range ids("m", modelcache.MaxQueued+1) {
		p := modelcache.Requested
		if i >= modelcache.MaxQueued/2 {
			_, err := h.want(modelcache.Model{ID: id}, modelcache.Requested)
			wantRefusal(t, err, modelcache.QueueFull, 30*time.Second)
			p = modelcache.Waiting
		}
		_, err := h.want(modelcache.Model{ID: id}, p)
		if i < modelcache.MaxQueued && err != nil {
			t.Fatal(err)
		} else if i == modelcache.MaxQueued {
			wantRefusal(t, err, modelcache.QueueFull, 30*time.Second)
		}
	}
	h.pin("m0") // is queued already
}

func TestBegunLoadGoesOnWithoutItems(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(10))
	r := h.pin("m")
	h.act()
	h.unpin(r)
	wantActions(t, h.act())
	h.loaded(r)
	if r.State() != modelcache.Loaded {
		t.Fatalf("in state %d", r.State())
	}
}

func TestModelLargerThanPredictedIsRepaid(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(10))
	h.load(ids("m", 9)...)
	h.now = h.now.Add(time.Hour)
	grown := h.pin("grown")
	h.act()
	h.pin("next")
	h.finish(0, units(4))
	wantActions(t, h.act(), "unload m0", "unload m1", "unload m2", "unload m3") // three for the deficit, one for next
	h.finish(0, model.Size{})
	h.finish(0, model.Size{})
	wantActions(t, h.act()) // only the capacity holds again
	h.finish(0, model.Size{})
	wantActions(t, h.act(), "load next")
	h.c.Resize(h.now, grown, units(11))
	h.deficit = true
	wantActions(t, h.act(), "refuse grown: "+string(modelcache.TooLarge))
	h.c.Resize(h.now, grown, units(1)) // too late
	h.unpin(grown)
	wantActions(t, h.act(), "unload grown")
	h.settle()
}

func TestFailedLoadIsRefused(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(10))
	for _, usesMemory := range []bool{false, true} {
		r := h.pin("m")
		h.act()
		h.loadFailed(r, usesMemory)
		want := []string{"refuse m: " + string(modelcache.Failed)}
		if usesMemory {
			want = append(want, "unload m")
		}
		wantActions(t, h.act(), want...)
		h.unpin(r)
	}
	again := h.pin("m")
	other := h.pin("other")
	wantActions(t, h.act(), "load other") // m is still unloaded
	h.loaded(other)
	h.finish(0, model.Size{})
	wantActions(t, h.act(), "load m")
	h.loaded(again)
	h.settle()
}

func TestDropEndsReplicaInEveryState(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(10))
	h.drop("unknown")
	loading, queued := h.pin("loading"), h.pin("queued")
	h.act()
	h.drop("queued")
	h.drop("loading")
	dropped := string(modelcache.Dropped)
	wantActions(t, h.act(), "refuse queued: "+dropped, "refuse loading: "+dropped)
	h.unpin(queued)
	h.unpin(loading)
	wantActions(t, h.act())
	h.loaded(loading) // too late
	wantActions(t, h.act(), "unload loading")
	h.settle()
	h.load("loaded")
	h.drop("loaded")
	wantActions(t, h.act(), "unload loaded")
	h.settle()
	if f := h.c.Figures(h.now); f.Used != (model.Size{}) || f.Models+f.Queued+f.Loading != 0 {
		t.Fatalf("left: %+v", f)
	}
}

func TestDroppedLoadKeepsItsSlotAndMemoryUntilItEnds(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		end    func(*host, *modelcache.Replica)
		unload []string
	}{
		"loaded":        {(*host).loaded, []string{"unload m"}},
		"failed":        {func(h *host, r *modelcache.Replica) { h.loadFailed(r, true) }, []string{"unload m"}},
		"without trace": {func(h *host, r *modelcache.Replica) { h.loadFailed(r, false) }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, roomFor(10))
			old, err := h.want(modelcache.Model{ID: "m", Size: units(8)}, modelcache.Requested)
			if err != nil {
				t.Fatal(err)
			}
			wantActions(t, h.act(), "load m")
			h.drop("m")
			wantActions(t, h.act(), "refuse m: "+string(modelcache.Dropped))
			again, err := h.want(modelcache.Model{ID: "m", Size: units(8)}, modelcache.Requested)
			if err != nil {
				t.Fatalf("the model is wanted again: %v", err)
			}
			other := h.pin("other")
			wantActions(t, h.act())
			test.end(h, old)
			wantActions(t, h.act(), append(test.unload, "load other")...)
			h.loaded(other)
			h.settle()
			if again.State() != modelcache.Loaded || h.c.Replica("m") != again {
				t.Errorf("it is in state %d", again.State())
			}
		})
	}
}

func TestQueuedLoadsAreGivenUp(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(10))
	h.load("loaded")
	loading, waiting := h.pin("loading"), h.pin("waiting")
	if _, err := h.want(modelcache.Model{ID: "requested"}, modelcache.Requested); err != nil {
		t.Fatal(err)
	}
	h.act()
	h.c.GiveUpQueued()
	actions := describe(h.act())
	slices.Sort(actions)
	if want := []string{"refuse requested: " + string(modelcache.GivenUp), "refuse waiting: " + string(modelcache.GivenUp)}; !slices.Equal(actions, want) {
		t.Errorf("got %q, want %q", actions, want)
	}
	h.unpin(waiting)
	h.loaded(loading)
	next := h.pin("waiting")
	wantActions(t, h.act(), "load waiting")
	h.loaded(next)
	if f := h.c.Figures(h.now); f.Models != 3 || f.Queued != 0 {
		t.Errorf("left: %+v", f)
	}
}

func TestDroppedModelWaitsForItsItems(t *testing.T) {
	t.Parallel()
	for _, end := range []bool{true, false} {
		h := newHost(t, roomFor(10))
		h.load("m")
		r := h.pin("m")
		h.drop("m")
		wantActions(t, h.act())
		next := h.pin("m")
		if next == r {
			t.Fatal("a dropped replica is used again")
		}
		h.now = h.now.Add(127*time.Second - 1)
		wantActions(t, h.act())
		if end {
			h.unpin(r)
		} else if wake, ok := h.c.Wake(); !ok || wake.Sub(h.now) != 1 {
			t.Fatalf("wakes at %s, %t", wake, ok)
		}
		h.now = h.now.Add(1)
		wantActions(t, h.act(), "unload m")
		h.unloaded(r)
		wantActions(t, h.act(), "load m")
		h.loaded(next)
		if !end {
			h.unpin(r)
		}
		h.settle()
	}
}

func TestFailedUnloadIsRetried(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(100))
	h.load("m", "other")
	r := h.c.Replica("m")
	h.drop("m")
	capacity := h.c.Figures(h.now).Capacity.Host
	for try := range 6 {
		if try > 0 {
			if wake, ok := h.c.Wake(); !ok || wake.Sub(h.now) != 10*time.Second {
				t.Fatalf("try %d: wakes at %s, %t", try, wake, ok)
			}
			h.now = h.now.Add(10 * time.Second)
		}
		wantActions(t, h.act(), "unload m")
		h.unloadFailed(r)
	}
	next := h.pin("m")
	wantActions(t, h.act(), "load m")
	if f := h.c.Figures(h.now); h.c.Lost() != units(1) || f.Capacity.Host != capacity-unit {
		t.Fatalf("figures %+v", f)
	}
	h.loaded(next)
	h.settle()
	h.lose()
	if f := h.c.Figures(h.now); h.c.Lost() != (model.Size{}) || f.Capacity.Host != capacity {
		t.Fatalf("figures without the runtime %+v", f)
	}
}

func TestKeptModelsAreNotEvicted(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(10))
	h.load(ids("m", 10)...)
	h.now = h.now.Add(time.Hour)
	kept := h.c.Replica("m0")
	for _, row := range []struct {
		keep bool
		want string
	}{{true, "unload m1"}, {false, "unload m0"}} {
		h.known[kept].kept = row.keep
		h.c.Keep(kept, row.keep)
		next := h.pin(model.ID("next " + row.want))
		wantActions(t, h.act(), row.want, "load "+string(next.ID)) // in the buffer
		h.finish(0, model.Size{})
		h.loaded(next)
		h.unpin(next)
	}
}

func TestLoadTime(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		seconds []int
		timeout time.Duration
		want    time.Duration
	}{
		"unknown":                           {nil, 90 * time.Second, 30 * time.Second},
		"two loads":                         {[]int{1, 1}, 90 * time.Second, 30 * time.Second},
		"unknown with a short timeout":      {nil, 3 * time.Second, 3 * time.Second},
		"three equal loads":                 {[]int{2, 2, 2}, 90 * time.Second, 2 * time.Second},
		"five deviations of a few loads":    {[]int{1, 2, 3}, 90 * time.Second, 7 * time.Second},
		"five deviations of twenty loads":   {slices.Repeat([]int{1, 3}, 10), 90 * time.Second, 7129891 * time.Microsecond},
		"three deviations of 21 and more":   {slices.Repeat([]int{1, 2, 3}, 7), 90 * time.Second, 4509980 * time.Microsecond},
		"a load longer than all the others": {append(slices.Repeat([]int{1}, 99), 11), 90 * time.Second, 4100 * ms},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := roomFor(1000)
			s.LoadTimeout = test.timeout
			h := newHost(t, s)
			for i, id := range ids("m", len(test.seconds)) {
				r := h.pin(id)
				h.act()
				h.now = h.now.Add(time.Duration(test.seconds[i]) * time.Second)
				h.loaded(r)
			}
			if got := h.c.LoadTime(""); (got - test.want).Abs() > ms {
				t.Errorf("got %s, want %s", got, test.want)
			}
			if got := h.c.LoadTime("another type"); got != max(3*time.Second, test.timeout/3) {
				t.Errorf("another type: got %s", got)
			}
		})
	}
}

func TestTypesOfLoadTimesAreBounded(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(2000))
	for i, id := range ids("m", 1000) {
		r, err := h.want(modelcache.Model{ID: id, Type: fmt.Sprint(i)}, modelcache.Waiting)
		if err != nil {
			t.Fatal(err)
		}
		h.act()
		h.now = h.now.Add(time.Second)
		h.loaded(r)
	}
	if f := h.c.Figures(h.now); len(f.LoadTimes) > 257 || f.LoadTimes["999"] != 0 || h.c.LoadTime("999") != time.Second {
		t.Fatalf("%d types, the last loads for %s", len(f.LoadTimes), h.c.LoadTime("999"))
	}
}

func TestLostRuntimeReloadsModelsInUse(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(10))
	h.load("idle", "used", "dropped")
	used, loading := h.pin("used"), h.pin("loading")
	h.drop("dropped")
	wantActions(t, h.act(), "unload dropped", "load loading")
	h.pin("queued")
	h.lose()
	h.ready()
	if f := h.c.Figures(h.now); f.Used != (model.Size{}) || f.Queued != 2 {
		t.Fatalf("figures %+v", f)
	}
	for _, a := range h.act() { // in any order
		if want := map[model.ID]modelcache.Reason{"idle": modelcache.Lost, "loading": modelcache.Crashed, "used": ""}; want[a.Replica.ID] != h.known[a.Replica].refused {
			t.Fatalf("got %q", describe([]modelcache.Action{a}))
		}
	}
	h.loaded(used)
	h.unpin(loading)
	wantActions(t, h.act(), "load queued")
	h.settle()
}

func TestCrashAmongLoadsIsBlamedOnOne(t *testing.T) {
	t.Parallel()
	s := roomFor(100)
	s.LoadSlots = 3
	h := newHost(t, s)
	for _, id := range ids("m", 5) {
		h.pin(id)
	}
	wantActions(t, h.act(), "load m0", "load m1", "load m2")
	h.lose()
	wantActions(t, h.act()) // no runtime
	h.ready()
	h.suspect = true
	wantActions(t, h.act(), "load m0")
	h.loaded(h.c.Replica("m0"))
	wantActions(t, h.act(), "load m1")
	h.lose()
	h.ready()
	h.suspect = false
	wantActions(t, h.act(), "refuse m1: "+string(modelcache.Crashed), "load m0", "load m2", "load m3")
	h.settle()
}

func TestCrashBesideADroppedLoadIsBlamedOnNone(t *testing.T) {
	t.Parallel()
	s := roomFor(100)
	s.LoadSlots = 2
	h := newHost(t, s)
	h.pin("dropped")
	h.pin("m")
	wantActions(t, h.act(), "load dropped", "load m")
	h.drop("dropped")
	wantActions(t, h.act(), "refuse dropped: "+string(modelcache.Dropped))
	h.lose()
	h.ready()
	wantActions(t, h.act(), "load m")
	h.settle()
}

func TestSuspicionEndsWithItsLoads(t *testing.T) {
	t.Parallel()
	s := roomFor(100)
	s.LoadSlots = 3
	h := newHost(t, s)
	for _, id := range ids("m", 5) {
		h.pin(id)
	}
	h.act()
	h.lose()
	h.ready()
	wantActions(t, h.act(), "load m0")
	h.drop("m1")
	wantActions(t, h.act(), "refuse m1: "+string(modelcache.Dropped))
	h.loaded(h.c.Replica("m0"))
	wantActions(t, h.act(), "load m2")
	h.loaded(h.c.Replica("m2"))
	wantActions(t, h.act(), "load m3", "load m4")
}

func TestFiguresTellOldestUse(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(10))
	oldest := func() time.Time { return h.c.Figures(h.now).OldestUse }
	if !oldest().IsZero() {
		t.Fatalf("without models: %s", oldest())
	}
	h.load("a")
	h.now = h.now.Add(time.Second)
	h.load("b")
	h.now = h.now.Add(time.Second)
	if oldest() != epoch.Add(1) {
		t.Fatalf("got %s", oldest())
	}
	h.pin("b")
	if _, err := h.want(modelcache.Model{ID: "a", LastUse: epoch.Add(5 * ms)}, modelcache.Requested); err != nil || oldest() != epoch.Add(5*ms) {
		t.Fatalf("a request is no use: %s, %v", oldest(), err)
	}
	h.pin("a")
	if oldest() != h.now {
		t.Fatalf("all are in use: %s", oldest())
	}
	if f := h.c.Figures(h.now); !reflect.DeepEqual(f.LoadTimes, map[string]time.Duration{"": 30 * time.Second}) {
		t.Fatalf("load times %v", f.LoadTimes)
	}
}

// configure replaces the settings.
func (h *host) configure(s modelcache.Settings) {
	h.settings, h.deficit = s, true
	h.c.Configure(s)
}

func TestLessCapacityEvictsInOrderOfUse(t *testing.T) {
	t.Parallel()
	h := newHost(t, roomFor(30))
	h.load("a", "b", "c")
	used := h.pin("a")
	h.load(ids("m", 20)...)
	large, err := h.want(modelcache.Model{ID: "large", Size: units(20)}, modelcache.Waiting)
	if err != nil {
		t.Fatal(err)
	}
	h.configure(roomFor(10))
	var gone []string
	for _, a := range h.act() {
		gone = append(gone, describe([]modelcache.Action{a})...)
	}
	want := []string{"refuse large: " + string(modelcache.TooLarge), "unload b", "unload c"}
	for _, id := range ids("m", 20)[:11] {
		want = append(want, "unload "+string(id))
	}
	if !slices.Equal(gone, want) {
		t.Errorf("got %q, want %q", gone, want)
	}
	if used.State() != modelcache.Loaded || large.State() != modelcache.Ended {
		t.Errorf("the model in use is in state %d, the load that is too large in %d", used.State(), large.State())
	}
	h.settle()
	h.configure(roomFor(30))
	h.load(ids("n", 20)...)
	if r := h.c.Replica("m19"); r == nil || r.State() != modelcache.Loaded {
		t.Error("a model was evicted although the capacity is back")
	}
}

func TestFewerLoadSlotsHoldLaterLoads(t *testing.T) {
	t.Parallel()
	s := roomFor(30)
	s.LoadSlots = 3
	h := newHost(t, s)
	loads := []*modelcache.Replica{h.pin("a"), h.pin("b")}
	h.act()
	s.LoadSlots = 1
	h.slots = 2
	h.configure(s)
	later := h.pin("c")
	h.act()
	h.loaded(loads[0])
	h.act()
	if later.State() != modelcache.Queued || loads[1].State() != modelcache.Loading {
		t.Errorf("the later load is in state %d, the one that runs in %d", later.State(), loads[1].State())
	}
	h.slots = 0
	h.loaded(loads[1])
	h.act()
	if later.State() != modelcache.Loading {
		t.Errorf("the later load is in state %d", later.State())
	}
}
