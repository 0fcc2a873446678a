package modelcache_test

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost/internal/modelcache"
)

func drawSettings(t *rapid.T) modelcache.Settings {
	s := modelcache.Settings{
		DefaultSize: units(2), LoadSlots: rapid.IntRange(1, 4).Draw(t, "slots"),
		LoadTimeout: 90 * time.Second,
	}
	s.Capacity = units(rapid.Int64Range(20, 60).Draw(t, "capacity"))
	if rapid.Bool().Draw(t, "has a device") {
		s.Capacity.Device = s.Capacity.Host
	}
	return s
}

func drawModel(t *rapid.T, now time.Time) modelcache.Model {
	return modelcache.Model{
		ID:   model.ID(fmt.Sprintf("m%d", rapid.IntRange(0, 15).Draw(t, "model"))),
		Type: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "type"),
		Size: model.Size{
			Host:   unit * rapid.SampledFrom([]int64{0, 1, 1, 5, 25, 70}).Draw(t, "host size"),
			Device: unit * rapid.SampledFrom([]int64{0, 0, 3, 30}).Draw(t, "device size"),
		},
		LastUse: now.Add(-time.Duration(rapid.SampledFrom([]int{0, 0, 60, 3600}).Draw(t, "age")) * time.Second),
	}
}

// TestPromisesHoldAfterEveryEvent drives a Cache at random; the host checks its promises at
// every step. At the end all that was wanted has ended.
func TestPromisesHoldAfterEveryEvent(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		h := newHost(t, drawSettings(t))
		var pins []*modelcache.Replica
		oneRunning := func(t *rapid.T) int {
			if len(h.running) == 0 {
				t.Skip("nothing runs")
			}
			return rapid.IntRange(0, len(h.running)-1).Draw(t, "which")
		}
		pin := func(t *rapid.T) {
			if r, err := h.want(drawModel(t, h.now), modelcache.Waiting); err == nil {
				pins = append(pins, r)
			}
		}
		unpin := func(t *rapid.T) {
			if len(pins) == 0 {
				t.Skip("no pins")
			}
			i := rapid.IntRange(0, len(pins)-1).Draw(t, "which")
			h.unpin(pins[i])
			pins = append(pins[:i], pins[i+1:]...)
		}
		finish := func(t *rapid.T) {
			i, size := oneRunning(t), model.Size{}
			if r := h.running[i].Replica; r != nil {
				size = r.Size
			}
			if rapid.IntRange(0, 9).Draw(t, "odd size") == 0 {
				size = units(rapid.Int64Range(0, 70).Draw(t, "size"))
			}
			h.finish(i, size)
		}
		t.Repeat(map[string]func(*rapid.T){
			"pin": pin, "pin another": pin, "unpin": unpin, "unpin another": unpin, "finish": finish, "finish another": finish,
			"want": func(t *rapid.T) {
				_, _ = h.want(drawModel(t, h.now), modelcache.Requested)
			},
			"keep": func(t *rapid.T) {
				if r := h.c.Replica(drawModel(t, h.now).ID); r != nil {
					h.known[r].kept = rapid.Bool().Draw(t, "kept")
					h.c.Keep(r, h.known[r].kept)
				}
			},
			"drop": func(t *rapid.T) { h.drop(drawModel(t, h.now).ID) },
			"give up": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "really") == 0 {
					h.c.GiveUpQueued()
				}
			},
			"fail": func(t *rapid.T) {
				switch a := h.running[oneRunning(t)]; a.Kind {
				case modelcache.Load:
					h.loadFailed(a.Replica, rapid.Bool().Draw(t, "uses memory"))
				case modelcache.Unload:
					h.unloadFailed(a.Replica)
				}
			},
			"resize": func(t *rapid.T) {
				if r := h.c.Replica(drawModel(t, h.now).ID); r != nil && r.State() == modelcache.Loaded {
					h.deficit = true
					h.c.Resize(h.now, r, units(rapid.Int64Range(0, 70).Draw(t, "size")))
				}
			},
			"configure": func(t *rapid.T) {
				s := h.settings.WithCapacity(units(rapid.Int64Range(1, 60).Draw(t, "capacity")))
				s.LoadSlots = rapid.IntRange(1, 4).Draw(t, "slots")
				h.slots = h.c.Figures(h.now).Loading
				h.configure(s)
			},
			"lose the runtime": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "really") == 0 {
					h.lose()
				}
			},
			"start a runtime": func(t *rapid.T) {
				if !h.stopped || len(h.running) > 0 {
					t.Skip("it runs")
				}
				h.ready()
			},
			"wait": func(t *rapid.T) {
				h.act()
				wake, ok := h.c.Wake()
				h.now = h.now.Add(time.Duration(rapid.SampledFrom([]int{1, 1000, 60_000, 200_000}).Draw(t, "ms")) * ms)
				if actions := h.act(); len(actions) > 0 && (!ok || wake.After(h.now)) {
					t.Fatalf("%v at %s; Wake returned %s, %t", describe(actions), h.now, wake, ok)
				}
			},
			"": func(*rapid.T) { h.act() },
		})
		for _, r := range pins {
			if r.State() == modelcache.Draining {
				h.unpin(r)
			}
		}
		h.end()
	})
}

// end lets everything end and checks that it does.
func (h *host) end() {
	h.t.Helper()
	if h.stopped && len(h.running) == 0 {
		h.ready()
	}
	for range 1000 {
		h.settle()
		wake, ok := h.c.Wake()
		if !ok {
			break
		}
		h.now = wake
	}
	h.settle()
	if f := h.c.Figures(h.now); f.Queued > 0 || f.Loading > 0 {
		h.t.Fatalf("loads do not end: %+v", f)
	}
	for r, k := range h.known {
		if r.State() != modelcache.Loaded && !k.loaded && k.refused == "" {
			h.t.Fatalf("%s is in state %d, neither loaded nor refused", r.ID, r.State())
		}
	}
}
