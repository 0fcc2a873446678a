package placement_test

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stagemesh/stagemesh/internal/models/placement"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// simulation is a stage with one model whose replicas come and go by the decisions of the
// package. Each replica gets the same share of the requests.
type simulation struct {
	t          *testing.T
	view       placement.View
	model      *placement.Model
	usages     map[pipeline.HostID]*placement.Usage
	now        time.Time
	pending    int
	ups, downs int
}

func newSimulation(t *testing.T, hosts int, change ...hostChange) *simulation {
	s := &simulation{t: t, now: start, model: newModel("m"), usages: map[pipeline.HostID]*placement.Usage{}}
	for i := range hosts {
		s.view.Hosts = append(s.view.Hosts, newHost(pipeline.HostID(fmt.Sprint("h", i)), change...))
	}
	s.add()
	return s
}

// add begins to load a replica.
func (s *simulation) add() {
	id, refusal := s.view.Place(s.now, s.model)
	if refusal != nil {
		s.t.Fatalf("%+v", refusal)
	}
	s.model.Replicas = append(s.model.Replicas, placement.Replica{Host: id, Since: s.now})
	s.usages[id] = &placement.Usage{}
}

// step simulates ten seconds with these requests per minute.
func (s *simulation) step(requests float64) {
	s.now = s.now.Add(10 * time.Second)
	if requests > 0 {
		s.model.LastUse = s.now
	}
	loading := false
	for i, r := range s.model.Replicas {
		s.model.Replicas[i].Loaded = s.now.Sub(r.Since) > s.model.LoadTime
		loading = loading || !s.model.Replicas[i].Loaded
	}
	if requests > 0 {
		share := requests / float64(len(s.model.Replicas))
		for _, u := range s.usages {
			u.Observe(s.now, share/2000)
		}
		s.model.Usage = s.usages[s.model.Replicas[0].Host]
		if more := s.view.ScaleUp(s.now, s.model); more > 0 {
			s.pending = more
		}
	}
	if s.pending > 0 && !loading {
		s.pending--
		s.ups++
		s.add()
	}
	if s.now.Unix()%360 != 0 {
		return
	}
	for i := range s.view.Hosts {
		h := &s.view.Hosts[i]
		if s.model.Usage = s.usages[h.ID]; s.model.Usage != nil && len(s.view.ScaleDown(s.now, h, []*placement.Model{s.model})) > 0 {
			s.downs++
			s.model.Replicas = slices.DeleteFunc(s.model.Replicas, func(r placement.Replica) bool { return r.Host == h.ID })
			delete(s.usages, h.ID)
		}
	}
	if len(s.model.Replicas) == 0 {
		s.t.Fatal("the last replica was removed")
	}
}

// during simulates a time.
func (s *simulation) during(d time.Duration, requests func(second int) float64) {
	for second := 0; second < int(d.Seconds()); second += 10 {
		s.step(requests(second))
		// The caches keep their age.
		for i := range s.view.Hosts {
			if h := &s.view.Hosts[i]; !h.OldestUse.IsZero() {
				h.OldestUse = h.OldestUse.Add(10 * time.Second)
			}
		}
	}
}

func TestRegularUseGetsOneMoreReplica(t *testing.T) {
	t.Parallel()
	every := func(d time.Duration) func(int) float64 {
		return func(second int) float64 {
			if second%int(d.Seconds()) == 0 {
				return 6
			}
			return 0
		}
	}
	for name, test := range map[string]struct {
		use   func(int) float64
		hosts []hostChange
		want  int
	}{
		"continuous use":                  {use: every(10 * time.Second), want: 2},
		"use every 20 minutes":            {use: every(20 * time.Minute), want: 2},
		"use every 2 hours":               {use: every(2 * time.Hour), want: 1},
		"one burst":                       {use: func(second int) float64 { return float64(max(0, 360-second)) }, want: 1},
		"two bursts at 30 minutes":        {use: func(second int) float64 { return float64(max(0, 300-second%1800)) }, want: 2},
		"no room":                         {use: every(10 * time.Second), hosts: []hostChange{used(91)}, want: 1},
		"no room, but unused models only": {use: every(10 * time.Second), hosts: []hostChange{full(21 * time.Hour)}, want: 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSimulation(t, 5, test.hosts...)
			s.during(24*time.Hour, test.use)
			if len(s.model.Replicas) != test.want || s.ups != test.want-1 {
				t.Errorf("%d replicas after %d loads, want %d", len(s.model.Replicas), s.ups, test.want)
			}
		})
	}
}

