package placement_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/internal/models/placement"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

type (
	hostChange  = func(*placement.Host)
	modelChange = func(*placement.Model)
)

// full fills a host whose models were last used that long ago.
func full(age time.Duration) hostChange {
	return func(h *placement.Host) {
		h.Used, h.Models, h.Full, h.OldestUse = h.Capacity, 100, true, start.Add(-age)
	}
}

// used takes MiB of the host.
func used(n int64) hostChange { return func(h *placement.Host) { h.Used.Host = n * mib } }

func labels(l ...string) hostChange { return func(h *placement.Host) { h.Labels = l } }

func rate(r float64) hostChange { return func(h *placement.Host) { h.Rate = r } }

func queued(n int) hostChange { return func(h *placement.Host) { h.Queued = n } }

func unused(d time.Duration) modelChange {
	return func(m *placement.Model) { m.LastUse = start.Add(-d) }
}

func ofType(typ string) modelChange { return func(m *placement.Model) { m.Type = typ } }

// chosen returns the hosts that any of many models is placed on: those that are equally good.
func chosen(t *testing.T, v placement.View, change ...modelChange) string {
	t.Helper()
	var ids []pipeline.HostID
	for i := range 100 {
		id, refusal := v.Place(start, newModel(model.ID(fmt.Sprint("m", i)), change...))
		if refusal != nil {
			t.Fatalf("%+v", refusal)
		}
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return fmt.Sprint(slices.Compact(ids))
}

func TestHostsAreNarrowedRuleByRule(t *testing.T) {
	t.Parallel()
	joined := func(version string, ago time.Duration) hostChange {
		return func(h *placement.Host) { h.Version, h.JoinedAt = version, start.Add(-ago) }
	}
	models := func(n int) hostChange { return func(h *placement.Host) { h.Models = n } }
	slots := func(slots, loading, queued int) hostChange {
		return func(h *placement.Host) { h.LoadSlots, h.Loading, h.Queued = slots, loading, queued }
	}
	device := func(capacity, used int64) hostChange {
		return func(h *placement.Host) { h.Capacity.Device, h.Used.Device = capacity*mib, used*mib }
	}
	types := map[string]placement.Constraint{
		"gpu": {Required: []string{"gpu"}}, "big": {Required: []string{"gpu"}, Preferred: []string{"big", "new"}}, "any": {},
	}
	for name, test := range map[string]struct {
		a, b, c hostChange
		model   modelChange
		want    string
	}{
		"equal hosts share":              {want: "[a b c]"},
		"dead, draining":                 {a: func(h *placement.Host) { h.Alive = false }, b: func(h *placement.Host) { h.Draining = true }, want: "[c]"},
		"visited":                        {model: func(m *placement.Model) { m.Visited = []pipeline.HostID{"a", "c"} }, want: "[b]"},
		"a replica, even one that loads": {model: func(m *placement.Model) { m.Replicas = []placement.Replica{{Host: "a"}} }, want: "[b c]"},
		"a failure":                      {model: func(m *placement.Model) { m.Failures = []placement.Failure{{Host: "b", At: start}} }, want: "[a c]"},
		"an expired failure": {model: func(m *placement.Model) {
			m.Failures = []placement.Failure{{Host: "b", At: start.Add(-5 * time.Minute)}}
		}, want: "[a b c]"},
		"a full load queue":                 {a: queued(256), want: "[b c]"},
		"required labels":                   {a: labels("gpu", "x"), model: ofType("gpu"), want: "[a]"},
		"preferred labels":                  {a: labels("gpu"), b: labels("gpu", "big"), c: labels("gpu", "big", "new"), model: ofType("big"), want: "[c]"},
		"preferred labels yield to room":    {a: labels("gpu"), b: func(h *placement.Host) { labels("gpu", "big")(h); full(0)(h) }, model: ofType("big"), want: "[a]"},
		"hosts that other types need":       {a: labels("gpu"), model: ofType("any"), want: "[b c]"},
		"an older version":                  {a: joined("2", 14*time.Minute), want: "[a]"},
		"a rollback":                        {a: joined("2", 14*time.Minute), b: joined("1", time.Minute), want: "[b c]"},
		"an upgrade long ago":               {a: joined("2", 16*time.Minute), want: "[a b c]"},
		"an older version is all":           {a: joined("2", time.Minute), model: func(m *placement.Model) { m.Visited = []pipeline.HostID{"a"} }, want: "[b c]"},
		"an idle slot":                      {a: slots(2, 2, 0), b: slots(2, 1, 0), c: slots(2, 1, 1), want: "[b]"},
		"a wait of a quarter load":          {a: slots(4, 4, 0), b: slots(4, 4, 1), want: "[a c]"},
		"all wait alike":                    {a: slots(4, 4, 3), b: slots(4, 4, 4), c: slots(4, 4, 8), want: "[a b]"},
		"room before an eviction":           {a: full(time.Hour), b: full(time.Hour), want: "[c]"},
		"old models before a wait":          {a: full(100 * time.Minute), b: queued(2), c: queued(2), want: "[a]"},
		"a wait before young models":        {a: full(10 * time.Minute), b: queued(2), c: queued(2), want: "[b c]"},
		"eviction before a long queue":      {a: full(time.Hour), b: queued(9), c: queued(9), want: "[a]"},
		"room for device memory":            {a: device(50, 50), b: device(50, 10), c: device(50, 49), model: func(m *placement.Model) { m.Need.Device = 2 * mib }, want: "[b]"},
		"capacity for device memory":        {b: device(50, 10), model: func(m *placement.Model) { m.Need.Device = 2 * mib }, want: "[b]"},
		"a quarter of the largest room":     {a: used(74), b: used(76), want: "[a c]"},
		"few models are equal":              {a: models(4), b: models(3), want: "[a b c]"},
		"numbers of models":                 {a: models(10), b: models(11), c: models(8), want: "[a c]"},
		"full hosts with the oldest models": {a: full(100 * time.Minute), b: full(95 * time.Minute), c: full(80 * time.Minute), want: "[a b]"},
		"full hosts with young models":      {a: full(45 * time.Second), b: full(time.Second), c: full(0), want: "[a b c]"},
		"rates of a model used now":         {a: rate(100), b: rate(150), c: rate(151), want: "[a b]"},
		"low rates":                         {a: rate(0), b: rate(140), c: rate(151), want: "[a b]"},
		"rates of a busy model":             {a: rate(1000), b: rate(1099), c: rate(1101), model: func(m *placement.Model) { m.ScaleUp = true }, want: "[a b]"},
		"rates of a model used lately":      {a: rate(1000), b: rate(3000), c: rate(3001), model: unused(10 * time.Minute), want: "[a b]"},
		"rates of a model used today":       {a: rate(1000), b: rate(4000), c: rate(4001), model: unused(time.Hour), want: "[a b]"},
		"an old model goes to busy hosts":   {a: rate(1000), b: rate(999), c: rate(4000), model: unused(24 * time.Hour), want: "[a c]"},
		"an old model and low rates":        {a: rate(0), b: rate(99), c: rate(400), model: unused(24 * time.Hour), want: "[a b c]"},
		"an old model that is busy":         {a: rate(1000), b: rate(1099), c: rate(4000), model: func(m *placement.Model) { unused(24 * time.Hour)(m); m.ScaleUp = true }, want: "[a b]"},
		"others keep their place":           {a: full(time.Hour), b: func(h *placement.Host) { h.Full = true }, c: queued(50), model: func(m *placement.Model) { m.KeepOthers = true }, want: "[c]"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := view(newHost("a"), newHost("b"), newHost("c"))
			for i, change := range []hostChange{test.a, test.b, test.c} {
				if change != nil {
					change(&v.Hosts[i])
				}
			}
			v.Types = types
			var changes []modelChange
			if test.model != nil {
				changes = append(changes, test.model)
			}
			if got := chosen(t, v, changes...); got != test.want {
				t.Errorf("placed on %v, want %v", got, test.want)
			}
		})
	}
}

