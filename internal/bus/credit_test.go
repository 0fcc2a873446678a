package bus

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	highClass = 0
	lowClass  = 2
)

// deliverAll has the broker send everything that was requested, of classes with
// endless backlogs, and books it.
func deliverAll(c *credit, backlog [pipeline.ClassCount]bool) (came [pipeline.ClassCount]int) {
	for {
		any := false
		for _, r := range c.plan(time.Time{}) {
			if !backlog[r.cq] {
				continue
			}
			for range r.items {
				c.deliver(r.cq, 1)
				any = true
			}
			came[r.cq] += r.items
		}
		if !any {
			return came
		}
	}
}

// used returns the credit of one queue that is there.
func used(bound int) credit {
	c := newCredit(bound, 1)
	c.use(0, true)
	return c
}

// Its items may be in flight for long.
func TestIdleQueueIsRequestedBesideItsItems(t *testing.T) {
	t.Parallel()
	c := newCredit(16, 2)
	c.use(0, true)
	c.use(1, true)
	until := time.Now()
	c.plan(until)
	second := c.index(normalClass, 1)
	c.deliver(second, 0)
	c.closeAll()
	for _, r := range c.plan(until) {
		if r.cq == second {
			return
		}
	}
	t.Error("an item of the second queue would wait for the one in flight")
}

// planned is how many items of each class a plan requests for.
func planned(c *credit, until time.Time) (items [pipeline.ClassCount]int) {
	for _, r := range c.plan(until) {
		items[r.cq] = r.items
	}
	return items
}

func TestFirstRequestsShareTheBound(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name  string
		bound int
		want  [pipeline.ClassCount]int
	}{
		{"the least bound", LeastBound(1), [pipeline.ClassCount]int{1, 2, 1}},
		{"small", 7, [pipeline.ClassCount]int{1, 5, 1}},
		{"one eighth stands for each class", 64, [pipeline.ClassCount]int{8, 48, 8}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			c := used(test.bound)
			if got := planned(&c, time.Time{}); got != test.want {
				t.Errorf("requests %v, want %v", got, test.want)
			}
			if got := planned(&c, time.Time{}); got != [pipeline.ClassCount]int{} {
				t.Errorf("requests %v again although all of it is requested", got)
			}
		})
	}
}

func TestHighestClassWithWorkGetsTheRemainder(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name    string
		backlog [pipeline.ClassCount]bool
		want    [pipeline.ClassCount]int
	}{
		{"all have work", [pipeline.ClassCount]bool{true, true, true}, [pipeline.ClassCount]int{30, 5, 5}},
		{"normal and low have work", [pipeline.ClassCount]bool{false, true, true}, [pipeline.ClassCount]int{0, 30, 5}},
		{"high has work", [pipeline.ClassCount]bool{true, false, false}, [pipeline.ClassCount]int{30, 0, 0}},
		{"low has work", [pipeline.ClassCount]bool{false, false, true}, [pipeline.ClassCount]int{0, 0, 30}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			c := used(40)
			deliverAll(&c, test.backlog)
			for i, busy := range test.backlog {
				if !busy {
					c.close(i)
				}
			}
			deliverAll(&c, test.backlog)
			turnOver(&c, test.backlog, 1000)
			var inFlight [pipeline.ClassCount]int
			for i, class := range c.classQueues {
				inFlight[i] = class.inFlight
			}
			if inFlight != test.want {
				t.Errorf("%v in flight of a bound of 40, want %v", inFlight, test.want)
			}
			for i, class := range c.classQueues {
				if !test.backlog[i] && class.requested != c.reservedCredit() {
					t.Errorf("class %d without work has %d requested, not its reserved credit of %d", i, class.requested, c.reservedCredit())
				}
			}
		})
	}
}

// turnOver settles one item in flight after the other, of the classes in turn, in
// proportion to their items in flight.
func turnOver(c *credit, backlog [pipeline.ClassCount]bool, items int) (came [pipeline.ClassCount]int) {
	order := holdings(c)
	for range items {
		i := order[0]
		order = order[1:]
		c.release(i)
		got := deliverAll(c, backlog)
		for class, n := range got {
			came[class] += n
			order = append(order, slices.Repeat([]int{class}, n)...)
		}
	}
	return came
}

func holdings(c *credit) []int {
	var out []int
	for i, class := range c.classQueues {
		out = append(out, slices.Repeat([]int{i}, class.inFlight)...)
	}
	return out
}

