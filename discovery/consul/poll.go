package consul

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/process"
)

// pollInterval is the least time from an answer to the next query: the changes in between, of many
// busy hosts, come in one answer.
const pollInterval = 100 * time.Millisecond

// poll repeats a blocking query, and calls update after each change until the context
// ends. fresh means that the answer replaces everything before: it is the first one, or
// the first after a failure, or the index has gone back.
func (r *Registry) poll(ctx context.Context, what string, disconnect func(error), query func(q *api.QueryOptions) (*api.QueryMeta, error), update func(fresh bool)) error {
	var index uint64
	var delay backoff
	fresh, disconnected := true, false
	for ctx.Err() == nil {
		meta, err := r.query(ctx, index, query)
		answered := time.Now()
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // the caller ended it
		case errors.Is(err, discovery.ErrDenied):
			return fmt.Errorf("%s: %w", what, err)
		case err != nil:
			if !disconnected {
				r.log.Warn("the registry is unavailable; retrying", "watching", what, "error", err)
			}
			index, fresh, disconnected = 0, true, true
			disconnect(err)
			delay.wait(ctx)
			continue
		case disconnected:
			r.log.Info("the registry is available again", "watching", what)
		}
		disconnected = false
		delay.reset()
		if meta.LastIndex < index {
			index, fresh = 0, true
			continue
		}
		unchanged := meta.LastIndex == index
		index = max(1, meta.LastIndex)
		update(fresh)
		fresh = false
		if unchanged && isStreamed(meta) {
			index = 0 // a stream does not say that it hides something: the next read does
		}
		_ = process.Sleep(ctx, pollInterval-time.Since(answered))
	}
	return nil
}

// query runs a blocking query once, and bounds its time.
func (r *Registry) query(ctx context.Context, index uint64, query func(q *api.QueryOptions) (*api.QueryMeta, error)) (*api.QueryMeta, error) {
	limit, options := requestTimeout, r.consistentRead
	if index > 0 {
		limit, options = r.settings.WaitTime+r.settings.WaitTime/16+waitSlack, r.options
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	q := options(ctx)
	q.WaitIndex, q.WaitTime = index, r.settings.WaitTime
	meta, err := query(q)
	switch {
	case err != nil:
		return nil, classify(err)
	case meta.ResultsFilteredByACLs:
		return nil, fmt.Errorf("%w: its policy hides results", discovery.ErrDenied)
	case !r.settings.Stale && !meta.KnownLeader && !isStreamed(meta):
		return nil, fmt.Errorf("%w: consul has no leader", discovery.ErrUnavailable)
	}
	return meta, nil
}

// isStreamed reports whether an agent that changes are streamed to has answered from its own
// copy. It never reports that it knows a leader.
func isStreamed(meta *api.QueryMeta) bool { return meta.QueryBackend == api.QueryBackendStreaming }

const (
	minDelay = 50 * time.Millisecond
	maxDelay = 2 * time.Second
)

// backoff is the delay after failures in a row.
type backoff struct{ delay time.Duration }

func (b *backoff) reset() { b.delay = 0 }

// wait waits, longer each time, and returns false if the context has ended.
func (b *backoff) wait(ctx context.Context) bool {
	b.delay = min(max(minDelay, 2*b.delay), maxDelay)
	return process.Sleep(ctx, b.delay/2+rand.N(b.delay/2)) == nil
}
