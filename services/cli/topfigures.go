package cli

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"time"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/encoding/protodelim"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/explain"
)

const (
	// topSamples is how many samples the figures span.
	topSamples = 6
	// topPresent is how long a process that does not answer counts as running.
	topPresent = 2500 * time.Millisecond
	// maxFamilies and maxAllFamilies bound the metrics of a process, and of all, in bytes. Any
	// client of the broker may send some, and they are packed.
	maxFamilies    = 4 << 20
	maxAllFamilies = 32 << 20
)

// topSample is what a gateway knows of the mesh at one time.
type topSample struct {
	at        time.Time
	processes map[string]topProcess
	stages    []*adminv1.StageStatus
	// hosts is nil if the mesh has no registry.
	hosts []*adminv1.HostStatus
}

// topProcess has the metrics of a process, by name and labels. They only grow: a process has a
// new ID with each start.
type topProcess map[string]series

// series is one series of a metric.
type series struct {
	metric string
	labels map[string]string
	*dto.Metric
}

// readProcesses reads the metrics of processes. Those that cannot be read are left out.
func readProcesses(all []*meshv1.ProcessMetrics) map[string]topProcess {
	out, left := map[string]topProcess{}, int64(maxAllFamilies)
	for _, p := range all {
		bound := min(maxFamilies, left)
		limited := &io.LimitedReader{N: bound}
		if read, err := readMetrics(p.GetFamilies(), limited); err == nil && limited.N > 0 {
			out[p.GetProcess()] = read
		}
		left -= bound - limited.N
	}
	return out
}

// readMetrics unpacks metrics as far as limited allows.
func readMetrics(families []byte, limited *io.LimitedReader) (topProcess, error) {
	unpacked, err := gzip.NewReader(bytes.NewReader(families))
	if err != nil {
		return nil, err
	}
	limited.R = unpacked
	in, out := bufio.NewReader(limited), topProcess{}
	for {
		var f dto.MetricFamily
		if err := protodelim.UnmarshalFrom(in, &f); errors.Is(err, io.EOF) {
			return out, nil
		} else if err != nil {
			return nil, err
		}
		for _, m := range f.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			out[fmt.Sprintf("%s %q", f.GetName(), labels)] = series{f.GetName(), labels, m}
		}
	}
}

// topWindow has the last samples.
type topWindow []topSample

func (w *topWindow) add(s topSample) { *w = append((*w)[max(0, len(*w)-topSamples+1):], s) }

// topFigures are the figures of a mesh. Rates and quantiles are over the last polls.
type topFigures struct {
	Time              time.Time         `json:"time"`
	Gateways          int               `json:"gateways"`
	Hosts             int               `json:"hosts"`
	InFlight          uint64            `json:"requestsInFlight"`
	RequestsPerSecond figure            `json:"requestsPerSecond"`
	P50               figure            `json:"p50Seconds"`
	P99               figure            `json:"p99Seconds"`
	FailuresPerSecond map[string]figure `json:"failuresPerSecond"`
	Stages            []*stageFigures   `json:"stages"`
	// MapItems is how many items a map has for a request, by pipeline and path.
	MapItems map[string]figure `json:"mapItems,omitempty"`

	// records come from the registry.
	records  []*adminv1.HostStatus
	duration histogram
}

type stageFigures struct {
	Stage string `json:"stage"`
	// Unhealthy is why answers may be wrong; mostly empty.
	Unhealthy      string `json:"unhealthy,omitempty"`
	ItemsPerSecond figure `json:"itemsPerSecond"`
	// Queue counts the items that wait for a slot.
	Queue uint64 `json:"queue"`
	Hosts int    `json:"hosts"`
	// Wanted is how many hosts it should have, and why; nil where nobody asks for that.
	Wanted       *wantedFigures `json:"hostsWanted,omitempty"`
	BusySlots    figure         `json:"busySlots"`
	Slots        uint64         `json:"slots"`
	MeanBatch    figure         `json:"meanBatch"`
	QueueWaitP50 figure         `json:"queueWaitP50Seconds"`
	QueueWaitP99 figure         `json:"queueWaitP99Seconds"`
	RunP50       figure         `json:"runP50Seconds"`
	RunP99       figure         `json:"runP99Seconds"`

	hosts                      []*hostFigures
	batchItems, queueWait, run histogram
}

