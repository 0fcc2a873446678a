package bus

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

const (
	highClass = 0
	lowClass  = 2
)

// deliverAll has the broker send everything that was asked for, of classes with
// endless backlogs, and books it.
func deliverAll(c *credit, backlog [classCount]bool) (came [classCount]int) {
	for {
		any := false
		for _, ask := range c.plan(time.Time{}) {
			if !backlog[ask.lane] {
				continue
			}
			for range ask.items {
				c.delivered(ask.lane, 1)
				any = true
			}
			came[ask.lane] += ask.items
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

// planned is how many items of each class a plan asks for.
func planned(c *credit, until time.Time) (items [classCount]int) {
	for _, ask := range c.plan(until) {
		items[ask.lane] = ask.items
	}
	return items
}

func TestFirstAskSharesTheBound(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name  string
		bound int
		want  [classCount]int
	}{
		{"the least bound", LeastBound(1), [classCount]int{1, 2, 1}},
		{"small", 7, [classCount]int{1, 5, 1}},
		{"one eighth stands for each class", 64, [classCount]int{8, 48, 8}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			c := used(test.bound)
			if got := planned(&c, time.Time{}); got != test.want {
				t.Errorf("asks %v, want %v", got, test.want)
			}
			if got := planned(&c, time.Time{}); got != [classCount]int{} {
				t.Errorf("asks %v again although all of it is asked for", got)
			}
		})
	}
}

func TestHighestClassWithWorkGetsTheRemainder(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name    string
		backlog [classCount]bool
		want    [classCount]int
	}{
		{"all have work", [classCount]bool{true, true, true}, [classCount]int{30, 5, 5}},
		{"normal and low have work", [classCount]bool{false, true, true}, [classCount]int{0, 30, 5}},
		{"high has work", [classCount]bool{true, false, false}, [classCount]int{30, 0, 0}},
		{"low has work", [classCount]bool{false, false, true}, [classCount]int{0, 0, 30}},
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
			var held [classCount]int
			for i, class := range c.lanes {
				held[i] = class.held
			}
			if held != test.want {
				t.Errorf("holds %v of a bound of 40, want %v", held, test.want)
			}
			for i, class := range c.lanes {
				if !test.backlog[i] && class.asked != c.standing() {
					t.Errorf("class %d without work has %d asked for, not its standing share of %d", i, class.asked, c.standing())
				}
			}
		})
	}
}

