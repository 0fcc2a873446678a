package report

import (
	"bytes"
	"os"
	"runtime/metrics"
	"strconv"
	"sync"
	"time"
)

// sampler looks at this process until it is stopped.
type sampler struct {
	begun   time.Time
	kept    *series
	over    chan struct{}
	looking sync.WaitGroup
	stop    func()
}

// startSampler takes the first sample before it returns.
func startSampler(begun time.Time) *sampler {
	s := &sampler{begun: begun, kept: newSeries(), over: make(chan struct{})}
	s.stop = sync.OnceFunc(func() {
		close(s.over)
		s.looking.Wait()
	})
	s.look()
	s.looking.Go(s.run)
	return s
}

func (s *sampler) run() {
	timer := time.NewTimer(s.wait())
	defer timer.Stop()
	for {
		select {
		case <-s.over:
			return
		case <-timer.C:
			s.look()
			timer.Reset(s.wait())
		}
	}
}

// wait returns how long until the next sample.
func (s *sampler) wait() time.Duration {
	passed := time.Since(s.begun)
	return s.kept.next(passed) - passed
}

func (s *sampler) look() { s.kept.add(time.Since(s.begun), thisProcess()) }

// thisProcess returns what this process is like now.
func thisProcess() ProcessSample {
	read := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/sched/goroutines:goroutines"}}
	metrics.Read(read)
	return ProcessSample{HeapMB: megabytes(count64(read[0])), RSSMB: megabytes(resident()), Goroutines: int64(count64(read[1]))}
}

// count64 returns a metric of the runtime, 0 where it has none of that name.
func count64(s metrics.Sample) uint64 {
	if s.Value.Kind() != metrics.KindUint64 {
		return 0
	}
	return s.Value.Uint64()
}

// resident returns the resident memory of this process in bytes, as Linux tells it in
// /proc/self/statm, whose second number counts pages; 0 where there is none.
func resident() uint64 {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	return residentPages(text) * uint64(os.Getpagesize())
}

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
