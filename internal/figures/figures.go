// Package figures computes the rates, quantiles and states of a mesh from samples of what its
// processes count, for stagemesh top and for the page of the admin port.
//
//	var window figures.Window
//	window.Add(figures.Sample{At: time.Now(), Processes: figures.ReadProcesses(metrics), Stages: stages, Hosts: hosts})
//	shown := window.Figures()
//
// A window is for one goroutine; figures are not changed once they are returned. Metrics may come
// from any client of the broker: those that are too large or malformed are left out.
package figures

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
	// samples is how many samples the figures span.
	samples = 6
	// present is how long a process that does not answer counts as running.
	present = 2500 * time.Millisecond
	// maxFamilies and maxAllFamilies bound the metrics of a process, and of all, in bytes. Any
	// client of the broker may send some, and they are packed.
	maxFamilies    = 4 << 20
	maxAllFamilies = 32 << 20
)

// Sample is what a gateway knows of the mesh at one time.
type Sample struct {
	At        time.Time
	Processes map[string]Process
	Stages    []*adminv1.StageStatus
	// Hosts is nil if the mesh has no registry.
	Hosts []*adminv1.HostStatus
}

// Process has the metrics of a process, by name and labels. They only grow: a process has a
// new ID with each start.
type Process map[string]series

// series is one series of a metric.
type series struct {
	metric string
	labels map[string]string
	*dto.Metric
}

// ReadProcesses reads the metrics of processes. Those that cannot be read are left out.
func ReadProcesses(all []*meshv1.ProcessMetrics) map[string]Process {
	out, left := map[string]Process{}, int64(maxAllFamilies)
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
func readMetrics(families []byte, limited *io.LimitedReader) (Process, error) {
	unpacked, err := gzip.NewReader(bytes.NewReader(families))
	if err != nil {
		return nil, err
	}
	limited.R = unpacked
	in, out := bufio.NewReader(limited), Process{}
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

// Window has the last samples.
type Window []Sample

// Add adds a sample, which is later than the others.
func (w *Window) Add(s Sample) { *w = append((*w)[max(0, len(*w)-samples+1):], s) }

// Mesh has the figures of a mesh. Rates and quantiles are over the last samples.
type Mesh struct {
	Time     time.Time `json:"time"`
	Gateways int       `json:"gateways"`
	Hosts    int       `json:"hosts"`
	InFlight uint64    `json:"requestsInFlight"`
	Requests
	Stages []*Stage `json:"stages"`
	// MapItems is how many items a map has for a request, by pipeline and path.
	MapItems map[string]Figure `json:"mapItems,omitempty"`
	// Pipelines has the requests of each pipeline.
	Pipelines map[string]*Requests `json:"-"`
	// Records come from the registry.
	Records []*adminv1.HostStatus `json:"-"`
}

// Requests has the rates and quantiles of requests.
type Requests struct {
	RequestsPerSecond Figure `json:"requestsPerSecond"`
	P50               Figure `json:"p50Seconds"`
	P99               Figure `json:"p99Seconds"`
	// FailuresPerSecond is by reason.
	FailuresPerSecond map[string]Figure `json:"failuresPerSecond"`

	duration histogram
}

// Stage has the figures of a stage.
type Stage struct {
	Stage string `json:"stage"`
	// Unhealthy is why answers may be wrong; mostly empty.
	Unhealthy      string `json:"unhealthy,omitempty"`
	ItemsPerSecond Figure `json:"itemsPerSecond"`
	// FaultsPerSecond are those of the items that ended with a fault.
	FaultsPerSecond Figure `json:"faultsPerSecond"`
	// Queue counts the items that wait for a slot.
	Queue uint64 `json:"queue"`
	Hosts int    `json:"hosts"`
	// Wanted is how many hosts it should have, and why; nil where nobody asks for that.
	Wanted       *Wanted `json:"hostsWanted,omitempty"`
	BusySlots    Figure  `json:"busySlots"`
	Slots        uint64  `json:"slots"`
	MeanBatch    Figure  `json:"meanBatch"`
	QueueWaitP50 Figure  `json:"queueWaitP50Seconds"`
	QueueWaitP99 Figure  `json:"queueWaitP99Seconds"`
	RunP50       Figure  `json:"runP50Seconds"`
	RunP99       Figure  `json:"runP99Seconds"`

	// ByHost has its hosts, sorted by name.
	ByHost []*Host `json:"-"`

	batchItems, queueWait, run histogram
}

// Wanted is how many hosts a stage should have.
type Wanted struct {
	Hosts  uint32 `json:"hosts"`
	Reason string `json:"reason"`
}

// Host has the figures of a host.
type Host struct {
	Host                    string
	InFlight, Queued, Slots uint64
	BusySlots               Figure
}

// Disconnected is the state of a host that is registered and not alive.
const Disconnected = "disconnected"

// HostState names the state of a host.
func HostState(h *adminv1.HostStatus) string {
	switch r := h.GetRecord(); {
	case !h.GetAlive():
		return Disconnected
	case r.GetDraining():
		return "draining"
	case !r.GetReady():
		return "not ready"
	default:
		return "ready"
	}
}

// Figure is a number that may be unknown: NaN.
type Figure float64

// MarshalJSON implements json.Marshaler. An unknown Figure is null.
func (f Figure) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(f)) {
		return []byte("null"), nil
	}
	return json.Marshal(float64(f))
}

