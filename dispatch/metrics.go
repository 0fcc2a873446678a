package dispatch

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// metrics are a dispatcher's instruments. Gauges, and counters of jobs, are those of the pools that
// it owns.
type metrics struct {
	ended, attempts, saved metric.Int64Counter
	waits                  metric.Float64Histogram
	// What attempts took, by tenant.
	runner, bytes, tokens, cost, energy metric.Float64Counter
}

func newMetrics(meter metric.Meter, owners *sync.Map) (*metrics, error) {
	var errs []error
	counter := func(name, help string) metric.Int64Counter {
		out, err := meter.Int64Counter(name, metric.WithDescription(help))
		errs = append(errs, err)
		return out
	}
	total := func(name, unit, help string) metric.Float64Counter {
		out, err := meter.Float64Counter(name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return out
	}
	var all []metric.Observable
	gauge := func(name, help string) metric.Float64Observable {
		out, err := meter.Float64ObservableGauge(name, metric.WithDescription(help))
		errs, all = append(errs, err), append(all, out)
		return out
	}
	owned := func(name, help string) metric.Int64Observable {
		out, err := meter.Int64ObservableCounter(name, metric.WithDescription(help))
		errs, all = append(errs, err), append(all, out)
		return out
	}
	waits, err := meter.Float64Histogram("stagemesh.job.wait", metric.WithUnit("s"), metric.WithDescription("Time from the acceptance of a job to its first attempt."), metric.WithExplicitBucketBoundaries(waitBounds...))
	m := &metrics{
		ended:    counter("stagemesh.job.ended", "Jobs that ended, by queue, tenant and state: succeeded, failed, expired or cancelled."),
		attempts: counter("stagemesh.job.attempts", "Attempts that ended, by pool and outcome: succeeded, refused, retried, failed, poison or interrupted."),
		saved:    counter("stagemesh.job.saved", "Jobs that ended without an attempt, by queue and state."),
		waits:    waits,
		runner:   total("stagemesh.job.runner", "s", "Time of runners that jobs took, by tenant."),
		bytes:    total("stagemesh.job.bytes", "", "Bytes of payloads and answers of jobs, by tenant and direction: in or out."),
		tokens:   total("stagemesh.job.tokens", "", "Tokens that HTTP targets counted, by tenant and kind: prompt or completion."),
		cost:     total("stagemesh.job.cost", "", "Cost of jobs by jobs.rates, by tenant."),
		energy:   total("stagemesh.job.energy", "J", "Energy that jobs took by jobs.rates, by tenant."),
	}
	accepted := owned("stagemesh.job.accepted", "Jobs that came since the dispatcher owns the pool, by queue.")
	recovered := owned("stagemesh.job.recovered", "Jobs that the dispatcher found when it began to own the pool, by queue.")
	settled := owned("stagemesh.job.settled", "Jobs that ended since the dispatcher owns the pool, by queue.")
	queued := gauge("stagemesh.job.queued", "Jobs that have not ended, by queue and state: waiting, delayed or running.")
	oldest := gauge("stagemesh.job.oldest_seconds", "Age of the oldest job of a queue that has not ended; 0 without one.")
	paused := gauge("stagemesh.job.queue_paused", "1 while operators have paused the queue.")
	inFlight := gauge("stagemesh.job.in_flight", "Jobs of a pool that were sent and have not ended.")
	open := gauge("stagemesh.job.pool_open", "1 while a pool sends jobs, 0 while its gate, a refusal or its breaker holds them back.")
	held := gauge("stagemesh.job.pool_held", "1 for the reason why a pool sends nothing now.")
	room := gauge("stagemesh.job.pool_room", "D: how empty a pool's target is by its gate, from 0 to 1.")
	baseline := gauge("stagemesh.job.pool_baseline", "B: the baseline of a pool's budget.")
	budget := gauge("stagemesh.job.pool_budget", "N: what may be in flight of a pool by its last reading, in the unit of its budget.")
	_, failed := meter.RegisterCallback(func(_ context.Context, out metric.Observer) error {
		for pool, o := range owners.Range {
			r := o.(*owner).report(pipeline.JobID{})
			of := attribute.String("pool", pool.(string))
			for gauge, value := range map[metric.Float64Observable]float64{inFlight: float64(r.GetOut()), open: oneIf(r.GetState() == "open"), room: r.GetD(), baseline: r.GetB(), budget: r.GetN()} {
				out.ObserveFloat64(gauge, value, metric.WithAttributes(of))
			}
			if why, _, _ := strings.Cut(r.GetWhy(), ": "); why != "" {
				out.ObserveFloat64(held, 1, metric.WithAttributes(of, attribute.String("reason", why)))
			}
			for _, q := range r.GetQueues() {
				of := attribute.String("queue", q.GetName())
				out.ObserveInt64(accepted, int64(q.GetAccepted()), metric.WithAttributes(of))
				out.ObserveInt64(recovered, int64(q.GetRecovered()), metric.WithAttributes(of))
				out.ObserveFloat64(paused, oneIf(q.GetPausedSince() != nil), metric.WithAttributes(of))
				out.ObserveInt64(settled, int64(q.GetEnded()), metric.WithAttributes(of))
				for state, n := range map[string]uint64{"waiting": q.GetWaiting(), "delayed": q.GetDelayed(), "running": q.GetRunning()} {
					out.ObserveFloat64(queued, float64(n), metric.WithAttributes(of, attribute.String("state", state)))
				}
				age := 0.
				if q.GetOldest() != nil {
					age = time.Since(q.GetOldest().AsTime()).Seconds()
				}
				out.ObserveFloat64(oldest, age, metric.WithAttributes(of))
			}
		}
		return nil
	}, all...)
	return m, errors.Join(append(errs, err, failed)...)
}

// waitBounds are the bounds of waits in seconds: jobs may wait for days.
var waitBounds = []float64{.01, .1, 1, 10, 60, 600, 3600, 6 * 3600, 24 * 3600, 72 * 3600}

func oneIf(holds bool) float64 {
	if holds {
		return 1
	}
	return 0
}

func (m *metrics) end(queue, tenant string, end *inferencev1.Job) {
	of, state := attribute.String("queue", queue), attribute.String("state", pipeline.JobStateName(end.GetState()))
	m.ended.Add(context.Background(), 1, metric.WithAttributeSet(attribute.NewSet(of, attribute.String("tenant", tenant), state)))
	if end.GetAttempts() == 0 {
		m.saved.Add(context.Background(), 1, metric.WithAttributeSet(attribute.NewSet(of, state)))
	}
}

func (m *metrics) wait(queue string, d time.Duration) {
	m.waits.Record(context.Background(), d.Seconds(), metric.WithAttributeSet(attribute.NewSet(attribute.String("queue", queue))))
}

func (m *metrics) attempt(pool, tenant string, out outcome, u *inferencev1.JobUsage) {
	m.attempts.Add(context.Background(), 1, metric.WithAttributeSet(attribute.NewSet(attribute.String("pool", pool), attribute.String("outcome", outcomeNames[out]))))
	add := func(to metric.Float64Counter, value float64, of ...attribute.KeyValue) {
		if value > 0 {
			to.Add(context.Background(), value, metric.WithAttributeSet(attribute.NewSet(append(of, attribute.String("tenant", tenant))...)))
		}
	}
	add(m.runner, u.GetRunnerSeconds())
	add(m.bytes, float64(u.GetBytesIn()), attribute.String("direction", "in"))
	add(m.bytes, float64(u.GetBytesOut()), attribute.String("direction", "out"))
	add(m.tokens, float64(u.GetPromptTokens()), attribute.String("kind", "prompt"))
	add(m.tokens, float64(u.GetCompletionTokens()), attribute.String("kind", "completion"))
	add(m.cost, u.GetCost())
	add(m.energy, u.GetJoules())
}

// otherTenants is the label of tenants that the file does not name, and of jobs without one.
const otherTenants = "other"

// tenantLabel returns the label of a tenant in metrics. So the file bounds how many there are.
func (c Config) tenantLabel(tenant string) string {
	if _, ok := c.Tenants[tenant]; ok {
		return tenant
	}
	return otherTenants
}

var outcomeNames = map[outcome]string{
	interrupted: "interrupted", succeeded: "succeeded", latched: "refused", retried: "retried", failed: "failed", poison: "poison",
}
