package fleet

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
)

func modelName(i int) string { return fmt.Sprintf("m%d", i) }

// modelSpec describes a host of models.
type modelSpec struct {
	// room is how many of the models fit.
	room int
	// load is how long a load takes, 20 ms if it is 0; broken is how loads fail, if they do.
	load   time.Duration
	broken string
}

// pidFile has the process ID of a host's worker.
const pidFile = "pid"

// modelHost starts a host that loads models of 1 MiB in a worker.
func (f *fleet) modelHost(s modelSpec) *member {
	f.t.Helper()
	m := &member{fleet: f, link: f.newLink(), models: filepath.Join(f.newFolder(), "models")}
	m.args = []string{"stage", "score", "--listen", anyPort, "--config", f.meshFile(m.link, "stages", f.modelStage(s, m.models))}
	m.launch()
	m.awaitReady()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hosts = append(f.hosts, m)
	return m
}

func (f *fleet) newFolder() string {
	f.t.Helper()
	folder, err := os.MkdirTemp(f.folder, "")
	must(f.t, err)
	return folder
}

func (f *fleet) modelStage(s modelSpec, folder string) map[string]any {
	program, err := filepath.Abs(filepath.Join("testdata", "models.py"))
	must(f.t, err)
	if s.load == 0 {
		s.load = 20 * time.Millisecond
	}
	return map[string]any{"score": map[string]any{
		"runner": map[string]any{"worker": map[string]any{
			"command": []string{"python3", program}, "concurrency": 2,
			"options": map[string]any{"folder": folder, "load": s.load.Seconds(), "run": 0.001, "broken": s.broken},
		}},
		"models": map[string]any{"capacity": fmt.Sprintf("%dMiB", s.room+1), "default_size": "64KiB"},
	}}
}

