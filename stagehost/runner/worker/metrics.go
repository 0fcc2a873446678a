package worker

import (
	"context"
	"errors"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker/supervise"
)

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

// What becomes of a worker's batch.
const (
	batchEnded   = "ended"
	batchFailed  = "failed"
	batchInvalid = "invalid"
	batchLost    = "lost"
)

// newMetrics returns the instruments of the workers of the settings.
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
	m.transitions, errs[1] = meter.Int64Counter("stagemesh.worker.transitions", metric.WithDescription("Transitions of workers, by the state they came to and whether something had failed."))
	m.batches, errs[2] = meter.Int64Counter("stagemesh.worker.batches", metric.WithDescription("Batches that workers were given, by outcome."))
	m.starts, errs[3] = meter.Float64Histogram("stagemesh.worker.start", seconds, metric.WithUnit("s"), metric.WithDescription("From a worker's start until it was ready."))
	return m, errors.Join(errs[:]...)
}

func (m *metrics) with(worker int, more ...attribute.KeyValue) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(append(more, m.stage, attribute.String("worker", strconv.Itoa(worker)))...))
}

// moved books a transition; began is when the worker's incarnation did.
func (m *metrics) moved(e Edge, began time.Time) {
	ctx := context.Background()
	for state, n := range map[supervise.State]int64{e.From: 0, e.To: 1} {
		m.states.Record(ctx, n, m.with(e.Worker, m.host, attribute.String("state", state.String())))
	}
	failed := strconv.FormatBool(e.Cause != nil)
	m.transitions.Add(ctx, 1, m.with(e.Worker, attribute.String("state", e.To.String()), attribute.String("failed", failed)))
	if e.To == supervise.Ready {
		m.starts.Record(ctx, e.At.Sub(began).Seconds(), m.with(e.Worker))
	}
}

// ran books what has become of a batch.
func (m *metrics) ran(worker int, err error) {
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
