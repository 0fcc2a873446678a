package call

import (
	"context"
	"maps"
	"strconv"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/stagemesh/stagemesh/gateway/admission"
	"github.com/stagemesh/stagemesh/gateway/correlate"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// notes is a meter that keeps how often each instrument was told something of each set
// of attributes. It belongs to one goroutine.
type notes struct {
	noop.Meter

	told map[string]int
}

func (n notes) Int64Counter(name string, _ ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return notedCounter{name: name, told: n.told}, nil
}

func (n notes) Float64Histogram(name string, _ ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	return notedHistogram{name: name, told: n.told}, nil
}

type notedCounter struct {
	noop.Int64Counter

	name string
	told map[string]int
}

func (c notedCounter) Add(_ context.Context, more int64, options ...metric.AddOption) {
	of := metric.NewAddConfig(options).Attributes()
	c.told[c.name+" "+of.Encoded(attribute.DefaultEncoder())] += int(more)
}

type notedHistogram struct {
	noop.Float64Histogram

	name string
	told map[string]int
}

func (h notedHistogram) Record(_ context.Context, _ float64, options ...metric.RecordOption) {
	of := metric.NewRecordConfig(options).Attributes()
	h.told[h.name+" "+of.Encoded(attribute.DefaultEncoder())]++
}

func TestAnswersAreCountedByPipelineAndReason(t *testing.T) {
	t.Parallel()
	told := map[string]int{}
	m, err := newMetrics(notes{told: told}, correlate.New(1, 0), admission.NewLimiter(1))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		m.request("one", nil, time.Second)
		m.request("one", fault.New(fault.QueueFull, ""), time.Second)
		m.request("two", nil, time.Second)
	}
	want := map[string]int{
		"stagemesh.gateway.requests pipeline=one,reason=OK":         2,
		"stagemesh.gateway.requests pipeline=one,reason=QUEUE_FULL": 2,
		"stagemesh.gateway.requests pipeline=two,reason=OK":         2,
		"stagemesh.gateway.request_duration pipeline=one":           4,
		"stagemesh.gateway.request_duration pipeline=two":           2,
	}
	if !maps.Equal(told, want) {
		t.Errorf("got %v", told)
	}
}

func TestLabelsAreRememberedWithinABound(t *testing.T) {
	t.Parallel()
	l := labels{made: map[outcome]*labelled{}}
	for i := range 2*maxLabels + 1 {
		l.of(outcome{pipeline: strconv.Itoa(i), reason: "OK"})
		if len(l.made) > maxLabels {
			t.Fatalf("%d are remembered", len(l.made))
		}
	}
	last := outcome{pipeline: "last", reason: "OK"}
	if first, second := l.of(last), l.of(last); first != second {
		t.Error("labels are made twice")
	}
}
