package models

import (
	"cmp"
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/models/placement"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Placer chooses hosts for new replicas, by the records that hosts publish and what it has
// chosen since. It is safe for concurrent use.
type Placer struct {
	registry *Registry
	members  *discovery.Membership

	mu sync.Mutex
	// alive are the hosts that were alive when changed was made, which closes when they may
	// be others.
	alive   map[pipeline.HostID]*meshv1.HostRecord
	changed <-chan struct{}
	// promised are the models placed on hosts since their records.
	promised map[hostKey]promise
}

type hostKey struct {
	stage pipeline.StageName
	host  pipeline.HostID
}

type promise struct {
	since *meshv1.HostRecord
	needs map[model.ID]need
}

// need is the memory that a model takes, since it was placed.
type need struct {
	model.Size
	at time.Time
}

const (
	// maxPromised bounds the hosts that are remembered, and maxPromises the models of each. A
	// host publishes each second what has changed, so what it took is there after
	// promiseLife, and all else was refused.
	maxPromised = 4096
	maxPromises = 1024
	promiseLife = 2 * time.Second
	// touchAfter is the least difference of a later last use that is written.
	touchAfter = time.Second
	// maxPreloads bounds the models that are loaded ahead of requests at a time.
	maxPreloads = 1024
)

// NewPlacer returns a placer.
func NewPlacer(r *Registry, members *discovery.Membership) *Placer {
	unknown := make(chan struct{})
	close(unknown)
	return &Placer{registry: r, members: members, promised: map[hostKey]promise{}, changed: unknown}
}

// Place returns the host that should load a model for a request, or why there is none.
func (p *Placer) Place(now time.Time, m *Model, there *meshv1.ReplicasRecord, visited []pipeline.HostID) (pipeline.HostID, *fault.Fault) {
	return p.place(now, now, m, there, visited)
}

// place is Place for a model that was used last at that time.
func (p *Placer) place(now, lastUse time.Time, m *Model, there *meshv1.ReplicasRecord, visited []pipeline.HostID) (pipeline.HostID, *fault.Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	v := p.view(now, m.Stage)
	if len(v.Hosts) == 0 {
		return "", nil
	}
	wanted := v.modelOf(now, m, there)
	wanted.Visited, wanted.LastUse, wanted.ScaleUp = visited, lastUse, len(wanted.Replicas) > 0
	host, refusal := v.Place(now, wanted)
	if refusal != nil {
		return "", refusalFault(now, m, refusal)
	}
	p.promise(now, hostKey{m.Stage, host}, v.records[host], wanted)
	return host, nil
}

// stageView is a stage as its hosts publish it.
type stageView struct {
	placement.View
	records map[pipeline.HostID]*meshv1.HostRecord
	// cache may be any host's.
	cache *meshv1.CacheRecord
}

// view returns the view of a stage. The caller holds the lock.
func (p *Placer) view(now time.Time, stage pipeline.StageName) stageView {
	v := stageView{View: placement.View{Types: map[string]placement.Constraint{}}, records: map[pipeline.HostID]*meshv1.HostRecord{}}
	for name, t := range p.registry.StageSettings(stage).GetTypes() {
		v.Types[name] = placement.Constraint{Required: t.GetRequired(), Preferred: t.GetPreferred()}
	}
	for _, member := range p.members.Hosts() {
		r := member.Record
		if r.GetStage() != string(stage) || r.GetCache() == nil {
			continue
		}
		h := hostOf(member)
		if known := p.promised[hostKey{stage, h.ID}]; known.since == r {
			for _, need := range known.needs {
				if now.Sub(need.at) < promiseLife {
					h.Promise(need.Size)
				}
			}
		}
		v.Hosts = append(v.Hosts, h)
		v.records[h.ID], v.cache = r, r.GetCache()
	}
	return v
}

// modelOf returns a model as it is on record.
func (v *stageView) modelOf(now time.Time, m *Model, there *meshv1.ReplicasRecord) *placement.Model {
	out := &placement.Model{
		Model: &m.Model, Need: cmp.Or(m.Size, SizeOf(v.cache.GetDefaultSize())), LastUse: there.GetLastUse().AsTime(),
		LoadTime: v.cache.GetLoadTimes()[m.Type].AsDuration(),
	}
	for _, one := range LiveReplicas(there, now) {
		host, since := pipeline.HostID(one.GetHost()), one.GetSince().AsTime()
		if one.GetState() == failed {
			out.Failures = append(out.Failures, placement.Failure{Host: host, At: since, Crashed: one.GetKind() == KindCrashed, Invalid: one.GetKind() == KindInvalid, Message: one.GetMessage()})
			continue
		}
		out.Replicas = append(out.Replicas, placement.Replica{Host: host, Loaded: one.GetState() == loaded, Since: since})
		if size := SizeOf(one.GetSize()); size != (model.Size{}) {
			out.Need = size
		}
	}
	return out
}

// Scale has hosts load more replicas of those models that need them, one of each, and returns
// the models of which a host should remove its replica. It takes the use of the models that the host
// has; isDown says whether replicas are to be removed.
func (p *Placer) Scale(ctx context.Context, now time.Time, stage pipeline.StageName, host pipeline.HostID, used map[model.ID]*placement.Usage, isDown bool) (remove []model.ID) {
	p.mu.Lock()
	v := p.view(now, stage)
	p.mu.Unlock()
	self := slices.IndexFunc(v.Hosts, func(h placement.Host) bool { return h.ID == host })
	if self < 0 {
		return nil
	}
	if isDown {
		used = maps.Clone(used)
		for m, there := range p.registry.Models(stage) {
			if HasReplica(there, host) && used[m.ID] == nil {
				used[m.ID] = &placement.Usage{}
			}
		}
	}
	var own []*placement.Model
	for id, usage := range used {
		m, there, ok := p.registry.Model(id)
		if !ok || !HasReplica(there, host) {
			continue
		}
		one := v.modelOf(now, m, there)
		one.Usage = usage
		own = append(own, one)
		oldest := slices.MinFunc(one.Replicas, func(a, b placement.Replica) int { return a.Since.Compare(b.Since) })
		if more := v.ScaleUp(now, one); more > 0 && oldest.Host == host {
			if _, err := p.Load(ctx, id, Wanted{Replicas: p.Replicas(there) + 1}); err != nil {
				p.registry.log.Debug("a busy model gets no other replica", "model", id, "error", err)
			}
		}
	}
	if !isDown {
		return nil
	}
	return v.ScaleDown(now, &v.Hosts[self], own)
}

// Preload has hosts load models ahead of requests: those used last, into memory that is free or
// has older ones, and those with fewer replicas than they should have. It unregisters those with
// AutoDelete that no alias points at.
func (p *Placer) Preload(ctx context.Context, stage pipeline.StageName) error {
	now := time.Now()
	p.mu.Lock()
	v := p.view(now, stage)
	p.mu.Unlock()
	if len(v.Hosts) == 0 {
		return nil
	}
	var wanted []*placement.Model
	for m, there := range p.registry.Models(stage) {
		if m.AutoDelete && !p.registry.isPointedAt(m.ID) {
			// The process that moved its last alias stopped before it was unregistered.
			p.registry.deleteUnused(ctx, &meshv1.AliasRoute{Model: string(m.ID)})
		} else if p.Replicas(there) < max(1, m.MinReplicas) {
			wanted = append(wanted, v.modelOf(now, m, there))
		}
	}
	slices.SortFunc(wanted, func(a, b *placement.Model) int { return b.LastUse.Compare(a.LastUse) })
	for _, load := range v.Proactive(now, wanted[:min(len(wanted), maxPreloads)]) {
		_, _, err := p.registry.ClaimLoading(ctx, load.Model, load.Host, func(there *meshv1.ReplicasRecord) bool {
			m, _, ok := p.registry.Model(load.Model)
			return ok && p.Replicas(there) < max(1, m.MinReplicas)
		})
		if err != nil && fault.From(err).Reason != fault.UnknownModel {
			return err
		}
	}
	return nil
}

// Wanted says which replicas of a model there should be.
type Wanted struct {
	// Replicas are as many as fit, at least one.
	Replicas int
	// Without are hosts whose replicas do not count, and that get none.
	Without []pipeline.HostID
	// LastUse replaces the model's if it is later.
	LastUse time.Time
}

// Load has the host that placement chooses load a model, and returns it; "" if the model has
// the replicas wanted. The host finds the claim in the registry.
func (p *Placer) Load(ctx context.Context, id model.ID, w Wanted) (pipeline.HostID, error) {
	m, there, err := p.registry.Find(ctx, id)
	if err == nil && len(p.staying(there, w.Without)) >= w.Replicas {
		if w.LastUse.Sub(there.GetLastUse().AsTime()) > touchAfter {
			err = p.registry.Touch(ctx, id, w.LastUse)
		}
		return "", err
	}
	if err != nil {
		return "", err
	}
	now := time.Now()
	host, f := p.place(now, cmp.Or(w.LastUse, now), m, there, w.Without)
	if f == nil && host == "" {
		f = fault.Newf(fault.NoCapacity, "no host of stage %s is known", m.Stage).WithRetryAfter(time.Second)
	}
	if f != nil {
		return "", f
	}
	_, claimed, err := p.registry.ClaimLoading(ctx, id, host, func(there *meshv1.ReplicasRecord) bool {
		if w.LastUse.After(there.GetLastUse().AsTime()) {
			there.LastUse = timestamppb.New(w.LastUse)
		}
		return len(p.staying(there, w.Without)) < w.Replicas
	})
	if err != nil || !claimed {
		return "", err
	}
	return host, nil
}

// staying returns the replicas on hosts that do not leave.
func (p *Placer) staying(there *meshv1.ReplicasRecord, without []pipeline.HostID) (out []*meshv1.Replica) {
	hosts := p.aliveHosts()
	for _, one := range there.GetReplicas() {
		host := pipeline.HostID(one.GetHost())
		if r := hosts[host]; r != nil && !r.GetDraining() && one.GetState() != failed && !slices.Contains(without, host) {
			out = append(out, one)
		}
	}
	return out
}

// Replicas returns how many replicas there are, and are being loaded, on hosts that do not leave.
func (p *Placer) Replicas(there *meshv1.ReplicasRecord) int { return len(p.staying(there, nil)) }

// aliveHosts returns the records of the hosts that are alive.
func (p *Placer) aliveHosts() map[pipeline.HostID]*meshv1.HostRecord {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.changed:
		p.changed = p.members.Changed()
		p.alive = map[pipeline.HostID]*meshv1.HostRecord{}
		for _, member := range p.members.Hosts() {
			if member.Alive {
				p.alive[pipeline.HostID(member.Record.GetHost())] = member.Record
			}
		}
	default:
	}
	return p.alive
}

