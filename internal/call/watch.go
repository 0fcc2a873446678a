package call

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	watchInterval = time.Second
	watchTimeout  = time.Second
)

// watchConnection signals every new connection to the broker.
func (s *Service) watchConnection(ctx context.Context, reconnects <-chan struct{}) {
	for {
		select {
		case <-reconnects:
			s.table.each(func(p *pending) {
				if p.env != nil {
					p.signalLocked(signals{isReconnected: true})
				}
			})
		case <-ctx.Done():
			return
		}
	}
}

// clockInterval is how often the broker's clock is compared with the gateway's.
const clockInterval = 2 * time.Second

// watchClock compares the clocks at once, after each reconnect and in between, whatever
// requests there are.
func (s *Service) watchClock(ctx context.Context, reconnects <-chan struct{}) {
	tick := time.NewTicker(clockInterval)
	defer tick.Stop()
	for wasWrong := false; ; {
		asking, cancel := context.WithTimeout(ctx, watchTimeout)
		_ = s.bus.MeasureClock(asking) // the next one may succeed
		cancel()
		err := s.bus.ClockError()
		if err != nil && !wasWrong {
			s.settings.Logger.Warn("the gateway accepts no requests", "error", err)
		}
		wasWrong = err != nil
		select {
		case <-tick.C:
		case <-reconnects:
		case <-ctx.Done():
			return
		}
	}
}

// watchQueues fails calls whose memory queue is lost or was replaced, and signals
// calls that wait for a stage without hosts. It looks right after a reconnect, and
// every second while calls wait.
func (s *Service) watchQueues(ctx context.Context, reconnects <-chan struct{}) {
	since := noHostSince{}
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-reconnects:
		case <-ctx.Done():
			return
		}
		all, first := s.stagesOfPendingCalls()
		for stage := range all {
			s.checkQueue(ctx, stage)
		}
		s.checkHosts(ctx, first, since)
	}
}

type stageSet map[pipeline.StageName]bool

// stagesOfPendingCalls returns the stages in whose memory queues requests may wait, and those
// of them that are first steps of this gateway's own requests.
func (s *Service) stagesOfPendingCalls() (all, first stageSet) {
	all, first = stageSet{}, stageSet{}
	s.table.each(func(p *pending) {
		for i, stage := range p.stages {
			all[stage] = true
			if i == 0 && p.env != nil {
				first[stage] = true
			}
		}
	})
	return all, first
}

// checkQueue fails the calls that waited in the stage's queue before it was lost.
func (s *Service) checkQueue(ctx context.Context, stage pipeline.StageName) {
	ctx, cancel := context.WithTimeout(ctx, watchTimeout)
	defer cancel()
	lostAt := time.Now()
	info, err := s.bus.Queue(ctx, stage, pipeline.Memory)
	switch {
	case errors.Is(err, bus.ErrNoQueue):
	case err != nil:
		return
	default:
		// The broker's clock is known only to half a round trip, and a call that
		// waits in the new queue must not fail.
		lostAt = info.Created.Add(-info.RoundTrip / 2)
	}
	f := fault.Newf(fault.QueueLost, "the in-memory queue of stage %s was lost with its broker; send the request again", stage).
		At(string(stage), "", "").WithRetryAfter(budget.RetryAfter)
	calls := 0
	s.table.each(func(p *pending) {
		if p.since.Before(lostAt) && slices.Contains(p.stages, stage) && p.failLocked(f) {
			calls++
		}
	})
	if calls > 0 {
		s.settings.Logger.Warn("calls failed because their queue was lost", "stage", stage, "calls", calls)
	}
}

// watchLostQueue returns a channel that holds a value once checkQueue finds that a memory
// queue of these stages was lost after the time: the queues of a request that another
// gateway may have sent. It registers a pending call that no reply and no cancel can find.
// With a full table the channel stays empty, and the request's deadline ends the wait. The
// caller calls unwatch.
func (s *Service) watchLostQueue(stages []pipeline.StageName, since time.Time) (lost <-chan struct{}, unwatch func()) {
	queues := &pending{execution: pipeline.ExecutionID(newID()), stages: stages, since: since}
	if len(stages) == 0 || s.table.register(queues) != nil {
		return nil, func() {}
	}
	return queues.ready, queues.forget
}

// noHostSince is since when stages have had no host. It is the watch's.
type noHostSince map[pipeline.StageName]time.Time

// checkHosts signals the calls that wait in memory for their first step, where its
// stage has had no host for hostGrace.
func (s *Service) checkHosts(ctx context.Context, stages stageSet, since noHostSince) {
	maps.DeleteFunc(since, func(stage pipeline.StageName, _ time.Time) bool { return !stages[stage] })
	for stage := range stages {
		if !s.hasNoHost(ctx, stage) {
			delete(since, stage)
			continue
		}
		now := time.Now()
		if _, known := since[stage]; !known {
			since[stage] = now
		}
		if now.Sub(since[stage]) < s.hostGrace(stage) {
			continue
		}
		s.table.each(func(p *pending) {
			if p.env != nil && len(p.stages) > 0 && p.stages[0] == stage {
				p.signalLocked(signals{hasNoHost: true})
			}
		})
	}
}

// hasNoHost reports whether no host serves the stage, and none has items of it in
// flight either: a host that drains, or whose runner cannot run, serves no more.
func (s *Service) hasNoHost(ctx context.Context, stage pipeline.StageName) bool {
	if _, err := s.bus.Alive(ctx, stage); !errors.Is(err, bus.ErrNoHost) {
		return false
	}
	return errors.Is(s.bus.InFlight(ctx, stage), bus.ErrNoHost)
}

// failUnserved fails a call whose item still waits for its first step, which has no
// host, and deletes the item. A call whose item has passed that step, or whose answer
// has begun, continues.
func (x *call) failUnserved(ctx context.Context) error {
	o, known := x.sending.outcome()
	message := x.sending.message
	if seq := x.pending.publishedAt(); seq != 0 { // by a host
		o.receipt.Seq, known = seq, true
		message, o.err = x.service.bus.Item(x.env)
	}
	switch {
	case !known, o.err != nil:
		return nil //nolint:nilerr // it is not known (yet) whether the item was queued
	case o.receipt.Duplicate && x.sending.tries == 1, x.progress.seq > 0:
		return nil // the item in the queue is another's, or its answer has begun
	}
	if !x.service.cancels.delete(ctx, message, o.receipt.Seq) {
		return nil // the next check tries again, or the deadline ends the call
	}
	x.service.availability.Deleted(x.env)
	hop := x.env.Hop()
	return fault.Newf(fault.NoCapacity, "stage %s has no ready host: the last one left, and none has come for %s", hop.Stage, x.service.hostGrace(hop.Stage)).
		At(string(hop.Stage), string(hop.Step), "").WithRetryAfter(budget.RetryAfter)
}
