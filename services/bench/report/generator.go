package report

import "time"

// Meter measures what the generator does itself.
type Meter struct {
	shared bool
	begun  time.Time
	used   time.Duration
}

// StartMeter begins. Shared says that the mesh is in the same process.
func StartMeter(shared bool) Meter {
	return Meter{shared: shared, begun: time.Now(), used: CPUTime()}
}

// Into fills in what the process took since then.
func (m Meter) Into(g *Generator) {
	took, cores := time.Since(m.begun), float64(ThisMachine().Cores)
	used := CPUTime() - m.used
	g.Shared, g.CPUMS = m.shared, milliseconds(used)
	if took > 0 {
		g.CPUShare = used.Seconds() / took.Seconds() / cores
	}
}
