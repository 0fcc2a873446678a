package models

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/models/placement"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// The states of a replica.
const (
	loading = meshv1.ReplicaState_REPLICA_STATE_LOADING
	loaded  = meshv1.ReplicaState_REPLICA_STATE_LOADED
	failed  = meshv1.ReplicaState_REPLICA_STATE_FAILED
)

// The kinds of failed loads.
const (
	KindLoad     = "load"
	KindTooLarge = "too_large"
	// KindInvalid: no host can load the model.
	KindInvalid = "invalid"
	// KindCrashed: the load ended the process.
	KindCrashed = "crashed"
)

const (
	// maxFailures is how many failures a record has, maxMessage their longest message in runes,
	// and maxSpec the bytes of a spec.
	maxFailures = 8
	maxMessage  = 256
	maxSpec     = 2 << 10
)

// LoadFault returns the fault of a failed load for callers; only a valid model's may be
// retried, after the pause.
func LoadFault(isInvalid bool, pause time.Duration, format string, args ...any) *fault.Fault {
	if isInvalid {
		return fault.Newf(fault.InvalidModel, format, args...)
	}
	return fault.Newf(fault.ModelLoadFailed, format, args...).WithRetryAfter(pause)
}

// LiveReplicas returns the entries that count: failures expire.
func LiveReplicas(r *meshv1.ReplicasRecord, now time.Time) []*meshv1.Replica {
	lastUse := r.GetLastUse().AsTime()
	return slices.DeleteFunc(slices.Clone(r.GetReplicas()), func(one *meshv1.Replica) bool {
		return one.GetState() == failed && !now.Before(placement.Failure{At: one.GetSince().AsTime()}.Expiry(now, lastUse))
	})
}

// BestState returns the state of a model by its live replicas, 0 if there are none, and the
// latest failure, nil if there is none.
func BestState(live []*meshv1.Replica) (state meshv1.ReplicaState, failure *meshv1.Replica) {
	for _, one := range live {
		switch {
		case one.GetState() != failed:
			state = max(state, one.GetState())
		case failure == nil || earlier(failure, one):
			failure = one
		}
	}
	if state == 0 && failure != nil {
		state = failed
	}
	return state, failure
}

func noReplicas(m *Model) *meshv1.ReplicasRecord {
	return &meshv1.ReplicasRecord{RegisteredAt: timestamppb.New(m.RegisteredAt), LastUse: timestamppb.New(m.LastUse)}
}

// isOf reports whether replicas belong to this registration of a model.
func isOf(r *meshv1.ReplicasRecord, m *Model) bool {
	return r != nil && r.GetRegisteredAt().AsTime().Equal(m.RegisteredAt)
}

