package dispatch

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// metrics are a dispatcher's instruments. Gauges are those of the pools that it owns.
type metrics struct {
	ended, attempts metric.Int64Counter
	// What attempts took, by tenant.
	runner, bytes, tokens, cost, energy metric.Float64Counter

	mu     sync.Mutex
	owners map[string]*owner
}

func newMetrics(meter metric.Meter) (*metrics, error) {
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
	gauge := func(name, help string) metric.Float64ObservableGauge {
		out, err := meter.Float64ObservableGauge(name, metric.WithDescription(help))
		errs = append(errs, err)
		return out
	}
	m := &metrics{
		ended:    counter("stagemesh.job.ended", "Jobs that ended, by queue, tenant and state: succeeded, failed, expired or cancelled."),
		attempts: counter("stagemesh.job.attempts", "Attempts that ended, by pool and outcome: succeeded, refused, retried, failed, poison or interrupted."),
		runner:   total("stagemesh.job.runner", "s", "Time of runners that jobs took, by tenant."),
		bytes:    total("stagemesh.job.bytes", "", "Bytes of payloads and answers of jobs, by tenant and direction: in or out."),
		tokens:   total("stagemesh.job.tokens", "", "Tokens that HTTP targets counted, by tenant and kind: prompt or completion."),
		cost:     total("stagemesh.job.cost", "", "Cost of jobs by jobs.rates, by tenant."),
		energy:   total("stagemesh.job.energy", "J", "Energy that jobs took by jobs.rates, by tenant."),
		owners:   map[string]*owner{},
	}
	queued := gauge("stagemesh.job.queued", "Jobs that have not ended, by queue and state: waiting or delayed.")
	inFlight := gauge("stagemesh.job.in_flight", "Jobs of a pool that run.")
	open := gauge("stagemesh.job.pool_open", "1 while a pool sends jobs, 0 while its gate, a refusal or its breaker holds them back.")
	room := gauge("stagemesh.job.pool_room", "D: how empty a pool's target is by its gate, from 0 to 1.")
	budget := gauge("stagemesh.job.pool_budget", "N: what may be in flight of a pool by its last reading, in the unit of its budget.")
	_, err := meter.RegisterCallback(func(_ context.Context, out metric.Observer) error {
		for pool, o := range m.snapshot() {
			of := metric.WithAttributes(attribute.String("pool", pool))
			status, counts := o.status(time.Now())
			out.ObserveFloat64(inFlight, float64(status.out), of)
			out.ObserveFloat64(room, status.d, of)
			out.ObserveFloat64(budget, status.n, of)
			isOpen := 0.0
			if status.open {
				isOpen = 1
			}
			out.ObserveFloat64(open, isOpen, of)
			for queue, c := range counts {
				for state, n := range map[string]int{"waiting": c.waiting, "delayed": c.delayed} {
					out.ObserveFloat64(queued, float64(n), metric.WithAttributes(attribute.String("queue", queue), attribute.String("state", state)))
				}
			}
		}
		return nil
	}, queued, inFlight, open, room, budget)
	return m, errors.Join(append(errs, err)...)
}

// own has the gauges show a pool until the returned function is called.
func (m *metrics) own(pool string, o *owner) (release func()) {
	set := func(o *owner) {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.owners[pool] = o; o == nil {
			delete(m.owners, pool)
		}
	}
	set(o)
	return func() { set(nil) }
}

func (m *metrics) snapshot() map[string]*owner {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.owners)
}

func (m *metrics) end(queue, tenant string, state inferencev1.JobState) {
	m.ended.Add(context.Background(), 1, metric.WithAttributeSet(attribute.NewSet(attribute.String("queue", queue), attribute.String("tenant", tenant), attribute.String("state", pipeline.JobStateName(state)))))
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

// status returns the state of a pool, and how many jobs its queues have.
func (o *owner) status(now time.Time) (gateStatus, map[string]queueCount) {
	o.mu.Lock()
	defer o.mu.Unlock()
	counts := make(map[string]queueCount, len(o.queues))
	for _, queue := range o.queues {
		counts[string(queue)] = o.order.count(string(queue))
	}
	return o.credit.status(now), counts
}
