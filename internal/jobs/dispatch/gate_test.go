package dispatch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/metric/noop"
	"google.golang.org/protobuf/types/known/timestamppb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/config"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// poolOf reads the section of a pool, whose target is pipeline echo.
func poolOf(text string) (p PoolConfig, err error) {
	doc, err := config.Parse("pool", "", []byte("target: {pipelines: [echo]}\n"+text), &p)
	if err == nil {
		err = doc.At(nil, p.validate())
	}
	return p, err
}

func mustPool(t *testing.T, text string) PoolConfig {
	t.Helper()
	p, err := poolOf(text)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func mustGate(t *testing.T, s Settings, text string, now time.Time) *poolGate {
	t.Helper()
	g, err := newPoolGate(&s, mustPool(t, text), now)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// runningGate is a gate that asks its sources.
type runningGate struct {
	t    *testing.T
	mu   sync.Mutex
	gate *poolGate
}

func runGate(t *testing.T, s Settings, text string) *runningGate {
	t.Helper()
	g := &runningGate{t: t, gate: mustGate(t, s, text, time.Now().Add(-time.Hour))}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		g.gate.run(ctx, func() {})
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return g
}

func (g *runningGate) report() *meshv1.PoolReport {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	g.gate.update(now)
	return g.gate.credit.report(now)
}

// await waits until the gate permits n jobs, for a reason that has the words.
func (g *runningGate) await(what string, n float64, words string) {
	g.t.Helper()
	var last *meshv1.PoolReport
	defer func() {
		if g.t.Failed() {
			g.t.Logf("%s: %v", what, last)
		}
	}()
	testbed.Eventually(g.t, what, func() bool {
		last = g.report()
		return (last.GetState() == "open") == (n > 0) && last.GetN() == n && strings.Contains(last.GetWhy(), words)
	})
}

// page is an HTTP server with one page that a test changes. It hangs while the page is empty.
type page struct {
	*httptest.Server

	mu    sync.Mutex
	text  string
	asked atomic.Int64
}

func servePage(t *testing.T, text string) *page {
	t.Helper()
	p := &page{text: text}
	p.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.asked.Add(1)
		p.mu.Lock()
		text := p.text
		p.mu.Unlock()
		if text == "" {
			<-r.Context().Done()
			return
		}
		_, _ = io.WriteString(w, text)
	}))
	t.Cleanup(p.Close)
	return p
}

func (p *page) set(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text = text
}

const goldenBudget = "budget: {baseline: 0.1, ready: {count: 5}, each: 10}, interval: 20ms"

// prometheus is a server that scrapes a page.
type prometheus struct {
	t            *testing.T
	folder, addr string
	process      *testbed.Process
}

func startPrometheus(t *testing.T, target *page) *prometheus {
	t.Helper()
	ports, err := testbed.FreePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	p := &prometheus{t: t, folder: t.TempDir(), addr: fmt.Sprintf("127.0.0.1:%d", ports[0])}
	text := fmt.Sprintf(`
scrape_configs:
- job_name: target
  scrape_interval: 100ms
  scrape_timeout: 100ms
  static_configs: [{targets: [%q]}]
`, strings.TrimPrefix(target.URL, "http://"))
	if err := os.WriteFile(filepath.Join(p.folder, "prometheus.yml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p.start()
	return p
}

func (p *prometheus) start() {
	p.t.Helper()
	path, err := exec.LookPath("prometheus")
	if err != nil {
		p.t.Fatalf("the test needs Debian's package prometheus: %v", err)
	}
	p.process = testbed.StartProcess(p.t, exec.Command(path, "--config.file", filepath.Join(p.folder, "prometheus.yml"),
		"--storage.tsdb.path", filepath.Join(p.folder, "data"), "--web.listen-address", p.addr))
}

func TestPrometheusGateFollowsServer(t *testing.T) {
	t.Parallel()
	target := servePage(t, "sat 0.3\n")
	server := startPrometheus(t, target)
	follow := func(query string) *runningGate {
		return runGate(t, Settings{}, fmt.Sprintf("gate: {prometheus: {url: http://%s, of: saturation, query: %q, time_query: min(timestamp(sat))}, %s}", server.addr, query, goldenBudget))
	}
	g, all := follow("max(sat)"), follow("sat")
	g.await("S = .3", 30, "")
	all.await("one sample", 30, "")
	target.set("sat 0.95\n")
	g.await("S = .95", 0, "D <= B")
	target.set("sat{a=\"1\"} 0.3\nsat{a=\"2\"} 0.1\n")
	g.await("two series, the larger one", 30, "")
	all.await("two samples", 0, "the query has 2 samples")
	target.set("") // it hangs
	g.await("the target is frozen", 0, "the query has 0 samples")
	target.set("sat NaN\n")
	g.await("NaN", 0, "the value is NaN")
	target.set("sat 0.3\n")
	g.await("the target is back", 30, "")
	server.process.Signal(syscall.SIGSTOP)
	g.await("Prometheus hangs", 0, "gate is unreadable")
	server.process.Signal(syscall.SIGCONT)
	g.await("Prometheus goes on", 30, "")
	server.process.Kill()
	g.await("Prometheus is killed", 0, "gate is unreadable")
	server.start()
	g.await("Prometheus is back", 30, "")
}

// fakePrometheus answers queries with a sample that a test chooses.
type fakePrometheus struct {
	*httptest.Server

	mu    sync.Mutex
	s     float64
	at    time.Time
	polls int
}

func serveSample(t *testing.T, s float64) *fakePrometheus {
	t.Helper()
	f := &fakePrometheus{s: s, at: time.Now()}
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		value := f.s
		if r.FormValue("query") == "time" {
			value = float64(f.at.UnixMicro()) / 1e6
		} else {
			f.polls++
		}
		_, _ = fmt.Fprintf(w, `{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[%f,"%f"]}]}}`, float64(time.Now().UnixMicro())/1e6, value)
	}))
	t.Cleanup(f.Close)
	return f
}