// modelGateways starts gateways that register that many models, and those that load slowly. It
// waits until they know the memory of all hosts.
func (f *fleet) modelGateways(gateways, models int, slow ...string) (out []*member) {
	f.t.Helper()
	registered := map[string]any{}
	for i := range models {
		registered[modelName(i)] = map[string]any{"stage": "score", "size": "1MiB"}
	}
	for _, name := range slow {
		registered[name] = map[string]any{"stage": "score", "size": "1MiB", "options": map[string]string{"load": "2"}}
	}
	for range gateways {
		m := &member{fleet: f, link: f.newLink()}
		m.args = []string{"gateway", "--admin", anyPort, "--config", f.meshFile(m.link, "stages", f.modelStage(modelSpec{room: 1}, f.folder), "models", registered)}
		m.launch()
		m.awaitReady()
		testbed.Eventually(f.t, "the gateway knows all hosts", func() bool {
			list, err := callAdmin(m, adminv1connect.NewMeshServiceClient, adminv1connect.MeshServiceClient.ListHosts, &adminv1.ListHostsRequest{})
			return err == nil && len(list.GetHosts()) == len(f.hosts) &&
				!slices.ContainsFunc(list.GetHosts(), func(h *adminv1.HostStatus) bool { return !h.GetAlive() || h.GetRecord().GetCache() == nil })
		})
		out = append(out, m)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gateways = append(f.gateways, out...)
	return out
}

// awaitModels waits until each model has answered once.
func (f *fleet) awaitModels(models int) {
	f.t.Helper()
	testbed.Eventually(f.t, "all models answer", func() bool {
		r := f.load(loadSpec{requests: models, inFlight: 32, models: models, through: perRequest}).wait()
		return r.right == models
	})
}

// statuses returns what a gateway shows of the models, by name.
func (m *member) statuses() map[string]*adminv1.ModelStatus {
	m.fleet.t.Helper()
	list, err := callAdmin(m, adminv1connect.NewModelServiceClient, adminv1connect.ModelServiceClient.ListModels, &adminv1.ListModelsRequest{PageSize: 1000})
	must(m.fleet.t, err)
	out := map[string]*adminv1.ModelStatus{}
	for _, status := range list.GetModels() {
		out[status.GetModel().GetId()] = status
	}
	return out
}

// replicas returns the replicas that a gateway shows, loaded or not, as "host model", sorted.
func (m *member) replicas() (out []string) {
	m.fleet.t.Helper()
	for name, status := range m.statuses() {
		for _, r := range status.GetReplicas() {
			if r.GetState() != meshv1.ReplicaState_REPLICA_STATE_FAILED {
				out = append(out, r.GetHost()+" "+name)
			}
		}
	}
	slices.Sort(out)
	return out
}

// loaded returns the models that the workers of hosts have, as "host model", sorted.
func loaded(hosts []*member) (out []string) {
	for _, h := range hosts {
		files, err := os.ReadDir(h.models)
		must(h.fleet.t, err)
		for _, file := range files {
			if name := file.Name(); name != pidFile {
				out = append(out, h.address()+" "+name)
			}
		}
	}
	slices.Sort(out)
	return out
}

// signalWorker sends a signal to the worker of a host.
func (m *member) signalWorker(s syscall.Signal) {
	m.fleet.t.Helper()
	data, err := os.ReadFile(filepath.Join(m.models, pidFile))
	must(m.fleet.t, err)
	pid, err := strconv.Atoi(string(data))
	must(m.fleet.t, err)
	if err := syscall.Kill(pid, s); err != nil {
		m.fleet.t.Logf("%s to worker %d: %v", s, pid, err) // its host may have replaced it
	}
}

func TestColdRequestsShareOneLoad(t *testing.T) {
	t.Parallel()
	f := newFleet(t, brokerRegistry)
	for range 3 {
		f.modelHost(modelSpec{room: 100, load: 200 * time.Millisecond})
	}
	models := pick(5, 50)
	f.modelGateways(3, models)
	for i := range models {
		r := f.load(loadSpec{requests: 100, inFlight: 100, models: 1, firstModel: i}).wait()
		r.checkAllRight(t)
		if loads := sum(f.hosts, "stagemesh_stage_model_loads_total"); loads != i+1 {
			t.Fatalf("%d loads of %d models", loads, i+1)
		}
	}
}

func TestModelsStayLoadedWhileHostsLeave(t *testing.T) {
	t.Parallel()
	for name, atOnce := range map[string]int{"one by one": 1, "at once": 3} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const load = time.Second
			models := pick(20, 40)
			f := newFleet(t, brokerRegistry)
			for range 5 {
				f.modelHost(modelSpec{room: models, load: load})
			}
			f.modelGateways(2, models)
			f.awaitModels(models)
			misses := func() int { return sum(f.hosts[3:], "stagemesh_stage_model_requests_total", `result="miss"`) }
			before := misses()
			l := f.load(loadSpec{inFlight: 16, every: pick(10*time.Millisecond, 5*time.Millisecond), models: models})
			l.flow(100)
			for leaving := range slices.Chunk(f.hosts[:3], atOnce) {
				var stops sync.WaitGroup
				for _, host := range leaving {
					stops.Go(host.Stop)
				}
				stops.Wait()
			}
			l.flow(250)
			r := l.finish()
			r.checkAllRight(t)
			times, missed := r.times(took, ""), misses()-before
			t.Logf("P50 %s, P99 %s, longest %s, %d waited for a load", quantile(times, .5), quantile(times, .99), quantile(times, 1), missed)
			// A host may get a request as soon as the registry shows its model as loaded.
			if missed > models/4 {
				t.Errorf("%d requests wait for loads", missed)
			}
			testbed.Eventually(t, "the registry has what is loaded", func() bool {
				return slices.Equal(f.gateways[0].replicas(), loaded(f.hosts[3:]))
			})
		})
	}
}

