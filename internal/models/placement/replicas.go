package placement

import (
	"math"
	"slices"
	"time"

	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	// The load of a replica is 1 where it should get no more. Below lowLoad it may be removed.
	lowLoad = 2. / 3
	// A model in regular use gets a second replica if this share of the memory is free, or
	// evicted models are this old. No replica is removed while more than scaleDownFree is free.
	secondFree, scaleDownFree = 0.1, 0.05
	secondAge                 = 20 * time.Hour
	// A host removes replicas of up to this share of its capacity at a time.
	scaleDownShare = 0.05
	// Proactive loads leave free 1/reserve of a host and half of the rest. When all hosts are
	// full, they replace 1/turnover of the models, and only by younger ones.
	reserve, turnover = 8, 20
	turnoverAge       = 20 * time.Minute
)

// Pool sums up the hosts that a type may use. Free is the mean free share of their memory.
// LRUAge is how long the least recently used model has been unused: the metric for sizing.
type Pool struct {
	Hosts  int
	Free   float64
	LRUAge time.Duration
}

// Pool returns the sums of the hosts that stay and have the required labels.
func (v View) Pool(now time.Time, c Constraint) Pool {
	var p Pool
	for i := range v.Hosts {
		if h := &v.Hosts[i]; h.stays() && h.fits(c) {
			p.Hosts, p.Free, p.LRUAge = p.Hosts+1, p.Free+min(1, room(h.Capacity, h.Used, h.Capacity)), max(p.LRUAge, h.age(now))
		}
	}
	p.Free /= float64(max(1, p.Hosts))
	return p
}

// Usage is what a holder knows about the use of its replica.
type Usage struct {
	minutes    uint64    // a bit for each minute with a sample, the lowest for the minute of last
	last, high time.Time // the last sample, and the last one with a high load
	load       float64
}

// Observe adds a sample of a replica that was used: its load since the last one.
func (u *Usage) Observe(now time.Time, load float64) {
	u.minutes = u.minutes<<max(0, now.Unix()/60-u.last.Unix()/60) | 1
	u.last, u.load = now, load
	if u.load >= lowLoad {
		u.high = now
	}
}

// Last returns when the replica was used last.
func (u *Usage) Last() time.Time { return u.last }

// staying returns the hosts with a replica that stay, and when the latest load began.
func (v View) staying(m *Model) (hosts []candidate, latest time.Time, loading bool) {
	for _, r := range m.Replicas {
		at := slices.IndexFunc(v.Hosts, func(h Host) bool { return h.ID == r.Host && h.stays() })
		if at < 0 {
			continue
		}
		hosts, loading = append(hosts, candidate{Host: &v.Hosts[at]}), loading || !r.Loaded
		if r.Since.After(latest) {
			latest = r.Since
		}
	}
	return hosts, latest, loading
}

// ScaleUp returns how many more replicas a model should have after a sample: for its load,
// for regular use (now and 7 to 40 minutes ago), for MinReplicas. The caller loads them one
// after the other, with Model.ScaleUp set. One replica stands for all: senders spread load.
func (v View) ScaleUp(now time.Time, m *Model) int {
	hosts, latest, loading := v.staying(m)
	n, pool := len(hosts), v.Pool(now, v.Types[m.Type])
	if n == 0 || loading || now.Sub(m.Usage.last) > time.Minute || now.Sub(latest) < 20*time.Second+2*m.LoadTime {
		return 0
	}
	wanted := max(m.MinReplicas, int(math.Ceil(float64(n)*min(m.Usage.load, float64(pool.Hosts)))))
	if n == 1 && m.Usage.minutes&(1<<41-1)>>7 != 0 && (pool.Free >= secondFree || pool.LRUAge > secondAge) {
		wanted = max(wanted, 2)
	}
	return max(0, min(wanted-n, max(2, pool.Hosts/3), pool.Hosts-n))
}

