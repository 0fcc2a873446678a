package load

import (
	"context"
	"time"
)

// RunLoadFrom is RunLoad of a load that started at that time.
func RunLoadFrom(ctx context.Context, start time.Time, s Settings, target Target, record func(Sample)) (Outcome, error) {
	return runLoadFrom(ctx, start, s, target, record)
}

// NewSchedule returns a function that returns the times of arrivals.
func NewSchedule(a Arrivals, rate float64, seed uint64) (next func() time.Duration) {
	return newSchedule(a, rate, seed).next
}
