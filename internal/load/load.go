// Package load measures a pipeline of a mesh: it generates load, records latencies and
// timelines, and reports them as text, JSON and pictures. docs/benchmarks.md describes the
// figures. Flags and Session do this for commands:
//
//	client, err := load.NewClient(load.ClientSettings{Protocol: load.GRPC, Address: "http://127.0.0.1:8080", Pipeline: "digits", Inputs: inputs})
//	defer client.Close()
//	recorder, meter := load.NewRecorder(deadline), load.StartMeter(false)
//	defer meter.Stop()
//	outcome, err := load.RunLoad(ctx, settings, client.Do, recorder.Record)
//	run := recorder.Run(settings, outcome)
//	meter.Into(&run)
//	err = load.WriteText(os.Stdout, load.Report{Version: load.ReportVersion, Runs: []load.Run{run}})
//
// RunLoad waits for all requests that it has sent, so a target must end each of them by
// itself: no request of a Client outlives its timeout by more than ten seconds, or ten minutes
// if it has no timeout. The end of the context cancels those in flight, which are not recorded.
// RunLoad keeps nothing per request. It allocates nothing, except for a few bytes per arrival
// with Settings.Fine. Loads without that setting can be tested in a bubble of
// testing/synctest.
//
// A Client prepares its requests once, so that a request costs what the client library
// costs, and little more. Answers are read to their end and discarded, except for the timeline:
// the answer's own for GRPC and Connect; the Server-Timing header for HTTP and OIP, which has
// microseconds and no delivery counts. Errors are of type *RequestError.
package load

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// Arrivals say how the requests of an open loop are spread over time.
type Arrivals string

const (
	// Constant arrivals are evenly spaced.
	Constant Arrivals = "constant"
	// Poisson arrivals are independent of each other: the gaps between them are
	// distributed exponentially.
	Poisson Arrivals = "poisson"
)

// Bounds on a load, and the bound of an open loop that names none.
const (
	MaxConcurrency     = 100_000
	MaxRate            = 10_000_000
	DefaultMaxInFlight = 4096
)

// Settings describe one load: Concurrency callers of a closed loop, or requests of an
// open loop at a Rate; for a Duration, or a number of Requests.
type Settings struct {
	// Concurrency is the number of callers of a closed loop; 0 means an open loop.
	Concurrency int
	// Rate is the requests per second of an open loop.
	Rate float64
	// Arrivals are constant if empty.
	Arrivals Arrivals
	// MaxInFlight bounds the requests in flight of an open loop; 0 means
	// DefaultMaxInFlight.
	MaxInFlight int
	// Warmup precedes the measurement. Its requests are not recorded.
	Warmup time.Duration
	// Duration of the measurement; may be 0 if Requests is not.
	Duration time.Duration
	// Requests to record at most; 0 means no bound.
	Requests int64
	// Seed of Poisson arrivals: equal seeds give equal arrivals.
	Seed uint64
	// Fine waits for arrivals with the system's timer too, as Go's may be a millisecond
	// late. A bubble of testing/synctest has no such timer.
	Fine bool
}

// Open reports whether the loop is open.
func (s Settings) Open() bool { return s.Concurrency == 0 }

// WithDefaults returns the settings with their defaults filled in.
func (s Settings) WithDefaults() Settings {
	if !s.Open() {
		return s
	}
	if s.Arrivals == "" {
		s.Arrivals = Constant
	}
	if s.MaxInFlight == 0 {
		s.MaxInFlight = DefaultMaxInFlight
	}
	return s
}

