package target

import "testing"

func TestATraceParentCostsOneAllocation(t *testing.T) {
	if n := testing.AllocsPerRun(1000, func() { kept = traceParent() }); n != 1 {
		t.Errorf("got %v", n)
	}
}

// kept has what is measured be made at all.
var kept string

// BenchmarkTraceParent is what a trace costs the generator, from all processors.
func BenchmarkTraceParent(b *testing.B) {
	b.ReportAllocs()
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			if traceParent() == "" {
				b.Error("it is empty")
			}
		}
	})
}
