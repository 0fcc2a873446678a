package report

import (
	"runtime"
	"time"
)

// Meter measures what the generator does itself. It is stopped once it is not needed any
// more, also by Into.
type Meter struct {
	shared  bool
	begun   time.Time
	used    time.Duration
	sampler *sampler
}

// StartMeter begins. Shared says that the mesh is in the same process. What the process
// has left behind is collected first, so that its heap is known from the begin.
func StartMeter(shared bool) *Meter {
	runtime.GC()
	begun := time.Now()
	return &Meter{shared: shared, begun: begun, used: CPUTime(), sampler: startSampler(begun)}
}

// Stop ends what looks at the process, and waits for that. More than once is no harm.
func (m *Meter) Stop() { m.sampler.stop() }

// Into stops the meter, and fills in what the process took and was like since it began.
func (m *Meter) Into(r *Run) {
	m.Stop()
	took, cores := time.Since(m.begun), float64(ThisMachine().Cores)
	used, g := CPUTime()-m.used, &r.Generator
	g.Shared, g.CPUMS = m.shared, milliseconds(used)
	if took > 0 {
		g.CPUShare = used.Seconds() / took.Seconds() / cores
	}
	r.Process.Samples = m.sampler.kept.samples
}