// Validate returns an error that begins with the name of the wrong setting.
func (s Settings) Validate() error {
	switch {
	case s.Warmup < 0:
		return fmt.Errorf("warmup: %s is negative", s.Warmup)
	case s.Duration < 0:
		return fmt.Errorf("duration: %s is negative", s.Duration)
	case s.Requests < 0:
		return fmt.Errorf("requests: %d is negative", s.Requests)
	case s.Duration == 0 && s.Requests == 0:
		return errors.New("duration: missing, and so is the number of requests; give one of them")
	case s.Concurrency != 0 && s.Rate != 0:
		return errors.New("rate: is for an open loop, and concurrency for a closed one; give one of them")
	case s.Concurrency < 0 || s.Concurrency > MaxConcurrency:
		return fmt.Errorf("concurrency: %d is not between 1 and %d", s.Concurrency, MaxConcurrency)
	case !s.Open():
		return nil
	case math.IsNaN(s.Rate) || s.Rate <= 0 || s.Rate > MaxRate:
		return fmt.Errorf("rate: %v is not above 0 and at most %d per second", s.Rate, MaxRate)
	case s.Arrivals != "" && s.Arrivals != Constant && s.Arrivals != Poisson:
		return fmt.Errorf("arrivals: %q is neither constant nor poisson", s.Arrivals)
	case s.MaxInFlight < 0 || s.MaxInFlight > MaxConcurrency:
		return fmt.Errorf("max_in_flight: %d is not between 1 and %d", s.MaxInFlight, MaxConcurrency)
	}
	return nil
}

// schedule returns the times of arrivals, as durations since its start that never go
// back. It is pure, and for one goroutine.
type schedule struct {
	arrivals Arrivals
	rate     float64
	random   *rand.Rand
	// n arrivals have been returned, the last at sum seconds.
	n   int64
	sum float64
}

func newSchedule(a Arrivals, rate float64, seed uint64) *schedule {
	return &schedule{arrivals: a, rate: rate, random: rand.New(rand.NewPCG(seed, seed))}
}

// never is later than any run, and still a valid Duration.
const never = 100 * 365 * 24 * time.Hour

// next returns the time of the next arrival. Constant arrivals start at 0; they are
// multiples, not sums, and so do not drift.
func (s *schedule) next() time.Duration {
	if s.arrivals == Poisson {
		s.sum += s.random.ExpFloat64() / s.rate
	} else {
		s.sum = float64(s.n) / s.rate
	}
	s.n++
	return time.Duration(min(s.sum, never.Seconds()) * float64(time.Second))
}

// Outcome summarizes a load, beside its samples.
type Outcome struct {
	// Began is the end of the warm-up.
	Began time.Time
	// Elapsed is from then until the last recorded answer, or the end of the
	// duration, whichever is later.
	Elapsed time.Duration
	// Sent counts the measured requests. Each has a sample, unless the run was
	// interrupted.
	Sent int64
	// NotSent counts the measured arrivals that exceeded the open loop's bound.
	NotSent int64
	// Interrupted is true if the context ended the run.
	Interrupted bool
}

// RunLoad sends requests to the target until the settings' end or the context's, and
// calls record for each measured request. Target and record are called by many
// goroutines at once, all of which have ended when RunLoad returns.
func RunLoad(ctx context.Context, s Settings, target Target, record func(Sample)) (Outcome, error) {
	return runLoadFrom(ctx, time.Now(), s, target, record)
}

// runLoadFrom is RunLoad of a load that started at a time, perhaps in the past.
func runLoadFrom(ctx context.Context, start time.Time, s Settings, target Target, record func(Sample)) (Outcome, error) {
	if err := s.Validate(); err != nil {
		return Outcome{}, err
	}
	r := &run{settings: s.WithDefaults(), target: target, record: record, start: start, begin: start.Add(s.Warmup)}
	if s.Duration > 0 {
		r.end = r.begin.Add(s.Duration)
	}
	if s.Open() {
		if err := r.openLoop(ctx); err != nil {
			return Outcome{}, err
		}
	} else {
		r.closedLoop(ctx)
	}
	return r.outcome(ctx.Err() != nil), nil
}

// run is a load that is running.
type run struct {
	settings Settings
	target   Target
	record   func(Sample)
	// begin is the end of the warm-up. Requests planned for end or later are not sent;
	// a zero end is none.
	start, begin, end time.Time

	// admitted counts the measured requests that were allowed, the refused one included.
	admitted, sent, notSent atomic.Int64
	// last is the time of the last recorded answer, since begin.
	last atomic.Int64
}

// arrival is a request to send.
type arrival struct {
	planned  time.Time
	measured bool
}

// admit returns the arrival of that time; false ends the loop.
func (r *run) admit(planned time.Time) (arrival, bool) {
	switch {
	case planned.Before(r.begin):
		return arrival{planned: planned}, true
	case !r.end.IsZero() && !planned.Before(r.end):
		return arrival{}, false
	case r.settings.Requests > 0 && r.admitted.Add(1) > r.settings.Requests:
		return arrival{}, false
	}
	return arrival{planned: planned, measured: true}, true
}

