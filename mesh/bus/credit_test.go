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
		asks, any := c.plan(time.Time{}), false
		for i, ask := range asks {
			if !backlog[i] {
				continue
			}
			for range ask.items {
				c.delivered(i, 1)
				any = true
			}
			came[i] += ask.items
		}
		if !any {
			return came
		}
	}
}

// planned is how many items of each class a plan asks for.
func planned(c *credit, until time.Time) (items [classCount]int) {
	for i, ask := range c.plan(until) {
		items[i] = ask.items
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
		{"the least bound", MinBound, [classCount]int{1, 2, 1}},
		{"small", 7, [classCount]int{1, 5, 1}},
		{"one eighth stands for each class", 64, [classCount]int{8, 48, 8}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			c := credit{bound: test.bound}
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
			c := credit{bound: 40}
			deliverAll(&c, test.backlog)
			for i, busy := range test.backlog {
				if !busy {
					c.close(i)
				}
			}
			deliverAll(&c, test.backlog)
			turnOver(&c, test.backlog, 1000)
			var held [classCount]int
			for i, class := range c.classes {
				held[i] = class.held
			}
			if held != test.want {
				t.Errorf("holds %v of a bound of 40, want %v", held, test.want)
			}
			for i, class := range c.classes {
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
	for i, class := range c.classes {
		out = append(out, slices.Repeat([]int{i}, class.held)...)
	}
	return out
}

// A place at a time falls free, which is when the class above could take all.
func TestLowClassesKeepTheirShareUnderSaturation(t *testing.T) {
	t.Parallel()
	c := credit{bound: 40}
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
	c := credit{bound: 64}
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
	c := credit{bound: 40}
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
	c := credit{bound: 40}
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
	c := credit{bound: 40}
	now := time.Unix(1000, 0)
	first := c.plan(now.Add(time.Second))
	c.lapse(now.Add(2 * time.Second))
	c.plan(now.Add(3 * time.Second))
	for i, ask := range first {
		if c.over(i, ask.number, ask.items) {
			t.Errorf("class %d: an ask that lapsed counts as open", i)
		}
	}
	if c.asked() != 40 {
		t.Errorf("%d asked for, want 40", c.asked())
	}
}

// creditModel books by itself what the credit may have asked for and hold.
type creditModel struct {
	credit
	now         time.Time
	held, asked [classCount]int
	until       [classCount]time.Time
	lapsed      [classCount]uint64
}

func (m *creditModel) total() int {
	total := 0
	for i := range m.held {
		total += m.held[i] + m.asked[i]
	}
	return total
}

// Whatever comes in whatever order, also items that were not asked for.
func TestCreditKeepsItsBoundAndNeverStalls(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m := &creditModel{credit: credit{bound: rapid.IntRange(MinBound, 300).Draw(t, "bound")}, now: time.Unix(1000, 0)}
		classes := rapid.IntRange(0, classCount-1)
		t.Repeat(map[string]func(*rapid.T){
			"":        m.check,
			"plan":    m.plans,
			"deliver": func(t *rapid.T) { m.deliver(t, classes.Draw(t, "class"), rapid.IntRange(1, 50).Draw(t, "items")) },
			"settle":  func(t *rapid.T) { m.settle(classes.Draw(t, "class"), rapid.IntRange(1, 50).Draw(t, "items")) },
			"over": func(t *rapid.T) {
				i := classes.Draw(t, "class")
				n := rapid.IntRange(0, 50).Draw(t, "items")
				number := rapid.Uint64Range(0, m.asks).Draw(t, "number")
				if open := m.over(i, number, n); open != (number > m.lapsed[i]) {
					t.Fatalf("ask %d counts as open: %v; those up to %d are over", number, open, m.lapsed[i])
				} else if open {
					m.asked[i] = max(0, m.asked[i]-n)
				}
			},
			"time passes": func(t *rapid.T) {
				m.now = m.now.Add(time.Duration(rapid.IntRange(0, 1500).Draw(t, "ms")) * time.Millisecond)
				m.lapse(m.now)
				for i := range m.asked {
					if m.asked[i] > 0 && m.now.After(m.until[i]) {
						m.asked[i], m.lapsed[i] = 0, m.asks
					}
				}
			},
			"reconnect": func(*rapid.T) {
				m.forget()
				m.asked = [classCount]int{}
				m.lapsed = [classCount]uint64{m.asks, m.asks, m.asks}
			},
		})
	})
}

// deliver sends items of a class, more than were asked for now and then.
func (m *creditModel) deliver(t *rapid.T, i, n int) {
	if !rapid.Bool().Draw(t, "unasked too") {
		n = min(n, m.asked[i])
	}
	for range n {
		m.delivered(i, rapid.Uint64Range(0, 2).Draw(t, "pending"))
		m.held[i]++
		m.asked[i] = max(0, m.asked[i]-1)
	}
}

func (m *creditModel) settle(i, n int) {
	for range min(n, m.held[i]) {
		m.settled(i)
		m.held[i]--
	}
}

func (m *creditModel) plans(t *rapid.T) {
	before := m.total()
	asks := m.plan(m.now.Add(time.Second))
	for i, ask := range asks {
		if ask.items < 0 || ask.items > 0 && ask.number <= m.lapsed[i] {
			t.Fatalf("asks class %d for %d items as number %d", i, ask.items, ask.number)
		}
		if ask.items > 0 {
			m.asked[i] += ask.items
			m.until[i] = m.now.Add(time.Second)
		}
	}
	if after := m.total(); after > m.bound && after > before {
		t.Fatalf("asks %v: %d are held or asked for, the bound is %d", asks, after, m.bound)
	}
	m.checkShares(t, before)
}

// checkShares holds after every plan.
func (m *creditModel) checkShares(t *rapid.T, before int) {
	free, standing, asked := m.bound-m.total(), max(1, m.bound/8), 0
	for i := range m.asked {
		asked += m.asked[i]
		if free > 0 && m.asked[i] == 0 && m.held[i] < standing {
			t.Fatalf("class %d has nothing asked for and holds %d, though %d places are free", i, m.held[i], free)
		}
	}
	if asked == 0 && before < m.bound {
		t.Fatalf("nothing is asked for, though %d places are free", free)
	}
}

func (m *creditModel) check(t *rapid.T) {
	for i, class := range m.classes {
		if class.held != m.held[i] || class.asked != m.asked[i] {
			t.Fatalf("class %d: books %d held and %d asked for, it is %d and %d", i, class.held, class.asked, m.held[i], m.asked[i])
		}
	}
}
