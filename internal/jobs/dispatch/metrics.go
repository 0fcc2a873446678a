package dispatch

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// RatesConfig is what work costs, in a currency that the mesh does not interpret.
type RatesConfig struct {
	Currency string `yaml:"currency"`
	// Stages has the stages of the mesh, Pools the pools with an HTTP target.
	Stages map[string]StageRate `yaml:"stages"`
	Pools  map[string]TokenRate `yaml:"pools"`
}

// StageRate is what a runner of a stage costs while it runs: the price of a second, and power.
type StageRate struct {
	Price float64 `yaml:"price"`
	Watts float64 `yaml:"watts"`
}

// TokenRate is what a million tokens cost.
type TokenRate struct {
	Prompt     float64 `yaml:"prompt_tokens"`
	Completion float64 `yaml:"completion_tokens"`
}

const (
	perTokens = 1_000_000
	maxPrice  = 1e12 // bounds rates, so that a sum of them is a number
)

func (r RatesConfig) validate(pools map[string]PoolConfig) error {
	return errors.Join(
		inEach("stages", r.Stages, validNameOf("stage"), func(_ string, of StageRate) error {
			return errors.Join(within("price", of.Price, maxPrice), within("watts", of.Watts, maxPrice))
		}),
		inEach("pools", r.Pools, func(name string) error {
			if pools[name].Target.HTTP == nil {
				return errors.New("there is no such pool with an HTTP target, which counts tokens")
			}
			return nil
		}, func(_ string, of TokenRate) error {
			return errors.Join(within("prompt_tokens", of.Prompt, maxPrice), within("completion_tokens", of.Completion, maxPrice))
		}),
	)
}

// usageOf returns what an attempt took of a job in a pool, but for time.
func (r RatesConfig) usageOf(pool string, a Answer, out outcome) *inferencev1.JobUsage {
	u := &inferencev1.JobUsage{Attempts: 1}
	if out != latched {
		u.BytesIn, u.BytesOut = a.sent, bytesOf(a.Infer.GetOutputs())+uint64(len(a.HTTP.GetBody()))
	}
	for _, step := range a.Steps {
		took := step.GetRun().AsDuration().Seconds() / float64(max(1, step.GetBatchSize()))
		if rows := step.GetBatchRows(); rows > 0 && step.GetRows() > 0 { // older hosts do not say
			took = step.GetRun().AsDuration().Seconds() * float64(step.GetRows()) / float64(rows)
		}
		rate := r.Stages[step.GetStage()]
		u.RunnerSeconds += took
		u.Cost += took * rate.Price
		u.Joules += took * rate.Watts
	}
	u.PromptTokens, u.CompletionTokens = tokensOf(a.HTTP.GetBody())
	rate := r.Pools[pool]
	u.Cost += (float64(u.GetPromptTokens())*rate.Prompt + float64(u.GetCompletionTokens())*rate.Completion) / perTokens
	return u
}

func (r RatesConfig) addUsage(to, of *inferencev1.JobUsage) {
	to.Attempts += of.GetAttempts()
	to.RunnerSeconds += of.GetRunnerSeconds()
	to.BytesIn += of.GetBytesIn()
	to.BytesOut += of.GetBytesOut()
	to.PromptTokens += of.GetPromptTokens()
	to.CompletionTokens += of.GetCompletionTokens()
	to.Cost += of.GetCost()
	to.Joules += of.GetJoules()
	to.Currency = r.Currency
}

// tokensOf returns the tokens that an OpenAI-compatible answer has used; 0 if it does not say.
func tokensOf(answer []byte) (prompt, completion uint64) {
	if len(answer) == 0 || answer[0] != '{' {
		return 0, 0
	}
	var of struct {
		Usage struct {
			Prompt     int64 `json:"prompt_tokens"`
			Completion int64 `json:"completion_tokens"`
		} `json:"usage"`
	}
	_ = json.Unmarshal(answer, &of) // what is not of that form says nothing
	count := func(n int64) uint64 { return uint64(min(max(0, n), math.MaxInt32)) }
	return count(of.Usage.Prompt), count(of.Usage.Completion)
}

func sizeOf(job *meshv1.QueuedJob) uint64 {
	return bytesOf(job.GetInfer().GetInputs()) + uint64(len(job.GetHttp().GetBody()))
}

func bytesOf(parts []*inferencev1.Part) (n uint64) {
	for _, p := range parts {
		n += uint64(len(p.GetBlob().GetData()) + len(p.GetTensor().GetRaw()))
	}
	return n
}

// metrics are a dispatcher's instruments. Those that are observed are of the pools that it owns.
type metrics struct {
	ended, attempts, saved, dropped     metric.Float64Counter
	waits                               metric.Float64Histogram
	runner, bytes, tokens, cost, energy metric.Float64Counter
}

