package modelcache_test

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost/internal/modelcache"
)

const (
	unit = 8 << 10
	ms   = time.Millisecond
)

var (
	epoch     = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	errUnload = errors.New("the runtime does not unload")
)

// units is the size of so many units of host memory.
func units(n int64) model.Size { return model.Size{Host: n * unit} }

// roomFor returns settings for models of one unit each, that many beside the unload buffer.
func roomFor(models int64) modelcache.Settings {
	s := modelcache.Settings{DefaultSize: units(1), LoadSlots: 1, LoadTimeout: 90 * time.Second}
	s.Capacity = model.Size{Host: max(models+models/10, 10) * unit}
	return s
}

// reporter fails a test; *testing.T and *rapid.T are such.
type reporter interface {
	Helper()
	Fatalf(format string, args ...any)
}

// known is what the test knows of a replica by itself.
type known struct {
	pins      int
	want      modelcache.Priority
	arrival   int
	lastUse   time.Time
	droppedAt time.Time
	loaded    bool
	unloading bool
	kept      bool
	refused   modelcache.Reason
}

// host drives a Cache as a stage host does, and checks what it promises at each step.
type host struct {
	t        reporter
	c        *modelcache.Cache
	now      time.Time
	settings modelcache.Settings
	known    map[*modelcache.Replica]*known
	// memory is what the runtime holds, from Load to the end of Unload.
	memory map[model.ID]*modelcache.Replica
	// running are the actions whose end has not been reported.
	running  []modelcache.Action
	arrivals int
	// deficit is true from a size that was larger than predicted until the capacity holds.
	deficit bool
	// slots is how many loads may still run from before the load slots became fewer.
	slots   int
	suspect bool
	stopped bool
	evicted []*modelcache.Replica
}

func newHost(t reporter, s modelcache.Settings) *host {
	t.Helper()
	if err := s.Validate(); err != nil {
		t.Fatalf("settings: %v", err)
	}
	return &host{
		t: t, c: modelcache.New(s), now: epoch, settings: s,
		known: make(map[*modelcache.Replica]*known), memory: make(map[model.ID]*modelcache.Replica),
	}
}

func (h *host) want(m modelcache.Model, p modelcache.Priority) (*modelcache.Replica, error) {
	h.t.Helper()
	r, err := h.c.Want(h.now, m, p)
	if err != nil {
		var refusal *modelcache.Refusal
		if r != nil || !errors.As(err, &refusal) {
			h.t.Fatalf("Want returned %v and %v", r, err)
		}
		return nil, err
	}
	k := h.known[r]
	if k == nil {
		k = &known{}
		h.known[r] = k
	}
	if r.State() == modelcache.Ended || k.refused != "" && !k.loaded {
		h.t.Fatalf("Want returned a replica that has ended")
	}
	if m.LastUse.After(k.lastUse) {
		k.lastUse = m.LastUse
	}
	if p != modelcache.Waiting {
		if r.State() != modelcache.Loaded {
			k.want = max(k.want, p)
		}
	} else if k.pins++; k.pins == 1 {
		h.arrivals++
		k.arrival = h.arrivals
	}
	return r, nil
}

// pin wants a model for an item, which must be possible.
func (h *host) pin(id model.ID) *modelcache.Replica {
	h.t.Helper()
	r, err := h.want(modelcache.Model{ID: id, LastUse: h.now}, modelcache.Waiting)
	if err != nil {
		h.t.Fatalf("%s: %v", id, err)
	}
	return r
}

func (h *host) unpin(r *modelcache.Replica) {
	h.known[r].pins--
	h.known[r].lastUse = h.now
	h.c.Unpin(h.now, r)
}

func (h *host) drop(id model.ID) {
	if r := h.c.Replica(id); r != nil {
		h.known[r].droppedAt = h.now
	}
	h.c.Drop(h.now, id)
}

// act executes the actions that are due and returns them.
func (h *host) act() []modelcache.Action {
	h.t.Helper()
	queued := h.startable()
	actions := h.c.Actions(h.now)
	h.evicted = nil
	for _, a := range actions {
		h.execute(a)
	}
	h.checkOrder(queued)
	h.check()
	if again := h.c.Actions(h.now); len(again) > 0 {
		h.t.Fatalf("Actions returned %v only when called again", again)
	}
	return actions
}