// turnOver settles one held item after the other, of the classes in turn, in
// proportion to what they hold.
func turnOver(c *credit, backlog [classCount]bool, items int) (came [classCount]int) {
	order := holdings(c)
	for range items {
		i := order[0]
		order = order[1:]
		c.settled(i)
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
	for i, class := range c.lanes {
		out = append(out, slices.Repeat([]int{i}, class.held)...)
	}
	return out
}

// A place at a time falls free, which is when the class above could take all.
func TestLowClassesKeepTheirShareUnderSaturation(t *testing.T) {
	t.Parallel()
	c := used(40)
	backlog := [classCount]bool{true, true, true}
	deliverAll(&c, backlog)
	came := turnOver(&c, backlog, 4000)
	if came[lowClass] < 4000/10 || came[normalClass] < 4000/10 {
		t.Errorf("of 4000 items came %v; an eighth stands for each class", came)
	}
	if came[highClass] < 4000/2 {
		t.Errorf("of 4000 items came %v; high goes first", came)
	}
}

func TestSmallAsksWaitWhileOneIsOpen(t *testing.T) {
	t.Parallel()
	c := used(64)
	c.plan(time.Time{})
	for range 40 {
		c.delivered(normalClass, 100)
	}
	c.plan(time.Time{})
	for freed := 1; freed < 24; freed++ {
		c.settled(normalClass)
		if asks := planned(&c, time.Time{}); asks != [classCount]int{} {
			t.Fatalf("asks %v for %d freed places while 8 are asked for", asks, freed)
		}
	}
	c.settled(normalClass)
	if asks := planned(&c, time.Time{}); asks[normalClass] != 24 {
		t.Errorf("asks %v when 24 places are free", asks)
	}
}

func TestLapseReturnsOnlyWhatIsOver(t *testing.T) {
	t.Parallel()
	c := used(40)
	now := time.Unix(1000, 0)
	c.plan(now.Add(time.Second))
	c.lapse(now.Add(time.Second))
	if c.asked() != 40 {
		t.Errorf("%d asked for at the very end of the ask, want 40", c.asked())
	}
	c.lapse(now.Add(time.Second + 1))
	if c.asked() != 0 {
		t.Errorf("%d asked for after the end of the ask", c.asked())
	}
	if again := planned(&c, now.Add(2*time.Second)); again != [classCount]int{5, 30, 5} {
		t.Errorf("asks %v after all asks lapsed", again)
	}
}

func TestForgetFreesEverythingAskedFor(t *testing.T) {
	t.Parallel()
	c := used(40)
	c.plan(time.Time{})
	for range 10 {
		c.delivered(normalClass, 5)
	}
	c.forget()
	if c.asked() != 0 || c.free() != 30 {
		t.Errorf("%d asked for and %d free with 10 of 40 held", c.asked(), c.free())
	}
}

// The broker was busy for longer than the ask was believed to be open, and
// then says that it is over, while the next one is open.
func TestLateEndOfAnAskDoesNotEndTheNext(t *testing.T) {
	t.Parallel()
	c := used(40)
	now := time.Unix(1000, 0)
	first := c.plan(now.Add(time.Second))
	c.lapse(now.Add(2 * time.Second))
	c.plan(now.Add(3 * time.Second))
	for _, ask := range first {
		if c.over(ask.lane, ask.number, ask.items) {
			t.Errorf("lane %d: an ask that lapsed counts as open", ask.lane)
		}
	}
	if c.asked() != 40 {
		t.Errorf("%d asked for, want 40", c.asked())
	}
}

// creditModel books by itself what the credit may have asked for and hold.
type creditModel struct {
	credit
	now   time.Time
	books []laneBook
}

type laneBook struct {
	used        bool
	held, asked int
	until       time.Time
	lapsed      uint64
}

func (b *laneBook) end(m *creditModel) { b.asked, b.lapsed = 0, m.asks }

func (m *creditModel) total() int {
	total := 0
	for _, b := range m.books {
		total += b.held + b.asked
	}
	return total
}

// Whatever comes in whatever order, also items that were not asked for.
func TestCreditKeepsItsBoundAndNeverStalls(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		queues := rapid.IntRange(1, 2).Draw(t, "queues")
		m := &creditModel{
			credit: newCredit(rapid.IntRange(LeastBound(queues), 300).Draw(t, "bound"), queues),
			now:    time.Unix(1000, 0),
			books:  make([]laneBook, classCount*queues),
		}
		lanes := rapid.IntRange(0, len(m.books)-1)
		t.Repeat(map[string]func(*rapid.T){
			"":        m.check,
			"plan":    m.plans,
			"deliver": func(t *rapid.T) { m.deliver(t, lanes.Draw(t, "lane"), rapid.IntRange(1, 50).Draw(t, "items")) },
			"settle":  func(t *rapid.T) { m.settle(lanes.Draw(t, "lane"), rapid.IntRange(1, 50).Draw(t, "items")) },
			"use":     func(t *rapid.T) { m.uses(rapid.IntRange(0, queues-1).Draw(t, "queue"), rapid.Bool().Draw(t, "used")) },
			"over": func(t *rapid.T) {
				i := lanes.Draw(t, "lane")
				n := rapid.IntRange(0, 50).Draw(t, "items")
				number := rapid.Uint64Range(0, m.asks).Draw(t, "number")
				b := &m.books[i]
				if open := m.over(i, number, n); open != (number > b.lapsed) {
					t.Fatalf("ask %d counts as open: %v; those up to %d are over", number, open, b.lapsed)
				} else if open {
					b.asked = max(0, b.asked-n)
				}
			},
			"time passes": func(t *rapid.T) {
				m.now = m.now.Add(time.Duration(rapid.IntRange(0, 1500).Draw(t, "ms")) * time.Millisecond)
				m.lapse(m.now)
				for i := range m.books {
					if b := &m.books[i]; b.asked > 0 && m.now.After(b.until) {
						b.end(m)
					}
				}
			},
			"reconnect": func(*rapid.T) {
				m.forget()
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

// deliver sends items of a lane, more than were asked for now and then.
func (m *creditModel) deliver(t *rapid.T, i, n int) {
	b := &m.books[i]
	if !rapid.Bool().Draw(t, "unasked too") {
		n = min(n, b.asked)
	}
	for range n {
		m.delivered(i, rapid.Uint64Range(0, 2).Draw(t, "pending"))
		b.held++
		b.asked = max(0, b.asked-1)
	}
}

func (m *creditModel) settle(i, n int) {
	for range min(n, m.books[i].held) {
		m.settled(i)
		m.books[i].held--
	}
}

func (m *creditModel) plans(t *rapid.T) {
	before := m.total()
	asks := m.plan(m.now.Add(time.Second))
	for _, ask := range asks {
		b := &m.books[ask.lane]
		if ask.items <= 0 || ask.number <= b.lapsed || !b.used {
			t.Fatalf("asks lane %d, in use %v, for %d items as number %d", ask.lane, b.used, ask.items, ask.number)
		}
		b.asked += ask.items
		b.until = m.now.Add(time.Second)
	}
	if after := m.total(); after > m.bound && after > before {
		t.Fatalf("asks %v: %d are held or asked for, the bound is %d", asks, after, m.bound)
	}
	m.checkShares(t, before)
}

// checkShares holds after every plan.
func (m *creditModel) checkShares(t *rapid.T, before int) {
	free, standing, asked, used, kept := m.bound-m.total(), max(1, m.bound/(8*m.queues)), 0, false, 0
	for i, b := range m.books {
		asked += b.asked
		used = used || b.used
		if !b.used {
			kept += max(0, standing-b.held)
		}
		if b.used && free > 0 && b.asked == 0 && b.held < standing {
			t.Fatalf("lane %d has nothing asked for and holds %d, though %d places are free", i, b.held, free)
		}
	}
	if used && asked == 0 && before < m.bound-kept {
		t.Fatalf("nothing is asked for, though %d places are free and %d kept for queues that are away", free, kept)
	}
}

func (m *creditModel) check(t *rapid.T) {
	for i, lane := range m.lanes {
		if b := m.books[i]; lane.held != b.held || lane.asked != b.asked {
			t.Fatalf("lane %d: books %d held and %d asked for, it is %d and %d", i, lane.held, lane.asked, b.held, b.asked)
		}
	}
}

func TestQueuesOfAClassShareIt(t *testing.T) {
	t.Parallel()
	c := newCredit(64, 2)
	c.use(0, true)
	first, second := c.lane(normalClass, 0), c.lane(normalClass, 1)
	if got := c.plan(time.Time{}); len(got) != classCount || got[1].lane != first || got[1].items != 64-5*c.standing() {
		t.Errorf("with one queue there, asks %v", got)
	}
	c.use(1, true)
	c.forget()
	// Both have endless backlogs, and what is held is settled in turn.
	for range 2000 {
		for _, ask := range c.plan(time.Time{}) {
			if ask.lane != first && ask.lane != second {
				continue
			}
			for range ask.items {
				c.delivered(ask.lane, 1)
			}
		}
		for _, i := range []int{first, second} {
			if c.lanes[i].held > 0 {
				c.settled(i)
			}
		}
	}
	a, b := c.lanes[first].held, c.lanes[second].held
	if a < 16 || b < 16 {
		t.Errorf("of a bound of 64 one queue has %d and the other %d in hand", a, b)
	}
}

// Credit that was asked for comes back late, so a queue that comes after another
// finds its share where nobody has asked for it.
func TestQueueThatComesLaterHasItsShareAtOnce(t *testing.T) {
	t.Parallel()
	for _, bound := range []int{LeastBound(2), 96} {
		c := newCredit(bound, 2)
		c.use(0, true)
		c.plan(time.Time{})
		c.use(1, true)
		asks := c.plan(time.Time{})
		if len(asks) != classCount {
			t.Fatalf("bound %d: asks %v, want one for each class", bound, asks)
		}
		for _, ask := range asks {
			if c.queueOf(ask.lane) != 1 || ask.items != c.standing() {
				t.Errorf("bound %d: asks lane %d for %d, want %d of the second queue", bound, ask.lane, ask.items, c.standing())
			}
		}
	}
}

// A host that pulls sparingly asks for what it can run of a class, and for no more.
func TestABoundForSlotsIsFilledByTheItemsOfOneLane(t *testing.T) {
	t.Parallel()
	for _, queues := range []int{1, 2} {
		for slots := 1; slots <= 100; slots++ {
			c := newCredit(BoundFor(slots, queues), queues)
			c.sparing = true
			for queue := range queues {
				c.use(queue, true)
			}
			normal := c.lane(1, 0)
			c.lanes[normal].busy = true
			if got := c.target(normal, c.favoured()); got != slots {
				t.Fatalf("%d slots, %d queues: one lane may have %d", slots, queues, got)
			}
			c.lanes[normal].held = slots
			for _, ask := range c.plan(time.Time{}) {
				if ask.lane == normal || ask.items != 1 {
					t.Fatalf("%d slots, %d queues, all of them taken: it asks for %v", slots, queues, ask)
				}
			}
		}
	}
}
