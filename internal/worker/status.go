package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/stagemesh/stagemesh/stagehost/runner"
)

// status is the status of a worker.
type status struct {
	state       State
	incarnation uint64
	// progress is its last progress message while it started.
	progress string
	looping  bool
	cause    error
	// startFailed is true where its last start failed.
	startFailed bool
	// lateSince is since when it has a batch that is late; zero without one.
	lateSince time.Time
	// lastOutput is the last output of the last process that exited.
	lastOutput []string
}

// equal compares what somebody may wait for.
func (s status) equal(other status) bool {
	return s.state == other.state && s.incarnation == other.incarnation && s.looping == other.looping && s.startFailed == other.startFailed &&
		s.progress == other.progress && s.lateSince.Equal(other.lateSince) && (s.cause == nil) == (other.cause == nil)
}

// String describes a worker that is not ready, also for callers: without what it wrote.
func (s status) String() string {
	out := s.state.String()
	if s.progress != "" {
		out += " (" + s.progress + ")"
	}
	if s.cause != nil {
		out += ", " + s.cause.Error()
	}
	return out
}

// remark returns why the worker is not ready, or what is wrong although it is; it may be
// empty.
func (s status) remark() string {
	switch {
	case !s.lateSince.IsZero():
		return lateText(s.lateSince)
	case s.cause != nil && s.state != Ready && len(s.lastOutput) > 0:
		return s.cause.Error() + "; it wrote last: " + s.lastOutput[len(s.lastOutput)-1]
	case s.cause != nil && s.state != Ready:
		return s.cause.Error()
	default:
		return ""
	}
}

func lateText(since time.Time) string {
	return "a batch has run since " + since.UTC().Format(time.TimeOnly) + " UTC, far longer than batches do"
}

// failure is the cause with the last output.
func (s status) failure() error {
	if len(s.lastOutput) == 0 {
		return s.cause
	}
	return fmt.Errorf("%w; it wrote last:\n\t%s", s.cause, strings.Join(s.lastOutput, "\n\t"))
}

// startError returns why a worker with so many tries will not become ready; nil while
// it may.
func (s status) startError(tries int) error {
	crashes := int(s.incarnation)
	if s.state != Dead {
		crashes--
	}
	final := errors.Is(s.cause, ErrStartLimit) || errors.Is(s.cause, ErrSpecChanged) || errors.Is(s.cause, ErrSpecUnfit)
	if s.state == Ready || s.cause == nil || crashes < tries && !final {
		return nil
	}
	return s.failure()
}

// describeUnready describes the workers that are not ready.
func describeUnready(workers []status) string {
	var out []string
	for i, s := range workers {
		if s.state != Ready {
			out = append(out, fmt.Sprintf("worker %d: %s", i, s))
		}
	}
	return strings.Join(out, "; ")
}

// board has the statuses of all workers, for those that wait for a change.
type board struct {
	mu      sync.Mutex
	workers []status
	changed chan struct{}
}

func newBoard(workers int) *board {
	return &board{workers: make([]status, workers), changed: make(chan struct{})}
}

func (b *board) set(worker int, s status) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.workers[worker].equal(s) {
		return
	}
	b.workers[worker] = s
	close(b.changed)
	b.changed = make(chan struct{})
}

// look returns the statuses, and a channel that is closed when one changes.
func (b *board) look() ([]status, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.workers), b.changed
}

// metrics are the instruments of all workers of a runner.
type metrics struct {
	stage, host attribute.KeyValue
	// outcomes are the series of batches, by worker.
	outcomes []map[string]metric.MeasurementOption

	states      metric.Int64Gauge
	transitions metric.Int64Counter
	batches     metric.Int64Counter
	starts      metric.Float64Histogram
}

// Outcomes of a worker's batch.
const (
	batchEnded   = "ended"
	batchFailed  = "failed"
	batchInvalid = "invalid"
	batchLost    = "lost"
)

func newMetrics(s Settings) (*metrics, error) {
	meter := s.Meter
	if meter == nil {
		meter = noop.Meter{}
	}
	m := &metrics{stage: attribute.String("stage", s.Stage), host: attribute.String("host", s.Host)}
	for i := range s.Replicas {
		series := map[string]metric.MeasurementOption{}
		for _, outcome := range []string{batchEnded, batchFailed, batchInvalid, batchLost} {
			series[outcome] = m.with(i, attribute.String("outcome", outcome))
		}
		m.outcomes = append(m.outcomes, series)
	}
	seconds := metric.WithExplicitBucketBoundaries(.1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
	var errs [4]error
	m.states, errs[0] = meter.Int64Gauge("stagemesh.worker.state", metric.WithDescription("1 for the state that a worker is in."))
	m.transitions, errs[1] = meter.Int64Counter("stagemesh.worker.transitions", metric.WithDescription("State transitions of workers, by new state and by whether something had failed."))
	m.batches, errs[2] = meter.Int64Counter("stagemesh.worker.batches", metric.WithDescription("Batches given to workers, by outcome."))
	m.starts, errs[3] = meter.Float64Histogram("stagemesh.worker.start", seconds, metric.WithUnit("s"), metric.WithDescription("Time from the start of a worker until it is ready."))
	return m, errors.Join(errs[:]...)
}

func (m *metrics) with(worker int, more ...attribute.KeyValue) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(append(more, m.stage, attribute.String("worker", strconv.Itoa(worker)))...))
}

// recordTransition records a transition of an incarnation that began at began.
func (m *metrics) recordTransition(t Transition, began time.Time) {
	ctx := context.Background()
	for state, n := range map[State]int64{t.From: 0, t.To: 1} {
		m.states.Record(ctx, n, m.with(t.Worker, m.host, attribute.String("state", state.String())))
	}
	failed := strconv.FormatBool(t.Cause != nil)
	m.transitions.Add(ctx, 1, m.with(t.Worker, attribute.String("state", t.To.String()), attribute.String("failed", failed)))
	if t.To == Ready {
		m.starts.Record(ctx, t.At.Sub(began).Seconds(), m.with(t.Worker))
	}
}

// recordBatch records a batch by its error.
func (m *metrics) recordBatch(worker int, err error) {
	outcome := batchFailed
	switch {
	case err == nil:
		outcome = batchEnded
	case errors.Is(err, runner.ErrBadOutput):
		outcome = batchInvalid
	case errors.Is(err, runner.ErrCrashed):
		outcome = batchLost
	}
	m.batches.Add(context.Background(), 1, m.outcomes[worker][outcome])
}