func TestBrokenRuntimesLeaveTheModelsToTheThird(t *testing.T) {
	t.Parallel()
	for _, broken := range [][]string{{"its disk is broken", "it has no memory"}, {"its disk is broken", "crash"}}[:pick(1, 2)] {
		t.Run(broken[1], func(t *testing.T) {
			t.Parallel()
			const models = 16
			f := newFleet(t, brokerRegistry)
			for _, how := range broken {
				f.modelHost(modelSpec{room: models, broken: how})
			}
			good := f.modelHost(modelSpec{room: models})
			g := f.modelGateways(2, models)[0]
			f.load(loadSpec{requests: 10 * models, inFlight: 8, models: models, timeout: time.Minute}).wait().checkAllRight(t)
			messages := ""
			for name, status := range g.statuses() {
				for _, r := range status.GetReplicas() {
					if isGood := r.GetHost() == good.address(); isGood != (r.GetState() == meshv1.ReplicaState_REPLICA_STATE_LOADED) {
						t.Errorf("model %s: %v", name, r)
					}
					messages += r.GetMessage() + "\n"
				}
			}
			for _, how := range broken {
				// A crash is blamed on one load only where no other runs.
				if how != "crash" && !strings.Contains(messages, how) {
					t.Errorf("the statuses have no failure of %q:\n%s", how, messages)
				}
			}
		})
	}
}

// Each host has room for two thirds of the models.
func TestDurableRequestsRunWhereTheirModelIs(t *testing.T) {
	t.Parallel()
	const models, room = 18, 12
	f := newFleet(t, brokerRegistry)
	for range 2 {
		f.modelHost(modelSpec{room: room, load: 200 * time.Millisecond})
	}
	f.modelGateways(2, models)
	f.load(loadSpec{durable: true, requests: pick(20, 500) * models, inFlight: 16, models: models, timeout: time.Minute}).wait().checkAllRight(t)
	if loads := sum(f.hosts, "stagemesh_stage_model_loads_total"); loads > models+2 {
		t.Errorf("%d loads of %d models", loads, models)
	}
	if sum(f.hosts, "stagemesh_stage_model_forwards_total") == 0 {
		t.Error("no request was forwarded to the host of its model")
	}
	l := f.load(loadSpec{durable: true, inFlight: 16, every: pick(4*time.Millisecond, 2*time.Millisecond), models: room / 2, timeout: time.Minute})
	for i := range pick(2, 20) {
		holder := f.hosts[i%2]
		l.flow(100)
		holder.pause()
		testbed.Eventually(t, "requests wait for the host", func() bool { return int(l.next.Load()) >= l.answerCount()+16 })
		holder.Kill()
		holder.start()
	}
	l.flow(100)
	l.finish().checkAllRight(t)
}

// period is when requests of an alias may be answered by some models.
type period struct {
	models   []string
	from, to time.Time
	answers  map[string]int
}

