package consul

import (
	"cmp"
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
	if err := key.Validate(); err != nil {
		return discovery.Entry{}, err
	}
	pair, err := r.pair(ctx, key)
	if err != nil {
		return discovery.Entry{}, err
	}
	if pair == nil {
		return discovery.Entry{}, fmt.Errorf("%w: %s", discovery.ErrNotFound, key)
	}
	return r.entry(pair), nil
}

// pair returns what Consul has under a key, nil if there is nothing.
func (r *Registry) pair(ctx context.Context, key discovery.Key) (*api.KVPair, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	pair, _, err := r.client.KV().Get(r.prefix+string(key), r.consistentRead(ctx))
	return pair, classify(err)
}

func (r *Registry) entry(pair *api.KVPair) discovery.Entry {
	return discovery.Entry{
		Key: discovery.Key(strings.TrimPrefix(pair.Key, r.prefix)), Value: pair.Value, Revision: discovery.Revision(pair.ModifyIndex),
	}
}

// Observe implements discovery.Table.
func (r *Registry) Observe(ctx context.Context, below discovery.Key, o discovery.Observer[discovery.Change]) error {
	if err := below.ValidatePrefix(); err != nil {
		return err
	}
	prefix := r.prefix
	if below != "" {
		prefix += string(below) + "/"
	}
	var pairs api.KVPairs
	known := map[discovery.Key]discovery.Revision{}
	list := func(q *api.QueryOptions) (meta *api.QueryMeta, err error) {
		pairs, meta, err = r.client.KV().List(prefix, q)
		return meta, err
	}
	return r.poll(ctx, "table "+prefix, o.OnDisconnect, list, func(fresh bool) {
		if fresh {
			clear(known)
		}
		if change := r.update(known, pairs); fresh || len(change.Entries) > 0 || len(change.Deleted) > 0 {
			change.Reset = fresh
			o.OnUpdate(change)
		}
	})
}

// update takes the revisions of a listing, and returns what has changed, in
// the order of the revisions.
func (r *Registry) update(known map[discovery.Key]discovery.Revision, now api.KVPairs) discovery.Change {
	var out discovery.Change
	listed := make(map[discovery.Key]bool, len(now))
	for _, pair := range now {
		e := r.entry(pair)
		listed[e.Key] = true
		if known[e.Key] != e.Revision {
			known[e.Key] = e.Revision
			out.Entries = append(out.Entries, e)
		}
	}
	for key := range known {
		if !listed[key] {
			delete(known, key)
			out.Deleted = append(out.Deleted, key)
		}
	}
	slices.SortFunc(out.Entries, func(a, b discovery.Entry) int { return cmp.Compare(a.Revision, b.Revision) })
	return out
}

// Put implements discovery.Table.
func (r *Registry) Put(ctx context.Context, key discovery.Key, value []byte, expect discovery.Revision) (discovery.Revision, error) {
	if err := discovery.ValidatePut(key, value); err != nil {
		return 0, err
	}
	nonce := rand.Uint64() | 1 //nolint:gosec // it tells writes apart and keeps no secret
	put := api.KVTxnOp{Verb: api.KVCAS, Key: r.prefix + string(key), Value: value, Flags: nonce, Index: uint64(expect)}
	return r.commit(ctx, &change{key: key, nonce: nonce, operations: api.TxnOps{{KV: &put}}})
}

// Delete implements discovery.Table.
func (r *Registry) Delete(ctx context.Context, key discovery.Key, expect discovery.Revision) error {
	if err := discovery.ValidateDelete(key, expect); err != nil {
		return err
	}
	// Consul's own delete-cas succeeds if there is no entry.
	check := api.KVTxnOp{Verb: api.KVCheckIndex, Key: r.prefix + string(key), Index: uint64(expect)}
	remove := api.KVTxnOp{Verb: api.KVDelete, Key: r.prefix + string(key)}
	_, err := r.commit(ctx, &change{key: key, operations: api.TxnOps{{KV: &check}, {KV: &remove}}})
	return err
}

// change is a Put or Delete on its way.
type change struct {
	key discovery.Key
	// nonce identifies a Put in the entry's flags; a Delete has none.
	nonce uint64
	// operations are sent to Consul's transaction endpoint: of all ways to write, only
	// that one returns the new revision.
	operations api.TxnOps
	// lost is true once an answer was lost: the change may have been made.
	lost bool
}

// commit sends a change until it knows the outcome.
func (r *Registry) commit(ctx context.Context, c *change) (discovery.Revision, error) {
	var delay backoff
	for {
		revision, err := r.try(ctx, c)
		if !errors.Is(err, discovery.ErrUnavailable) {
			return revision, err
		}
		if !delay.wait(ctx) {
			if c.lost {
				err = fmt.Errorf("%w: %w", discovery.ErrUnknown, err)
			}
			return 0, err
		}
	}
}

// try sends a change once. An error that wraps ErrUnavailable is worth a retry.
func (r *Registry) try(ctx context.Context, c *change) (discovery.Revision, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	var answer api.TxnResponse
	// The client's own Txn hides the status.
	_, err := r.client.Raw().Write("/v1/txn", c.operations, &answer, (&api.WriteOptions{}).WithContext(ctx))
	var status api.StatusError
	switch {
	case err == nil && len(answer.Results) > 0 && answer.Results[0].KV != nil:
		return discovery.Revision(answer.Results[0].KV.ModifyIndex), nil
	case err == nil:
		return 0, nil
	case errors.As(err, &status) && status.Code == http.StatusConflict:
		return r.settle(ctx, c, status.Body)
	}
	sent := !wasNotSent(err)
	err = classify(err)
	c.lost = c.lost || sent && errors.Is(err, discovery.ErrUnavailable)
	return 0, err
}

// settle decides what became of a change that Consul rejected: if an answer was lost,
// an earlier try may have made it.
func (r *Registry) settle(ctx context.Context, c *change, body string) (discovery.Revision, error) {
	var answer api.TxnResponse
	if err := json.Unmarshal([]byte(body), &answer); err != nil {
		return 0, fmt.Errorf("consul answers %d: %s", http.StatusConflict, firstLine(body))
	}
	reason := "consul gives no reason"
	for _, e := range slices.Backward(answer.Errors) {
		if reason = firstLine(e.What); strings.Contains(reason, "Permission denied") {
			return 0, fmt.Errorf("%w: %s", discovery.ErrDenied, reason)
		}
	}
	if !c.lost {
		return 0, fmt.Errorf("%w: %s", discovery.ErrConflict, reason)
	}
	pair, err := r.pair(ctx, c.key)
	switch {
	case err != nil:
		return 0, err
	case c.nonce == 0 && pair == nil:
		return 0, nil
	case c.nonce != 0 && pair != nil && pair.Flags == c.nonce:
		return discovery.Revision(pair.ModifyIndex), nil
	}
	return 0, fmt.Errorf("%w: %s has changed since", discovery.ErrUnknown, c.key)
}
