package report

import (
	"errors"
	"runtime"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/stagemesh/stagemesh/services/bench/load"
)

// Recorder takes the samples of one load.
type Recorder struct {
	deadline time.Duration
	shards   []shard
}

var _ load.Recorder = (*Recorder)(nil)

// NewRecorder returns an empty one. A deadline above 0 is what goodput counts by.
func NewRecorder(deadline time.Duration) *Recorder {
	r := &Recorder{deadline: deadline, shards: make([]shard, runtime.GOMAXPROCS(0))}
	for i := range r.shards {
		r.shards[i].init()
	}
	return r
}

// Record implements load.Recorder.
func (r *Recorder) Record(caller int, s load.Sample) {
	shard := &r.shards[caller%len(r.shards)]
	shard.mu.Lock()
	defer shard.mu.Unlock()
	record(shard.late, s.Late)
	if s.Err != nil {
		shard.failure(s)
		return
	}
	shard.answer(s, r.deadline)
}

// Answered returns how many answers and failures there are so far.
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

// shard is what some callers record, one at a time.
type shard struct {
	mu sync.Mutex

	latency, late, total, hops, outside *hdrhistogram.Histogram
	// firstChunk and gap are nil until there is a chunk.
	firstChunk, gap *hdrhistogram.Histogram
	inTime          int64
	steps           []*step
	failed          int64
	failures        map[string]*failure
}

func (s *shard) init() {
	s.latency = newHistogram(fine)
	for _, h := range []**hdrhistogram.Histogram{&s.late, &s.total, &s.hops, &s.outside} {
		*h = newHistogram(coarse)
	}
	s.failures = map[string]*failure{}
}

func (s *shard) answer(a load.Sample, deadline time.Duration) {
	record(s.latency, a.Latency)
	if a.Latency <= deadline {
		s.inTime++
	}
	var steps time.Duration
	for i := range a.Answer.Steps {
		step := &a.Answer.Steps[i]
		steps += step.Queue + step.Batch + step.Run
		if of := s.step(i, step.Name); of != nil {
			of.record(step)
		}
	}
	if a.Answer.Total > 0 {
		record(s.total, a.Answer.Total)
		record(s.hops, a.Answer.Total-steps)
	}
	record(s.outside, a.Latency-a.Late-max(a.Answer.Total, steps))
	s.chunks(a)
}

// maxSteps bounds the steps that are told apart; pipelines have fewer.
const maxSteps = 64

// step returns what is recorded of the step of that name, which is mostly the i-th; nil
// where there are too many.
func (s *shard) step(i int, name string) *step {
	if i < len(s.steps) && s.steps[i].name == name {
		return s.steps[i]
	}
	for _, known := range s.steps {
		if known.name == name {
			return known
		}
	}
	if len(s.steps) == maxSteps {
		return nil
	}
	s.steps = append(s.steps, newStep(name))
	return s.steps[len(s.steps)-1]
}

func (s *shard) chunks(a load.Sample) {
	for i, at := range a.Answer.Chunks {
		if s.firstChunk == nil {
			s.firstChunk, s.gap = newHistogram(fine), newHistogram(coarse)
		}
		if i == 0 {
			record(s.firstChunk, a.Late+at)
		} else {
			record(s.gap, at-a.Answer.Chunks[i-1])
		}
	}
}

// maxReasons bounds the reasons that are told apart, and other is all beyond.
const (
	maxReasons = 32
	other      = "OTHER"
)

// Unnamed is the reason of a failure that has none.
const Unnamed = "UNKNOWN"

// failure is what is recorded of one reason.
type failure struct {
	refused bool
	example string
	latency *hdrhistogram.Histogram
}

func (s *shard) failure(a load.Sample) {
	s.failed++
	reason, refused := Unnamed, false
	if named, ok := errors.AsType[*load.Failure](a.Err); ok {
		reason, refused = named.Reason, named.Refused
	}
	f := s.failures[reason]
	if f == nil && len(s.failures) >= maxReasons {
		reason, refused = other, false
		f = s.failures[reason]
	}
	if f == nil {
		f = &failure{refused: refused, example: a.Err.Error(), latency: newHistogram(coarse)}
		s.failures[reason] = f
	}
	record(f.latency, a.Latency)
}