// A place at a time falls free, which is when the class above could take all.
func TestLowClassesKeepTheirShareUnderSaturation(t *testing.T) {
	t.Parallel()
	c := used(40)
	backlog := [pipeline.ClassCount]bool{true, true, true}
	deliverAll(&c, backlog)
	came := turnOver(&c, backlog, 4000)
	if came[lowClass] < 4000/10 || came[normalClass] < 4000/10 {
		t.Errorf("of 4000 items came %v; an eighth stands for each class", came)
	}
	if came[highClass] < 4000/2 {
		t.Errorf("of 4000 items came %v; high goes first", came)
	}
}

func TestSmallRequestsWaitWhileOneIsOpen(t *testing.T) {
	t.Parallel()
	c := used(64)
	c.plan(time.Time{})
	for range 40 {
		c.deliver(normalClass, 100)
	}
	c.plan(time.Time{})
	for freed := 1; freed < 24; freed++ {
		c.release(normalClass)
		if requests := planned(&c, time.Time{}); requests != [pipeline.ClassCount]int{} {
			t.Fatalf("requests %v for %d freed places while 8 are requested", requests, freed)
		}
	}
	c.release(normalClass)
	if requests := planned(&c, time.Time{}); requests[normalClass] != 24 {
		t.Errorf("requests %v when 24 items are free", requests)
	}
}

func TestExpireEndsOnlyOldRequests(t *testing.T) {
	t.Parallel()
	c := used(40)
	now := time.Unix(1000, 0)
	c.plan(now.Add(time.Second))
	c.expire(now.Add(time.Second))
	if c.requested() != 40 {
		t.Errorf("%d requested at the very end of the ask, want 40", c.requested())
	}
	c.expire(now.Add(time.Second + 1))
	if c.requested() != 0 {
		t.Errorf("%d requested after the end of the ask", c.requested())
	}
	if again := planned(&c, now.Add(2*time.Second)); again != [pipeline.ClassCount]int{5, 30, 5} {
		t.Errorf("requests %v after all requests lapsed", again)
	}
}

func TestCloseAllFreesEveryRequest(t *testing.T) {
	t.Parallel()
	c := used(40)
	c.plan(time.Time{})
	for range 10 {
		c.deliver(normalClass, 5)
	}
	c.closeAll()
	if c.requested() != 0 || c.free() != 30 {
		t.Errorf("%d requested and %d free with 10 of 40 in flight", c.requested(), c.free())
	}
}

// The broker was busy for longer than the ask was believed to be open, and
// then says that it is over, while the next one is open.
func TestLateStatusDoesNotEndTheNextRequest(t *testing.T) {
	t.Parallel()
	c := used(40)
	now := time.Unix(1000, 0)
	first := c.plan(now.Add(time.Second))
	c.expire(now.Add(2 * time.Second))
	c.plan(now.Add(3 * time.Second))
	for _, r := range first {
		if c.endSome(r.cq, r.number, r.items) {
			t.Errorf("cq %d: an ask that lapsed counts as open", r.cq)
		}
	}
	if c.requested() != 40 {
		t.Errorf("%d requested, want 40", c.requested())
	}
}

// creditModel books by itself what the credit may have requested and in flight.
type creditModel struct {
	credit
	now   time.Time
	books []queueBook
}

type queueBook struct {
	used                bool
	inFlight, requested int
	until               time.Time
	lapsed              uint64
}

func (b *queueBook) end(m *creditModel) { b.requested, b.lapsed = 0, m.requests }

func (m *creditModel) total() int {
	total := 0
	for _, b := range m.books {
		total += b.inFlight + b.requested
	}
	return total
}

