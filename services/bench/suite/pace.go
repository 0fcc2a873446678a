package suite

import "time"

// Pace says how long the suite takes its time.
type Pace struct {
	// Quick says that the figures are for trying the suite out, and for nothing else.
	Quick bool
	// Warmup comes before each run, which is measured for Run; Long is for loads whose
	// last answers come late.
	Warmup, Run, Long time.Duration
	// Pairs of mesh and baseline, and Repeats of what has none.
	Pairs, Repeats int
	// Soak is how long the load is that shows whether memory stays.
	Soak time.Duration
}

// Full is that of figures that are published.
func Full() Pace {
	return Pace{Warmup: time.Second, Run: 3 * time.Second, Long: 10 * time.Second, Pairs: 5, Repeats: 5, Soak: 10 * time.Minute}
}

// Quick is for trying out.
func Quick() Pace {
	return Pace{Quick: true, Warmup: 300 * time.Millisecond, Run: 700 * time.Millisecond, Long: 2 * time.Second, Pairs: 2, Repeats: 2, Soak: 20 * time.Second}
}