func TestAliasSwitchesUnderLoad(t *testing.T) {
	t.Parallel()
	f := newFleet(t, brokerRegistry)
	for range 3 {
		f.modelHost(modelSpec{room: 100})
	}
	switches := pick(10, 200)
	gateways := f.modelGateways(2, switches+2, "slow")
	var periods []*period
	request := func(await bool, route *meshv1.AliasRoute) {
		_, err := callAdmin(gateways[len(periods)%2], adminv1connect.NewModelServiceClient, adminv1connect.ModelServiceClient.SetAlias,
			&adminv1.SetAliasRequest{Name: "best", Route: route, Wait: await})
		must(t, err)
	}
	isActive := func(model string) bool {
		return !slices.ContainsFunc(gateways, func(g *member) bool {
			got, err := callAdmin(g, adminv1connect.NewModelServiceClient, adminv1connect.ModelServiceClient.GetAlias, &adminv1.GetAliasRequest{Name: "best"})
			return err != nil || got.GetAlias().GetActive().GetModel() != model
		})
	}
	set := func(model string, others ...string) {
		t.Helper()
		p := &period{models: append(others, model), from: time.Now(), answers: map[string]int{}}
		route := &meshv1.AliasRoute{Model: model, Weights: map[string]uint32{}}
		for _, other := range others {
			route.Weights[other] = 30
		}
		request(true, route)
		testbed.Eventually(t, "all gateways have switched", func() bool { return isActive(model) })
		if n := len(periods); n > 0 {
			periods[n-1].to = time.Now()
		}
		periods = append(periods, p)
	}
	set(modelName(0))
	var loads []*load
	for _, g := range gateways {
		loads = append(loads, f.load(loadSpec{pipeline: "alias:best", inFlight: 8, every: pick(8*time.Millisecond, 4*time.Millisecond), gateway: g}))
	}
	for i := range switches {
		loads[0].flow(25)
		set(modelName(i + 1))
	}
	// The slow one is in no period: a newer target replaces it.
	request(false, &meshv1.AliasRoute{Model: "slow"})
	testbed.Eventually(t, "the slow model is being loaded", func() bool {
		return gateways[0].statuses()["slow"].GetState() == adminv1.ModelState_MODEL_STATE_LOADING
	})
	set(modelName(switches+1), modelName(switches))
	testbed.Eventually(t, "the slow model is loaded", func() bool {
		return gateways[0].statuses()["slow"].GetState() == adminv1.ModelState_MODEL_STATE_LOADED
	})
	loads[1].flow(150)
	if !isActive(modelName(switches + 1)) {
		t.Error("an older target replaces a newer one")
	}
	weighted := periods[len(periods)-1]
	weighted.to = time.Now().Add(time.Hour)
	for _, l := range loads {
		r := l.finish()
		r.checkAllRight(t)
		for _, a := range r.answers {
			_, by, _ := strings.Cut(a.body, " ")
			at := slices.IndexFunc(periods, func(p *period) bool {
				return slices.Contains(p.models, by) && !a.at.Before(p.from) && !a.at.Add(-a.took).After(p.to)
			})
			if at < 0 {
				t.Errorf("at %s, after %s: %q", a.at, a.took, a.body)
				continue
			}
			periods[at].answers[by]++
		}
	}
	t.Log(weighted.answers)
	if n := weighted.answers[weighted.models[0]]; n*10 < 2*weighted.answers[weighted.models[1]] {
		t.Errorf("answers by weight: %v", weighted.answers)
	}
}

