package consul

import (
	"context"
	"errors"
	"fmt"

	"github.com/hashicorp/consul/api"

	"github.com/stagemesh/stagemesh/discovery"
)

// block asks again and again, each time until there is a change, and hands on what
// it gets until the context ends. Fresh says that what came before says nothing
// about what comes: at first, after a failure, and where the index goes back.
func (r *Registry) block(ctx context.Context, what string, lose func(error), ask func(q *api.QueryOptions) (*api.QueryMeta, error), see func(fresh bool)) error {
	var index uint64
	var pauses backoff
	fresh, lost := true, false
	for ctx.Err() == nil {
		meta, err := r.wait(ctx, index, ask)
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // it was told to end
		case errors.Is(err, discovery.ErrDenied):
			return fmt.Errorf("%s: %w", what, err)
		case err != nil:
			if !lost {
				r.log.Warn("the registry is lost; trying again", "watching", what, "error", err)
			}
			index, fresh, lost = 0, true, true
			lose(err)
			pauses.wait(ctx)
			continue
		case lost:
			r.log.Info("the registry is back", "watching", what)
		}
		lost = false
		pauses.reset()
		if meta.LastIndex < index {
			index, fresh = 0, true
			continue
		}
		index = max(1, meta.LastIndex)
		see(fresh)
		fresh = false
	}
	return nil
}

// wait asks once, and gives up where the answer takes longer than it may.
func (r *Registry) wait(ctx context.Context, index uint64, ask func(q *api.QueryOptions) (*api.QueryMeta, error)) (*api.QueryMeta, error) {
	limit, query := askTime, r.latest
	if index > 0 {
		limit, query = r.settings.WaitTime+r.settings.WaitTime/16+waitSlack, r.query
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	q := query(ctx)
	q.WaitIndex, q.WaitTime = index, r.settings.WaitTime
	meta, err := ask(q)
	// An agent that has changes streamed to it answers from what it has, and never says
	// that it knows a leader.
	led := meta != nil && (meta.KnownLeader || meta.QueryBackend == api.QueryBackendStreaming)
	if err == nil && !r.settings.Stale && !led {
		return nil, fmt.Errorf("%w: consul has no leader", discovery.ErrUnavailable)
	}
	return meta, failure(err)
}
