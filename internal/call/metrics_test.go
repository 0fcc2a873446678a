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

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// recorder is a meter that counts the records of each instrument by attributes. It
// belongs to one goroutine.
type recorder struct {
	noop.Meter

	records map[string]int
}

func (r recorder) Int64Counter(name string, _ ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return recordedCounter{name: name, records: r.records}, nil
}

func (r recorder) Float64Histogram(name string, _ ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	return recordedHistogram{name: name, records: r.records}, nil
}

type recordedCounter struct {
	noop.Int64Counter

	name    string
	records map[string]int
}

func (c recordedCounter) Add(_ context.Context, more int64, options ...metric.AddOption) {
	of := metric.NewAddConfig(options).Attributes()
	c.records[c.name+" "+of.Encoded(attribute.DefaultEncoder())] += int(more)
}

type recordedHistogram struct {
	noop.Float64Histogram

	name    string
	records map[string]int
}

func (h recordedHistogram) Record(_ context.Context, _ float64, options ...metric.RecordOption) {
	of := metric.NewRecordConfig(options).Attributes()
	h.records[h.name+" "+of.Encoded(attribute.DefaultEncoder())]++
}

func TestRequestsAreCountedByPipelineAndReason(t *testing.T) {
	t.Parallel()
	records := map[string]int{}
	m, err := newMetrics(&Service{settings: Settings{Meter: recorder{records: records}}})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		m.request(t.Context(), "one", nil, time.Second)
		m.request(t.Context(), "one", fault.New(fault.QueueFull, ""), time.Second)
		m.request(t.Context(), "two", nil, time.Second)
	}
	want := map[string]int{
		"stagemesh.gateway.requests pipeline=one,reason=OK":         2,
		"stagemesh.gateway.requests pipeline=one,reason=QUEUE_FULL": 2,
		"stagemesh.gateway.requests pipeline=two,reason=OK":         2,
		"stagemesh.gateway.request_duration pipeline=one":           4,
		"stagemesh.gateway.request_duration pipeline=two":           2,
	}
	if !maps.Equal(records, want) {
		t.Errorf("got %v", records)
	}
}

func TestRememberedLabelsAreBounded(t *testing.T) {
	t.Parallel()
	var l labels[requestLabel, *requestOptions]
	for i := range 2*maxLabels + 1 {
		l.of(requestLabel{pipeline: strconv.Itoa(i), reason: "OK"})
		if len(l.made) > maxLabels {
			t.Fatalf("%d are remembered", len(l.made))
		}
	}
	last := requestLabel{pipeline: "last", reason: "OK"}
	if first, second := l.of(last), l.of(last); first != second {
		t.Error("labels are made twice")
	}
}

func TestStatisticsAreBoundedAndOfOneTenant(t *testing.T) {
	t.Parallel()
	m, err := newMetrics(&Service{settings: Settings{Meter: noop.Meter{}}})
	if err != nil {
		t.Fatal(err)
	}
	s := &Service{metrics: m}
	count := func(ctx context.Context, name string) {
		steps := []request.StepTiming{{QueueWait: time.Second, BatchWait: time.Second, Run: time.Second, Rows: 2, BatchSize: 1}, {BatchWait: time.Second, Run: time.Second, Rows: 3, BatchSize: 4}}
		s.countRequest(ctx, &request.Request{}, &request.Response{Pipeline: name, Timeline: request.Timeline{Steps: steps}}, nil, 6*time.Second)
	}
	for i := range 2*maxLabels + 1 {
		count(t.Context(), strconv.Itoa(i))
		if n := len(m.served.byName); n > maxLabels {
			t.Fatalf("%d are remembered", n)
		}
	}
	one := budget.WithTenant(t.Context(), "one")
	count(one, "a")
	count(one, "a")
	got := s.Statistics(one, "")
	if len(got) != 1 || got[0].Last.IsZero() {
		t.Fatalf("got %+v", got)
	}
	want := Statistics{Name: "a", Last: got[0].Last, Rows: 4, Batches: .5, Success: Spent{2, 12 * time.Second}, Queue: Spent{2, 6 * time.Second}, Run: Spent{2, 4 * time.Second}}
	if got[0] != want {
		t.Errorf("got %+v", got[0])
	}
	if got := s.Statistics(budget.WithTenant(t.Context(), "two"), "a"); len(got) != 1 || got[0] != (Statistics{Name: "a"}) {
		t.Errorf("another tenant gets %+v", got)
	}
}
