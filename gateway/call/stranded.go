package call

import (
	"context"
	"errors"
	"time"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// lonely is since when stages have had no host. It is the watch's.
type lonely map[pipeline.StageName]time.Time

// note takes what was heard about a stage and returns how long it has had no
// host.
func (l lonely) note(stage pipeline.StageName, hostless bool, now time.Time) time.Duration {
	if !hostless {
		delete(l, stage)
		return 0
	}
	if _, known := l[stage]; !known {
		l[stage] = now
	}
	return now.Sub(l[stage])
}

// keep forgets the stages that no call waits for.
func (l lonely) keep(stages map[pipeline.StageName]bool) {
	for stage := range l {
		if !stages[stage] {
			delete(l, stage)
		}
	}
}

// seekStranded has the calls that wait in memory for their first step look
// whether they still do, where the step's stage has had no host for the grace.
func (s *Service) seekStranded(ctx context.Context, since lonely) {
	stages := s.waiting.firstStages()
	since.keep(stages)
	for stage := range stages {
		if without := since.note(stage, s.hostless(ctx, stage), time.Now()); without >= s.settings.HostGrace {
			s.waiting.strand(stage)
		}
	}
}

// hostless reports whether nobody serves the stage, and nobody has items of it in
// hand either: one that drains, or whose runner cannot run, serves no more.
func (s *Service) hostless(ctx context.Context, stage pipeline.StageName) bool {
	if _, err := s.bus.Alive(ctx, stage); !errors.Is(err, bus.ErrNoHost) {
		return false
	}
	return errors.Is(s.bus.Holding(ctx, stage), bus.ErrNoHost)
}

// firstStages are those of the first steps of the calls in memory.
func (w *waiting) firstStages() map[pipeline.StageName]bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[pipeline.StageName]bool{}
	for _, c := range w.calls {
		if c.env.Durability == pipeline.Memory {
			out[c.env.Hop().Stage] = true
		}
	}
	return out
}

func (w *waiting) strand(stage pipeline.StageName) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.calls {
		if c.env.Durability != pipeline.Memory || c.env.Hop().Stage != stage {
			continue
		}
		select {
		case c.stranded <- struct{}{}:
		default: // it was told before
		}
	}
}

// withdraw ends a call whose item still waits for its first step, which has no
// host. One that has gone further, or whose answer has begun, goes on.
func (c *exchange) withdraw(ctx context.Context) error {
	p, known := c.outcome()
	switch {
	case !known, p.err != nil:
		return nil //nolint:nilerr // whether it was queued is not known (yet)
	case p.receipt.Duplicate && c.tries == 1, c.seq > 0:
		return nil // what is in the queue is another's, or its answer has begun
	}
	if !c.service.callOffs.withdraw(ctx, c.message, p.receipt.Seq) {
		return nil // it is tried again, or the deadline ends the call
	}
	c.service.capacity.Withdrawn(c.env)
	hop := c.env.Hop()
	return fault.Newf(fault.NoCapacity, "the last host of stage %s has left, and none has come for %s; the request did not run", hop.Stage, c.service.settings.HostGrace).
		At(string(hop.Stage), string(hop.Step), "").WithRetryAfter(admission.RetryAfter)
}