// ScaleDown returns which of its replicas the host should remove, the least recently used
// first, of those whose model has several. Senders spread requests, so the use of one replica
// stands for the others. The caller removes by compare-and-set, so holders never remove all
// replicas. It sorts own.
func (v View) ScaleDown(now time.Time, self *Host, own []*Model) []model.ID {
	slices.SortFunc(own, func(a, b *Model) int { return a.LastUse.Compare(b.LastUse) })
	var remove []model.ID
	left := scaleDownShare
	for _, m := range own {
		if !v.canRemove(now, self.ID, m) {
			continue
		}
		// One larger than the limit goes alone.
		if left -= 1 / room(self.Capacity, model.Size{}, m.Need); left < 0 && len(remove) > 0 {
			break
		}
		remove = append(remove, m.ID)
	}
	return remove
}

// canRemove is true where room is short and the host's replica is not needed. A load that
// was high lately, or a model that was loaded lately, keeps all replicas. One at a time goes,
// from the host that placement would choose last: by the rates, then by the lowest hash.
func (v View) canRemove(now time.Time, self pipeline.HostID, m *Model) bool {
	hosts, latest, loading := v.staying(m)
	n, pool := len(hosts), v.Pool(now, v.Types[m.Type])
	switch {
	case n <= max(1, m.MinReplicas), loading, pool.Free > scaleDownFree,
		now.Sub(latest) < 30*time.Minute,
		now.Sub(m.Usage.high) < min(5*time.Hour, max(10*time.Minute, pool.LRUAge*3/100)):
		return false
	case n > 2 && now.Sub(m.Usage.last) <= time.Minute && m.Usage.load*float64(n)/float64(n-1) >= lowLoad:
		return false
	}
	used := *m
	if m.Usage.last.After(used.LastUse) {
		used.LastUse = m.Usage.last
	}
	if n == 2 && now.Sub(used.LastUse) < min(10*time.Hour, pool.LRUAge/10) {
		return false
	}
	if best := keepByRate(now, slices.Clone(hosts), &used); len(best) < n {
		hosts = slices.DeleteFunc(hosts, func(h candidate) bool { return slices.Contains(best, h) })
	}
	return self == slices.MinFunc(hosts, func(a, b candidate) int { return compareHosts(m.ID, a.ID, b.ID) }).ID
}

// Load is a load ahead of requests.
type Load struct {
	Model model.ID
	Host  pipeline.HostID
}

// Proactive returns the loads that a leader requests, of models with fewer replicas than
// one or MinReplicas. The models come in the order of their last use, the latest first.
func (v View) Proactive(now time.Time, models []*Model) []Load {
	full := !slices.ContainsFunc(v.Hosts, func(h Host) bool { return h.stays() && !h.Full })
	// A copy in which the budgets of the hosts are all that is free.
	v.Hosts = slices.Clone(v.Hosts)
	for i := range v.Hosts {
		h := &v.Hosts[i]
		if full {
			h.Full, h.Used.Host, h.Used.Device = false, h.Capacity.Host-h.Capacity.Host/turnover, h.Capacity.Device-h.Capacity.Device/turnover
			continue
		}
		h.Used.Host += (h.Capacity.Host + h.Capacity.Host/reserve - h.Used.Host) / 2
		h.Used.Device += (h.Capacity.Device + h.Capacity.Device/reserve - h.Used.Device) / 2
	}
	var loads []Load
	for _, m := range models {
		hosts, _, _ := v.staying(m)
		if len(hosts) >= max(1, m.MinReplicas) {
			continue
		}
		spare := *m
		spare.KeepOthers = true
		id, refusal := v.Place(now, &spare)
		if refusal != nil {
			continue
		}
		h := &v.Hosts[slices.IndexFunc(v.Hosts, func(h Host) bool { return h.ID == id })]
		if full && len(hosts) >= m.MinReplicas && !m.LastUse.After(h.OldestUse.Add(max(h.age(now)/3, turnoverAge))) {
			continue
		}
		h.Promise(m.Need)
		loads = append(loads, Load{m.ID, id})
	}
	return loads
}
