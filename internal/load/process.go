package load

import (
	"bytes"
	"os"
	"runtime"
	"runtime/metrics"
	"strconv"
	"sync"
	"time"
)

// Process describes the generator's process during a run.
type Process struct {
	// Samples are in order, evenly spaced, and at most maxSamples.
	Samples []ProcessSample `json:"samples"`
}

// ProcessSample describes the process at one moment. A megabyte is a million bytes.
type ProcessSample struct {
	// AtMS is since the load began, with its warm-up.
	AtMS float64 `json:"at_ms"`
	// HeapMB is the live heap of the last collection. Unlike the allocated heap it does
	// not rise and fall with the collector, so growth is visible.
	HeapMB float64 `json:"heap_mb"`
	// RSSMB is the resident memory; 0 on systems that do not report it.
	RSSMB      float64 `json:"rss_mb"`
	Goroutines int64   `json:"goroutines"`
}

// Measured returns the process's samples since the end of the warm-up.
func (r Run) Measured() []ProcessSample {
	for i, s := range r.Process.Samples {
		if s.AtMS >= r.Load.WarmupMS {
			return r.Process.Samples[i:]
		}
	}
	return nil
}

// Meter measures the generator's process. It has one goroutine, which ends with Stop or
// Into. A Meter is for one goroutine.
type Meter struct {
	shared  bool
	begun   time.Time
	used    time.Duration
	samples sampleSeries
	stop    func()
}

// StartMeter starts a meter and takes its first sample. Shared means that the mesh is in
// this process too. A collection comes first, so that the live heap is known.
func StartMeter(shared bool) *Meter {
	runtime.GC()
	m := &Meter{shared: shared, begun: time.Now(), used: cpuTime(), samples: sampleSeries{interval: firstInterval}}
	stopped := make(chan struct{})
	var sampling sync.WaitGroup
	m.samples.add(0, thisProcess())
	sampling.Go(func() { m.sample(stopped) })
	m.stop = sync.OnceFunc(func() {
		close(stopped)
		sampling.Wait()
	})
	return m
}

// Stop ends the meter, and may be called more than once.
func (m *Meter) Stop() { m.stop() }

// Into stops the meter and adds its measurements to the run.
func (m *Meter) Into(r *Run) {
	m.Stop()
	took, used := time.Since(m.begun), cpuTime()-m.used
	r.Generator.Shared, r.Generator.CPUMS = m.shared, milliseconds(used)
	if took > 0 {
		r.Generator.CPUShare = used.Seconds() / took.Seconds() / float64(ThisMachine().Cores)
	}
	r.Process.Samples = m.samples.samples
}

func (m *Meter) sample(stopped <-chan struct{}) {
	wait := func() time.Duration {
		passed := time.Since(m.begun)
		return m.samples.next(passed) - passed
	}
	timer := time.NewTimer(wait())
	defer timer.Stop()
	for {
		select {
		case <-stopped:
			return
		case <-timer.C:
			m.samples.add(time.Since(m.begun), thisProcess())
			timer.Reset(wait())
		}
	}
}

// Bounds on the samples of a process.
const (
	maxSamples    = 60
	firstInterval = time.Second
)

// sampleSeries keeps evenly spaced samples of a run of any length: when it is full it
// drops every second sample and doubles its interval. It is pure; times are since its
// start.
type sampleSeries struct {
	interval time.Duration
	at       []time.Duration
	samples  []ProcessSample
}

// next returns when the next sample is due. Missed samples are not made up for.
func (s *sampleSeries) next(after time.Duration) time.Duration {
	return after.Truncate(s.interval) + s.interval
}

// add keeps a sample that is later than all others, unless its interval already has one,
// which is possible after the interval has doubled.
func (s *sampleSeries) add(at time.Duration, sample ProcessSample) {
	for len(s.samples) >= maxSamples {
		s.thin()
	}
	if n := len(s.at); n > 0 && s.at[n-1]/s.interval == at/s.interval {
		return
	}
	sample.AtMS = milliseconds(at)
	s.at, s.samples = append(s.at, at), append(s.samples, sample)
}

// thin doubles the interval and keeps the first sample of each.
func (s *sampleSeries) thin() {
	s.interval *= 2
	kept := 0
	last := time.Duration(-1)
	for i, at := range s.at {
		if at/s.interval == last {
			continue
		}
		last = at / s.interval
		s.at[kept], s.samples[kept] = at, s.samples[i]
		kept++
	}
	s.at, s.samples = s.at[:kept], s.samples[:kept]
}

func thisProcess() ProcessSample {
	read := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/sched/goroutines:goroutines"}}
	metrics.Read(read)
	value := func(s metrics.Sample) uint64 {
		if s.Value.Kind() != metrics.KindUint64 {
			return 0 // a later runtime may have no such metric
		}
		return s.Value.Uint64()
	}
	statm, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		statm = nil // only Linux has it
	}
	return ProcessSample{
		HeapMB: megabytes(value(read[0])), RSSMB: megabytes(residentPages(statm) * uint64(os.Getpagesize())),
		Goroutines: int64(value(read[1])),
	}
}

// residentPages returns the second number of Linux's /proc/self/statm; 0 if there is none.
func residentPages(statm []byte) uint64 {
	fields := bytes.Fields(statm)
	if len(fields) < 2 {
		return 0
	}
	pages, err := strconv.ParseUint(string(fields[1]), 10, 64)
	if err != nil {
		return 0
	}
	return pages
}

// megabytes are rounded to a kilobyte.
func megabytes(n uint64) float64 { return float64(n/1000) / 1000 }
