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
)

const (
	// topPolls is how many polls the figures are a mean of.
	topPolls = 5
	// topPresent is how long a process that does not answer counts as running, and topKept
	// how long its metrics are kept for the next difference.
	topPresent = 2500 * time.Millisecond
	topKept    = time.Minute
	// maxFamilies bounds the metrics of a process, in bytes.
	maxFamilies = 64 << 20
)

// topSample is what a gateway knows of the mesh.
type topSample struct {
	processes []*meshv1.ProcessMetrics
	stages    []*adminv1.StageStatus
	// hosts is nil if the mesh has no registry.
	hosts []*adminv1.HostStatus
}

// topWindow makes figures of samples. Its zero value is ready for use.
type topWindow struct {
	at    time.Time
	now   topSample
	known map[string]knownProcess
	polls []topPoll
}

type knownProcess struct {
	series map[string]series
	seen   time.Time
}

// series is one series of a metric.
type series struct {
	metric string
	*dto.Metric
}

func (s series) label(name string) string {
	for _, l := range s.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// topPoll is what changed since the sample before. A process that was not known then is not
// part of it: nobody knows when it counted.
type topPoll struct {
	took    time.Duration
	changes []change
}

// change is a series now and before; before has no Metric if it is new.
type change struct{ now, before series }

// count returns by how much a counter has grown. One that went back began anew.
func (c change) count() figure {
	now, before := c.now.GetCounter().GetValue(), c.before.GetCounter().GetValue()
	if now < before {
		before = 0
	}
	return figure(now - before)
}

// add adds the next sample. Processes whose metrics cannot be read are left out.
func (w *topWindow) add(s topSample, at time.Time) {
	if w.known == nil {
		w.known = map[string]knownProcess{}
	}
	poll := topPoll{took: at.Sub(w.at)}
	for _, p := range s.processes {
		now, err := seriesOf(p.GetFamilies())
		if err != nil {
			continue
		}
		if before, ok := w.known[p.GetProcess()]; ok {
			for key, one := range now {
				poll.changes = append(poll.changes, change{one, before.series[key]})
			}
		}
		w.known[p.GetProcess()] = knownProcess{now, at}
	}
	maps.DeleteFunc(w.known, func(_ string, p knownProcess) bool { return at.Sub(p.seen) > topKept })
	if !w.at.IsZero() {
		w.polls = append(w.polls, poll)
		w.polls = w.polls[max(0, len(w.polls)-topPolls):]
	}
	w.at, w.now = at, s
}

// seriesOf reads the metrics of a process, by name and labels.
func seriesOf(families []byte) (map[string]series, error) {
	unpacked, err := gzip.NewReader(bytes.NewReader(families))
	if err != nil {
		return nil, err
	}
	in, out := bufio.NewReader(io.LimitReader(unpacked, maxFamilies)), map[string]series{}
	for {
		var f dto.MetricFamily
		if err := protodelim.UnmarshalFrom(in, &f); errors.Is(err, io.EOF) {
			return out, nil
		} else if err != nil {
			return nil, err
		}
		for _, m := range f.GetMetric() {
			key := f.GetName()
			for _, l := range m.GetLabel() {
				key += fmt.Sprintf(" %q", l.GetValue())
			}
			out[key] = series{f.GetName(), m}
		}
	}
}

// topFigures are the figures of a mesh. Rates and quantiles are those of the last polls.
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

	// records are those of the registry.
	records  []*adminv1.HostStatus
	duration histogram
}

type stageFigures struct {
	Stage          string `json:"stage"`
	ItemsPerSecond figure `json:"itemsPerSecond"`
	// Queue counts the items that wait for a slot.
	Queue        uint64 `json:"queue"`
	Hosts        int    `json:"hosts"`
	BusySlots    figure `json:"busySlots"`
	Slots        uint64 `json:"slots"`
	MeanBatch    figure `json:"meanBatch"`
	QueueWaitP50 figure `json:"queueWaitP50Seconds"`
	QueueWaitP99 figure `json:"queueWaitP99Seconds"`
	RunP50       figure `json:"runP50Seconds"`
	RunP99       figure `json:"runP99Seconds"`

	hosts                      []*hostFigures
	batchItems, queueWait, run histogram
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
	d, digit := time.Duration(f*figure(time.Second)), time.Duration(1)
	for d/digit >= 1000 {
		digit *= 10
	}
	return d.Round(digit).String()
}