// Whatever comes in whatever order, also items that were not requested.
func TestCreditKeepsItsBoundAndNeverStalls(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		queues := rapid.IntRange(1, 2).Draw(t, "queues")
		m := &creditModel{
			credit: newCredit(rapid.IntRange(LeastBound(queues), 300).Draw(t, "bound"), queues),
			now:    time.Unix(1000, 0),
			books:  make([]queueBook, pipeline.ClassCount*queues),
		}
		m.oneIdlePull = rapid.Bool().Draw(t, "one idle pull")
		classQueues := rapid.IntRange(0, len(m.books)-1)
		t.Repeat(map[string]func(*rapid.T){
			"":        m.check,
			"plan":    m.plans,
			"deliver": func(t *rapid.T) { m.deliver(t, classQueues.Draw(t, "cq"), rapid.IntRange(1, 50).Draw(t, "items")) },
			"settle":  func(t *rapid.T) { m.settle(classQueues.Draw(t, "cq"), rapid.IntRange(1, 50).Draw(t, "items")) },
			"use":     func(t *rapid.T) { m.uses(rapid.IntRange(0, queues-1).Draw(t, "queue"), rapid.Bool().Draw(t, "used")) },
			"over": func(t *rapid.T) {
				i := classQueues.Draw(t, "cq")
				n := rapid.IntRange(0, 50).Draw(t, "items")
				number := rapid.Uint64Range(0, m.requests).Draw(t, "number")
				b := &m.books[i]
				if open := m.endSome(i, number, n); open != (number > b.lapsed) {
					t.Fatalf("ask %d counts as open: %v; those up to %d are over", number, open, b.lapsed)
				} else if open {
					b.requested = max(0, b.requested-n)
				}
			},
			"time passes": func(t *rapid.T) {
				m.now = m.now.Add(time.Duration(rapid.IntRange(0, 1500).Draw(t, "ms")) * time.Millisecond)
				m.expire(m.now)
				for i := range m.books {
					if b := &m.books[i]; b.requested > 0 && m.now.After(b.until) {
						b.end(m)
					}
				}
			},
			"reconnect": func(*rapid.T) {
				m.closeAll()
				for i := range m.books {
					m.books[i].end(m)
				}
			},
		})
	})
}

func (m *creditModel) uses(queue int, used bool) {
	m.use(queue, used)
	for i := range m.books {
		if i%m.queues == queue {
			m.books[i].end(m)
			m.books[i].used = used
		}
	}
}

// deliver sends items of a cq, more than were requested now and then.
func (m *creditModel) deliver(t *rapid.T, i, n int) {
	b := &m.books[i]
	if !rapid.Bool().Draw(t, "unasked too") {
		n = min(n, b.requested)
	}
	for range n {
		want := b.requested > 0 || m.total() < m.bound
		if got := m.credit.deliver(i, rapid.Uint64Range(0, 2).Draw(t, "pending")); got != want {
			t.Fatalf("an item is taken: %t; %d are requested, and %d of %d are in flight or requested", got, b.requested, m.total(), m.bound)
		}
		if !want {
			continue
		}
		b.inFlight++
		b.requested = max(0, b.requested-1)
	}
}

func (m *creditModel) settle(i, n int) {
	for range min(n, m.books[i].inFlight) {
		m.release(i)
		m.books[i].inFlight--
	}
}

func (m *creditModel) plans(t *rapid.T) {
	before := m.total()
	for _, r := range m.plan(m.now.Add(time.Second)) {
		b := &m.books[r.cq]
		if m.oneIdlePull && b.inFlight > 0 && m.freeSlots() <= 0 {
			t.Fatalf("cq %d: an item is requested that would wait for a slot", r.cq)
		}
		if r.items <= 0 || r.number <= b.lapsed || !b.used {
			t.Fatalf("requests cq %d, in use %v, for %d items as number %d", r.cq, b.used, r.items, r.number)
		}
		b.requested += r.items
		b.until = m.now.Add(time.Second)
	}
	m.checkShares(t, before)
}

// freeSlots is how many items more a host with oneIdlePull runs at once.
func (m *creditModel) freeSlots() int {
	slots := m.bound - len(m.books) + 1
	for _, b := range m.books {
		slots -= b.inFlight
	}
	return slots
}

// checkShares holds after every plan.
func (m *creditModel) checkShares(t *rapid.T, before int) {
	free, reserved, requested, used, kept := m.bound-m.total(), max(1, m.bound/(8*m.queues)), 0, false, 0
	if m.oneIdlePull {
		reserved = 1
	}
	hasSlot := !m.oneIdlePull || m.freeSlots() > 0
	for i, b := range m.books {
		requested += b.requested
		used = used || b.used
		if !b.used {
			kept += max(0, reserved-b.inFlight)
		}
		mayIdle := m.classQueues[i].busy || !hasSlot
		if b.used && free > 0 && b.requested == 0 && (b.inFlight < reserved || !mayIdle) {
			t.Fatalf("cq %d has nothing requested and %d in flight, though %d items are free", i, b.inFlight, free)
		}
	}
	if used && requested == 0 && hasSlot && before < m.bound-kept {
		t.Fatalf("nothing is requested, though %d items are free and %d reserved for missing queues", free, kept)
	}
}