func TestRefusalNamesItsReason(t *testing.T) {
	t.Parallel()
	failed := func(host pipeline.HostID, ago time.Duration) placement.Failure {
		return placement.Failure{Host: host, At: start.Add(-ago), Message: string(host)}
	}
	dead := newHost("dead", func(h *placement.Host) { h.Alive = false; h.Labels = []string{"big"} })
	for name, test := range map[string]struct {
		hosts  []placement.Host
		model  modelChange
		reason placement.Reason
		labels []string
		last   string
		retry  time.Duration
	}{
		"no host":                  {reason: placement.NoHost},
		"only dead ones":           {hosts: []placement.Host{dead}, reason: placement.NoHost},
		"a missing label":          {hosts: []placement.Host{newHost("a", labels("gpu")), dead}, model: ofType("t"), reason: placement.NoLabels, labels: []string{"big"}},
		"a missing combination":    {hosts: []placement.Host{newHost("a", labels("gpu")), newHost("b", labels("big"))}, model: ofType("t"), reason: placement.NoLabels, labels: []string{"gpu", "big"}},
		"too large":                {hosts: []placement.Host{newHost("a"), dead}, model: func(m *placement.Model) { m.Need.Host = 101 * mib }, reason: placement.TooLarge},
		"too large for the device": {hosts: []placement.Host{newHost("a")}, model: func(m *placement.Model) { m.Need.Device = 1 }, reason: placement.TooLarge},
		"visited":                  {hosts: []placement.Host{newHost("a")}, model: func(m *placement.Model) { m.Visited = []pipeline.HostID{"a"} }, reason: placement.NoOtherHost},
		"queues are full":          {hosts: []placement.Host{newHost("a", queued(256))}, reason: placement.QueuesFull},
		"would evict":              {hosts: []placement.Host{newHost("a", used(100))}, model: func(m *placement.Model) { m.KeepOthers = true }, reason: placement.NoRoom},
		"failed on the only host": {
			hosts:  []placement.Host{newHost("a"), dead},
			model:  func(m *placement.Model) { m.Failures = []placement.Failure{failed("a", time.Minute)} },
			reason: placement.LoadFailed, last: "a", retry: 4 * time.Minute,
		},
		"failed on three": {
			hosts: []placement.Host{newHost("a"), newHost("b"), newHost("c"), newHost("d")},
			model: func(m *placement.Model) {
				m.Failures = []placement.Failure{failed("b", 2*time.Minute), failed("a", 6*time.Minute), failed("c", 3*time.Minute), failed("d", 8*time.Minute)}
				m.LastUse = start.Add(-3 * time.Minute)
			},
			reason: placement.LoadFailed, last: "b", retry: 4 * time.Minute,
		},
		"crashed two": {
			hosts: []placement.Host{newHost("a"), newHost("b"), newHost("c"), newHost("d")},
			model: func(m *placement.Model) {
				m.Failures = []placement.Failure{{Host: "a", At: start, Crashed: true, Message: "x"}, {Host: "b", At: start.Add(-time.Minute), Crashed: true}}
			},
			reason: placement.LoadFailed, last: "x", retry: 4 * time.Minute,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := view(test.hosts...)
			v.Types = map[string]placement.Constraint{"t": {Required: []string{"gpu", "big"}}}
			m := newModel("m")
			if test.model != nil {
				test.model(m)
			}
			id, refusal := v.Place(start, m)
			if refusal == nil || refusal.Reason != test.reason || !slices.Equal(refusal.Labels, test.labels) {
				t.Fatalf("placed on %q: %+v", id, refusal)
			}
			if test.retry == 0 {
				return
			}
			if last := refusal.Failures[len(refusal.Failures)-1].Message; last != test.last || !refusal.RetryAt.Equal(start.Add(test.retry)) {
				t.Errorf("last %q, retry after %v", last, refusal.RetryAt.Sub(start))
			}
			// The model counts as unused as before, or the failures expire earlier.
			m.LastUse = m.LastUse.Add(test.retry)
			if _, again := v.Place(refusal.RetryAt, m); again != nil {
				t.Errorf("refused when the records expired: %+v", again)
			}
		})
	}
}

