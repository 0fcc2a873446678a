package worker

import (
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// isAllowed reports whether the transition exists.
func isAllowed(from, to State) bool {
	switch from {
	case Dead:
		return to == Startup
	case Startup:
		return to != Startup
	case Ready:
		return to == Error || to == Shutdown || to == Dead
	case Error:
		return to == Shutdown || to == Dead
	case Shutdown:
		return to == Dead
	}
	return false
}

// outside is what a machine runs in: processes and slots.
type outside struct {
	*rapid.T
	*machine
	now  time.Time
	seen State
	// alive are the ranks whose process runs; asked is true once they were asked to exit,
	// killed once they were killed.
	alive         map[int]bool
	asked, killed bool
	offered       bool
	started       time.Time
	stopped       bool
	died          time.Time
}

func (m *outside) edge(e Transition) {
	if e.From != m.seen || !isAllowed(e.From, e.To) {
		m.Fatalf("an edge from %s to %s in state %s", e.From, e.To, m.seen)
	}
	m.seen = e.To
	if e.To == Dead {
		m.died = e.At
	}
}

func (m *outside) act(actions []action) {
	for _, a := range actions {
		switch a {
		case doSpawn:
			if len(m.alive) > 0 || m.stopped {
				m.Fatalf("it starts while %d processes are left; stopped: %t", len(m.alive), m.stopped)
			}
			if pause := m.now.Sub(m.died); !m.died.IsZero() && pause > m.MaxBackoff {
				m.Fatalf("it starts %s after its crash", pause)
			}
			m.asked, m.killed, m.started = false, false, m.now
			for rank := range m.size {
				m.alive[rank] = true
			}
		case doOffer:
			m.offered = true
		case doWithdraw:
			m.offered = false
		case doAsk:
			m.asked = true
		case doKill:
			m.killed = true
		case doPing:
			if m.seen != Ready {
				m.Fatalf("it is asked in state %s", m.seen)
			}
		case doWarmUp:
		}
	}
	m.check()
}

func (m *outside) check() {
	if m.state != m.seen {
		m.Fatalf("it is %s, its transitions end at %s", m.state, m.seen)
	}
	if m.offered && m.seen != Ready {
		m.Fatalf("slots are offered in state %s", m.seen)
	}
	if dead := m.seen == Dead; dead != (len(m.alive) == 0) {
		m.Fatalf("it is %s with %d processes", m.seen, len(m.alive))
	}
	leaving := m.seen == Error || m.seen == Shutdown
	if leaving && !m.asked && !m.killed {
		m.Fatalf("it is %s, and neither asked to leave nor killed", m.seen)
	}
	bounded := !m.Wake().IsZero()
	if !bounded && !m.killed && !m.Stopped() {
		m.Fatalf("it is %s and waits for nothing", m.seen)
	}
}

func (m *outside) rank() int { return rapid.IntRange(0, m.size-1).Draw(m.T, "rank") }

func (m *outside) exit(rank int) {
	if !m.alive[rank] {
		return
	}
	delete(m.alive, rank)
	how := errors.New("exit code 1")
	if rapid.Bool().Draw(m.T, "well") {
		how = nil
	}
	m.act(m.Exited(rank, how, m.now))
}

// Whatever happens, in whatever order: only edges that there are, no second
// incarnation beside the first, slots only of a worker that is READY, and no
// state that nothing ends.
func TestAnyEventSequenceKeepsTheRules(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m := &outside{T: t, machine: plain(), now: time.Unix(1_000_000, 0), alive: map[int]bool{}}
		m.size = rapid.IntRange(1, 3).Draw(t, "ranks")
		m.onTransition = m.edge
		m.act(m.Start(m.now))
		t.Repeat(map[string]func(*rapid.T){
			"ready":   func(*rapid.T) { m.act(m.Ready(m.rank())) },
			"warm":    func(*rapid.T) { m.act(m.Warm(m.now)) },
			"fail":    func(*rapid.T) { m.act(m.machine.Fail(errBroke, m.now)) },
			"erring":  func(*rapid.T) { m.act(m.ReportError(errBroke, m.now)) },
			"leaving": func(*rapid.T) { m.act(m.ReportShutdown(m.now)) },
			"pong":    func(*rapid.T) { m.Pong(m.rank(), m.now) },
			"exit":    func(*rapid.T) { m.exit(m.rank()) },
			"recycle": func(*rapid.T) { m.act(m.Recycle(m.now)) },
			"work": func(t *rapid.T) {
				w := workload{}
				if rapid.Bool().Draw(t, "busy") {
					w.Oldest, w.GiveUp = m.now, m.now.Add(time.Minute)
				}
				if rapid.Bool().Draw(t, "ended") {
					w.Ended = m.now
				}
				m.act(m.Work(w, m.now))
			},
			"time": func(t *rapid.T) {
				at := m.Wake()
				if some := m.now.Add(time.Duration(rapid.IntRange(0, 5000).Draw(t, "ms")) * time.Millisecond); at.IsZero() || some.Before(at) {
					at = some
				}
				if at.After(m.now) {
					m.now = at
				}
				m.act(m.Tick(m.now))
			},
			"stop": func(t *rapid.T) {
				if rapid.IntRange(0, 4).Draw(t, "really") > 0 {
					return
				}
				m.stopped = true
				m.act(m.Stop(m.now))
			},
			"abandon": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "really") > 0 {
					return
				}
				m.stopped = true
				m.act(m.Kill(m.now))
			},
		})
		m.end()
	})
}

// end holds that a worker that is stopped ends in time, whatever it was
// doing, where its processes exit when asked.
func (m *outside) end() {
	m.stopped = true
	m.act(m.Stop(m.now))
	deadline := m.now.Add(m.StopLimit)
	for !m.Stopped() {
		if m.killed {
			for rank := range m.size {
				m.exit(rank)
			}
			continue
		}
		if m.now = m.Wake(); m.now.After(deadline) {
			m.Fatalf("it is %s %s after it was stopped", m.seen, m.now.Sub(deadline)+m.StopLimit)
		}
		m.act(m.Tick(m.now))
	}
}
