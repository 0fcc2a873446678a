package bench

import (
	"cmp"
	"errors"
	"maps"
	"math/bits"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Sample is one request that has ended.
type Sample struct {
	// Latency is from the planned time of the request until its answer arrived.
	Latency time.Duration
	// Late is the part of it before the request was sent.
	Late time.Duration
	// Answer is valid only during the call.
	Answer *Answer
	Err    error
}

// Recorder aggregates the samples of one load. It is safe for concurrent use. Its memory
// is some histograms per processor, however many samples there are; a sample allocates
// nothing.
type Recorder struct {
	deadline time.Duration
	shards   []shard
}

// shard has the samples of some callers.
type shard struct {
	mu sync.Mutex
	measures
}

// NewRecorder returns an empty recorder. A deadline above 0 defines goodput.
func NewRecorder(deadline time.Duration) *Recorder {
	r := &Recorder{deadline: deadline, shards: make([]shard, runtime.GOMAXPROCS(0))}
	for i := range r.shards {
		r.shards[i].measures = newMeasures()
	}
	return r
}

// Record adds a sample of a caller.
func (r *Recorder) Record(caller int, s Sample) {
	shard := &r.shards[caller%len(r.shards)]
	shard.mu.Lock()
	defer shard.mu.Unlock()
	observe(shard.late, s.Late)
	if s.Err != nil {
		shard.addFailure(s)
	} else {
		shard.addAnswer(s, r.deadline)
	}
}

// Answered returns the numbers of answers and of failures so far.
func (r *Recorder) Answered() (answers, failures int64) {
	for i := range r.shards {
		s := &r.shards[i]
		s.mu.Lock()
		answers += s.latency.TotalCount()
		failures += s.failed
		s.mu.Unlock()
	}
	return answers, failures
}

// Run summarizes a load that has ended.
func (r *Recorder) Run(s Settings, o Outcome) Run {
	all := newMeasures()
	for i := range r.shards {
		all.merge(&r.shards[i].measures)
	}
	out := Run{
		Load: loadOf(s), Began: o.Began, ElapsedMS: milliseconds(o.Elapsed), Interrupted: o.Interrupted,
		Sent: o.Sent, NotSent: o.NotSent, Answered: all.latency.TotalCount(), Failed: all.failed,
		Latency: distribution(all.latency), Curve: curve(all.latency),
		Total: distribution(all.total), Hops: distribution(all.hops), Outside: distribution(all.outside),
		Steps: make([]Step, len(all.steps)), Failures: make([]Failure, 0, len(all.failures)),
		Process: Process{Samples: []ProcessSample{}}, Generator: Generator{Late: distribution(all.late)},
	}
	perSecond := func(n int64) float64 {
		if o.Elapsed <= 0 {
			return 0
		}
		return float64(n) / o.Elapsed.Seconds()
	}
	out.ThroughputPerS = perSecond(out.Answered)
	if r.deadline > 0 {
		out.Goodput = &Goodput{DeadlineMS: milliseconds(r.deadline), Answers: all.inTime, PerS: perSecond(all.inTime)}
		if offered := out.Answered + out.Failed + out.NotSent; offered > 0 {
			out.Goodput.Share = float64(all.inTime) / float64(offered)
		}
	}
	for i, s := range all.steps {
		out.Steps[i] = Step{
			Name: s.name, Queue: distribution(s.queue), Batch: distribution(s.batch), Run: distribution(s.run),
			BatchSizes: s.sizes, Dispatches: s.dispatches, Redelivered: s.redelivered,
		}
	}
	refusals := newHistogram(coarse)
	for _, reason := range slices.Sorted(maps.Keys(all.failures)) {
		f := all.failures[reason]
		if f.refused {
			refusals.Merge(f.latency)
		}
		out.Failures = append(out.Failures, Failure{Reason: reason, Refused: f.refused, Latency: distribution(f.latency), Example: f.example})
	}
	out.Refusals = distribution(refusals)
	slices.SortStableFunc(out.Failures, func(a, b Failure) int { return cmp.Compare(b.Latency.Count, a.Latency.Count) })
	if all.firstChunk != nil {
		chunks := all.firstChunk.TotalCount() + all.gap.TotalCount()
		out.Stream = &Stream{FirstChunk: distribution(all.firstChunk), Gap: distribution(all.gap), Chunks: chunks, ChunksPerS: perSecond(chunks)}
	}
	return out
}

// measures aggregate samples.
type measures struct {
	latency, late, total, hops, outside *hdrhistogram.Histogram
	// firstChunk and gap are nil until there is a chunk.
	firstChunk, gap *hdrhistogram.Histogram
	inTime          int64
	steps           []*stepMeasures
	failed          int64
	failures        map[string]*failureMeasures
}

type stepMeasures struct {
	name              string
	queue, batch, run *hdrhistogram.Histogram
	sizes             map[uint32]int64
	dispatches        map[string]int64
	redelivered       int64
}

type failureMeasures struct {
	refused bool
	example string
	latency *hdrhistogram.Histogram
}

// Bounds on distinct values; otherReason counts the reasons beyond them.
const (
	maxSteps      = 64
	maxReasons    = 32
	maxDispatches = 16
	// maxSizes bounds the sizes of batches; further ones count as the next power of two.
	maxSizes    = 1024
	otherReason = "OTHER"
)

func newMeasures() measures {
	return measures{
		latency: newHistogram(fine), late: newHistogram(coarse), total: newHistogram(coarse),
		hops: newHistogram(coarse), outside: newHistogram(coarse), failures: map[string]*failureMeasures{},
	}
}

func (m *measures) addAnswer(s Sample, deadline time.Duration) {
	observe(m.latency, s.Latency)
	if s.Latency <= deadline {
		m.inTime++
	}
	var steps time.Duration
	for i := range s.Answer.Steps {
		step := &s.Answer.Steps[i]
		steps += step.Queue + step.Batch + step.Run
		if of := m.step(i, step.Name); of != nil {
			of.add(step)
		}
	}
	if s.Answer.Total > 0 {
		observe(m.total, s.Answer.Total)
		observe(m.hops, s.Answer.Total-steps)
	}
	observe(m.outside, s.Latency-s.Late-max(s.Answer.Total, steps))
	for i, at := range s.Answer.Chunks {
		m.needChunks()
		if i == 0 {
			observe(m.firstChunk, s.Late+at)
		} else {
			observe(m.gap, at-s.Answer.Chunks[i-1])
		}
	}
}

func (m *measures) needChunks() {
	if m.firstChunk == nil {
		m.firstChunk, m.gap = newHistogram(fine), newHistogram(coarse)
	}
}

// step returns the step of that name, which is usually the i-th; nil if there are too
// many.
func (m *measures) step(i int, name string) *stepMeasures {
	if i < len(m.steps) && m.steps[i].name == name {
		return m.steps[i]
	}
	for _, known := range m.steps {
		if known.name == name {
			return known
		}
	}
	if len(m.steps) == maxSteps {
		return nil
	}
	m.steps = append(m.steps, &stepMeasures{
		name: name, queue: newHistogram(coarse), batch: newHistogram(coarse), run: newHistogram(coarse),
		sizes: map[uint32]int64{}, dispatches: map[string]int64{},
	})
	return m.steps[len(m.steps)-1]
}

func (s *stepMeasures) add(of *StepTiming) {
	observe(s.queue, of.Queue)
	observe(s.batch, of.Batch)
	observe(s.run, of.Run)
	if of.Attempt > 1 {
		s.redelivered++
	}
	if of.BatchSize == 0 {
		return
	}
	size, reason := of.BatchSize, of.Dispatch
	if _, known := s.sizes[size]; !known && len(s.sizes) >= maxSizes {
		size = 1 << min(bits.Len32(size-1), 31)
	}
	if _, known := s.dispatches[reason]; !known && len(s.dispatches) >= maxDispatches {
		reason = otherReason
	}
	s.sizes[size]++
	s.dispatches[reason]++
}

func (m *measures) addFailure(s Sample) {
	m.failed++
	reason, refused := ReasonUnknown, false
	if of, ok := errors.AsType[*RequestError](s.Err); ok {
		reason, refused = of.Reason, of.Refused
	}
	if m.failures[reason] == nil && len(m.failures) >= maxReasons {
		reason, refused = otherReason, false
	}
	if m.failures[reason] == nil {
		m.failures[reason] = &failureMeasures{refused: refused, example: s.Err.Error(), latency: newHistogram(coarse)}
	}
	observe(m.failures[reason].latency, s.Latency)
}

// merge adds the samples of another.
func (m *measures) merge(of *measures) {
	m.latency.Merge(of.latency)
	m.late.Merge(of.late)
	m.total.Merge(of.total)
	m.hops.Merge(of.hops)
	m.outside.Merge(of.outside)
	if of.firstChunk != nil {
		m.needChunks()
		m.firstChunk.Merge(of.firstChunk)
		m.gap.Merge(of.gap)
	}
	m.inTime += of.inTime
	m.failed += of.failed
	for i, s := range of.steps {
		into := m.step(i, s.name)
		if into == nil {
			continue
		}
		into.queue.Merge(s.queue)
		into.batch.Merge(s.batch)
		into.run.Merge(s.run)
		for size, n := range s.sizes {
			into.sizes[size] += n
		}
		for reason, n := range s.dispatches {
			into.dispatches[reason] += n
		}
		into.redelivered += s.redelivered
	}
	for reason, f := range of.failures {
		if into := m.failures[reason]; into != nil {
			into.latency.Merge(f.latency)
		} else {
			m.failures[reason] = &failureMeasures{refused: f.refused, example: f.example, latency: f.latency}
		}
	}
}

// Range of the histograms: shorter values are 0, and longer ones count as longest. Fine
// and coarse are significant figures.
const (
	shortest = 16 * time.Nanosecond
	longest  = 10 * time.Minute
	fine     = 3
	coarse   = 2
)

func newHistogram(figures int) *hdrhistogram.Histogram {
	return hdrhistogram.New(int64(shortest), int64(longest), figures)
}

// observe records a duration. Negative ones, which clocks that differ produce, count as 0.
func observe(h *hdrhistogram.Histogram, d time.Duration) {
	_ = h.RecordValue(int64(min(max(d, 0), longest))) // it is in the range
}

func distribution(h *hdrhistogram.Histogram) Distribution {
	if h.TotalCount() == 0 {
		return Distribution{}
	}
	at := func(percentile float64) float64 { return milliseconds(time.Duration(h.ValueAtPercentile(percentile))) }
	out := Distribution{
		Count: h.TotalCount(), MeanMS: h.Mean() / float64(time.Millisecond), MinMS: milliseconds(time.Duration(h.Min())),
		P50MS: at(50), P90MS: at(90), P99MS: at(99), P999MS: at(99.9), MaxMS: milliseconds(time.Duration(h.Max())),
	}
	if out.MaxMS == 0 {
		// The mean counts each 0 as the middle of the histogram's first bucket.
		out.MeanMS = 0
	}
	return out
}

// curve returns the histogram as points up to the longest. Five points halve the rest of
// the way to 100 %.
func curve(h *hdrhistogram.Histogram) []Point {
	out := []Point{}
	if h.TotalCount() == 0 {
		return out
	}
	for _, b := range h.CumulativeDistributionWithTicks(5) {
		out = append(out, Point{Percentile: b.Quantile, MS: milliseconds(time.Duration(b.ValueAt))})
	}
	return out
}

// milliseconds are rounded to a microsecond, which is finer than the measurement.
func milliseconds(d time.Duration) float64 {
	return float64(d.Round(time.Microsecond)) / float64(time.Millisecond)
}