// TestPlacementIsStableAcrossReleases holds the hash: hosts of two releases must agree.
func TestPlacementIsStableAcrossReleases(t *testing.T) {
	t.Parallel()
	got := ""
	for i := range 12 {
		id, refusal := view(newHost("host-1"), newHost("host-2"), newHost("host-3")).Place(start, newModel(model.ID(fmt.Sprint("iris-v", i))))
		if refusal != nil {
			t.Fatalf("%+v", refusal)
		}
		got += string(id[len(id)-1])
	}
	if want := "123223232313"; got != want {
		t.Errorf("placed on %s, want %s", got, want)
	}
}

func drawHost(t *rapid.T, i int) placement.Host {
	size := func(name string, most int64) int64 { return rapid.Int64Range(0, most).Draw(t, name) }
	h := placement.Host{
		ID:        pipeline.HostID(fmt.Sprint("h", i)),
		Version:   rapid.SampledFrom([]string{"1", "2"}).Draw(t, "version"),
		JoinedAt:  start.Add(-time.Duration(size("joined", 30)) * time.Minute),
		Alive:     rapid.IntRange(0, 5).Draw(t, "alive") > 0,
		Draining:  rapid.IntRange(0, 5).Draw(t, "draining") == 0,
		Labels:    rapid.SliceOfDistinct(rapid.SampledFrom([]string{"gpu", "big"}), rapid.ID).Draw(t, "labels"),
		Capacity:  model.Size{Host: size("capacity", 20), Device: size("device", 20)},
		Models:    int(size("models", 20)),
		Full:      rapid.Bool().Draw(t, "full"),
		LoadSlots: int(size("slots", 4)),
		Loading:   int(size("loading", 4)),
		Queued:    rapid.SampledFrom([]int{0, 0, 1, 7, 255, 256}).Draw(t, "queued"),
		Rate:      rapid.SampledFrom([]float64{0, 90, 200, 5000}).Draw(t, "rate"),
	}
	h.Used = model.Size{Host: size("used", h.Capacity.Host), Device: size("device used", h.Capacity.Device)}
	if h.Models > 0 {
		h.OldestUse = start.Add(-time.Duration(size("age", 7200)) * time.Second)
	}
	return h
}