func TestMinReplicasAreLoaded(t *testing.T) {
	t.Parallel()
	s := newSimulation(t, 5, full(time.Minute))
	s.model.MinReplicas = 3
	s.during(48*time.Hour, func(second int) float64 { return float64(max(0, 100-second)) })
	if len(s.model.Replicas) != 3 || s.downs != 0 {
		t.Errorf("%d replicas after %d unloads", len(s.model.Replicas), s.downs)
	}
}

// TestReplicasFollowTheDay has a load that grows to the work of eight replicas and shrinks
// again, with noise, on hosts that are full.
func TestReplicasFollowTheDay(t *testing.T) {
	t.Parallel()
	noise := rand.New(rand.NewPCG(1, 2))
	s := newSimulation(t, 12, full(20*time.Hour))
	most, overloaded := 0, 0
	s.during(72*time.Hour, func(second int) float64 {
		day := 2 * math.Pi * float64(second) / 86400
		requests := 8000 * (1 - math.Cos(day)) * (0.95 + 0.1*noise.Float64())
		most = max(most, len(s.model.Replicas))
		if requests/float64(len(s.model.Replicas)) > 2000 {
			overloaded++
		}
		return requests
	})
	if most < 8 || most > 10 {
		t.Errorf("at most %d replicas, want 8 to 10", most)
	}
	if len(s.model.Replicas) > 3 {
		t.Errorf("%d replicas at midnight", len(s.model.Replicas))
	}
	if s.ups > 3*9 {
		t.Errorf("%d loads in three days with a need of 8: replicas flap", s.ups)
	}
	if overloaded > 72*360/50 {
		t.Errorf("overloaded for %d of %d steps", overloaded, 72*360)
	}
}

// TestBurstsKeepReplicas has a load that needs four replicas for one minute in ten.
func TestBurstsKeepReplicas(t *testing.T) {
	t.Parallel()
	s := newSimulation(t, 6, full(time.Hour))
	s.during(24*time.Hour, func(second int) float64 {
		if second%600 < 60 {
			return 7000
		}
		return 100
	})
	if s.ups > 4 || s.downs > 0 {
		t.Errorf("%d loads and %d unloads", s.ups, s.downs)
	}
}

func TestScaleUpIsBoundedAndWaitsForLoads(t *testing.T) {
	t.Parallel()
	at := func(ago time.Duration, hosts ...pipeline.HostID) (r []placement.Replica) {
		for _, h := range hosts {
			r = append(r, placement.Replica{Host: h, Loaded: true, Since: start.Add(-ago)})
		}
		return r
	}
	busy := 4.5
	for name, test := range map[string]struct {
		hosts    int
		replicas []placement.Replica
		load     float64
		want     int
	}{
		"at most two more on few hosts": {5, at(time.Hour, "h0"), busy, 2},
		"by load on many hosts":         {12, at(time.Hour, "h0"), busy, 4},
		"a third of the hosts":          {12, at(time.Hour, "h0", "h1"), 1e9, 4},
		"no more than hosts":            {3, at(time.Hour, "h0", "h1"), busy, 1},
		"exactly enough":                {5, at(time.Hour, "h0", "h1"), 1, 0},
		"a little too much":             {5, at(time.Hour, "h0", "h1"), 1.01, 1},
		"a load just before":            {5, at(27*time.Second, "h0"), busy, 0},
		"a load before":                 {5, at(28*time.Second, "h0"), busy, 2},
		"a load now":                    {5, append(at(time.Hour, "h0"), placement.Replica{Host: "h1", Since: start.Add(-time.Hour)}), busy, 0},
		"a load on a dead host":         {5, append(at(time.Hour, "h0"), placement.Replica{Host: "dead"}), busy, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var v placement.View
			for i := range test.hosts {
				v.Hosts = append(v.Hosts, newHost(pipeline.HostID(fmt.Sprint("h", i))))
			}
			m := newModel("m")
			m.Replicas = test.replicas
			m.Usage = &placement.Usage{}
			m.Usage.Observe(start, test.load)
			if got := v.ScaleUp(start, m); got != test.want {
				t.Errorf("%d more, want %d", got, test.want)
			}
		})
	}
}