// Number returns the figure with about three digits.
func (f Figure) Number() string {
	switch {
	case math.IsNaN(float64(f)):
		return "-"
	case f < 99.95:
		return fmt.Sprintf("%.1f", float64(f))
	}
	return fmt.Sprintf("%.0f", float64(f))
}

// Duration returns seconds with three digits.
func (f Figure) Duration() string {
	if math.IsNaN(float64(f)) {
		return "-"
	}
	return explain.ShortDuration(time.Duration(f * Figure(time.Second)))
}

// Figures returns the figures at the last sample. Of a process that was not part of the first
// one nobody knows when it counted what it had by then.
func (w Window) Figures() *Mesh {
	type span struct {
		first, last Process
		seen        time.Time
	}
	spans, now := map[string]*span{}, w[len(w)-1]
	for _, s := range w {
		for id, p := range s.Processes {
			if spans[id] == nil {
				spans[id] = &span{first: p}
			}
			spans[id].last, spans[id].seen = p, s.At
		}
	}
	f := &Mesh{Time: now.At, Requests: newRequests(), Stages: []*Stage{}, Pipelines: map[string]*Requests{}, Records: now.Hosts}
	for _, s := range now.Stages {
		stage := f.stage(s.GetStage())
		stage.Unhealthy = s.GetUnhealthyCause()
		if w := s.GetHostsWanted(); w != nil {
			stage.Wanted = &Wanted{w.GetHosts(), w.GetReason()}
		}
		for _, q := range s.GetQueues() {
			stage.Queue += q.GetItems()
		}
	}
	for _, p := range spans {
		for key, s := range p.last {
			f.addChange(s, p.first[key].Metric)
			if now.At.Sub(p.seen) <= present {
				f.addState(s)
			}
		}
	}
	f.finish(Figure(now.At.Sub(w[0].At).Seconds()))
	return f
}

func newRequests() Requests { return Requests{FailuresPerSecond: map[string]Figure{}} }

// pipeline returns the requests of a pipeline, new ones if there are none.
func (f *Mesh) pipeline(name string) *Requests {
	if f.Pipelines[name] == nil {
		requests := newRequests()
		f.Pipelines[name] = &requests
	}
	return f.Pipelines[name]
}

// stage returns the figures of a stage, new ones if there are none.
func (f *Mesh) stage(name string) *Stage {
	at, found := slices.BinarySearchFunc(f.Stages, name, func(s *Stage, name string) int { return cmp.Compare(s.Stage, name) })
	if !found {
		f.Stages = slices.Insert(f.Stages, at, &Stage{Stage: name})
	}
	return f.Stages[at]
}

// host returns the figures of a host, new ones if there are none.
func (s *Stage) host(name string) *Host {
	at, found := slices.BinarySearchFunc(s.ByHost, name, func(h *Host, name string) int { return cmp.Compare(h.Host, name) })
	if !found {
		s.ByHost = slices.Insert(s.ByHost, at, &Host{Host: name})
	}
	return s.ByHost[at]
}