func drawModel(t *rapid.T, hosts []placement.Host) *placement.Model {
	some := func(name string) []pipeline.HostID {
		var ids []pipeline.HostID
		for _, h := range hosts {
			if rapid.IntRange(0, 7).Draw(t, name) == 0 {
				ids = append(ids, h.ID)
			}
		}
		return ids
	}
	m := newModel(model.ID(rapid.StringN(1, 8, -1).Draw(t, "id")))
	m.Type = rapid.SampledFrom([]string{"", "gpu", "big"}).Draw(t, "type")
	m.Need = model.Size{Host: rapid.Int64Range(0, 12).Draw(t, "need"), Device: rapid.Int64Range(0, 6).Draw(t, "need of the device")}
	m.Visited = some("visited")
	for _, id := range some("holders") {
		m.Replicas = append(m.Replicas, placement.Replica{Host: id, Loaded: rapid.Bool().Draw(t, "loaded")})
	}
	for _, id := range some("failed") {
		ago := time.Duration(rapid.IntRange(0, 700).Draw(t, "failed at")) * time.Second
		m.Failures = append(m.Failures, placement.Failure{Host: id, At: start.Add(-ago), Crashed: rapid.IntRange(0, 3).Draw(t, "crashed") == 0})
	}
	m.LastUse = start.Add(-time.Duration(rapid.SampledFrom([]int{0, 60, 200, 90000}).Draw(t, "unused")) * time.Second)
	m.KeepOthers = rapid.Bool().Draw(t, "keep others")
	return m
}

