package fleet

import (
	"context"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/metric"
)

// Stall knows how late a timer of this process has been: what a machine that has
// more to do than it can adds to every time that is measured in it.
type Stall struct{ worst atomic.Int64 }

const stallEvery = 5 * time.Millisecond

// Watch measures until the context ends.
func (s *Stall) Watch(ctx context.Context) {
	tick := time.NewTimer(stallEvery)
	defer tick.Stop()
	for {
		due := time.Now().Add(stallEvery)
		tick.Reset(stallEvery)
		select {
		case <-tick.C:
			s.worst.Store(max(s.worst.Load(), int64(time.Since(due))))
		case <-ctx.Done():
			return
		}
	}
}

// Worst returns the most since it was asked last.
func (s *Stall) Worst() time.Duration { return time.Duration(s.worst.Swap(0)) }

const stallMetric = "fleet_stall"

// show makes the figure one of the member's metrics, in nanoseconds.
func (s *Stall) show(meter metric.Meter) error {
	_, err := meter.Int64ObservableGauge(stallMetric, metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
		o.Observe(int64(s.Worst()))
		return nil
	}))
	return err
}

// Stall returns how late a timer of the member was at most since this was asked
// last.
func (m *Member) Stall() time.Duration {
	m.fleet.t.Helper()
	return time.Duration(m.Count(stallMetric))
}