func (m *creditModel) check(t *rapid.T) {
	if total := m.total(); total > m.bound {
		t.Fatalf("%d are in flight or requested, the bound is %d", total, m.bound)
	}
	for i, cq := range m.classQueues {
		if b := m.books[i]; cq.inFlight != b.inFlight || cq.requested != b.requested {
			t.Fatalf("cq %d: books %d in flight and %d requested, it is %d and %d", i, cq.inFlight, cq.requested, b.inFlight, b.requested)
		}
	}
}

func TestQueuesOfAClassShareIt(t *testing.T) {
	t.Parallel()
	c := newCredit(64, 2)
	c.use(0, true)
	first, second := c.index(normalClass, 0), c.index(normalClass, 1)
	if got := c.plan(time.Time{}); len(got) != pipeline.ClassCount || got[1].cq != first || got[1].items != 64-5*c.reservedCredit() {
		t.Errorf("with one queue there, requests %v", got)
	}
	c.use(1, true)
	c.closeAll()
	// Both have endless backlogs, and items in flight are settled in turn.
	for range 2000 {
		for _, r := range c.plan(time.Time{}) {
			if r.cq != first && r.cq != second {
				continue
			}
			for range r.items {
				c.deliver(r.cq, 1)
			}
		}
		for _, i := range []int{first, second} {
			if c.classQueues[i].inFlight > 0 {
				c.release(i)
			}
		}
	}
	a, b := c.classQueues[first].inFlight, c.classQueues[second].inFlight
	if a < 16 || b < 16 {
		t.Errorf("of a bound of 64 one queue has %d and the other %d in flight", a, b)
	}
}

// Credit that was requested comes back late, so a queue that comes after another
// finds its share where nobody has requested it.
func TestLateQueueHasItsShareAtOnce(t *testing.T) {
	t.Parallel()
	for _, bound := range []int{LeastBound(2), 96} {
		c := newCredit(bound, 2)
		c.use(0, true)
		c.plan(time.Time{})
		c.use(1, true)
		requests := c.plan(time.Time{})
		if len(requests) != pipeline.ClassCount {
			t.Fatalf("bound %d: requests %v, want one for each class", bound, requests)
		}
		for _, r := range requests {
			if c.queueOf(r.cq) != 1 || r.items != c.reservedCredit() {
				t.Errorf("bound %d: requests cq %d for %d, want %d of the second queue", bound, r.cq, r.items, c.reservedCredit())
			}
		}
	}
}

// A host with oneIdlePull requests what it can run of a class, and for no more.
func TestOneClassQueueFillsABoundForSlots(t *testing.T) {
	t.Parallel()
	for _, queues := range []int{1, 2} {
		for slots := 1; slots <= 100; slots++ {
			c := newCredit(BoundFor(slots, queues), queues)
			c.oneIdlePull = true
			for queue := range queues {
				c.use(queue, true)
			}
			normal := c.index(1, 0)
			c.classQueues[normal].busy, c.classQueues[normal].waiting = true, 1000
			if got := c.target(normal, c.preferred()); got != slots {
				t.Fatalf("%d slots, %d queues: one cq may have %d", slots, queues, got)
			}
			c.classQueues[normal].inFlight = slots
			for _, r := range c.plan(time.Time{}) {
				if r.cq == normal || r.items != 1 {
					t.Fatalf("%d slots, %d queues, all of them taken: it requests %v", slots, queues, r)
				}
			}
		}
	}
}

// Items in flight for long keep no slot free while others of any class come one by one.
func TestLongItemsOfAnyClassFillTheSlots(t *testing.T) {
	t.Parallel()
	const queues, slots = 2, 8
	for cq := range pipeline.ClassCount * queues {
		c := newCredit(BoundFor(slots, queues), queues)
		c.oneIdlePull = true
		c.use(0, true)
		c.use(1, true)
		for n := range slots {
			c.plan(time.Time{})
			if c.classQueues[cq].requested == 0 {
				t.Fatalf("cq %d: %d of %d slots are taken, and no item more is requested: %+v", cq, n, slots, c.classQueues)
			}
			c.deliver(cq, 0)
		}
		c.plan(time.Time{})
		if c.classQueues[cq].requested > 0 {
			t.Errorf("cq %d: an item is requested that would wait for a slot", cq)
		}
	}
}