// closedLoop runs callers that each wait for their answer before they send again.
func (r *run) closedLoop(ctx context.Context) {
	var callers sync.WaitGroup
	for range r.settings.Concurrency {
		callers.Go(func() {
			var answer Answer
			for ctx.Err() == nil {
				a, ok := r.admit(time.Now())
				if !ok {
					return
				}
				r.send(ctx, a, &answer)
			}
		})
	}
	callers.Wait()
}

// send makes one request and records it.
func (r *run) send(ctx context.Context, a arrival, answer *Answer) {
	answer.reset()
	if a.measured {
		r.sent.Add(1)
	}
	sent := time.Now()
	err := r.target(ctx, answer)
	now := time.Now()
	if !a.measured || ctx.Err() != nil {
		return
	}
	after := int64(now.Sub(r.begin))
	for last := r.last.Load(); after > last && !r.last.CompareAndSwap(last, after); {
		last = r.last.Load()
	}
	r.record(Sample{Latency: now.Sub(a.planned), Late: sent.Sub(a.planned), Answer: answer, Err: err})
}

// openLoop sends requests as they arrive. Callers are started as needed; an arrival never
// waits for one: it is sent, or it exceeds the bound.
func (r *run) openLoop(ctx context.Context) error {
	work := make(chan arrival, r.settings.MaxInFlight)
	var callers sync.WaitGroup
	var inFlight atomic.Int64
	serve := func() {
		var answer Answer
		for a := range work {
			r.send(ctx, a, &answer)
			inFlight.Add(-1)
		}
	}
	started := 0
	err := r.pace(ctx, func(a arrival) {
		if int(inFlight.Load()) >= r.settings.MaxInFlight {
			if a.measured {
				r.notSent.Add(1)
			}
			return
		}
		if int(inFlight.Add(1)) > started {
			callers.Go(serve)
			started++
		}
		work <- a
	})
	close(work)
	callers.Wait()
	return err
}

// pace calls send for each arrival at its time. If it is late it sends all due arrivals
// at once, each planned for its own time. The end of the context is not an error.
func (r *run) pace(ctx context.Context, send func(arrival)) error {
	clock, err := r.pacer(ctx)
	if err != nil {
		return err
	}
	defer clock.stop()
	arrivals := newSchedule(r.settings.Arrivals, r.settings.Rate, r.settings.Seed)
	for {
		a, ok := r.admit(r.start.Add(arrivals.next()))
		if !ok {
			return nil
		}
		if err := clock.until(ctx, a.planned); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("the clock of the arrivals: %w", err)
		}
		send(a)
	}
}

func (r *run) outcome(interrupted bool) Outcome {
	out := Outcome{
		Began: r.begin, Elapsed: time.Duration(r.last.Load()),
		Sent: r.sent.Load(), NotSent: r.notSent.Load(), Interrupted: interrupted,
	}
	exhausted := r.settings.Requests > 0 && r.admitted.Load() >= r.settings.Requests
	switch {
	case interrupted:
		out.Elapsed = max(0, time.Since(r.begin))
	case !r.end.IsZero() && !exhausted:
		out.Elapsed = max(out.Elapsed, r.end.Sub(r.begin))
	}
	return out
}

// pacer waits for moments. It is for one goroutine.
type pacer interface {
	// until returns nil at the moment, at once if it has passed. Its errors are the
	// system's, and the context's, which is the one that the pacer was made with.
	until(ctx context.Context, moment time.Time) error
	stop()
}

func (r *run) pacer(ctx context.Context) (pacer, error) {
	if r.settings.Fine {
		return newFinePacer(ctx)
	}
	return newTimerPacer(), nil
}

// timerPacer uses Go's timers, which may fire a millisecond late in an idle process.
type timerPacer struct{ timer *time.Timer }

func newTimerPacer() timerPacer {
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	return timerPacer{timer}
}

func (p timerPacer) stop() { p.timer.Stop() }

func (p timerPacer) until(ctx context.Context, moment time.Time) error {
	if wait := time.Until(moment); wait > 0 {
		p.timer.Reset(wait)
		select {
		case <-p.timer.C:
		case <-ctx.Done():
		}
	}
	return ctx.Err()
}