// wantedFigures are the hosts wanted of a stage.
type wantedFigures struct {
	Hosts  uint32 `json:"hosts"`
	Reason string `json:"reason"`
}

type hostFigures struct {
	host                    string
	inFlight, queued, slots uint64
	busySlots               figure
}

// figure is a number that may be unknown: NaN.
type figure float64

// MarshalJSON implements json.Marshaler. An unknown figure is null.
func (f figure) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(f)) {
		return []byte("null"), nil
	}
	return json.Marshal(float64(f))
}

// number returns the figure with about three digits.
func (f figure) number() string {
	switch {
	case math.IsNaN(float64(f)):
		return "-"
	case f < 99.95:
		return fmt.Sprintf("%.1f", float64(f))
	}
	return fmt.Sprintf("%.0f", float64(f))
}

// duration returns seconds with three digits.
func (f figure) duration() string {
	if math.IsNaN(float64(f)) {
		return "-"
	}
	return explain.ShortDuration(time.Duration(f * figure(time.Second)))
}

// figures returns the figures at the last sample. Of a process that was not part of the first
// one nobody knows when it counted what it had by then.
func (w topWindow) figures() *topFigures {
	type span struct {
		first, last topProcess
		seen        time.Time
	}
	spans, now := map[string]*span{}, w[len(w)-1]
	for _, s := range w {
		for id, p := range s.processes {
			if spans[id] == nil {
				spans[id] = &span{first: p}
			}
			spans[id].last, spans[id].seen = p, s.at
		}
	}
	f := &topFigures{Time: now.at, FailuresPerSecond: map[string]figure{}, Stages: []*stageFigures{}, records: now.hosts}
	for _, s := range now.stages {
		stage := f.stage(s.GetStage())
		stage.Unhealthy = s.GetUnhealthyCause()
		if w := s.GetHostsWanted(); w != nil {
			stage.Wanted = &wantedFigures{w.GetHosts(), w.GetReason()}
		}
		for _, q := range s.GetQueues() {
			stage.Queue += q.GetItems()
		}
	}
	for _, p := range spans {
		for key, s := range p.last {
			f.addChange(s, p.first[key].Metric)
			if now.at.Sub(p.seen) <= topPresent {
				f.addState(s)
			}
		}
	}
	f.finish(figure(now.at.Sub(w[0].at).Seconds()))
	return f
}

// stage returns the figures of a stage, new ones if there are none.
func (f *topFigures) stage(name string) *stageFigures {
	at, found := slices.BinarySearchFunc(f.Stages, name, func(s *stageFigures, name string) int { return cmp.Compare(s.Stage, name) })
	if !found {
		f.Stages = slices.Insert(f.Stages, at, &stageFigures{Stage: name})
	}
	return f.Stages[at]
}

// host returns the figures of a host, new ones if there are none.
func (s *stageFigures) host(name string) *hostFigures {
	at, found := slices.BinarySearchFunc(s.hosts, name, func(h *hostFigures, name string) int { return cmp.Compare(h.host, name) })
	if !found {
		s.hosts = slices.Insert(s.hosts, at, &hostFigures{host: name})
	}
	return s.hosts[at]
}

// addState adds the state of a process that runs.
func (f *topFigures) addState(s series) {
	value := uint64(max(0, s.GetGauge().GetValue()))
	host := func() *hostFigures { return f.stage(s.labels["stage"]).host(s.labels["host"]) }
	switch s.metric {
	case "stagemesh_gateway_requests_in_flight":
		f.Gateways++
		f.InFlight += value
	case "stagemesh_stage_items_in_flight":
		host().inFlight += value
		if s.labels["state"] == "queued" {
			host().queued += value
		}
	case "stagemesh_graph_map_items": // of several gateways the largest
		if f.MapItems == nil {
			f.MapItems = map[string]figure{}
		}
		name := s.labels["pipeline"] + "/" + s.labels["map"]
		f.MapItems[name] = max(f.MapItems[name], figure(s.GetGauge().GetValue()))
	case "stagemesh_stage_slots":
		host().slots += value
	}
}