// TestScaleDownKeepsReplicas removes replicas of many models at random times and states.
func TestScaleDownKeepsReplicas(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var v placement.View
		for i := range 5 {
			v.Hosts = append(v.Hosts, drawHost(t, i))
			h := &v.Hosts[i]
			h.Capacity, h.Used = model.Size{Host: 1000}, model.Size{Host: rapid.SampledFrom([]int64{900, 990, 1000}).Draw(t, "used")}
		}
		m := drawModel(t, v.Hosts)
		m.Model.MinReplicas, m.Type = rapid.IntRange(0, 3).Draw(t, "least"), ""
		for i := range m.Replicas {
			m.Replicas[i].Since = start.Add(-time.Duration(rapid.IntRange(0, 90).Draw(t, "since")) * time.Minute)
		}
		m.Usage = &placement.Usage{}
		m.Usage.Observe(start.Add(-time.Duration(rapid.IntRange(0, 1200).Draw(t, "sampled"))*time.Second), rapid.Float64Range(0, 2).Draw(t, "load"))
		// Each holder decides after the others' removals.
		for i := range v.Hosts {
			remove := v.ScaleDown(start, &v.Hosts[i], []*placement.Model{m})
			if len(remove) == 0 {
				continue
			}
			before := len(m.Replicas)
			m.Replicas = slices.DeleteFunc(m.Replicas, func(r placement.Replica) bool { return r.Host == v.Hosts[i].ID })
			serving := 0
			for _, r := range m.Replicas {
				if h := v.Hosts[r.Host[1]-'0']; r.Loaded && h.Alive && !h.Draining {
					serving++
				}
			}
			if len(m.Replicas) != before-1 || serving < max(1, m.MinReplicas) {
				t.Fatalf("%d replicas left, of them %d serve; at least %d", len(m.Replicas), serving, m.MinReplicas)
			}
		}
	})
}

func TestScaleDownTakesTheOldestUpToItsShare(t *testing.T) {
	t.Parallel()
	// Old models are better on hosts b and c, which are busy.
	v := view(newHost("a", full(10*time.Hour)), newHost("b", full(10*time.Hour), rate(500)), newHost("c", full(10*time.Hour), rate(500)))
	var own []*placement.Model
	for i := range 20 {
		m := newModel(model.ID(fmt.Sprint("m", i)), unused(time.Duration(100-i)*time.Hour))
		for _, h := range v.Hosts {
			m.Replicas = append(m.Replicas, placement.Replica{Host: h.ID, Loaded: true, Since: start.Add(-200 * time.Hour)})
		}
		m.Usage, m.Need.Host = &placement.Usage{}, 2*mib
		own = append(own, m)
	}
	own[0].Replicas[2].Since = start.Add(-29 * time.Minute) // too young to decide
	rand.New(rand.NewPCG(3, 4)).Shuffle(len(own), func(i, j int) { own[i], own[j] = own[j], own[i] })
	if got := fmt.Sprint(v.ScaleDown(start, &v.Hosts[0], own)); got != "[m1 m2]" {
		t.Errorf("removed %v, want 5 %% of the host, the oldest first", got)
	}
	own[7].Need.Host = 30 * mib
	if got := fmt.Sprint(v.ScaleDown(start, &v.Hosts[0], own[7:8])); got != "[m7]" {
		t.Errorf("removed %v, want a large model alone", got)
	}
	for i := range v.Hosts {
		v.Hosts[i].Used.Host = 94 * mib
	}
	if got := v.ScaleDown(start, &v.Hosts[0], own); got != nil {
		t.Errorf("removed %v although there is room", got)
	}
}

func TestOneOfTwoUnusedReplicasIsRemoved(t *testing.T) {
	t.Parallel()
	v := view(newHost("a", full(10*time.Hour)), newHost("b", full(10*time.Hour)))
	both := func(id model.ID, unusedFor time.Duration) (removals int) {
		m := newModel(id, unused(unusedFor))
		m.Usage = &placement.Usage{}
		m.Replicas = []placement.Replica{{Host: "a", Loaded: true}, {Host: "b", Loaded: true}}
		for i := range v.Hosts {
			removals += len(v.ScaleDown(start, &v.Hosts[i], []*placement.Model{m}))
		}
		return removals
	}
	for i := range 20 {
		id := model.ID(fmt.Sprint("m", i))
		if early, late := both(id, 59*time.Minute), both(id, time.Hour); early != 0 || late != 1 {
			t.Errorf("%d and %d removals by holders that decide at once, want 0 and 1", early, late)
		}
	}
}

