package modelcache_test

import (
	"container/list"
	"fmt"
	"math/rand"
	"slices"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost/internal/modelcache"
)

// TestDayOfTrafficHitsLikePlainLRU simulates a day of two requests a second, by Zipf 1.1 for
// 20,000 models, with room for 1,000. Loads take 0.1 to 0.5 s, unloads 2 s and runs 20 ms.
func TestDayOfTrafficHitsLikePlainLRU(t *testing.T) {
	t.Parallel()
	const models, room = 20_000, 1_000
	random := rand.New(rand.NewSource(1))
	zipf := rand.NewZipf(random, 1.1, 1, models-1)
	d := &day{
		t: t, now: epoch, random: random, waiting: make(map[*modelcache.Replica]int),
		c: modelcache.New(modelcache.Settings{Capacity: units(room), DefaultSize: units(1), LoadSlots: 2, LoadTimeout: 90 * time.Second}),
	}
	plain := lru{room: room, at: make(map[uint64]*list.Element)}
	requests, hits, plainHits, refused := 0, 0, 0, 0
	for end := epoch.Add(24 * time.Hour); d.now.Before(end); requests++ {
		d.run(d.now.Add(time.Duration(random.ExpFloat64() * float64(time.Second) / 2)))
		n := zipf.Uint64()
		if plain.use(n) {
			plainHits++
		}
		r, err := d.c.Want(d.now, modelcache.Model{ID: model.ID(fmt.Sprint(n)), LastUse: d.now}, modelcache.Waiting)
		switch {
		case err != nil:
			refused++
			continue
		case r.State() == modelcache.Loaded:
			hits++
			d.after(20*ms, func() { d.c.Unpin(d.now, r) })
		default:
			d.waiting[r]++
		}
		d.act()
	}
	ratio, plainRatio := float64(hits)/float64(requests), float64(plainHits)/float64(requests)
	t.Logf("%d requests, %d loads, %d refused; hit ratio %.4f, of a plain LRU %.4f; load time %s; longest wait for a load %s",
		requests, d.loads, refused, ratio, plainRatio, d.c.LoadTime(""), d.longest)
	if ratio < plainRatio-0.02 || refused > 0 {
		t.Errorf("the hit ratio is %.4f, of a plain LRU %.4f; %d refused", ratio, plainRatio, refused)
	}
}

// day runs items and actions on a simulated clock. Its checks are few, because the checks of host
// look at all models.
type day struct {
	t       *testing.T
	c       *modelcache.Cache
	now     time.Time
	random  *rand.Rand
	events  []event // the earliest first
	waiting map[*modelcache.Replica]int
	live    int64
	loads   int
	longest time.Duration
}

type event struct {
	at time.Time
	do func()
}

func (d *day) after(delay time.Duration, do func()) {
	e := event{d.now.Add(delay), do}
	i, _ := slices.BinarySearchFunc(d.events, e, func(a, b event) int { return a.at.Compare(b.at) })
	d.events = slices.Insert(d.events, i, e)
}

// run lets everything happen that is due by a time.
func (d *day) run(until time.Time) {
	for len(d.events) > 0 && !d.events[0].at.After(until) {
		e := d.events[0]
		d.events = d.events[1:]
		d.now = e.at
		e.do()
		d.act()
	}
	d.now = until
}

func (d *day) act() {
	for _, a := range d.c.Actions(d.now) {
		r := a.Replica
		switch a.Kind {
		case modelcache.Load:
			d.loads++
			d.longest = max(d.longest, d.now.Sub(r.LastUse))
			if d.live += r.Size.Host; d.live > 1000*unit {
				d.t.Fatalf("the runtime holds %d bytes", d.live)
			}
			d.after(100*ms+time.Duration(d.random.Intn(400))*ms, func() {
				d.c.Loaded(d.now, r, model.Size{})
				for range d.waiting[r] {
					d.after(20*ms, func() { d.c.Unpin(d.now, r) })
				}
				delete(d.waiting, r)
			})
		case modelcache.Unload:
			d.after(2*time.Second, func() {
				d.live -= r.Size.Host
				d.c.Unloaded(d.now, r, nil)
			})
		default:
			d.t.Fatalf("%s %s: %s", a.Kind, r.ID, a.Refusal)
		}
	}
}

// lru is a plain LRU cache of so many models.
type lru struct {
	room  int
	order list.List
	at    map[uint64]*list.Element
}

// use reports whether the model was there.
func (l *lru) use(n uint64) bool {
	e, hit := l.at[n]
	if hit {
		l.order.MoveToBack(e)
		return true
	}
	l.at[n] = l.order.PushBack(n)
	if l.order.Len() > l.room {
		delete(l.at, l.order.Remove(l.order.Front()).(uint64))
	}
	return false
}

// BenchmarkUse is of an item of a loaded model, one of 10,000 in turn: from its arrival to its
// end, with what a host asks after each event.
func BenchmarkUse(b *testing.B) {
	const models = 10_000
	c, now := modelcache.New(roomFor(2*models)), epoch
	names := ids("m", models)
	use := func(id model.ID) *modelcache.Replica {
		now = now.Add(time.Microsecond)
		r, err := c.Want(now, modelcache.Model{ID: id, LastUse: now}, modelcache.Waiting)
		if err != nil {
			b.Fatal(err)
		}
		return r
	}
	for _, id := range names {
		r := use(id)
		c.Actions(now)
		c.Loaded(now, r, model.Size{})
		c.Unpin(now, r)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		r := use(names[i*7919%models])
		c.Actions(now)
		c.Unpin(now, r)
		if len(c.Actions(now)) > 0 {
			b.Fatal("a loaded model needs no action")
		}
		c.Wake()
	}
}

// BenchmarkEvict is of a load that evicts one of 10,000 models.
func BenchmarkEvict(b *testing.B) {
	const models = 10_000
	s := roomFor(models)
	s.DefaultSize = units(models / 1000)
	c, now := modelcache.New(s), epoch
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		now = now.Add(time.Hour)
		r, err := c.Want(now, modelcache.Model{ID: model.ID(fmt.Sprint(i)), Size: units(1)}, modelcache.Waiting)
		if err != nil {
			b.Fatal(err)
		}
		for _, a := range c.Actions(now) {
			switch a.Kind {
			case modelcache.Load:
				c.Loaded(now, a.Replica, model.Size{})
			case modelcache.Unload:
				c.Unloaded(now, a.Replica, nil)
			}
		}
		c.Unpin(now, r)
	}
}