// sample has the server answer with a new sample.
func (f *fakePrometheus) sample(s float64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.s, f.at = s, time.Now()
}

// awaitPolls waits for more polls.
func (f *fakePrometheus) awaitPolls(t *testing.T, n int) {
	t.Helper()
	asked := func() int {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.polls
	}
	before := asked()
	testbed.Eventually(t, "polls", func() bool { return asked() >= before+n })
}

// awaitOwner waits until the pool has an owner.
func (b *meshBed) awaitOwner() {
	b.t.Helper()
	b.report("the pool has an owner", pipeline.JobID{}, func(*meshv1.PoolReport) bool { return true })
}

// gatedMesh is a mesh whose pool has a gate that asks the server.
func gatedMesh(t *testing.T, f *fakePrometheus) *meshBed {
	t.Helper()
	return newMesh(t, func(c *Config) {
		c.Pools["main"] = mustPool(t, fmt.Sprintf("gate: {prometheus: {url: %s, of: saturation, query: value, time_query: time}, budget: {baseline: 0.1, ready: {count: 5}, each: 10, max_age: 10m}, interval: 20ms}", f.URL))
	})
}

// blocking is a target whose attempts end when a test wants it.
func blocking() (target *stub, finish chan struct{}) {
	finish = make(chan struct{})
	return &stub{answer: func(ctx context.Context, _ Attempt) Answer {
		select {
		case <-finish:
			return Answer{Infer: new(inferencev1.InferResponse)}
		case <-ctx.Done():
			return Answer{Fault: fault.From(context.Cause(ctx))}
		}
	}}, finish
}

func (s *stub) counts() (runs, inFlight, most int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.runs {
		runs += n
	}
	return runs, s.inFlight, s.most
}

func TestStandingReadingIsSpentOnce(t *testing.T) {
	t.Parallel()
	for _, dispatchers := range []int{1, 3} {
		t.Run(fmt.Sprint(dispatchers), func(t *testing.T) {
			t.Parallel()
			f := serveSample(t, .3)
			b := gatedMesh(t, f)
			for range 100 {
				b.submit()
			}
			target, finish := blocking()
			for range dispatchers {
				b.start(target)
			}
			b.awaitOwner()
			f.sample(.3)
			want := func(runs int) {
				t.Helper()
				testbed.Eventually(t, "30 in flight", func() bool {
					n, inFlight, _ := target.counts()
					return n == runs && inFlight == 30
				})
				f.awaitPolls(t, 5)
				if n, _, most := target.counts(); n != runs || most != 30 {
					t.Errorf("%d runs, %d in flight; want %d and 30", n, most, runs)
				}
			}
			want(30)
			for range 10 {
				finish <- struct{}{}
			}
			want(40)
		})
	}
}