// figures returns the figures at the last sample.
func (w *topWindow) figures() *topFigures {
	f := &topFigures{Time: w.at, FailuresPerSecond: map[string]figure{}, Stages: []*stageFigures{}, records: w.now.hosts}
	for _, s := range w.now.stages {
		stage := f.stage(s.GetStage())
		for _, q := range s.GetQueues() {
			stage.Queue += q.GetItems()
		}
	}
	for _, p := range w.known {
		if w.at.Sub(p.seen) <= topPresent {
			for _, one := range p.series {
				f.addState(one)
			}
		}
	}
	var took time.Duration
	for _, poll := range w.polls {
		took += poll.took
		for _, c := range poll.changes {
			f.addChange(c)
		}
	}
	f.finish(figure(took.Seconds()))
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
	switch s.metric {
	case "stagemesh_gateway_requests_in_flight":
		f.Gateways++
		f.InFlight += value
	case "stagemesh_stage_items_in_flight":
		h := f.stage(s.label("stage")).host(s.label("host"))
		h.inFlight += value
		if s.label("state") == "queued" {
			h.queued += value
		}
	case "stagemesh_stage_slots":
		f.stage(s.label("stage")).host(s.label("host")).slots += value
	}
}

// addChange adds what a process did in the window.
func (f *topFigures) addChange(c change) {
	stage := func() *stageFigures { return f.stage(c.now.label("stage")) }
	switch c.now.metric {
	case "stagemesh_gateway_requests_total":
		n := c.count()
		f.RequestsPerSecond += n
		if reason := c.now.label("reason"); n > 0 && reason != "OK" {
			f.FailuresPerSecond[reason] += n
		}
	case "stagemesh_gateway_request_duration_seconds":
		f.duration.add(c)
	case "stagemesh_stage_items_total":
		stage().ItemsPerSecond += c.count()
	case "stagemesh_stage_batch_items":
		stage().batchItems.add(c)
	case "stagemesh_stage_queue_wait_seconds":
		stage().queueWait.add(c)
	case "stagemesh_stage_run_seconds":
		stage().run.add(c)
	case "stagemesh_stage_busy_seconds_total":
		stage().host(c.now.label("host")).busySlots += c.count()
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
		s.MeanBatch = figure(s.batchItems.sum / float64(s.batchItems.count))
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
	upTo  map[float64]uint64
	count uint64
	sum   float64
}

// add adds the growth of a series. One that went back began anew.
func (h *histogram) add(c change) {
	now, before := c.now.GetHistogram(), c.before.GetHistogram()
	if now.GetSampleCount() < before.GetSampleCount() {
		before = nil
	}
	upTo := map[float64]uint64{}
	for _, b := range before.GetBucket() {
		upTo[b.GetUpperBound()] = b.GetCumulativeCount()
	}
	if h.upTo == nil {
		h.upTo = map[float64]uint64{}
	}
	for _, b := range now.GetBucket() {
		h.upTo[b.GetUpperBound()] += b.GetCumulativeCount() - min(upTo[b.GetUpperBound()], b.GetCumulativeCount())
	}
	h.count += now.GetSampleCount() - before.GetSampleCount()
	h.sum += now.GetSampleSum() - before.GetSampleSum()
}

// quantile takes the values between two bounds as evenly distributed, as Prometheus does,
// and those above the last bound as that. If nothing was counted it returns NaN.
func (h *histogram) quantile(q float64) figure {
	if h.count == 0 {
		return figure(math.NaN())
	}
	rank, lower, below := q*float64(h.count), 0.0, 0.0
	for _, bound := range slices.Sorted(maps.Keys(h.upTo)) {
		if math.IsInf(bound, 1) {
			break // this bucket is listed only where it has an exemplar
		}
		n := float64(h.upTo[bound])
		if n >= rank && n > below {
			return figure(lower + (bound-lower)*(rank-below)/(n-below))
		}
		lower, below = bound, n
	}
	return figure(lower)
}
