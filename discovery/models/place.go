package models

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/mesh/placement"
)

// Placer chooses hosts for new replicas, by the records that hosts publish and what it has
// chosen since. It is safe for concurrent use.
type Placer struct {
	registry *Registry
	members  *discovery.Membership

	mu sync.Mutex
	// promised are the models placed on hosts since their records.
	promised map[hostKey]promise
}

type hostKey struct {
	stage pipeline.StageName
	host  pipeline.HostID
}

type promise struct {
	since *meshv1.HostRecord
	needs []model.Size
}

const (
	// maxPromised bounds the hosts that are remembered, and maxPromises the models of each:
	// it publishes a record each second.
	maxPromised = 4096
	maxPromises = 1024
)

// NewPlacer returns a placer; members may be nil, and then it finds no host.
func NewPlacer(r *Registry, members *discovery.Membership) *Placer {
	return &Placer{registry: r, members: members, promised: map[hostKey]promise{}}
}

// Place returns the host that should load a model for a request, or why there is none.
func (p *Placer) Place(now time.Time, m *Model, there *meshv1.ReplicasRecord, visited []pipeline.HostID) (pipeline.HostID, *fault.Fault) {
	if p.members == nil {
		return "", nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	view := placement.View{Types: map[string]placement.Constraint{}}
	for name, t := range p.registry.StageSettings(m.Stage).GetTypes() {
		view.Types[name] = placement.Constraint{Required: t.GetRequired(), Preferred: t.GetPreferred()}
	}
	records := map[pipeline.HostID]*meshv1.HostRecord{}
	var cache *meshv1.CacheRecord
	for _, member := range p.members.Hosts() {
		r := member.Record
		if r.GetStage() != string(m.Stage) || r.GetCache() == nil {
			continue
		}
		h := hostOf(member)
		if known := p.promised[hostKey{m.Stage, h.ID}]; known.since == r {
			for _, need := range known.needs {
				h.Promise(need)
			}
		}
		view.Hosts = append(view.Hosts, h)
		records[h.ID], cache = r, r.GetCache()
	}
	if len(view.Hosts) == 0 {
		return "", nil
	}
	wanted := placement.Model{
		Model: &m.Model, Need: cmp.Or(m.Size, sizeOf(cache.GetDefaultSize())), Visited: visited, LastUse: now,
		LoadTime: cache.GetLoadTimes()[m.Type].AsDuration(),
	}
	for _, one := range LiveReplicas(there, now) {
		host, since := pipeline.HostID(one.GetHost()), one.GetSince().AsTime()
		if one.GetState() == failed {
			wanted.Failures = append(wanted.Failures, placement.Failure{Host: host, At: since, Crashed: one.GetKind() == KindCrashed, Message: one.GetMessage()})
		} else {
			wanted.Replicas = append(wanted.Replicas, placement.Replica{Host: host, Loaded: one.GetState() == loaded, Since: since})
		}
	}
	host, refusal := view.Place(now, &wanted)
	if refusal != nil {
		return "", refusalFault(now, m, refusal)
	}
	p.promise(hostKey{m.Stage, host}, records[host], wanted.Need)
	return host, nil
}

// promise notes that a host is to load a model of a size. The caller holds the lock.
func (p *Placer) promise(of hostKey, record *meshv1.HostRecord, need model.Size) {
	known, ok := p.promised[of]
	if !ok && len(p.promised) >= maxPromised {
		clear(p.promised)
	}
	if known.since != record {
		known = promise{since: record}
	}
	if len(known.needs) < maxPromises {
		known.needs = append(known.needs, need)
	}
	p.promised[of] = known
}

func hostOf(member discovery.Host) placement.Host {
	r, c := member.Record, member.Record.GetCache()
	h := placement.Host{
		ID: pipeline.HostID(r.GetHost()), Version: r.GetVersion(), JoinedAt: r.GetStartedAt().AsTime(), Alive: member.Alive, Draining: r.GetDraining(),
		Capacity: sizeOf(c.GetCapacity()), Used: sizeOf(c.GetUsed()), Models: int(c.GetModels() + c.GetQueued() + c.GetLoading()), Full: c.GetFull(),
		LoadSlots: int(c.GetLoadSlots()), Queued: int(c.GetQueued()), Loading: int(c.GetLoading()),
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
		return fault.Newf(fault.ModelLoadFailed, "model %s was not loaded on %d hosts, last on %s: %s", m.ID, len(r.Failures), last.Host, last.Message).
			WithRetryAfter(max(time.Second, r.RetryAt.Sub(now)))
	case placement.NoLabels:
		return fault.Newf(fault.NoCapacity, "no host of stage %s has the labels that model %s needs: %s", m.Stage, m.ID, strings.Join(slices.Sorted(slices.Values(r.Labels)), ", "))
	case placement.QueuesFull:
		return fault.Newf(fault.Overloaded, "too many loads wait on all hosts of stage %s", m.Stage).WithRetryAfter(time.Second)
	}
	return fault.Newf(fault.NoCapacity, "no host of stage %s can load model %s", m.Stage, m.ID).WithRetryAfter(time.Second)
}
