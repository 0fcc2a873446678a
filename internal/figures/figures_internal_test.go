package figures

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

func TestQuantilesLieWithinTheirBuckets(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		upTo     map[float64]float64
		count, q float64
		want     Figure
	}{
		"the middle of the first bucket": {map[float64]float64{1: 10, 2: 10}, 10, .5, .5},
		"the end of a bucket":            {map[float64]float64{1: 5, 2: 10}, 10, .5, 1},
		"within the second":              {map[float64]float64{1: 5, 2: 10}, 10, .9, 1.8},
		"behind an empty bucket":         {map[float64]float64{1: 0, 2: 0, 4: 10}, 10, .5, 3},
		"above the last bound":           {map[float64]float64{1: 1, 2: 1}, 10, .99, 2},
		"an exemplar above it":           {map[float64]float64{1: 1, 2: 1, math.Inf(1): 10}, 10, .5, 2},
		"one value":                      {map[float64]float64{1: 0, 2: 1}, 1, .99, 1.99},
		"nothing":                        {map[float64]float64{1: 0}, 0, .5, Figure(math.NaN())},
	} {
		h := histogram{upTo: test.upTo, count: test.count}
		if got := h.quantile(test.q); math.Abs(float64(got-test.want)) > 1e-9 || math.IsNaN(float64(got)) != math.IsNaN(float64(test.want)) {
			t.Errorf("%s: got %v, want %v", name, got, test.want)
		}
	}
}

func TestFiguresHaveThreeDigits(t *testing.T) {
	t.Parallel()
	for f, want := range map[Figure][2]string{
		0: {"0.0", "0s"}, 1.234e-6: {"0.0", "1.23µs"}, .0123456: {"0.0", "12.3ms"}, .9999: {"1.0", "1s"}, 12.34: {"12.3", "12.3s"},
		99.97: {"100", "1m40s"}, 12345.6: {"12346", "3h25m0s"},
	} {
		if got := [2]string{f.Number(), f.Duration()}; got != want {
			t.Errorf("%v: got %q, want %q", float64(f), got, want)
		}
	}
	unknown := Figure(math.NaN())
	if text, err := json.Marshal(unknown); err != nil || string(text) != "null" || unknown.Number() != "-" || unknown.Duration() != "-" {
		t.Errorf("an unknown one is %s, %s, %s, %v", text, unknown.Number(), unknown.Duration(), err)
	}
}

// metric returns a metric with labels "name=value".
func metric(m *dto.Metric, labels ...string) *dto.Metric {
	for _, l := range labels {
		name, value, _ := strings.Cut(l, "=")
		m.Label = append(m.Label, &dto.LabelPair{Name: &name, Value: &value})
	}
	return m
}

func counter(n float64, labels ...string) *dto.Metric {
	return metric(&dto.Metric{Counter: &dto.Counter{Value: &n}}, labels...)
}

func gauge(n float64, labels ...string) *dto.Metric {
	return metric(&dto.Metric{Gauge: &dto.Gauge{Value: &n}}, labels...)
}

// seconds is a histogram with n values of 10 to 20 ms.
func seconds(n uint64, labels ...string) *dto.Metric {
	h := &dto.Histogram{SampleCount: &n, SampleSum: proto.Float64(.015 * float64(n))}
	for bound, upTo := range map[float64]uint64{.01: 0, .02: n, .04: n} {
		h.Bucket = append(h.Bucket, &dto.Bucket{UpperBound: &bound, CumulativeCount: &upTo})
	}
	return metric(&dto.Metric{Histogram: h}, labels...)
}

// processOf returns a process with these metrics.
func processOf(t *testing.T, id string, metrics map[string][]*dto.Metric) *meshv1.ProcessMetrics {
	t.Helper()
	var out bytes.Buffer
	packed := gzip.NewWriter(&out)
	for name, of := range metrics {
		if _, err := protodelim.MarshalTo(packed, &dto.MetricFamily{Name: &name, Metric: of}); err != nil {
			t.Fatal(err)
		}
	}
	if err := packed.Close(); err != nil {
		t.Fatal(err)
	}
	return &meshv1.ProcessMetrics{Process: id, Families: out.Bytes()}
}