func TestPoolIsShutAtItsBaseline(t *testing.T) {
	t.Parallel()
	f := serveSample(t, .9)
	b, target := gatedMesh(t, f), &stub{}
	id := b.submit()
	b.start(target)
	f.awaitPolls(t, 5)
	if target.ran(id) != 0 {
		t.Error("it ran at D = B")
	}
	opened := time.Now()
	f.sample(.3)
	b.wantEnd(id, hasSucceeded, "", 1)
	t.Logf("it ended %s after the gate had opened", time.Since(opened))
}

func TestRefusalWithFrozenMetricShutsThePool(t *testing.T) {
	t.Parallel()
	f := serveSample(t, .875) // N is 1
	b, refuses := gatedMesh(t, f), make(chan Answer, 1)
	target := &stub{answer: func(context.Context, Attempt) Answer {
		select {
		case answer := <-refuses:
			return answer
		default:
			return Answer{Infer: new(inferencev1.InferResponse)}
		}
	}}
	refuses <- Answer{Fault: fault.New(fault.QueueFull, "full")}
	id := b.submit()
	stop := b.start(target)
	b.awaitOwner()
	f.sample(.875)
	testbed.Eventually(t, "a refusal", func() bool { return target.ran(id) == 1 })
	want := func() {
		t.Helper()
		f.awaitPolls(t, 10)
		if target.ran(id) != 1 {
			t.Error("it was sent again, by a reading from before the refusal")
		}
	}
	want()
	stop()
	b.start(target)
	b.awaitOwner()
	want()
	f.sample(.875)
	b.wantEnd(id, hasSucceeded, "", 1)
}

func TestGateReadsPages(t *testing.T) {
	t.Parallel()
	scraped := servePage(t, "# HELP busy x\nbusy_total 4\nbusy{a=\"} 1\"} 10 1700000000000\nbusy{a=\"c\"} 5\n")
	g := runGate(t, Settings{}, fmt.Sprintf("gate: {scrape: {url: %s, metric: busy}, %s}", scraped.URL, goldenBudget))
	g.await("15 of 50", 30, "")
	scraped.set("busy 60\n")
	g.await("over the capacity", 0, "D <= B")
	scraped.set("busy_total 1\n")
	g.await("no metric", 0, "the page has no busy")
	value := servePage(t, "0.7\n")
	v := runGate(t, Settings{}, fmt.Sprintf("gate: {value: {url: %s}, %s}", value.URL, goldenBudget))
	v.await("budget .7", 30, "")
	for _, bad := range []string{"+Inf", "full", " "} {
		value.set(bad)
		v.await(bad, 0, "gate is unreadable")
	}
	value.set("70")
	v.await("percent", 0, "reading is not within 0 and 1: the budget is 70")
	value.set("-0.1")
	v.await("more than full", 0, "D <= B")
	value.set("0.7")
	v.await("back", 30, "")
	value.set("")
	v.await("hung", 0, "gate is unreadable")
	upgraded := runGate(t, Settings{}, fmt.Sprintf("gate: {value: {url: %s}, %s}", serveRaw(t, switchingProtocols).URL, goldenBudget))
	upgraded.await("upgraded", 0, "status 101")
}

func TestGateOfTheProgramIsAsked(t *testing.T) {
	t.Parallel()
	var answer atomic.Pointer[func() (float64, time.Time, error)]
	set := func(room float64, at time.Time, err error) {
		answer.Store(new(func() (float64, time.Time, error) { return room, at, err }))
	}
	set(.7, time.Time{}, nil)
	own := map[string]GateFunc{"gpu": func(context.Context) (float64, time.Time, error) { return (*answer.Load())() }}
	g := runGate(t, Settings{Gates: own}, fmt.Sprintf("gate: {min: [{own: {name: gpu}}, {constant: {}}], %s}", goldenBudget))
	g.await("open", 30, "")
	set(.1, time.Now(), nil)
	g.await("full", 0, "D <= B")
	set(.7, time.Now().Add(-time.Minute), nil)
	g.await("old", 0, "reading is too old")
	set(70, time.Now(), nil)
	g.await("percent", 0, "reading is not within 0 and 1: the budget is 70")
	set(0, time.Time{}, errors.New("the driver is gone"))
	g.await("an error", 0, "the driver is gone")

	named := mustPool(t, "gate: {first: [{own: {name: gpu}}]}")
	config := Config{Pools: map[string]PoolConfig{"main": named}}
	target := func(PoolConfig) Target { return nil }
	for names, want := range map[string]string{"gpu": "", "tpu": `jobs.pools.main.gate.own: this program has no gate "gpu"; it has tpu.`, "": "it has none"} {
		gates := map[string]GateFunc{}
		if names != "" {
			gates[names] = own["gpu"]
		}
		_, err := New(Settings{Config: config, Gates: gates, Target: target, Logger: slog.New(slog.DiscardHandler), Meter: noop.Meter{}})
		if (err == nil) != (want == "") || want != "" && !strings.Contains(err.Error(), want) {
			t.Errorf("with %q: %v", names, err)
		}
	}
}