func TestOnlyEligibleHostsAreChosenAndSendersAgree(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		v := placement.View{Types: map[string]placement.Constraint{
			"gpu": {Required: []string{"gpu"}}, "big": {Required: []string{"gpu"}, Preferred: []string{"big"}},
		}}
		for i := range rapid.IntRange(0, 8).Draw(t, "hosts") {
			v.Hosts = append(v.Hosts, drawHost(t, i))
		}
		m := drawModel(t, v.Hosts)
		expiry := 10 * time.Minute
		if start.Sub(m.LastUse) < 3*time.Minute {
			expiry = 5 * time.Minute
		}
		live, crashed := map[pipeline.HostID]bool{}, 0
		for _, f := range m.Failures {
			if start.Sub(f.At) < expiry {
				live[f.Host] = true
				if f.Crashed {
					crashed++
				}
			}
		}
		eligible := map[pipeline.HostID]bool{}
		for _, h := range v.Hosts {
			free := model.Size{Host: h.Capacity.Host - h.Used.Host, Device: h.Capacity.Device - h.Used.Device}
			eligible[h.ID] = h.Alive && !h.Draining && (m.Type == "" || slices.Contains(h.Labels, "gpu")) &&
				m.Need.Host <= h.Capacity.Host && m.Need.Device <= h.Capacity.Device && h.Queued < 256 &&
				!live[h.ID] && len(live) < 3 && crashed < 2 && !slices.Contains(m.Visited, h.ID) &&
				!slices.ContainsFunc(m.Replicas, func(r placement.Replica) bool { return r.Host == h.ID }) &&
				(!m.KeepOthers || !h.Full && m.Need.Host <= free.Host && m.Need.Device <= free.Device)
		}
		possible := false
		for _, e := range eligible {
			possible = possible || e
		}
		id, refusal := v.Place(start, m)
		if possible != (refusal == nil) || possible && !eligible[id] {
			t.Fatalf("placed on %q: %+v; eligible are %v", id, refusal, eligible)
		}
		other := v
		other.Hosts = rapid.Permutation(v.Hosts).Draw(t, "another order")
		if again, _ := other.Place(start, m); again != id {
			t.Fatalf("another sender chooses %q, not %q", again, id)
		}
	})
}

// TestEqualModelsSpread places models one after the other, each loaded before the next.
func TestEqualModelsSpread(t *testing.T) {
	t.Parallel()
	for round := range 200 {
		v := view(newHost("a"), newHost("b"), newHost("c"))
		for i := range 30 {
			m := newModel(model.ID(fmt.Sprint(round, "/", i)))
			id, refusal := v.Place(start, m)
			if refusal != nil {
				t.Fatalf("%+v", refusal)
			}
			h := &v.Hosts[id[0]-'a']
			h.Promise(m.Need)
			h.Queued = 0
		}
		for _, h := range v.Hosts {
			if h.Models < 8 || h.Models > 12 {
				t.Errorf("round %d: host %s has %d models, want 10 +- 2", round, h.ID, h.Models)
			}
		}
	}
}

// TestColdModelsSpread has three gateways place 100 models at once that know of their own
// placements only.
func TestColdModelsSpread(t *testing.T) {
	t.Parallel()
	for _, slots := range []int{1, 2, 4, 8} {
		for round := range 50 {
			var gateways [3]placement.View
			for i := range gateways {
				gateways[i] = view(newHost("a"), newHost("b"), newHost("c"))
				for h := range gateways[i].Hosts {
					gateways[i].Hosts[h].LoadSlots = slots
				}
			}
			var queues [3]int
			for i := range 100 {
				m := newModel(model.ID(fmt.Sprint(round, "/", i)))
				v := gateways[i%3]
				id, refusal := v.Place(start, m)
				if refusal != nil {
					t.Fatalf("%+v", refusal)
				}
				v.Hosts[id[0]-'a'].Promise(m.Need)
				queues[id[0]-'a']++
			}
			if longest := slices.Max(queues[:]); float64(longest) > 1.5*100/3 {
				t.Errorf("%d slots, round %d: queues %v", slots, round, queues)
			}
		}
	}
}

func BenchmarkPlace(b *testing.B) {
	for name, change := range map[string]hostChange{"room": used(10), "full": full(time.Hour)} {
		v := placement.View{Types: map[string]placement.Constraint{}}
		for i := range 64 {
			v.Hosts = append(v.Hosts, newHost(pipeline.HostID(fmt.Sprintf("host-%02d", i)), change, labels("gpu", "zone-a")))
			v.Hosts[i].JoinedAt = start.Add(-time.Duration(i) * time.Minute)
			v.Hosts[i].Version = fmt.Sprint(i % 2)
		}
		for i := range 8 {
			v.Types[fmt.Sprint("type", i)] = placement.Constraint{Required: []string{"gpu"}}
		}
		m := newModel("digits-reader-17", ofType("type3"))
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, refusal := v.Place(start, m); refusal != nil {
					b.Fatalf("%+v", refusal)
				}
			}
		})
	}
}