// gatewayProcess has answered so many requests of two pipelines.
func gatewayProcess(t *testing.T, id string, n float64) *meshv1.ProcessMetrics {
	return processOf(t, id, map[string][]*dto.Metric{
		"stagemesh_gateway_requests_in_flight":       {gauge(3)},
		"stagemesh_gateway_requests_total":           {counter(n, "pipeline=a", "reason=OK"), counter(n, "pipeline=b", "reason=OK"), counter(n/2, "pipeline=a", "reason=QUEUE_FULL")},
		"stagemesh_gateway_request_duration_seconds": {seconds(uint64(n), "pipeline=a"), seconds(uint64(n), "pipeline=b")},
	})
}

// hostProcess is a host that ran so many batches of four.
func hostProcess(t *testing.T, id string, batches float64) *meshv1.ProcessMetrics {
	sizes := seconds(uint64(batches), "stage=s")
	sizes.Histogram.SampleSum = proto.Float64(4 * batches)
	return processOf(t, id, map[string][]*dto.Metric{
		"stagemesh_stage_items_total":        {counter(3*batches, "stage=s", "outcome=output"), counter(batches, "stage=s", "outcome=fault")},
		"stagemesh_stage_batch_items":        {sizes},
		"stagemesh_stage_queue_wait_seconds": {seconds(uint64(4*batches), "stage=s")},
		"stagemesh_stage_run_seconds":        {seconds(uint64(batches), "stage=s")},
		"stagemesh_stage_items_in_flight":    {gauge(5, "stage=s", "host="+id, "state=queued"), gauge(4, "stage=s", "host="+id, "state=running"), gauge(9, "stage=s", "host=ended", "state=queued")},
		"stagemesh_stage_slots":              {gauge(2, "stage=s", "host="+id)},
		"stagemesh_stage_busy_seconds_total": {counter(batches/100, "stage=s", "host="+id)},
	})
}

func TestPackedMetricsAreBounded(t *testing.T) {
	t.Parallel()
	large := func(id string, mebibytes int) *meshv1.ProcessMetrics {
		families := map[string][]*dto.Metric{}
		for i := range mebibytes {
			families[fmt.Sprint(i)] = []*dto.Metric{gauge(1, "x="+strings.Repeat("0", 1<<20))}
		}
		return processOf(t, id, families)
	}
	if got := ReadProcesses([]*meshv1.ProcessMetrics{large("a", 3), large("bomb", 5), hostProcess(t, "h", 1)}); len(got) != 2 || got["a"] == nil || got["h"] == nil {
		t.Errorf("%d processes are read", len(got))
	}
	var many []*meshv1.ProcessMetrics
	for i := range 20 {
		many = append(many, large(fmt.Sprint(i), 3))
	}
	if got := ReadProcesses(many); len(got) != 10 {
		t.Errorf("%d of many are read", len(got))
	}
}