func TestValueIsAsOldAsItsSourceSays(t *testing.T) {
	t.Parallel()
	var age, modified atomic.Value
	age.Store("0")
	modified.Store("")
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Age", age.Load().(string))
		w.Header().Set("Last-Modified", modified.Load().(string))
		_, _ = io.WriteString(w, "0.7")
	}))
	t.Cleanup(server.Close)
	old := time.Now().Add(-time.Minute).UTC().Format(http.TimeFormat)
	page := runGate(t, Settings{}, fmt.Sprintf("gate: {value: {url: %s}, %s}", server.URL, goldenBudget))
	page.await("fresh", 30, "")
	age.Store("60")
	page.await("Age", 0, "reading is too old")
	age.Store("")
	page.await("no Age", 30, "")
	modified.Store(old)
	page.await("Last-Modified", 0, "reading is too old")
	modified.Store(time.Now().UTC().Format(http.TimeFormat))
	page.await("modified", 30, "")

	conn := testbed.StartBroker(t).Connect("gate")
	entry := func(key string) *runningGate {
		return runGate(t, Settings{keyValue: conn.KeyValue}, fmt.Sprintf("gate: {value: {kv: gates/%s}, budget: {baseline: 0.1, ready: {count: 5}, each: 10, max_age: 2s}, interval: 20ms}", key))
	}
	g, other := entry("gpu.one"), entry("other")
	g.await("no bucket", 0, "there is no key gates/gpu.one")
	bucket, err := conn.JetStream().CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "gates"})
	if err != nil {
		t.Fatal(err)
	}
	put := func(text string) {
		if _, err := bucket.PutString(t.Context(), "gpu.one", text); err != nil {
			t.Fatal(err)
		}
	}
	g.await("no entry", 0, "there is no key gates/gpu.one")
	put("full")
	g.await("no number", 0, "gate is unreadable")
	put("0.7")
	g.await("a number", 30, "")
	g.await("it is old", 0, "reading is too old")
	put("0.5")
	g.await("another one", 20, "")
	if err := bucket.Delete(t.Context(), "gpu.one"); err != nil {
		t.Fatal(err)
	}
	g.await("deleted", 0, "gate is unreadable")
	other.await("never written", 0, "there is no key gates/other")
}

func TestReadyServersComeFromConsulOrQuery(t *testing.T) {
	t.Parallel()
	var n atomic.Int64
	n.Store(5)
	f := serveSample(t, 3)
	consul := runGate(t, Settings{ReadyInstances: func(_ context.Context, service string) (int, error) {
		if service != "vllm" || n.Load() < 0 {
			return 0, fmt.Errorf("no answer about %s", service)
		}
		return int(n.Load()), nil
	}}, "gate: {constant: {value: 0.7}, budget: {baseline: 0.1, ready: {consul: vllm}, each: 10}, interval: 20ms}")
	query := runGate(t, Settings{}, fmt.Sprintf("gate: {constant: {value: 0.7}, budget: {baseline: 0.1, ready: {prometheus: {query: count(up), url: %s}}, each: 10}, interval: 20ms}", f.URL))
	consul.await("five pass", 30, "")
	query.await("three are up", 18, "")
	n.Store(0)
	consul.await("none passes", 0, "no server is ready")
	n.Store(-1)
	consul.await("Consul is away", 0, "no answer about vllm")
	f.Close()
	query.await("Prometheus is away", 0, "gate is unreadable")
}