func (h *host) execute(a modelcache.Action) {
	h.t.Helper()
	r, k := a.Replica, h.known[a.Replica]
	switch a.Kind {
	case modelcache.Load:
		if h.memory[r.ID] != nil || h.stopped {
			h.t.Fatalf("%s is loaded twice, or without a runtime", r.ID)
		}
		h.memory[r.ID] = r
		h.running = append(h.running, a)
	case modelcache.Unload:
		h.checkUnload(r, k)
		h.running = append(h.running, a)
	case modelcache.Refuse:
		if k.refused != "" {
			h.t.Fatalf("%s is refused twice: %s, %s", r.ID, k.refused, a.Refusal)
		}
		k.refused = a.Refusal.Reason
	}
}

func (h *host) checkUnload(r *modelcache.Replica, k *known) {
	h.t.Helper()
	if h.memory[r.ID] != r {
		h.t.Fatalf("%s is unloaded, and the runtime does not have it", r.ID)
	}
	if slices.ContainsFunc(h.running, func(a modelcache.Action) bool { return a.Replica == r }) {
		h.t.Fatalf("%s is unloaded while its load runs", r.ID)
	}
	switch {
	case !k.loaded || k.refused != "" || k.unloading: // it was not in use, or is unloaded again
	case k.droppedAt.IsZero():
		if k.pins > 0 {
			h.t.Fatalf("%s is evicted with %d pins", r.ID, k.pins)
		}
		if k.kept {
			h.t.Fatalf("%s is evicted, and to be kept", r.ID)
		}
		h.evicted = append(h.evicted, r)
	case k.pins > 0 && h.now.Before(k.droppedAt.Add(127*time.Second)):
		h.t.Fatalf("%s is unloaded with %d pins, %s after it was dropped", r.ID, k.pins, h.now.Sub(k.droppedAt))
	}
	k.unloading = true
}

// startable returns the queued loads that no old replica holds up.
func (h *host) startable() (out []*modelcache.Replica) {
	for r := range h.c.All() {
		if r.State() == modelcache.Queued && h.memory[r.ID] == nil {
			out = append(out, r)
		}
	}
	return out
}

// checkOrder checks that no load overtook one that goes first.
func (h *host) checkOrder(queued []*modelcache.Replica) {
	h.t.Helper()
	for _, left := range queued {
		for _, stays := range queued {
			if stays.State() == modelcache.Queued && left.State() != modelcache.Queued && h.goesFirst(stays, left) {
				h.t.Fatalf("%s left the queue before %s", left.ID, stays.ID)
			}
		}
	}
}

func (h *host) goesFirst(a, b *modelcache.Replica) bool {
	k, l := h.known[a], h.known[b]
	switch {
	case k.pins > 0 && l.pins > 0:
		return k.arrival < l.arrival
	case k.pins > 0 || l.pins > 0:
		return k.pins > 0
	case k.want != l.want:
		return k.want > l.want
	}
	return k.lastUse.After(l.lastUse)
}

// check compares the cache with what the test knows.
func (h *host) check() {
	h.t.Helper()
	var live, used model.Size
	for _, r := range h.memory {
		live = sum(live, r.Size)
	}
	capacity := sum(h.settings.Capacity, model.Size{Host: -h.c.Lost().Host, Device: -h.c.Lost().Device})
	over := live.Host > capacity.Host || live.Device > capacity.Device
	if over && !h.deficit {
		h.t.Fatalf("the runtime holds %v, the capacity is %v", live, capacity)
	}
	h.deficit = over
	f, models, queued, loading := h.c.Figures(h.now), 0, 0, 0
	for r := range h.c.All() {
		switch r.State() {
		case modelcache.Queued:
			queued++
		case modelcache.MakingRoom, modelcache.Loading:
			loading++
			used = sum(used, r.Size)
		case modelcache.Loaded:
			models++
			used = sum(used, r.Size)
			for _, e := range h.evicted {
				if h.known[r].pins == 0 && !h.known[r].kept && h.known[r].lastUse.Before(h.known[e].lastUse) {
					h.t.Fatalf("%s is evicted, %s was used before it", e.ID, r.ID)
				}
			}
		default:
			h.t.Fatalf("%s is in state %d", r.ID, r.State())
		}
		if k := h.known[r]; k.pins == 0 && k.want == 0 && (r.State() == modelcache.Queued || r.State() == modelcache.MakingRoom) {
			h.t.Fatalf("%s is queued and nobody wants it", r.ID)
		}
	}
	for r := range h.known {
		if r.State() == modelcache.Cancelling {
			loading++
		}
	}
	slots := h.settings.LoadSlots
	if h.suspect {
		slots = 1
	}
	slots = max(slots, h.slots)
	switch {
	case f.Used != used || f.Models != models || f.Queued != queued || f.Loading != loading:
		h.t.Fatalf("figures %+v; there are %d models, %d queued, %d loading, of %v", f, models, queued, loading, used)
	case loading > slots || queued > modelcache.MaxQueued:
		h.t.Fatalf("%d loads, %d slots, %d queued", loading, slots, queued)
	}
}

