package load

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Run asks the target as the settings say, until their end or the context's.
func Run(ctx context.Context, s Settings, target Target, recorder Recorder) (Outcome, error) {
	if err := s.Validate(); err != nil {
		return Outcome{}, err
	}
	s = s.WithDefaults()
	now := time.Now()
	r := &run{settings: s, target: target, recorder: recorder, start: now, window: newWindow(s, now)}
	if !s.Open() {
		r.closed(ctx)
	} else if err := r.open(ctx); err != nil {
		return Outcome{}, err
	}
	return r.tally.outcome(r.window, time.Now(), ctx.Err() != nil), nil
}

// run is one run under way.
type run struct {
	settings Settings
	target   Target
	recorder Recorder
	start    time.Time
	window   *window
	tally    tally
}

// closed has each of the callers ask, one request after the other.
func (r *run) closed(ctx context.Context) {
	var callers sync.WaitGroup
	for caller := range r.settings.Concurrency {
		callers.Go(func() {
			var into Answer
			for ctx.Err() == nil {
				now := time.Now()
				made, counts := r.window.admit(now)
				if !made {
					return
				}
				r.ask(ctx, caller, arrival{planned: now, counts: counts}, &into)
			}
		})
	}
	callers.Wait()
}

// arrival is a request to make.
type arrival struct {
	planned time.Time
	counts  bool
}

// ask makes one request and records what came of it.
func (r *run) ask(ctx context.Context, caller int, a arrival, into *Answer) {
	into.reset()
	if a.counts {
		r.tally.sent.Add(1)
	}
	sent := time.Now()
	err := r.target.Do(ctx, into)
	now := time.Now()
	if !a.counts || ctx.Err() != nil {
		return
	}
	r.tally.answered(now.Sub(r.window.begin))
	r.recorder.Record(caller, Sample{Latency: now.Sub(a.planned), Late: sent.Sub(a.planned), Answer: into, Err: err})
}

// open sends requests as they arrive. Callers are started as they are needed, and
// there is never an arrival that waits for one: it has its place, or is not sent.
// Its errors are the pacer's.
func (r *run) open(ctx context.Context) error {
	work := make(chan arrival, r.settings.MaxInFlight)
	var callers sync.WaitGroup
	var inFlight atomic.Int64
	serve := func(caller int) {
		var into Answer
		for a := range work {
			r.ask(ctx, caller, a, &into)
			inFlight.Add(-1)
		}
	}
	started := 0
	err := r.pace(ctx, func(a arrival) {
		if int(inFlight.Load()) >= r.settings.MaxInFlight {
			if a.counts {
				r.tally.notSent.Add(1)
			}
			return
		}
		if int(inFlight.Add(1)) > started {
			caller := started
			callers.Go(func() { serve(caller) })
			started++
		}
		work <- a
	})
	close(work)
	callers.Wait()
	return err
}

// pace calls send for each arrival when its time has come. Where it is late it sends
// at once what is due, each planned for its own time. The context's end is its own, and
// no error.
func (r *run) pace(ctx context.Context, send func(arrival)) error {
	clock, err := r.pacer(ctx)
	if err != nil {
		return err
	}
	defer clock.stop()
	schedule := NewSchedule(r.settings.Arrivals, r.settings.Rate, r.settings.Seed)
	for {
		planned := r.start.Add(schedule.Next())
		made, counts := r.window.admit(planned)
		if !made {
			return nil
		}
		if err := clock.until(ctx, planned); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("the clock of the arrivals: %w", err)
		}
		send(arrival{planned: planned, counts: counts})
	}
}

func (r *run) pacer(ctx context.Context) (pacer, error) {
	if r.settings.Fine {
		return newFinePacer(ctx)
	}
	return newTimerPacer(), nil
}