func TestRatesDecideWhichReplicaGoes(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		rates []float64
		model modelChange
		want  string
	}{
		"low rates are equal":                   {[]float64{0, 100}, unused(time.Hour), "[a b]"},
		"the busier one of two":                 {[]float64{100, 401}, unused(time.Hour), "[b]"},
		"the busier one of two, before":         {[]float64{900, 100}, unused(time.Hour), "[a]"},
		"the busiest of three":                  {[]float64{100, 101, 151}, unused(0), "[c]"},
		"one of two that are busier":            {[]float64{100, 900, 800}, unused(0), "[b c]"},
		"any of three":                          {[]float64{100, 150, 150}, unused(0), "[a b c]"},
		"the idle one of two with an old model": {[]float64{401, 100}, unused(24 * time.Hour), "[b]"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var v placement.View
			for i, r := range test.rates {
				v.Hosts = append(v.Hosts, newHost(pipeline.HostID("abc"[i:i+1]), full(10*time.Hour), rate(r)))
			}
			removers := map[pipeline.HostID]bool{}
			for i := range 40 {
				m, removals := newModel(model.ID(fmt.Sprint("m", i)), test.model), 0
				m.Usage = &placement.Usage{}
				for _, h := range v.Hosts {
					m.Replicas = append(m.Replicas, placement.Replica{Host: h.ID, Loaded: true})
				}
				for i := range v.Hosts {
					if h := &v.Hosts[i]; len(v.ScaleDown(start, h, []*placement.Model{m})) > 0 {
						removals++
						removers[h.ID] = true
					}
				}
				if removals != 1 {
					t.Errorf("%d of the holders remove their replica at once", removals)
				}
			}
			if got := fmt.Sprint(slices.Sorted(maps.Keys(removers))); got != test.want {
				t.Errorf("%s remove theirs, want %s", got, test.want)
			}
		})
	}
}

// TestProactiveLoadsKeepTheReserve fills hosts over a simulated day with a task every 7 min.
func TestProactiveLoadsKeepTheReserve(t *testing.T) {
	t.Parallel()
	v := view(newHost("a", used(70)), newHost("b", used(10)), newHost("c", used(90)), newHost("dead", func(h *placement.Host) { h.Alive = false }))
	var models []*placement.Model
	for i := range 400 {
		models = append(models, newModel(model.ID(fmt.Sprint("m", i)), unused(time.Duration(i)*time.Minute)))
	}
	models[3].Failures = []placement.Failure{{Host: "a", At: start}, {Host: "b", At: start}, {Host: "c", At: start}}
	now, loaded := start, 0
	for round := range 24 * 60 / 7 {
		for _, load := range v.Proactive(now, models) {
			for _, m := range models {
				if m.ID != load.Model {
					continue
				}
				if len(m.Replicas) > 0 || round == 0 && m == models[3] {
					t.Fatalf("%s is loaded twice, or although that failed", m.ID)
				}
				m.Replicas = append(m.Replicas, placement.Replica{Host: load.Host, Loaded: true})
				h := &v.Hosts[slices.IndexFunc(v.Hosts, func(h placement.Host) bool { return h.ID == load.Host })]
				h.Promise(m.Need)
				h.Queued, h.OldestUse = 0, start.Add(-24*time.Hour)
				loaded++
			}
		}
		now = now.Add(7 * time.Minute)
	}
	for i, want := range []int64{87, 87, 90, 0} {
		if got := v.Hosts[i].Used.Host / mib; got < want-1 || got > want {
			t.Errorf("host %s uses %d MiB, want %d", v.Hosts[i].ID, got, want)
		}
	}
	for i, m := range models {
		if (len(m.Replicas) > 0) != (i < loaded) {
			t.Errorf("m%d is loaded: %v; %d are", i, len(m.Replicas) > 0, loaded)
		}
	}
}

func TestFullHostsTurnOver(t *testing.T) {
	t.Parallel()
	v := view(newHost("a", full(3*time.Hour)), newHost("b", full(3*time.Hour)))
	var models []*placement.Model
	for i := range 100 {
		models = append(models, newModel(model.ID(fmt.Sprint("m", i)), unused(time.Duration(2*i)*time.Minute)))
	}
	count := func(m []*placement.Model) int { return len(v.Proactive(start, m)) }
	if got := count(models); got != 10 {
		t.Errorf("%d loads, want 5 %% of both hosts", got)
	}
	// The least recently used models are 3 h old, so a model must be an hour younger.
	if got := count(models[57:]); got != 3 {
		t.Errorf("%d loads, want those of models used within two hours", got)
	}
	v.Hosts[0].Full = false
	if got := count(models); got != 0 {
		t.Errorf("%d loads, want none while a host is not full", got)
	}
	v.Hosts[0].Full, models[99].MinReplicas = true, 1
	if got := count(models[99:]); got != 1 {
		t.Error("MinReplicas does not hold on full hosts")
	}
}