func TestFiguresAddUpAllProcesses(t *testing.T) {
	t.Parallel()
	var w Window
	begun := time.Unix(0, 0)
	for i := range 3 {
		n := float64(100 * i)
		items := func(id string, n float64) *meshv1.ProcessMetrics {
			return processOf(t, id, map[string][]*dto.Metric{"stagemesh_graph_map_items": {gauge(n, "pipeline=p", "map=each")}})
		}
		w.Add(Sample{
			At:        begun.Add(time.Duration(i) * 2 * time.Second),
			Processes: ReadProcesses([]*meshv1.ProcessMetrics{gatewayProcess(t, "1", n), gatewayProcess(t, "2", 1000+n), hostProcess(t, "h1", n), hostProcess(t, "h2", n), items("m1", 7.5), items("m2", 3), {Process: "x", Families: []byte("x")}}),
			Stages:    []*adminv1.StageStatus{{Stage: "s", Queues: []*adminv1.QueueStatus{{Items: 40}, {Items: 2}}}, {Stage: "idle"}},
		})
	}
	f := w.Figures()
	if f.Gateways != 2 || f.Hosts != 2 || f.InFlight != 6 || f.RequestsPerSecond != 250 || len(f.FailuresPerSecond) != 1 || f.FailuresPerSecond["QUEUE_FULL"] != 50 {
		t.Errorf("got %+v", f)
	}
	if f.P50.Duration() != "15ms" || f.P99.Duration() != "19.9ms" {
		t.Errorf("quantiles are %v and %v", f.P50, f.P99)
	}
	if a := f.Pipelines["a"]; len(f.Pipelines) != 2 || a.RequestsPerSecond != 150 || a.FailuresPerSecond["QUEUE_FULL"] != 50 || a.P50.Duration() != "15ms" || f.Pipelines["b"].RequestsPerSecond != 100 {
		t.Errorf("of pipelines got %+v", f.Pipelines)
	}
	if f.MapItems["p/each"] != 7.5 || len(f.MapItems) != 1 {
		t.Errorf("maps have %v", f.MapItems)
	}
	if len(f.Stages) != 2 || f.Stages[0].Stage != "idle" || f.Stages[0].Hosts != 0 || f.Stages[0].ItemsPerSecond != 0 {
		t.Fatalf("stages %+v", f.Stages)
	}
	// Of 42 items in the queues 8 run.
	s := f.Stages[1]
	if s.ItemsPerSecond != 400 || s.FaultsPerSecond != 100 || s.Queue != 34 || s.Hosts != 2 || s.BusySlots != 1 || s.Slots != 4 || s.MeanBatch != 4 ||
		s.QueueWaitP50.Duration() != "15ms" || s.QueueWaitP99.Duration() != "19.9ms" || s.RunP50.Duration() != "15ms" || s.RunP99.Duration() != "19.9ms" {
		t.Errorf("got %+v", s)
	}
}

func TestFiguresOutliveRestarts(t *testing.T) {
	t.Parallel()
	type poll struct {
		// at is in seconds.
		at        int64
		processes map[string]float64
	}
	for name, test := range map[string]struct {
		polls    []poll
		gateways int
		// perSecond has no failures and is of one pipeline of two.
		perSecond float64
	}{
		"a process that starts":        {[]poll{{0, map[string]float64{"a": 10}}, {1, map[string]float64{"a": 20, "b": 1000}}, {2, map[string]float64{"a": 30, "b": 1010}}}, 2, 15},
		"a process that restarts":      {[]poll{{0, map[string]float64{"a": 1000}}, {1, map[string]float64{"a": 1020}}, {4, map[string]float64{"b": 4}}}, 1, 5},
		"an answer that came too late": {[]poll{{0, map[string]float64{"a": 10}}, {1, nil}, {2, map[string]float64{"a": 30}}}, 1, 10},
		"a process that is silent":     {[]poll{{0, map[string]float64{"a": 10}}, {1, map[string]float64{"a": 20}}, {2, nil}}, 1, 5},
		"a process that has ended":     {[]poll{{0, map[string]float64{"a": 10}}, {1, map[string]float64{"a": 20}}, {2, nil}, {4, nil}}, 0, 2.5},
		"the last five polls":          {[]poll{{0, map[string]float64{"a": 0}}, {1, map[string]float64{"a": 1000}}, {2, map[string]float64{"a": 1010}}, {3, map[string]float64{"a": 1020}}, {4, map[string]float64{"a": 1030}}, {5, map[string]float64{"a": 1040}}, {6, map[string]float64{"a": 1050}}}, 1, 10},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var w Window
			for _, p := range test.polls {
				var all []*meshv1.ProcessMetrics
				for id, n := range p.processes {
					all = append(all, gatewayProcess(t, id, n))
				}
				w.Add(Sample{At: time.Unix(p.at, 0), Processes: ReadProcesses(all)})
			}
			f := w.Figures()
			if got := float64(f.RequestsPerSecond-f.FailuresPerSecond["QUEUE_FULL"]) / 2; math.Abs(got-test.perSecond) > 1e-9 || f.Gateways != test.gateways {
				t.Errorf("got %v of %d gateways, want %v of %d", got, f.Gateways, test.perSecond, test.gateways)
			}
		})
	}
}