// addChange adds what a process did since a series was as before; nil if it is new.
func (f *topFigures) addChange(s series, before *dto.Metric) {
	stage := func() *stageFigures { return f.stage(s.labels["stage"]) }
	n := figure(max(0, s.GetCounter().GetValue()-before.GetCounter().GetValue()))
	switch s.metric {
	case "stagemesh_gateway_requests_total":
		f.RequestsPerSecond += n
		if reason := s.labels["reason"]; n > 0 && reason != "OK" {
			f.FailuresPerSecond[reason] += n
		}
	case "stagemesh_gateway_request_duration_seconds":
		f.duration.add(s.GetHistogram(), before.GetHistogram())
	case "stagemesh_stage_items_total":
		stage().ItemsPerSecond += n
	case "stagemesh_stage_batch_items":
		stage().batchItems.add(s.GetHistogram(), before.GetHistogram())
	case "stagemesh_stage_queue_wait_seconds":
		stage().queueWait.add(s.GetHistogram(), before.GetHistogram())
	case "stagemesh_stage_run_seconds":
		stage().run.add(s.GetHistogram(), before.GetHistogram())
	case "stagemesh_stage_busy_seconds_total":
		stage().host(s.labels["host"]).busySlots += n
	}
}

// finish makes rates and quantiles of what was counted in a time. In no time they are unknown:
// 0 / 0 is NaN.
func (f *topFigures) finish(seconds figure) {
	f.RequestsPerSecond /= seconds
	for reason := range f.FailuresPerSecond {
		f.FailuresPerSecond[reason] /= seconds
	}
	f.P50, f.P99 = f.duration.quantile(.5), f.duration.quantile(.99)
	for _, s := range f.Stages {
		s.ItemsPerSecond /= seconds
		s.MeanBatch = figure(s.batchItems.sum / s.batchItems.count)
		s.QueueWaitP50, s.QueueWaitP99 = s.queueWait.quantile(.5), s.queueWait.quantile(.99)
		s.RunP50, s.RunP99 = s.run.quantile(.5), s.run.quantile(.99)
		s.sumHosts(seconds)
		f.Hosts += s.Hosts
	}
}

// sumHosts adds up the hosts; one without slots has ended. The queues have items that were
// delivered and not settled too, but none that hosts got in memory.
func (s *stageFigures) sumHosts(seconds figure) {
	s.hosts = slices.DeleteFunc(s.hosts, func(h *hostFigures) bool { return h.slots == 0 })
	s.Hosts = len(s.hosts)
	var queued, taken uint64
	for _, h := range s.hosts {
		h.busySlots /= seconds
		s.Slots, s.BusySlots = s.Slots+h.slots, s.BusySlots+h.busySlots
		queued, taken = queued+h.queued, taken+h.inFlight-h.queued
	}
	s.Queue = max(queued, s.Queue-min(taken, s.Queue))
}

// histogram has how many values were counted up to each bound, which may differ between two
// releases. Its zero value is empty.
type histogram struct {
	upTo       map[float64]float64
	count, sum float64
}

// add adds the growth of a histogram.
func (h *histogram) add(now, before *dto.Histogram) {
	if h.upTo == nil {
		h.upTo = map[float64]float64{}
	}
	for _, b := range now.GetBucket() {
		h.upTo[b.GetUpperBound()] += float64(b.GetCumulativeCount())
	}
	for _, b := range before.GetBucket() {
		h.upTo[b.GetUpperBound()] -= float64(b.GetCumulativeCount())
	}
	h.count += float64(now.GetSampleCount()) - float64(before.GetSampleCount())
	h.sum += now.GetSampleSum() - before.GetSampleSum()
}

// quantile takes the values between two bounds as evenly distributed, as Prometheus does,
// and those above the last bound as that. If nothing was counted it returns NaN.
func (h *histogram) quantile(q float64) figure {
	if h.count == 0 {
		return figure(math.NaN())
	}
	rank, lower, below := q*h.count, 0.0, 0.0
	for _, bound := range slices.Sorted(maps.Keys(h.upTo)) {
		if math.IsInf(bound, 1) {
			break // this bucket is listed only where it has an exemplar
		}
		n := h.upTo[bound]
		if n >= rank && n > below {
			return figure(lower + (bound-lower)*(rank-below)/(n-below))
		}
		lower, below = bound, n
	}
	return figure(lower)
}
