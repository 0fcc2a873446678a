package supervise_test

import (
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/stagehost/runner/worker/supervise"
)

// allowed are the transitions that exist.
func allowed(from, to supervise.State) bool {
	switch from {
	case supervise.Dead:
		return to == supervise.Startup
	case supervise.Startup:
		return to != supervise.Startup
	case supervise.Ready:
		return to == supervise.Error || to == supervise.Shutdown || to == supervise.Dead
	case supervise.Error:
		return to == supervise.Shutdown || to == supervise.Dead
	case supervise.Shutdown:
		return to == supervise.Dead
	}
	return false
}

// model is what the outside of a machine looks like: processes and slots.
type model struct {
	*rapid.T
	*supervise.Machine
	settings supervise.Settings
	now      time.Time
	state    supervise.State
	// alive are the ranks whose process runs; asked is true once they were asked to exit,
	// killed once they were killed.
	alive         map[int]bool
	asked, killed bool
	offered       bool
	started       time.Time
	stopped       bool
	died          time.Time
}

func (m *model) edge(e supervise.Transition) {
	if e.From != m.state || !allowed(e.From, e.To) {
		m.Fatalf("an edge from %s to %s in state %s", e.From, e.To, m.state)
	}
	m.state = e.To
	if e.To == supervise.Dead {
		m.died = e.At
	}
}

func (m *model) act(actions []supervise.Action) {
	for _, a := range actions {
		if a.Incarnation != m.Incarnation() {
			m.Fatalf("%s for incarnation %d, it is %d", a.Do, a.Incarnation, m.Incarnation())
		}
		switch a.Do {
		case supervise.Spawn:
			if len(m.alive) > 0 || m.stopped {
				m.Fatalf("it starts while %d processes are left; stopped: %t", len(m.alive), m.stopped)
			}
			if pause := m.now.Sub(m.died); !m.died.IsZero() && pause > m.settings.MaxBackoff {
				m.Fatalf("it starts %s after its crash", pause)
			}
			m.asked, m.killed, m.started = false, false, m.now
			for rank := range max(1, m.settings.Ranks) {
				m.alive[rank] = true
			}
		case supervise.Offer:
			m.offered = true
		case supervise.Withdraw:
			m.offered = false
		case supervise.Ask:
			m.asked = true
		case supervise.Kill:
			m.killed = true
		case supervise.Ping:
			if m.state != supervise.Ready {
				m.Fatalf("it is asked in state %s", m.state)
			}
		case supervise.WarmUp:
		}
	}
	m.check()
}

func (m *model) check() {
	if m.State() != m.state {
		m.Fatalf("it is %s, its transitions end at %s", m.State(), m.state)
	}
	if m.offered && m.state != supervise.Ready {
		m.Fatalf("slots are offered in state %s", m.state)
	}
	if dead := m.state == supervise.Dead; dead != (len(m.alive) == 0) {
		m.Fatalf("it is %s with %d processes", m.state, len(m.alive))
	}
	leaving := m.state == supervise.Error || m.state == supervise.Shutdown
	if leaving && !m.asked && !m.killed {
		m.Fatalf("it is %s, and neither asked to leave nor killed", m.state)
	}
	bounded := !m.Wake().IsZero()
	if !bounded && !m.killed && !m.Stopped() {
		m.Fatalf("it is %s and waits for nothing", m.state)
	}
}

// incarnation is the current one, or at times one before it.
func (m *model) incarnation() supervise.Incarnation {
	if m.Incarnation() > 1 && rapid.IntRange(0, 9).Draw(m.T, "stale") == 0 {
		return m.Incarnation() - 1
	}
	return m.Incarnation()
}

func (m *model) rank() int { return rapid.IntRange(0, m.settings.Ranks).Draw(m.T, "rank") }

func (m *model) exit(rank int) {
	if !m.alive[rank] {
		return
	}
	delete(m.alive, rank)
	how := errors.New("exit code 1")
	if rapid.Bool().Draw(m.T, "well") {
		how = nil
	}
	m.act(m.Exited(m.Incarnation(), rank, how, m.now))
}

// Whatever happens, in whatever order: only edges that there are, no second
// incarnation beside the first, slots only of a worker that is READY, and no
// state that nothing ends.
func TestAnyEventSequenceKeepsTheRules(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m := &model{T: t, settings: plain(), now: time.Unix(1_000_000, 0), alive: map[int]bool{}}
		m.settings.Ranks = rapid.IntRange(1, 3).Draw(t, "ranks")
		m.settings.OnTransition = m.edge
		m.Machine = supervise.New(m.settings)
		m.act(m.Start(m.now))
		t.Repeat(map[string]func(*rapid.T){
			"ready":   func(*rapid.T) { m.act(m.Ready(m.incarnation(), m.rank(), m.now)) },
			"warm":    func(*rapid.T) { m.act(m.Warm(m.incarnation(), m.now)) },
			"fail":    func(*rapid.T) { m.act(m.Machine.Fail(m.incarnation(), errBroke, m.now)) },
			"erring":  func(*rapid.T) { m.act(m.ReportError(m.incarnation(), errBroke, m.now)) },
			"leaving": func(*rapid.T) { m.act(m.ReportShutdown(m.incarnation(), m.now)) },
			"pong":    func(*rapid.T) { m.Pong(m.incarnation(), m.rank(), m.now) },
			"exit":    func(*rapid.T) { m.exit(m.rank()) },
			"recycle": func(*rapid.T) { m.act(m.Recycle(m.now)) },
			"work": func(t *rapid.T) {
				w := supervise.Work{}
				if rapid.Bool().Draw(t, "busy") {
					w.Oldest = m.now
				}
				if rapid.Bool().Draw(t, "ended") {
					w.Ended = m.now
				}
				m.act(m.Work(m.incarnation(), w, m.now))
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
func (m *model) end() {
	m.stopped = true
	m.act(m.Stop(m.now))
	deadline := m.now.Add(m.settings.StopLimit)
	for !m.Stopped() {
		if m.killed {
			for rank := range m.settings.Ranks {
				m.exit(rank)
			}
			continue
		}
		if m.now = m.Wake(); m.now.After(deadline) {
			m.Fatalf("it is %s %s after it was stopped", m.State(), m.now.Sub(deadline)+m.settings.StopLimit)
		}
		m.act(m.Tick(m.now))
	}
}