func TestGatesCompose(t *testing.T) {
	t.Parallel()
	value := servePage(t, "0.7")
	source := "value: {url: " + value.URL + "}"
	gates := map[string]*runningGate{}
	for kind, of := range map[string]string{
		"first": source + "}, {constant: {value: 0.5}", "min": "constant: {value: 0.5}}, {" + source, "product": "constant: {value: 0.5}}, {" + source,
	} {
		gates[kind] = runGate(t, Settings{}, fmt.Sprintf("gate: {%s: [{%s}], %s}", kind, of, goldenBudget))
	}
	gates["first"].await("first is valid", 30, "")
	gates["min"].await("the least", 20, "")
	gates["product"].await(".35", 12, "")
	for kind, want := range map[string]string{"first": "value 1", "min": "constant 1", "product": "product"} {
		if s := gates[kind].report(); s.GetSource() != want {
			t.Errorf("%s: source %q", kind, s.GetSource())
		}
	}
	value.set("70")
	gates["first"].await("first is percent", 20, "")
	gates["min"].await("percent", 0, "gate is unreadable")
	value.set("none")
	gates["first"].await("first is not valid", 20, "")
	gates["min"].await("all or nothing", 0, "gate is unreadable")
	gates["product"].await("all or nothing", 0, "gate is unreadable")
}

func TestMeshGateReadsBusiestStage(t *testing.T) {
	t.Parallel()
	var load atomic.Pointer[[]StageLoad]
	var ready atomic.Int64
	ready.Store(2)
	s := Settings{
		Stages:     func(context.Context, []string) ([]StageLoad, error) { return *load.Load(), nil },
		ReadyHosts: func(string) (int, error) { return int(ready.Load()), nil },
	}
	load.Store(&[]StageLoad{{Name: "a", Items: 1, MaxInFlight: 40}, {Name: "b", Items: 8, MaxInFlight: 20}})
	g := runGate(t, s, "gate: {mesh: {max_wait: 2s}, budget: {baseline: 0.1}, interval: 20ms}")
	g.await("20 * (.6 - .1)", 10, "")
	h := runGate(t, s, "gate: {mesh: {}, budget: {baseline: 0.1, ready: {stage: b}, each: 5}, interval: 20ms}")
	h.await("2 hosts with 5 each", 5, "")
	ready.Store(0)
	h.await("no host is ready", 0, "no server is ready")
	load.Store(&[]StageLoad{{Name: "a", Items: 1, MaxInFlight: 40, Wait: 1500 * time.Millisecond}, {Name: "b", MaxInFlight: 20}})
	g.await("20 * (.25 - .1)", 3, "")
	load.Store(&[]StageLoad{{Name: "a"}})
	g.await("no host", 0, "stage a has no ready host")
}

func TestScheduleOpensAtItsHours(t *testing.T) {
	t.Parallel()
	for at, want := range map[string]float64{
		"2026-11-23T20:59:00Z": 0, // Monday, 21:59 in Berlin
		"2026-11-23T21:00:00Z": 1,
		"2026-11-24T04:59:00Z": 1, // Tuesday, but Monday's night
		"2026-11-24T05:00:00Z": 0,
		"2026-11-24T22:00:00Z": 0,
	} {
		now, err := time.Parse(time.RFC3339, at)
		if err != nil {
			t.Fatal(err)
		}
		g := mustGate(t, Settings{}, "gate: {schedule: {days: [mon], hours: 22:00-06:00, zone: Europe/Berlin}}", now)
		if r, err := g.gate(now); err != nil || r.d != want {
			t.Errorf("%s: %v, %v", at, r.d, err)
		}
	}
}

func TestAdaptiveWindowGrowsAndHalves(t *testing.T) {
	t.Parallel()
	now := time.Now()
	g := mustGate(t, Settings{}, "gate: {adaptive: {}, budget: {baseline: 0.2}}", now)
	want := func(n float64) {
		t.Helper()
		g.update(now)
		if s := g.credit.report(now); s.GetN() != n {
			t.Errorf("%v, want %v", s, n)
		}
	}
	end := func(n int, out outcome, after time.Duration) {
		r := &meshv1.JobRecord{Job: &inferencev1.Job{StartedAt: timestamppb.New(now)}, AttemptDeadline: timestamppb.New(now.Add(time.Second))}
		for range n {
			g.note(Answer{}, out, r, now.Add(after))
		}
	}
	want(4)
	end(3, succeeded, 0)
	want(4)
	end(1, succeeded, 0)
	want(5)
	end(100, succeeded, 0)
	want(15)
	end(5, latched, time.Millisecond)
	want(7)
	now = now.Add(2 * time.Second)
	end(1, retried, time.Millisecond)
	want(7)
	end(1, retried, time.Second)
	want(3)
}