// Holder returns the host to which a request for a model goes: any that has loaded it, one that
// does not leave if possible, else that which began to load it first; "" if there is none.
func (p *Placer) Holder(there *meshv1.ReplicasRecord) pipeline.HostID {
	hosts := p.aliveHosts()
	var best *meshv1.Replica
	bestRank, equals := 0, 0
	for _, one := range there.GetReplicas() {
		r, rank := hosts[pipeline.HostID(one.GetHost())], 0
		switch {
		case r == nil, one.GetState() == failed:
			continue
		case one.GetState() == loaded && !r.GetDraining():
			rank = 3
		case one.GetState() == loaded:
			rank = 2
		default:
			rank = 1
		}
		switch {
		case rank > bestRank:
			best, bestRank, equals = one, rank, 1
		case rank == bestRank && rank == 1 && earlier(one, best):
			best = one
		case rank == bestRank && rank > 1:
			// Of n equal ones each is chosen with probability 1/n.
			if equals++; rand.N(equals) == 0 { //nolint:gosec // it keeps no secret
				best = one
			}
		}
	}
	return pipeline.HostID(best.GetHost())
}

// membershipPoll is how often a wait looks for changes of the hosts.
const membershipPoll = time.Second

// EnsureLoaded has hosts load a model until it has the replicas wanted, and notes its last use. If
// wait is true it returns once they are loaded. It fails as a request for the model does.
func (p *Placer) EnsureLoaded(ctx context.Context, id model.ID, w Wanted, wait bool) error {
	if err := p.registry.changeable(); err != nil {
		return err
	}
	tick := time.NewTicker(membershipPoll)
	defer tick.Stop()
	var claimedBy, rejectedBy []pipeline.HostID
	for {
		changed := p.registry.mirror.Changed()
		next := w
		next.Without = slices.Concat(w.Without, rejectedBy)
		host, err := p.Load(ctx, id, next)
		if err != nil && ctx.Err() == nil {
			// The others have no room, or cannot load it.
			_, there, _ := p.registry.Model(id)
			if n := len(p.staying(there, next.Without)); 0 < n && n < w.Replicas {
				w.Replicas = n
				continue
			}
		}
		if f := fault.From(err); err != nil && f.Reason == fault.NoCapacity && len(rejectedBy) > 0 {
			return fault.Newf(fault.CacheFull, "model %s is not loaded: no host could begin to load it: their models are in use, or they are too busy", id).WithRetryAfter(time.Second)
		}
		if err != nil {
			return err
		}
		if host != "" {
			if claimedBy = append(claimedBy, host); w.Replicas > 1 {
				continue
			}
		}
		_, there, err := p.registry.Find(ctx, id)
		missing := w.Replicas
		for _, one := range p.staying(there, w.Without) {
			if one.GetState() == loaded {
				missing--
			}
		}
		if err != nil || missing <= 0 || !wait {
			return err
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-ctx.Done():
			return fault.Newf(fault.ModelLoading, "model %s is being loaded", id).WithRetryAfter(time.Second)
		}
		_, there, _ = p.registry.Model(id)
		rejectedBy = slices.DeleteFunc(slices.Clone(claimedBy), func(host pipeline.HostID) bool { return StateOf(there, host) != 0 })
	}
}

