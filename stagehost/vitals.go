package stagehost

import (
	"fmt"
	"time"

	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/stagehost/ledger"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// runnerGrace is how long a runner may be unable to run anything before its host
// leaves the stage to others. A process that is back in a moment is worth the wait:
// where this host is the only one, callers are refused without it.
const runnerGrace = 2 * time.Second

// vitals are how a runner is, where it says.
type vitals struct {
	runner  runner.HealthReporter
	changed <-chan struct{}
	err     error
	// since is when err became what it is, nil or not.
	since time.Time
}

func vitalsOf(r runner.Runner) vitals {
	m, _ := r.(runner.HealthReporter)
	return vitals{runner: m}
}

// look asks the runner, and reports whether it fell ill or has healed.
func (v *vitals) look(now time.Time) bool {
	if v.runner == nil {
		return false
	}
	was := v.err
	v.changed, v.err = v.runner.Health()
	turned := (was == nil) != (v.err == nil)
	if turned {
		v.since = now
	}
	return turned
}

// heedRunner says why the runner cannot run anything, and has the host rest where
// that lasts.
func (h *Host) heedRunner(now time.Time) error {
	h.vitals.look(now)
	if h.vitals.err == nil {
		return nil
	}
	if ill := now.Sub(h.vitals.since); ill >= runnerGrace {
		h.rest(ill)
	}
	return fmt.Errorf("the runner cannot run anything: %w", h.vitals.err)
}

// rest takes the host out of its stage. What waits here for a slot goes to other
// hosts, once nothing comes any more that was asked for: it would come back here,
// and be given back again, until it has been delivered too often.
func (h *Host) rest(ill time.Duration) {
	h.stopAlive()
	for _, d := range h.settings.Queue.Durabilities {
		h.puller.Use(d, "")
	}
	if ill >= runnerGrace+reconcileRetry+bus.AskLife {
		h.post(resting{})
	}
}

// resting says that no slot falls idle for a while.
type resting struct{}

func (resting) apply(l *loop) { l.giveBackIn(ledger.Queued) }
