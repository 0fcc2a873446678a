package models

import (
	"context"
	"slices"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Find is Model that also finds a model which the mirror does not have yet. The error is
// UNKNOWN_MODEL, or that the registry is unavailable.
func (r *Registry) Find(ctx context.Context, id model.ID) (*Model, *meshv1.ReplicasRecord, error) {
	if m, replicas, ok := r.Model(id); ok {
		return m, replicas, nil
	}
	if err := r.changeable(); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	found, err := r.get(ctx, modelKey(id))
	if err != nil {
		return nil, nil, discovery.Classify(err)
	}
	if m := current(found); m != nil {
		return m, noReplicas(m), nil
	}
	return nil, nil, Unknown(id)
}

// Holder returns the host to which a request for a model goes: one that has loaded it, else
// the one that began to load it first, else "". It returns none of the hosts in without.
func Holder(r *meshv1.ReplicasRecord, without []pipeline.HostID) pipeline.HostID {
	var best *meshv1.Replica
	for _, one := range r.GetReplicas() {
		switch {
		case one.GetState() != loaded && one.GetState() != loading, slices.Contains(without, pipeline.HostID(one.GetHost())):
		case best == nil, one.GetState() > best.GetState(), one.GetState() == best.GetState() && earlier(one, best):
			best = one
		}
	}
	return pipeline.HostID(best.GetHost())
}

func earlier(a, b *meshv1.Replica) bool { return a.GetSince().AsTime().Before(b.GetSince().AsTime()) }

// IsOf reports whether a host has a replica, or loads one.
func IsOf(r *meshv1.ReplicasRecord, host pipeline.HostID) bool {
	state := stateOf(r, host)
	return state == loading || state == loaded
}
