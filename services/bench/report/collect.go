package report

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/stagemesh/stagemesh/services/bench/load"
)

// Run returns what the load has come to. What the process knows of itself is for a Meter
// to fill in.
func (r *Recorder) Run(s load.Settings, o load.Outcome) Run {
	latency := r.each(fine, func(s *shard) *hdrhistogram.Histogram { return s.latency })
	out := Run{
		Load: loadOf(s), Began: o.Began, ElapsedMS: milliseconds(o.Elapsed), Interrupted: o.Interrupted,
		Sent: o.Sent, NotSent: o.NotSent,
		Latency: distribution(latency), Curve: curve(latency),
		Total:    r.of(func(s *shard) *hdrhistogram.Histogram { return s.total }),
		Hops:     r.of(func(s *shard) *hdrhistogram.Histogram { return s.hops }),
		Outside:  r.of(func(s *shard) *hdrhistogram.Histogram { return s.outside }),
		Failures: r.failures(), Steps: r.steps(), Refusals: r.refusals(), Stream: r.stream(o.Elapsed),
	}
	out.Process.Samples = []ProcessSample{}
	out.Generator.Late = r.of(func(s *shard) *hdrhistogram.Histogram { return s.late })
	out.Answered, out.Failed = r.Answered()
	out.ThroughputPerS = perSecond(out.Answered, o.Elapsed)
	out.Goodput = r.goodput(out, o.Elapsed)
	return out
}

func loadOf(s load.Settings) Load {
	s = s.WithDefaults()
	out := Load{
		Kind: Closed, Concurrency: s.Concurrency,
		WarmupMS: milliseconds(s.Warmup), DurationMS: milliseconds(s.Duration), Requests: s.Requests,
	}
	if s.Open() {
		out.Kind, out.RatePerS, out.Arrivals, out.MaxInFlight, out.Seed = Open, s.Rate, string(s.Arrivals), s.MaxInFlight, s.Seed
	}
	return out
}

func perSecond(n int64, in time.Duration) float64 {
	if in <= 0 {
		return 0
	}
	return float64(n) / in.Seconds()
}

// each adds up one of the shards' histograms.
func (r *Recorder) each(figures int, of func(*shard) *hdrhistogram.Histogram) *hdrhistogram.Histogram {
	var all []*hdrhistogram.Histogram
	for i := range r.shards {
		all = append(all, of(&r.shards[i]))
	}
	return merged(all, figures)
}

func (r *Recorder) of(which func(*shard) *hdrhistogram.Histogram) Distribution {
	return distribution(r.each(coarse, which))
}

func (r *Recorder) goodput(run Run, elapsed time.Duration) *Goodput {
	if r.deadline <= 0 {
		return nil
	}
	out := &Goodput{DeadlineMS: milliseconds(r.deadline)}
	for i := range r.shards {
		out.Answers += r.shards[i].inTime
	}
	out.PerS = perSecond(out.Answers, elapsed)
	if asked := run.Answered + run.Failed + run.NotSent; asked > 0 {
		out.Share = float64(out.Answers) / float64(asked)
	}
	return out
}

// steps returns the steps in the order in which the first shard that has any saw them.
func (r *Recorder) steps() []Step {
	var names []string
	for i := range r.shards {
		for _, s := range r.shards[i].steps {
			if !slices.Contains(names, s.name) {
				names = append(names, s.name)
			}
		}
	}
	out := make([]Step, len(names))
	for i, name := range names {
		out[i] = r.stepOf(name)
	}
	return out
}

func (r *Recorder) stepOf(name string) Step {
	out := Step{Name: name, BatchSizes: map[uint32]int64{}, Dispatches: map[string]int64{}}
	var queue, batch, run []*hdrhistogram.Histogram
	for i := range r.shards {
		for _, s := range r.shards[i].steps {
			if s.name != name {
				continue
			}
			queue, batch, run = append(queue, s.queue), append(batch, s.batch), append(run, s.run)
			add(out.BatchSizes, s.sizes)
			add(out.Dispatches, s.dispatches)
			out.Redelivered += s.redelivered
		}
	}
	out.Queue, out.Batch, out.Run = distribution(merged(queue, coarse)), distribution(merged(batch, coarse)), distribution(merged(run, coarse))
	return out
}

func add[K comparable](to, more map[K]int64) {
	for k, n := range more {
		to[k] += n
	}
}

// failures returns the reasons, the most frequent first.
func (r *Recorder) failures() []Failure {
	all := map[string][]*hdrhistogram.Histogram{}
	found := map[string]Failure{}
	for i := range r.shards {
		for reason, f := range r.shards[i].failures {
			all[reason] = append(all[reason], f.latency)
			if _, ok := found[reason]; !ok {
				found[reason] = Failure{Reason: reason, Refused: f.refused, Example: f.example}
			}
		}
	}
	out := make([]Failure, 0, len(found))
	for _, reason := range slices.Sorted(maps.Keys(found)) {
		f := found[reason]
		f.Latency = distribution(merged(all[reason], coarse))
		out = append(out, f)
	}
	slices.SortStableFunc(out, func(a, b Failure) int { return cmp.Compare(b.Latency.Count, a.Latency.Count) })
	return out
}

func (r *Recorder) refusals() Distribution {
	var all []*hdrhistogram.Histogram
	for i := range r.shards {
		for _, f := range r.shards[i].failures {
			if f.refused {
				all = append(all, f.latency)
			}
		}
	}
	return distribution(merged(all, coarse))
}

// stream returns how the chunks came, nil where there were none.
func (r *Recorder) stream(elapsed time.Duration) *Stream {
	first := distribution(r.each(fine, func(s *shard) *hdrhistogram.Histogram { return s.firstChunk }))
	gap := r.of(func(s *shard) *hdrhistogram.Histogram { return s.gap })
	if first.Count == 0 {
		return nil
	}
	chunks := first.Count + gap.Count
	return &Stream{FirstChunk: first, Gap: gap, Chunks: chunks, ChunksPerS: perSecond(chunks, elapsed)}
}
