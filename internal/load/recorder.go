package load

import (
	"cmp"
	"errors"
	"maps"
	"math/bits"
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
// is some histograms, however many samples there are. One lock is enough: a sample
// allocates nothing and takes 0.15 us, on all processors of a machine of two cores.
type Recorder struct {
	deadline time.Duration

	mu                                  sync.Mutex
	latency, late, total, hops, outside *hdrhistogram.Histogram
	// firstChunk and gap are nil until there is a chunk.
	firstChunk, gap *hdrhistogram.Histogram
	inTime          int64
	steps           []*stepRecord
	failed          int64
	failures        map[string]*failureRecord
}

type stepRecord struct {
	name              string
	queue, batch, run *hdrhistogram.Histogram
	sizes             map[uint32]int64
	dispatches        map[string]int64
	redelivered       int64
}

type failureRecord struct {
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

// NewRecorder returns an empty recorder. A deadline above 0 defines goodput.
func NewRecorder(deadline time.Duration) *Recorder {
	return &Recorder{
		deadline: deadline, latency: newHistogram(fine), late: newHistogram(coarse), total: newHistogram(coarse),
		hops: newHistogram(coarse), outside: newHistogram(coarse), failures: map[string]*failureRecord{},
	}
}

// Record adds a sample.
func (r *Recorder) Record(s Sample) {
	r.mu.Lock()
	defer r.mu.Unlock()
	observe(r.late, s.Late)
	if s.Err != nil {
		r.addFailure(s)
	} else {
		r.addAnswer(s)
	}
}

// Answered returns the numbers of answers and of failures so far.
func (r *Recorder) Answered() (answers, failures int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.latency.TotalCount(), r.failed
}

// Run summarizes a load that has ended.
func (r *Recorder) Run(s Settings, o Outcome) Run {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := Run{
		Load: loadOf(s), Began: o.Began, ElapsedMS: milliseconds(o.Elapsed), Interrupted: o.Interrupted,
		Sent: o.Sent, NotSent: o.NotSent, Answered: r.latency.TotalCount(), Failed: r.failed,
		Latency: distribution(r.latency), Curve: curve(r.latency),
		Total: distribution(r.total), Hops: distribution(r.hops), Outside: distribution(r.outside),
		Steps: make([]Step, len(r.steps)), Failures: make([]Failure, 0, len(r.failures)),
		Process: Process{Samples: []ProcessSample{}}, Generator: Generator{Late: distribution(r.late)},
	}
	perSecond := func(n int64) float64 {
		if o.Elapsed <= 0 {
			return 0
		}
		return float64(n) / o.Elapsed.Seconds()
	}
	out.ThroughputPerS = perSecond(out.Answered)
	if r.deadline > 0 {
		out.Goodput = &Goodput{DeadlineMS: milliseconds(r.deadline), Answers: r.inTime, PerS: perSecond(r.inTime)}
		if offered := out.Answered + out.Failed + out.NotSent; offered > 0 {
			out.Goodput.Share = float64(r.inTime) / float64(offered)
		}
	}
	for i, s := range r.steps {
		out.Steps[i] = Step{
			Name: s.name, Queue: distribution(s.queue), Batch: distribution(s.batch), Run: distribution(s.run),
			BatchSizes: s.sizes, Dispatches: s.dispatches, Redelivered: s.redelivered,
		}
	}
	refusals := newHistogram(coarse)
	for _, reason := range slices.Sorted(maps.Keys(r.failures)) {
		f := r.failures[reason]
		if f.refused {
			refusals.Merge(f.latency)
		}
		out.Failures = append(out.Failures, Failure{Reason: reason, Refused: f.refused, Latency: distribution(f.latency), Example: f.example})
	}
	out.Refusals = distribution(refusals)
	slices.SortStableFunc(out.Failures, func(a, b Failure) int { return cmp.Compare(b.Latency.Count, a.Latency.Count) })
	if r.firstChunk != nil {
		chunks := r.firstChunk.TotalCount() + r.gap.TotalCount()
		out.Stream = &Stream{FirstChunk: distribution(r.firstChunk), Gap: distribution(r.gap), Chunks: chunks, ChunksPerS: perSecond(chunks)}
	}
	return out
}

func (r *Recorder) addAnswer(s Sample) {
	observe(r.latency, s.Latency)
	if s.Latency <= r.deadline {
		r.inTime++
	}
	var steps time.Duration
	for i := range s.Answer.Steps {
		step := &s.Answer.Steps[i]
		steps += step.Queue + step.Batch + step.Run
		if of := r.step(i, step.Name); of != nil {
			of.add(step)
		}
	}
	if s.Answer.Total > 0 {
		observe(r.total, s.Answer.Total)
		if steps <= s.Answer.Total { // otherwise steps ran in parallel
			observe(r.hops, s.Answer.Total-steps)
		}
	}
	observe(r.outside, s.Latency-s.Late-cmp.Or(s.Answer.Total, steps))
	for i, at := range s.Answer.Chunks {
		if r.firstChunk == nil {
			r.firstChunk, r.gap = newHistogram(fine), newHistogram(coarse)
		}
		if i == 0 {
			observe(r.firstChunk, s.Late+at)
		} else {
			observe(r.gap, at-s.Answer.Chunks[i-1])
		}
	}
}

// step returns the step of that name, which is usually the i-th; nil if there are too
// many.
func (r *Recorder) step(i int, name string) *stepRecord {
	if i < len(r.steps) && r.steps[i].name == name {
		return r.steps[i]
	}
	for _, known := range r.steps {
		if known.name == name {
			return known
		}
	}
	if len(r.steps) == maxSteps {
		return nil
	}
	r.steps = append(r.steps, &stepRecord{
		name: name, queue: newHistogram(coarse), batch: newHistogram(coarse), run: newHistogram(coarse),
		sizes: map[uint32]int64{}, dispatches: map[string]int64{},
	})
	return r.steps[len(r.steps)-1]
}

func (s *stepRecord) add(of *StepTiming) {
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

func (r *Recorder) addFailure(s Sample) {
	r.failed++
	reason, refused := ReasonUnknown, false
	if of, ok := errors.AsType[*RequestError](s.Err); ok {
		reason, refused = of.Reason, of.Refused
	}
	if r.failures[reason] == nil && len(r.failures) >= maxReasons {
		reason, refused = otherReason, false
	}
	if r.failures[reason] == nil {
		r.failures[reason] = &failureRecord{refused: refused, example: s.Err.Error(), latency: newHistogram(coarse)}
	}
	observe(r.failures[reason].latency, s.Latency)
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
