package dispatch

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// totals is a meter that adds up.
type totals struct {
	noop.Meter
	sums sync.Map
}

func (m *totals) Float64Counter(name string, _ ...metric.Float64CounterOption) (metric.Float64Counter, error) {
	return &total{name: name, of: m}, nil
}

type total struct {
	noop.Float64Counter
	name string
	of   *totals
}

func (c *total) Add(_ context.Context, value float64, options ...metric.AddOption) {
	of := metric.NewAddConfig(options).Attributes()
	key := c.name
	for _, label := range of.ToSlice() {
		key += " " + label.Value.AsString()
	}
	before, _ := c.of.sums.LoadOrStore(key, 0.)
	c.of.sums.Store(key, before.(float64)+value)
}

func ran(stage string, run time.Duration, items, batchRows, rows uint32) *inferencev1.StepTiming {
	return &inferencev1.StepTiming{Stage: stage, Run: durationpb.New(run), BatchSize: items, BatchRows: batchRows, Rows: rows}
}

func TestUsageAddsUpOverAttempts(t *testing.T) {
	t.Parallel()
	b := newMesh(t, func(c *Config) {
		c.Tenants = map[string]TenantConfig{"acme": {}}
		c.Rates = RatesConfig{Currency: "EUR", Stages: map[string]StageRate{"classify": {Price: .5, Watts: 100}}}
	})
	answers := make(chan Answer, 3)
	answers <- Answer{Fault: fault.New(fault.QueueFull, "full")} // no attempt, and no bytes
	answers <- Answer{Fault: fault.New(fault.QueueLost, "lost"), Steps: []*inferencev1.StepTiming{ran("classify", 8*time.Second, 2, 8, 2)}}
	answers <- Answer{
		Infer: &inferencev1.InferResponse{Outputs: []*inferencev1.Part{{Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{Data: make([]byte, 10)}}}}},
		Steps: []*inferencev1.StepTiming{ran("decode", time.Second, 4, 0, 0), ran("classify", 6*time.Second, 3, 3, 1)},
	}
	meter := new(totals)
	d, err := New(Settings{
		Config: b.config, Mesh: "test", Bus: bus.Settings{URL: b.broker.URL()}, Logger: slog.New(slog.DiscardHandler), Meter: meter,
		Target: func(PoolConfig) Target {
			return &stub{answer: func(context.Context, Attempt) Answer { return <-answers }}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	stop := testbed.Background(t, d.Run)
	id := pipeline.NewJobID(queue)
	b.submitFor("acme", id)
	r := b.endOf("acme", id)
	stop()
	job := r.GetJob()
	u, took := job.GetUsage(), job.GetEndedAt().AsTime().Sub(job.GetAcceptedAt().AsTime()).Seconds()
	// 2 of 8 rows of 8 s, 1 of 4 items of 1 s, 1 of 3 rows of 6 s.
	if u.GetAttempts() != 3 || u.GetRunnerSeconds() != 2+.25+2 || u.GetCost() != 2 || u.GetCurrency() != "EUR" || u.GetJoules() != 400 || u.GetBytesOut() != 10 {
		t.Errorf("usage %v", u)
	}
	if sum := u.GetQueuedSeconds() + u.GetDelayedSeconds() + u.GetRunningSeconds(); math.Abs(sum-took) > .1 || u.GetDelayedSeconds() < .5 {
		t.Errorf("%.3f s of %.3f s: %v", sum, took, u)
	}
	// The refusal closed the pool for a second.
	if u.GetClosedSeconds() < .5 || u.GetClosedSeconds() > u.GetQueuedSeconds()+u.GetDelayedSeconds() {
		t.Errorf("the pool was closed for %.3f s: %v", u.GetClosedSeconds(), u)
	}
	for key, want := range map[string]float64{"stagemesh.job.runner acme": 4.25, "stagemesh.job.bytes out acme": 10, "stagemesh.job.cost acme": 2, "stagemesh.job.energy acme": 400} {
		if got, _ := meter.sums.Load(key); got != want {
			t.Errorf("%s is %v, want %v", key, got, want)
		}
	}
	if label := b.config.tenantLabel("unnamed"); label != "other" {
		t.Errorf("a tenant that the file does not name is %s", label)
	}
}

func TestExpiredJobHasTheTimeThatItWaited(t *testing.T) {
	t.Parallel()
	b := newMesh(t)
	id := b.submit(func(h *store.JobHeader) { h.Deadline = time.Now().Add(300 * time.Millisecond) })
	testbed.Eventually(t, "the deadline passes", func() bool {
		j, err := b.jobs.Queued(t.Context(), id, "")
		return err == nil && time.Now().After(j.Deadline)
	})
	b.start(new(stub))
	if u := b.end(id).GetJob().GetUsage(); u.GetQueuedSeconds() < .25 || u.GetAttempts() != 0 || u.GetRunningSeconds() != 0 {
		t.Errorf("usage %v", u)
	}
}

func TestTokensOfAnAnswerHaveAPrice(t *testing.T) {
	t.Parallel()
	rates := RatesConfig{Pools: map[string]TokenRate{"llm": {Prompt: 2, Completion: 8}}}
	for answer, want := range map[string]string{
		`{"usage": {"prompt_tokens": 500000, "completion_tokens": 250000, "total_tokens": 750000}}`: "500000 250000 3",
		`{"usage": {"prompt_tokens": 1000000}}`:                                                     "1000000 0 2",
		`{"usage": {"prompt_tokens": -1, "completion_tokens": "many"}}`:                             "0 0 0",
		`{"usage": null}`:     "0 0 0",
		`{"usage": {"prompt_`: "0 0 0",
		`data: {}`:            "0 0 0",
	} {
		u := rates.usageOf("llm", Answer{HTTP: &inferencev1.HttpAnswer{Body: []byte(answer)}}, succeeded)
		if got := fmt.Sprint(u.GetPromptTokens(), u.GetCompletionTokens(), u.GetCost()); got != want || u.GetBytesOut() != uint64(len(answer)) {
			t.Errorf("%s: %s, want %s", answer, got, want)
		}
	}
}