// addState adds the state of a process that runs.
func (f *Mesh) addState(s series) {
	value := uint64(max(0, s.GetGauge().GetValue()))
	host := func() *Host { return f.stage(s.labels["stage"]).host(s.labels["host"]) }
	switch s.metric {
	case "stagemesh_gateway_requests_in_flight":
		f.Gateways++
		f.InFlight += value
	case "stagemesh_stage_items_in_flight":
		host().InFlight += value
		if s.labels["state"] == "queued" {
			host().Queued += value
		}
	case "stagemesh_graph_map_items": // of several gateways the largest
		if f.MapItems == nil {
			f.MapItems = map[string]Figure{}
		}
		name := s.labels["pipeline"] + "/" + s.labels["map"]
		f.MapItems[name] = max(f.MapItems[name], Figure(s.GetGauge().GetValue()))
	case "stagemesh_stage_slots":
		host().Slots += value
	}
}

// addChange adds what a process did since a series was as before; nil if it is new.
func (f *Mesh) addChange(s series, before *dto.Metric) {
	stage := func() *Stage { return f.stage(s.labels["stage"]) }
	n := Figure(max(0, s.GetCounter().GetValue()-before.GetCounter().GetValue()))
	switch s.metric {
	case "stagemesh_gateway_requests_total":
		for _, r := range []*Requests{&f.Requests, f.pipeline(s.labels["pipeline"])} {
			r.RequestsPerSecond += n
			if reason := s.labels["reason"]; n > 0 && reason != "OK" {
				r.FailuresPerSecond[reason] += n
			}
		}
	case "stagemesh_gateway_request_duration_seconds":
		f.duration.add(s.GetHistogram(), before.GetHistogram())
		f.pipeline(s.labels["pipeline"]).duration.add(s.GetHistogram(), before.GetHistogram())
	case "stagemesh_stage_items_total":
		stage().ItemsPerSecond += n
		if s.labels["outcome"] == "fault" {
			stage().FaultsPerSecond += n
		}
	case "stagemesh_stage_batch_items":
		stage().batchItems.add(s.GetHistogram(), before.GetHistogram())
	case "stagemesh_stage_queue_wait_seconds":
		stage().queueWait.add(s.GetHistogram(), before.GetHistogram())
	case "stagemesh_stage_run_seconds":
		stage().run.add(s.GetHistogram(), before.GetHistogram())
	case "stagemesh_stage_busy_seconds_total":
		stage().host(s.labels["host"]).BusySlots += n
	}
}

// finish makes rates and quantiles of what was counted in a time. In no time they are unknown:
// 0 / 0 is NaN.
func (f *Mesh) finish(seconds Figure) {
	f.Requests.finish(seconds)
	for _, r := range f.Pipelines {
		r.finish(seconds)
	}
	for _, s := range f.Stages {
		s.ItemsPerSecond /= seconds
		s.FaultsPerSecond /= seconds
		s.MeanBatch = Figure(s.batchItems.sum / s.batchItems.count)
		s.QueueWaitP50, s.QueueWaitP99 = s.queueWait.quantile(.5), s.queueWait.quantile(.99)
		s.RunP50, s.RunP99 = s.run.quantile(.5), s.run.quantile(.99)
		s.sumHosts(seconds)
		f.Hosts += s.Hosts
	}
}

func (r *Requests) finish(seconds Figure) {
	r.RequestsPerSecond /= seconds
	for reason := range r.FailuresPerSecond {
		r.FailuresPerSecond[reason] /= seconds
	}
	r.P50, r.P99 = r.duration.quantile(.5), r.duration.quantile(.99)
}

// sumHosts adds up the hosts; one without slots has ended. The queues have items that were
// delivered and not settled too, but none that hosts got in memory.
func (s *Stage) sumHosts(seconds Figure) {
	s.ByHost = slices.DeleteFunc(s.ByHost, func(h *Host) bool { return h.Slots == 0 })
	s.Hosts = len(s.ByHost)
	var queued, taken uint64
	for _, h := range s.ByHost {
		h.BusySlots /= seconds
		s.Slots, s.BusySlots = s.Slots+h.Slots, s.BusySlots+h.BusySlots
		queued, taken = queued+h.Queued, taken+h.InFlight-h.Queued
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
func (h *histogram) quantile(q float64) Figure {
	if h.count == 0 {
		return Figure(math.NaN())
	}
	rank, lower, below := q*h.count, 0.0, 0.0
	for _, bound := range slices.Sorted(maps.Keys(h.upTo)) {
		if math.IsInf(bound, 1) {
			break // this bucket is listed only where it has an exemplar
		}
		n := h.upTo[bound]
		if n >= rank && n > below {
			return Figure(lower + (bound-lower)*(rank-below)/(n-below))
		}
		lower, below = bound, n
	}
	return Figure(lower)
}