func newMetrics(meter metric.Meter, owners *sync.Map) (*metrics, error) {
	var errs []error
	counter := func(name, unit, help string) metric.Float64Counter {
		out, err := meter.Float64Counter(name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return out
	}
	waits, err := meter.Float64Histogram("stagemesh.job.wait", metric.WithUnit("s"), metric.WithDescription("Time from the acceptance of a job to its first attempt."), metric.WithExplicitBucketBoundaries(waitBounds...))
	m := &metrics{
		ended:    counter("stagemesh.job.ended", "", "Jobs that ended, by queue, tenant and state: succeeded, failed, expired or cancelled."),
		attempts: counter("stagemesh.job.attempts", "", "Attempts that ended, by pool and outcome: succeeded, refused, retried, failed, poison or interrupted."),
		saved:    counter("stagemesh.job.saved", "", "Jobs that ended without an attempt, by queue and state."),
		dropped:  counter("stagemesh.job.notices_dropped", "", "Notices for webhooks that were dropped after half of jobs.retention, by queue."),
		waits:    waits,
		runner:   counter("stagemesh.job.runner", "s", "Time of runners that jobs took, by tenant."),
		bytes:    counter("stagemesh.job.bytes", "", "Bytes of payloads and answers of jobs, by tenant and direction: in or out."),
		tokens:   counter("stagemesh.job.tokens", "", "Tokens that HTTP targets counted, by tenant and kind: prompt or completion."),
		cost:     counter("stagemesh.job.cost", "", "Cost of jobs by jobs.rates, by tenant."),
		energy:   counter("stagemesh.job.energy", "J", "Energy that jobs took by jobs.rates, by tenant."),
	}
	var all []metric.Observable
	observe := func(out metric.Float64Observable, err error) metric.Float64Observable {
		errs, all = append(errs, err), append(all, out)
		return out
	}
	gauge := func(name, help string) metric.Float64Observable {
		return observe(meter.Float64ObservableGauge(name, metric.WithDescription(help)))
	}
	total := func(name, help string) metric.Float64Observable {
		return observe(meter.Float64ObservableCounter(name, metric.WithDescription(help)))
	}
	accepted := total("stagemesh.job.accepted", "Jobs that came since the dispatcher owns the pool, by queue.")
	recovered := total("stagemesh.job.recovered", "Jobs that the dispatcher found when it began to own the pool, by queue.")
	settled := total("stagemesh.job.settled", "Jobs that ended since the dispatcher owns the pool, by queue.")
	queued := gauge("stagemesh.job.queued", "Jobs in a queue, by queue and state: waiting, delayed or running.")
	oldest := gauge("stagemesh.job.oldest_seconds", "Age of the oldest job in a queue; 0 without one.")
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
				out.ObserveFloat64(gauge, value, labels(of))
			}
			if why, _, _ := strings.Cut(r.GetWhy(), ": "); why != "" {
				out.ObserveFloat64(held, 1, labels(of, attribute.String("reason", why)))
			}
			for _, q := range r.GetQueues() {
				of, age := labels(attribute.String("queue", q.GetName())), 0.
				if q.GetOldest() != nil {
					age = time.Since(q.GetOldest().AsTime()).Seconds()
				}
				for gauge, value := range map[metric.Float64Observable]float64{
					accepted: float64(q.GetAccepted()), recovered: float64(q.GetRecovered()), settled: float64(q.GetEnded()), paused: oneIf(q.GetPausedSince() != nil), oldest: age,
				} {
					out.ObserveFloat64(gauge, value, of)
				}
				for state, n := range map[string]uint64{"waiting": q.GetWaiting(), "delayed": q.GetDelayed(), "running": q.GetRunning()} {
					out.ObserveFloat64(queued, float64(n), labels(attribute.String("queue", q.GetName()), attribute.String("state", state)))
				}
			}
		}
		return nil
	}, all...)
	return m, errors.Join(append(errs, err, failed)...)
}

func labels(of ...attribute.KeyValue) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(of...))
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
	m.ended.Add(context.Background(), 1, labels(of, attribute.String("tenant", tenant), state))
	if end.GetAttempts() == 0 {
		m.saved.Add(context.Background(), 1, labels(of, state))
	}
}

func (m *metrics) attempt(pool, tenant string, out outcome, u *inferencev1.JobUsage) {
	m.attempts.Add(context.Background(), 1, labels(attribute.String("pool", pool), attribute.String("outcome", string(out))))
	add := func(to metric.Float64Counter, value float64, of ...attribute.KeyValue) {
		if value > 0 {
			to.Add(context.Background(), value, labels(append(of, attribute.String("tenant", tenant))...))
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

// tenantLabel returns the label of a tenant in metrics: the file bounds how many there are.
func (c Config) tenantLabel(tenant string) string {
	if _, ok := c.Tenants[tenant]; ok {
		return tenant
	}
	return "other"
}