// promise notes that a host is to load a model. The caller holds the lock.
func (p *Placer) promise(now time.Time, of hostKey, record *meshv1.HostRecord, m *placement.Model) {
	known, ok := p.promised[of]
	if !ok && len(p.promised) >= maxPromised {
		clear(p.promised)
	}
	if known.since != record {
		known = promise{since: record, needs: map[model.ID]need{}}
	}
	if len(known.needs) >= maxPromises {
		maps.DeleteFunc(known.needs, func(_ model.ID, n need) bool { return now.Sub(n.at) >= promiseLife })
	}
	if len(known.needs) < maxPromises {
		known.needs[m.ID] = need{m.Need, now}
	}
	p.promised[of] = known
}

func hostOf(member discovery.Host) placement.Host {
	r, c := member.Record, member.Record.GetCache()
	h := placement.Host{
		ID: pipeline.HostID(r.GetHost()), Version: r.GetVersion(), JoinedAt: r.GetStartedAt().AsTime(), Alive: member.Alive, Draining: r.GetDraining(),
		Capacity: SizeOf(c.GetCapacity()), Used: SizeOf(c.GetUsed()), Models: int(c.GetModels() + c.GetQueued() + c.GetLoading()), Full: c.GetFull(),
		LoadSlots: int(c.GetLoadSlots()), Queued: int(c.GetQueued()), Loading: int(c.GetLoading()), Rate: float64(c.GetRate()),
	}
	if c.GetOldestUse() != nil {
		h.OldestUse = c.GetOldestUse().AsTime()
	}
	for name, value := range r.GetLabels() {
		h.Labels = append(h.Labels, name, name+"="+value)
	}
	return h
}

func refusalFault(now time.Time, m *Model, r *placement.Refusal) *fault.Fault {
	switch r.Reason {
	case placement.TooLarge:
		return fault.Newf(fault.ModelTooLarge, "model %s is larger than the memory for models of any host", m.ID)
	case placement.LoadFailed:
		last := r.Failures[len(r.Failures)-1]
		return LoadFault(last.Invalid, max(time.Second, r.RetryAt.Sub(now)), "model %s was not loaded on %d hosts, last on %s: %s", m.ID, len(r.Failures), last.Host, last.Message)
	case placement.NoLabels:
		return fault.Newf(fault.NoCapacity, "no host of stage %s has the labels that model %s needs: %s", m.Stage, m.ID, strings.Join(slices.Sorted(slices.Values(r.Labels)), ", "))
	case placement.QueuesFull:
		return fault.Newf(fault.Overloaded, "too many loads wait on all hosts of stage %s", m.Stage).WithRetryAfter(time.Second)
	}
	return fault.Newf(fault.NoCapacity, "no host of stage %s can load model %s", m.Stage, m.ID).WithRetryAfter(time.Second)
}