// Everything fails, one part after the other, while requests flow through each gateway. Those
// of a killed gateway end with it, and all others are answered.
func TestModelsSurviveChaos(t *testing.T) {
	t.Parallel()
	models, requests := 60, pick(2_000, 200_000)
	f, agent := ownConsul(t)
	for range 4 {
		f.modelHost(modelSpec{room: models})
	}
	gateways := f.modelGateways(3, models)
	f.awaitModels(models)
	// A load fails with its worker, and no other host may be known at that moment.
	memory := append(slices.Clone(rejections), "QUEUE_LOST", "MODEL_LOAD_FAILED")
	kinds := []kindOfRequest{
		{load: loadSpec{}, faults: memory},
		{load: loadSpec{priority: 1}, faults: memory},
		{load: loadSpec{durable: true}, faults: rejections},
	}
	var loads []*load
	for i, kind := range kinds {
		s := kind.load
		s.gateway, s.models, s.inFlight, s.every, s.timeout = gateways[i], models, 8, pick(10*time.Millisecond, 4*time.Millisecond), time.Minute
		loads = append(loads, f.load(s))
	}
	killed := map[int]bool{}
	pause := func(atMost time.Duration) { _ = wait(t.Context(), 200*time.Millisecond+rand.N(atMost)) }
	// harm does something to a host, of which the first is the leader; one that starts again
	// is the last.
	harm := func(host int, begin, end func(*member)) {
		h := f.hosts[host]
		begin(h)
		// The long form is longer than what expires.
		pause(pick(2*time.Second, 14*time.Second))
		end(h)
		if h.HasEnded() {
			h.start()
			f.hosts = append(slices.Delete(slices.Clone(f.hosts), host, host+1), h)
		}
	}
	// harmGateway waits for requests at another one meanwhile.
	harmGateway := func(begin, end func(*member)) {
		i := rand.IntN(len(gateways))
		begin(gateways[i])
		killed[i] = killed[i] || gateways[i].HasEnded()
		loads[(i+1)%len(loads)].flow(100)
		end(gateways[i])
	}
	none := func(*member) {}
	faults := []struct {
		name string
		run  func()
	}{
		{"leader killed", func() { harm(0, (*member).Kill, none) }},
		{"host killed", func() { harm(1+rand.IntN(3), (*member).Kill, none) }},
		{"leader paused", func() { harm(0, (*member).pause, (*member).resume) }},
		{"host paused", func() { harm(1+rand.IntN(3), (*member).pause, (*member).resume) }},
		{"host restarted", func() { harm(rand.IntN(4), func(m *member) { m.Stop() }, none) }},
		{"worker killed", func() { harm(rand.IntN(4), func(m *member) { m.signalWorker(syscall.SIGKILL) }, none) }},
		{"worker paused", func() {
			harm(rand.IntN(4), func(m *member) { m.signalWorker(syscall.SIGSTOP) }, func(m *member) { m.signalWorker(syscall.SIGCONT) })
		}},
		{"gateway killed", func() { harmGateway((*member).Kill, (*member).start) }},
		{"gateway paused", func() { harmGateway((*member).pause, (*member).resume) }},
		{"broker killed", func() { f.broker.Kill(); pause(2 * time.Second); f.broker.start() }},
		{"Consul paused", func() { must(t, agent.Pause()); pause(4 * time.Second); must(t, agent.Resume()) }},
		{"table wiped", func() {
			js, table := f.jetStream(), string(f.mesh)+"_registry"
			must(t, js.DeleteStream(t.Context(), table))
			testbed.Eventually(t, "the table is filled", func() bool {
				s, err := js.Stream(t.Context(), table)
				return err == nil && int(s.CachedInfo().State.Msgs) >= 2*models
			})
		}},
	}
	answers := func() (n int) {
		for _, l := range loads {
			n += l.rightCount()
		}
		return n
	}
	count := 0
	for answers() < requests || count < len(faults) {
		for _, i := range rand.Perm(len(faults)) {
			t.Logf("%s %s", time.Now().Format("15:04:05.000"), faults[i].name)
			faults[i].run()
			pause(300 * time.Millisecond)
			count++
		}
	}
	for i, l := range loads {
		r := l.finish()
		t.Logf("gateway %d: %s", i, r)
		checkKind(t, gateways[i].address(), kinds[i], r)
		if len(r.broken) > 0 && !killed[i] {
			t.Errorf("requests without an answer at a gateway that lived: %q", r.broken)
		}
	}
	t.Logf("%d faults, %d answers", count, answers())
	f.awaitModels(models)
	var shown, there []string
	defer func() {
		if t.Failed() {
			t.Logf("the registry has %q, the hosts %q", shown, there)
		}
	}()
	testbed.Eventually(t, "the registry has what is loaded", func() bool {
		shown, there = gateways[0].replicas(), loaded(f.hosts)
		return slices.Equal(shown, there)
	})
	testbed.Eventually(t, "only queues of hosts exist", func() bool {
		return !slices.ContainsFunc(f.streamNames(), func(name string) bool {
			_, host, isOwn := strings.Cut(name, "@")
			host, _, _ = strings.Cut(host, "_")
			return isOwn && !slices.ContainsFunc(f.hosts, func(m *member) bool { return m.address() == host })
		})
	})
}
