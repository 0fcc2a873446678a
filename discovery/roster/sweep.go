package roster

import (
	"context"
	"errors"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
)

const (
	// Keep is how long the record of a host that is not alive is kept.
	Keep = 10 * time.Minute
	// sweepEvery is how often such records are looked for.
	sweepEvery = time.Minute
)

// Sweep removes the records of hosts that have not been alive for Keep, until the
// context ends: those that were killed have left theirs behind. Any number of views may
// do so. A host that is there after all publishes its record again.
func (v *View) Sweep(ctx context.Context) error {
	ticker := time.NewTicker(sweepEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
		for _, e := range v.left(time.Now()) {
			if err := v.remove(ctx, e); err != nil && ctx.Err() == nil {
				v.log.Debug("the record of a host that is gone stays", "record", e.Key, "error", err)
			}
		}
	}
}

// left are the records of hosts that have not been alive for Keep. While the registry,
// or a part of it, is away nobody knows.
func (v *View) left(now time.Time) []discovery.Entry {
	if since, _ := v.Stale(); !since.IsZero() {
		return nil
	}
	v.Hosts() // which notes who is not alive
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []discovery.Entry
	for key, since := range v.dead {
		if e, ok := v.records.Get(key); ok && now.Sub(since) >= Keep {
			out = append(out, e)
		}
	}
	return out
}

func (v *View) remove(ctx context.Context, e discovery.Entry) error {
	ctx, cancel := context.WithTimeout(ctx, commitTime)
	defer cancel()
	_, err := v.table.Commit(ctx, discovery.Delete(e.Key, e.Revision))
	if errors.Is(err, discovery.ErrConflict) {
		return nil // another view was faster, or the host is back
	}
	return err
}