func TestGateConfigNamesWhatIsWrong(t *testing.T) {
	t.Parallel()
	wrong := map[string]string{
		"{}":                                                          "pool:2:1: gate: a gate has exactly one of constant, prometheus,",
		"{mesh: {}, constant: {}}":                                    "pool:2:1: gate: a gate has exactly one of",
		"{metric: {}}":                                                `"metric" is not a key here`,
		"{min: []}":                                                   "pool:2:8: gate.min: there is no gate in it",
		"{first: [{mesh: {}}, {}]}":                                   "gate.first[1]: a gate has exactly one of",
		"{first: [{prometheus: {}}]}":                                 `gate.first[0].prometheus.url: "" is not an address`,
		"{constant: {value: 1.5}}":                                    "gate.constant.value: 1.5 is not within 0 and 1",
		"{schedule: {days: [monday]}}":                                `gate.schedule.days[0]: "monday"; use sun`,
		"{schedule: {hours: 22-6}}":                                   `gate.schedule.hours: "22-6"; use`,
		"{schedule: {zone: Mars}}":                                    "gate.schedule.zone: unknown time zone Mars",
		"{adaptive: {window: 300}}":                                   "gate.adaptive.window: 300, at most 256 are possible",
		"{mesh: {max_wait: -1s}}":                                     "gate.mesh.max_wait:",
		"{mesh: {}, interval: -1s}":                                   "gate.interval:",
		"{mesh: {}, budget: {ready: {count: 0}, each: 1}}":            "gate.budget.ready: has exactly one of count",
		"{mesh: {}, budget: {ready: {count: -1}, each: 1}}":           "gate.budget.ready: has exactly one of count, above 0",
		"{mesh: {}, budget: {ready: 5, each: 1}}":                     "pool:2:",
		"{mesh: {}, budget: {ready: {}}}":                             "gate.budget.ready: has exactly one of",
		"{mesh: {}, budget: {ready: {consul: a, stage: b}, each: 1}}": "gate.budget.ready: has exactly one of",
		"{mesh: {}, budget: {ready: {prometheus: {query: up, url: a}}, each: 1}}": `gate.budget.ready.prometheus.url: "a" is not an address`,
		"{mesh: {}, budget: {ready: {prometheus: {url: http://a}}, each: 1}}":     "gate.budget.ready.prometheus.query: is required",
		"{mesh: {}, budgets: {}}":                           `"budgets" is not a key here`,
		"{value: {}}":                                       "gate.value.url: a value is at a url or in kv",
		"{value: {kv: gates}}":                              `gate.value.kv: "gates"; use`,
		"{value: {kv: gates/a.>}}":                          `gate.value.kv: "gates/a.>"; use`,
		"{mesh: {}, budget: {unit: rows}}":                  `gate.budget.unit: "rows"`,
		"{prometheus: {url: http://a, query: a, of: load}}": `gate.prometheus.of: "load"; use fullness`,
		"{prometheus: {url: http://a, of: fullness}}":       "gate.prometheus.query: is required",
		"{scrape: {url: file:///a, metric: a}}":             `gate.scrape.url: "file:///a" is not an address`,
		"{mesh: {}, budget: {ready: {count: 5}}}":           "gate.budget.each: say how much one server takes",
		"{mesh: {}, budget: {refill: late}}":                `gate.budget.refill: "late"; use end or reading`,
	}
	for _, b := range []string{"1", "-0.1", "2", ".nan"} {
		wrong["{mesh: {}, budget: {baseline: "+b+"}}"] = "gate.budget.baseline: "
	}
	for _, text := range slices.Sorted(maps.Keys(wrong)) {
		if _, err := poolOf("gate: " + text); err == nil || !strings.HasPrefix(err.Error(), "pool:2:") || !strings.Contains(err.Error(), wrong[text]) {
			t.Errorf("%s: %v, want %s", text, err, wrong[text])
		}
	}
}

func FuzzSources(f *testing.F) {
	f.Add([]byte(`{"status":"success","data":{"resultType":"scalar","result":[1.5,"0.5"]}}`))
	f.Add([]byte(`{"status":"success","data":{"resultType":"vector","result":[{"value":[1,"NaN"]}]}}`))
	f.Add([]byte("busy{a=\"}\"} 1e308\nbusy 1e308\n"))
	f.Fuzz(func(t *testing.T, page []byte) {
		_, v, err := parseSample(page)
		sum, serr := sumOf(page, "busy")
		if err == nil && (math.IsNaN(v) || math.IsInf(v, 0)) || serr == nil && (math.IsNaN(sum) || math.IsInf(sum, 0)) {
			t.Errorf("%v, %v", v, sum)
		}
	})
}