// StateOf returns the state of a host's entry, 0 if it has none.
func StateOf(r *meshv1.ReplicasRecord, host pipeline.HostID) meshv1.ReplicaState {
	for _, one := range r.GetReplicas() {
		if one.GetHost() == string(host) {
			return one.GetState()
		}
	}
	return 0
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

// loadedReplicas returns how many hosts have loaded a model.
func loadedReplicas(r *meshv1.ReplicasRecord) (n int) {
	for _, one := range r.GetReplicas() {
		if one.GetState() == loaded {
			n++
		}
	}
	return n
}

// RankOf returns the place of a host among those that have loaded a model, 1 for the first and 0
// if it has not.
func RankOf(r *meshv1.ReplicasRecord, host pipeline.HostID) (rank int) {
	for _, one := range r.GetReplicas() { // sorted by host
		if one.GetState() != loaded {
			continue
		}
		if rank++; one.GetHost() == string(host) {
			return rank
		}
	}
	return 0
}

// HasReplica reports whether a host has a replica, or loads one.
func HasReplica(r *meshv1.ReplicasRecord, host pipeline.HostID) bool {
	state := StateOf(r, host)
	return state == loading || state == loaded
}

// setReplica replaces the entry of a host, or removes it if the new one has no state. It drops
// expired failures, and the oldest ones beyond maxFailures.
func setReplica(r *meshv1.ReplicasRecord, one *meshv1.Replica, now time.Time) {
	all := slices.DeleteFunc(LiveReplicas(r, now), func(old *meshv1.Replica) bool { return old.GetHost() == one.GetHost() })
	if one.GetState() != 0 {
		one.Since = timestamppb.New(now)
		all = append(all, one)
	}
	slices.SortFunc(all, func(a, b *meshv1.Replica) int { return b.GetSince().AsTime().Compare(a.GetSince().AsTime()) })
	failures := 0
	all = slices.DeleteFunc(all, func(one *meshv1.Replica) bool {
		if one.GetState() == failed {
			failures++
		}
		return one.GetState() == failed && failures > maxFailures
	})
	slices.SortFunc(all, func(a, b *meshv1.Replica) int { return cmp.Compare(a.GetHost(), b.GetHost()) })
	r.Replicas = all
}

// FailureOf returns the failure to load a model on a host, if that counts still for a request,
// which is a use of the model, else nil.
func FailureOf(r *meshv1.ReplicasRecord, host pipeline.HostID, now time.Time) *meshv1.Replica {
	for _, one := range r.GetReplicas() {
		if one.GetHost() == string(host) && one.GetState() == failed && now.Before(placement.Failure{At: one.GetSince().AsTime()}.Expiry(now, now)) {
			return one
		}
	}
	return nil
}

// ClaimLoading makes a host the loader of a replica, if allow agrees to the replicas that
// there are; allow may be called several times, and may set the last use. A host that finds
// itself the loader of a model loads it.
func (r *Registry) ClaimLoading(ctx context.Context, id model.ID, host pipeline.HostID, allow func(*meshv1.ReplicasRecord) bool) (there *meshv1.ReplicasRecord, claimed bool, err error) {
	return r.changeReplicas(ctx, id, func(now time.Time, there *meshv1.ReplicasRecord) bool {
		if state := StateOf(there, host); state == loading || state == loaded || !allow(there) {
			return false
		}
		setReplica(there, &meshv1.Replica{Host: string(host), State: loading}, now)
		return true
	})
}

// SetLoaded notes that a host has loaded a model, unless its claim was removed. The spec is the
// model's own; nil where it has the stage's.
func (r *Registry) SetLoaded(ctx context.Context, id model.ID, host pipeline.HostID, size model.Size, spec *stagev1.Spec) error {
	_, _, err := r.changeReplicas(ctx, id, func(now time.Time, there *meshv1.ReplicasRecord) bool {
		if StateOf(there, host) != loading {
			return false
		}
		setReplica(there, &meshv1.Replica{Host: string(host), State: loaded, Size: SizeToProto(size)}, now)
		there.LastUse = timestamppb.New(now)
		if there.Spec = spec; len(protojson.Format(spec)) > maxSpec {
			there.Spec = nil
		}
		return true
	})
	return err
}

// SetFailed replaces the replica of a host by the failure to load it. The message is cut.
func (r *Registry) SetFailed(ctx context.Context, id model.ID, host pipeline.HostID, kind, message string) error {
	if runes := []rune(message); len(runes) > maxMessage {
		message = string(runes[:maxMessage]) + "..."
	}
	_, _, err := r.changeReplicas(ctx, id, func(now time.Time, there *meshv1.ReplicasRecord) bool {
		setReplica(there, &meshv1.Replica{Host: string(host), State: failed, Kind: kind, Message: message}, now)
		return true
	})
	return err
}

// Evict removes the replicas of a model, and the failures to load it. The hosts unload it.
func (r *Registry) Evict(ctx context.Context, id model.ID) error {
	_, _, err := r.changeReplicas(ctx, id, func(_ time.Time, there *meshv1.ReplicasRecord) bool {
		changed := len(there.GetReplicas()) > 0
		there.Replicas = nil
		return changed
	})
	return err
}

// RemoveReplica removes the replica of a host in any state, also a claim or a failure, and records
// lastUse if it is later.
func (r *Registry) RemoveReplica(ctx context.Context, id model.ID, host pipeline.HostID, lastUse time.Time) error {
	return r.removeReplica(ctx, id, host, lastUse, func(state meshv1.ReplicaState) bool { return state != 0 })
}

// RemoveLoaded removes the replica of a host if it is loaded, and records lastUse if it is later. A
// host calls it before it unloads; a newer claim to load stays.
func (r *Registry) RemoveLoaded(ctx context.Context, id model.ID, host pipeline.HostID, lastUse time.Time) error {
	return r.removeReplica(ctx, id, host, lastUse, func(state meshv1.ReplicaState) bool { return state == loaded })
}

func (r *Registry) removeReplica(ctx context.Context, id model.ID, host pipeline.HostID, lastUse time.Time, matches func(meshv1.ReplicaState) bool) error {
	_, _, err := r.changeReplicas(ctx, id, func(now time.Time, there *meshv1.ReplicasRecord) bool {
		isRemoved, isLater := matches(StateOf(there, host)), lastUse.After(there.GetLastUse().AsTime())
		if isRemoved {
			setReplica(there, &meshv1.Replica{Host: string(host)}, now)
		}
		if isLater {
			there.LastUse = timestamppb.New(lastUse)
		}
		return isRemoved || isLater
	})
	return err
}

// RemoveSpare removes the replica of a host if at least one other, and least others, are loaded.
func (r *Registry) RemoveSpare(ctx context.Context, id model.ID, host pipeline.HostID, least int) error {
	_, _, err := r.changeReplicas(ctx, id, func(now time.Time, there *meshv1.ReplicasRecord) bool {
		others := 0
		for _, one := range there.GetReplicas() {
			if one.GetHost() != string(host) && one.GetState() == loaded {
				others++
			}
		}
		if others < max(1, least) || StateOf(there, host) != loaded {
			return false
		}
		setReplica(there, &meshv1.Replica{Host: string(host)}, now)
		return true
	})
	return err
}

// Touch notes a later last use of a model.
func (r *Registry) Touch(ctx context.Context, id model.ID, lastUse time.Time) error {
	return r.RemoveReplica(ctx, id, "", lastUse)
}

// changeReplicas changes the replicas of a registered model; decide reports whether it has.
// Those of an earlier registration count as none. Where there is no such model its record is
// removed, and that is UNKNOWN_MODEL.
func (r *Registry) changeReplicas(ctx context.Context, id model.ID, decide func(now time.Time, there *meshv1.ReplicasRecord) bool) (out *meshv1.ReplicasRecord, changed bool, err error) {
	if err := r.changeable(); err != nil {
		return nil, false, err
	}
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	isGone := false
	_, err = r.change(ctx, replicasKey(id), false, func(e discovery.Entry) (edit, error) {
		found, err := r.get(ctx, modelKey(id))
		if err != nil {
			return edit{}, discovery.Classify(err)
		}
		m := current(found)
		if isGone = m == nil; isGone {
			// One that is being unregistered may come back.
			return edit{remove: found.Revision == 0}, r.checkFilled(ctx)
		}
		out = &meshv1.ReplicasRecord{}
		if e.Revision == 0 || unmarshal(e, out) != nil || !isOf(out, m) {
			out = noReplicas(m)
		}
		if changed = decide(time.Now(), out); changed {
			return edit{put: out}, nil
		}
		return edit{}, nil
	})
	switch {
	case err == nil && isGone:
		err = Unknown(id)
	case err != nil && fault.From(err).Reason == fault.RevisionMismatch: // requests come here, which expect no revision
		err = discovery.Unavailable(errors.New("other hosts keep changing the replicas of the model"))
	}
	return out, changed, err
}

// removeReplicas removes the record of a model that is gone. Its hosts unload it because of that.
func (r *Registry) removeReplicas(ctx context.Context, id model.ID) {
	_, _, err := r.changeReplicas(ctx, id, func(time.Time, *meshv1.ReplicasRecord) bool { return false })
	if err != nil && fault.From(err).Reason != fault.UnknownModel {
		r.log.Warn("the record of the replicas of an unregistered model stays", "model", id, "error", err)
	}
}