// take removes the running action at an index, or the first for a model.
func (h *host) take(i int) modelcache.Action {
	a := h.running[i]
	h.running = slices.Delete(h.running, i, i+1)
	return a
}

// loaded reports the end of a load, with the size as predicted.
func (h *host) loaded(r *modelcache.Replica) { h.finish(h.indexOf(modelcache.Load, r), r.Size) }

func (h *host) unloaded(r *modelcache.Replica) {
	h.finish(h.indexOf(modelcache.Unload, r), model.Size{})
}

func (h *host) indexOf(kind modelcache.Kind, r *modelcache.Replica) int {
	h.t.Helper()
	i := slices.IndexFunc(h.running, func(a modelcache.Action) bool { return a.Kind == kind && a.Replica == r })
	if i < 0 {
		h.t.Fatalf("no %s of %s runs", kind, r.ID)
	}
	return i
}

// finish reports the success of a running action.
func (h *host) finish(i int, size model.Size) {
	switch a := h.take(i); a.Kind {
	case modelcache.Load:
		if a.Replica.State() == modelcache.Loading {
			h.known[a.Replica].loaded = true
			h.known[a.Replica].want = 0
			h.deficit = h.deficit || size.Host > a.Replica.Size.Host
		}
		h.c.Loaded(h.now, a.Replica, size)
	case modelcache.Unload:
		delete(h.memory, a.Replica.ID)
		h.c.Unloaded(h.now, a.Replica, nil)
	}
}

// loadFailed reports a load that failed and left memory in use, or not.
func (h *host) loadFailed(r *modelcache.Replica, usesMemory bool) {
	h.take(h.indexOf(modelcache.Load, r))
	if !usesMemory {
		delete(h.memory, r.ID)
	}
	h.c.LoadFailed(h.now, r, nil, usesMemory)
}

func (h *host) unloadFailed(r *modelcache.Replica) {
	h.take(h.indexOf(modelcache.Unload, r))
	lost := h.c.Lost()
	h.c.Unloaded(h.now, r, errUnload)
	if h.c.Lost() != lost {
		delete(h.memory, r.ID) // its memory is no longer part of the capacity
	}
}

func (h *host) lose() {
	clear(h.memory)
	h.running, h.stopped = nil, true
	h.c.RuntimeLost()
}

func (h *host) ready() {
	h.stopped = false
	h.c.RuntimeReady()
}

// load loads models one after the other and has an item run on each, a moment after the last.
func (h *host) load(ids ...model.ID) {
	h.t.Helper()
	for _, id := range ids {
		h.now = h.now.Add(1)
		r := h.pin(id)
		h.act()
		if r.State() == modelcache.Loading {
			h.loaded(r)
		}
		if r.State() != modelcache.Loaded {
			h.t.Fatalf("%s is in state %d", id, r.State())
		}
		h.unpin(r)
		h.settle()
	}
}

// settle ends all that runs, and what follows.
func (h *host) settle() {
	h.t.Helper()
	for h.act(); len(h.running) > 0; h.act() {
		h.finish(0, model.Size{})
	}
}

func sum(a, b model.Size) model.Size {
	return model.Size{Host: a.Host + b.Host, Device: a.Device + b.Device}
}

func ids(prefix string, n int) []model.ID {
	out := make([]model.ID, n)
	for i := range out {
		out[i] = model.ID(fmt.Sprintf("%s%d", prefix, i))
	}
	return out
}

// describe lists actions as "kind model reason".
func describe(actions []modelcache.Action) []string {
	out := []string{}
	for _, a := range actions {
		line := string(a.Kind)
		if a.Replica != nil {
			line += " " + string(a.Replica.ID)
		}
		if a.Refusal != nil {
			line += ": " + string(a.Refusal.Reason)
		}
		out = append(out, line)
	}
	return out
}
