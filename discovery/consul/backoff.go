package consul

import (
	"context"
	"math/rand/v2"
	"time"
)

const (
	firstPause = 50 * time.Millisecond
	lastPause  = 2 * time.Second
)

// backoff is how long to wait after failures in a row.
type backoff struct{ pause time.Duration }

func (b *backoff) reset() { b.pause = 0 }

// wait waits, each time longer, and reports whether the context goes on.
func (b *backoff) wait(ctx context.Context) bool {
	b.pause = min(max(firstPause, 2*b.pause), lastPause)
	return sleep(ctx, b.pause/2+rand.N(b.pause/2))
}

// sleep reports whether the context goes on after a while.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
