package stagehost

import (
	"context"
	"time"

	"github.com/stagemesh/stagemesh/stagehost/internal/models"
)

// MaxWaiting is how many items of a host may have waited for models.
const MaxWaiting = models.MaxWaiting

// Scale runs the loop that follows the use of models, by the clock of a test.
func (h *Host) Scale(ctx context.Context, ticks <-chan time.Time) { _ = h.models.Scale(ctx, ticks) }

// Lead returns what the host does as the leader of its stage, by the clock of a test: tick waits for
// the end of what it begins.
func (h *Host) Lead(start time.Time) (tick func(context.Context, time.Time) error) {
	l := h.models.NewLeader(start)
	return func(ctx context.Context, now time.Time) error {
		defer l.Stop()
		return l.Tick(ctx, now)
	}
}
