package consul

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"

	"github.com/hashicorp/consul/api"

	"github.com/stagemesh/stagemesh/discovery"
)

// Get implements discovery.Table.
func (r *Registry) Get(ctx context.Context, key discovery.Key) (discovery.Entry, error) {
	pair, err := r.pair(ctx, key)
	switch {
	case err != nil:
		return discovery.Entry{}, err
	case pair == nil:
		return discovery.Entry{}, fmt.Errorf("%w: %s", discovery.ErrNotFound, key)
	default:
		return r.entry(pair), nil
	}
}

// pair returns what is under a key, nil where there is nothing.
func (r *Registry) pair(ctx context.Context, key discovery.Key) (*api.KVPair, error) {
	if _, err := key.Segments(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	pair, _, err := r.client.KV().Get(r.prefix+string(key), r.latest(ctx))
	return pair, failure(err)
}

func (r *Registry) entry(pair *api.KVPair) discovery.Entry {
	return discovery.Entry{
		Key: discovery.Key(strings.TrimPrefix(pair.Key, r.prefix)), Value: pair.Value, Revision: discovery.Revision(pair.ModifyIndex),
	}
}

// List implements discovery.Table.
func (r *Registry) List(ctx context.Context, below discovery.Key) ([]discovery.Entry, error) {
	prefix, err := r.below(below)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	pairs, _, err := r.client.KV().List(prefix, r.latest(ctx))
	if err != nil {
		return nil, failure(err)
	}
	return r.entries(pairs), nil
}

// below is the prefix of what is below a key.
func (r *Registry) below(key discovery.Key) (string, error) {
	if key == "" {
		return r.prefix, nil
	}
	_, err := key.Segments()
	return r.prefix + string(key) + "/", err
}

func (r *Registry) entries(pairs api.KVPairs) []discovery.Entry {
	out := make([]discovery.Entry, len(pairs))
	for i, pair := range pairs {
		out[i] = r.entry(pair)
	}
	slices.SortFunc(out, func(a, b discovery.Entry) int { return strings.Compare(string(a.Key), string(b.Key)) })
	return out
}

// Observe implements discovery.Table.
func (r *Registry) Observe(ctx context.Context, below discovery.Key, o discovery.Observer[discovery.Change]) error {
	prefix, err := r.below(below)
	if err != nil {
		return err
	}
	var now []discovery.Entry
	known := map[discovery.Key]discovery.Revision{}
	ask := func(q *api.QueryOptions) (*api.QueryMeta, error) {
		pairs, meta, err := r.client.KV().List(prefix, q)
		if err != nil {
			return nil, err
		}
		now = r.entries(pairs)
		return meta, nil
	}
	return r.block(ctx, "table "+prefix, o.Lose, ask, func(fresh bool) {
		change := discovery.Change{Reset: fresh, Entries: now}
		if !fresh {
			change = differ(known, now)
		}
		if fresh || len(change.Entries) > 0 || len(change.Gone) > 0 {
			o.See(change)
		}
		clear(known)
		for _, e := range now {
			known[e.Key] = e.Revision
		}
	})
}

// differ returns what has changed, in the order of the revisions.
func differ(known map[discovery.Key]discovery.Revision, now []discovery.Entry) discovery.Change {
	var out discovery.Change
	there := make(map[discovery.Key]bool, len(now))
	for _, e := range now {
		there[e.Key] = true
		if known[e.Key] != e.Revision {
			out.Entries = append(out.Entries, e)
		}
	}
	for key := range known {
		if !there[key] {
			out.Gone = append(out.Gone, key)
		}
	}
	slices.SortFunc(out.Entries, func(a, b discovery.Entry) int { return int(int64(a.Revision) - int64(b.Revision)) })
	slices.Sort(out.Gone)
	return out
}

// Commit implements discovery.Table.
func (r *Registry) Commit(ctx context.Context, changes ...discovery.Operation) (discovery.Revision, error) {
	if err := discovery.ValidCommit(changes); err != nil {
		return 0, err
	}
	c := &commit{registry: r, changes: changes, nonce: rand.Uint64() | 1} //nolint:gosec // it tells writes apart and keeps no secret
	var pauses backoff
	for {
		revision, err := c.try(ctx)
		switch {
		case err == nil:
			return revision, nil
		case errors.Is(err, discovery.ErrConflict), errors.Is(err, discovery.ErrUnknown), !errors.Is(err, discovery.ErrUnavailable):
			return 0, err
		case !pauses.wait(ctx):
			return 0, c.end(err)
		}
	}
}

// commit is one on its way.
type commit struct {
	registry *Registry
	changes  []discovery.Operation
	nonce    uint64
	// asked says that an answer was lost: it may have been made.
	asked bool
}

// try asks once. An error that wraps ErrUnavailable is worth another try.
func (c *commit) try(ctx context.Context) (discovery.Revision, error) {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	var answer api.TxnResponse
	// The client's own Txn tells no status.
	_, err := c.registry.client.Raw().Write("/v1/txn", c.operations(), &answer, (&api.WriteOptions{}).WithContext(ctx))
	var status api.StatusError
	switch {
	case err == nil:
		return revisionOf(answer), nil
	case errors.As(err, &status) && status.Code == http.StatusConflict:
		return c.conflict(ctx, status.Body)
	}
	unsure := !refused(err)
	err = failure(err)
	c.asked = c.asked || unsure && errors.Is(err, discovery.ErrUnavailable)
	return 0, err
}

func (c *commit) operations() api.TxnOps {
	var out api.TxnOps
	add := func(op api.KVTxnOp) { out = append(out, &api.TxnOp{KV: &op}) }
	for _, change := range c.changes {
		key := c.registry.prefix + string(change.Key)
		if change.Delete {
			// A delete alone goes well where there is nothing.
			add(api.KVTxnOp{Verb: api.KVCheckIndex, Key: key, Index: uint64(change.Expect)})
			add(api.KVTxnOp{Verb: api.KVDelete, Key: key})
			continue
		}
		add(api.KVTxnOp{Verb: api.KVCAS, Key: key, Value: change.Value, Flags: c.nonce, Index: uint64(change.Expect)})
	}
	return out
}

func revisionOf(answer api.TxnResponse) discovery.Revision {
	var out discovery.Revision
	for _, result := range answer.Results {
		if result.KV != nil {
			out = max(out, discovery.Revision(result.KV.ModifyIndex))
		}
	}
	return out
}

// conflict is a commit that was refused, or of which an earlier answer was lost.
func (c *commit) conflict(ctx context.Context, body string) (discovery.Revision, error) {
	var answer api.TxnResponse
	if err := json.Unmarshal([]byte(body), &answer); err != nil {
		return 0, fmt.Errorf("consul answers %d: %s", http.StatusConflict, firstLine(body))
	}
	why := "consul says no more"
	for i, e := range slices.Backward(answer.Errors) {
		if why = firstLine(e.What); strings.Contains(why, "Permission denied") {
			return 0, fmt.Errorf("%w: %s", discovery.ErrDenied, why)
		}
		if more := len(answer.Errors) - 1; i == 0 && more > 0 {
			why += fmt.Sprintf(", and so are %d more", more)
		}
	}
	if !c.asked {
		return 0, fmt.Errorf("%w: %s", discovery.ErrConflict, why)
	}
	return c.recognise(ctx)
}

// recognise finds out whether an earlier try has made the commit.
func (c *commit) recognise(ctx context.Context) (discovery.Revision, error) {
	for _, change := range c.changes {
		pair, err := c.registry.pair(ctx, change.Key)
		switch {
		case err != nil:
			return 0, err
		case change.Delete && pair == nil, !change.Delete && pair != nil && pair.Flags == c.nonce:
			if !change.Delete {
				return discovery.Revision(pair.ModifyIndex), nil
			}
		default:
			return 0, fmt.Errorf("%w: %s has changed since", discovery.ErrUnknown, change.Key)
		}
	}
	return 0, nil
}

// end is what is said where the context has ended.
func (c *commit) end(err error) error {
	if c.asked {
		return fmt.Errorf("%w: %w", discovery.ErrUnknown, err)
	}
	return err
}
