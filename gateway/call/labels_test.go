package call

import (
	"strconv"
	"testing"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/stagemesh/stagemesh/gateway/admit"
	"github.com/stagemesh/stagemesh/gateway/correlate"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

func TestAnswersAreCountedByPipelineAndReason(t *testing.T) {
	t.Parallel()
	reader := sdk.NewManualReader()
	m, err := newMetrics(sdk.NewMeterProvider(sdk.WithReader(reader)).Meter("test"), correlate.New(1, 0), admit.New(1))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		m.request("one", nil, time.Second)
		m.request("one", fault.New(fault.QueueFull, ""), time.Second)
		m.request("two", nil, time.Second)
	}
	var got metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &got); err != nil {
		t.Fatal(err)
	}
	requests, ok := find(got, "stagemesh.gateway.requests").(metricdata.Sum[int64])
	if !ok || len(requests.DataPoints) != 3 {
		t.Fatalf("got %v", requests)
	}
	for _, point := range requests.DataPoints {
		if point.Attributes.Len() != 2 || point.Value != 2 {
			t.Errorf("%v: %d", point.Attributes.ToSlice(), point.Value)
		}
	}
	duration, ok := find(got, "stagemesh.gateway.request").(metricdata.Histogram[float64])
	if !ok || len(duration.DataPoints) != 2 {
		t.Fatalf("got %v", duration)
	}
	for _, point := range duration.DataPoints {
		name, _ := point.Attributes.Value("pipeline")
		if want := map[string]uint64{"one": 4, "two": 2}[name.AsString()]; point.Count != want {
			t.Errorf("%s: %d", name.AsString(), point.Count)
		}
	}
}

func find(from metricdata.ResourceMetrics, name string) metricdata.Aggregation {
	for _, scope := range from.ScopeMetrics {
		for _, m := range scope.Metrics {
			if m.Name == name {
				return m.Data
			}
		}
	}
	return nil
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
