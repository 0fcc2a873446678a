package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// What the attacked mesh may take. A tenant's requests have a budget; callers without a token
// have little. The rest is what a process takes that serves so many connections.
const (
	hostileBudget  = 64 << 20
	mostOfTenant   = hostileBudget + 100<<20
	mostOfStage    = 256<<20 + 100<<20
	mostOfStranger = 64 << 20
	// soonEnough is how long other callers may wait while the mesh is attacked.
	soonEnough = 2 * time.Second
	// mostWork is how many times the work of a good request's byte a byte may cost.
	mostWork = 20
)

var tokenA, tokenB = strings.Repeat("a", 32), strings.Repeat("b", 32)

// The ports of a mesh.
const publicPort, grpcPort, stagePort, adminPort, opsPort = "public", "grpc", "stage", "admin", "ops"

// attacked is a mesh in one process, with all of its ports.
type attacked struct {
	*member

	ports map[string]string
	// idleHeap and idleMemory are its live heap and its resident memory before an attack. work is how
	// many CPU seconds a byte of a good request takes, callWork how many a bystander's call.
	idleHeap, idleMemory, idleRoutines int
	work, callWork                     float64
	operator                           *http.Client
}

func newAttacked(t *testing.T) *attacked {
	t.Helper()
	f := &fleet{t: t, folder: t.TempDir()}
	ports, err := testbed.FreePorts(5)
	must(t, err)
	m := &attacked{ports: map[string]string{}, operator: &http.Client{Transport: &http.Transport{DialContext: bystander.DialContext}}}
	for i, name := range []string{publicPort, grpcPort, stagePort, adminPort, opsPort} {
		m.ports[name] = fmt.Sprintf("127.0.0.1:%d", ports[i])
	}
	tokens := filepath.Join(f.folder, "tokens")
	must(t, os.WriteFile(tokens, []byte(tokenA+" a\n"+tokenB+" b\n"), 0o600))
	file, err := json.Marshal(map[string]any{
		"mesh": "hostile",
		"gateway": map[string]any{
			"listen": m.ports[publicPort], "grpc_listen": m.ports[grpcPort], "token_file": tokens, "max_in_flight_bytes": "64MiB",
			"admin": map[string]any{"listen": m.ports[adminPort], "token_file": tokens},
		},
		"ops":       map[string]any{"listen": m.ports[opsPort]},
		"stages":    map[string]any{"echo": map[string]any{"runner": map[string]any{"echo": struct{}{}}, "listen": m.ports[stagePort], "token_file": tokens}},
		"pipelines": map[string]any{"echo": map[string]any{"steps": []any{map[string]any{"name": "echo", "stage": "echo"}}}},
		"jobs": map[string]any{
			"pools":   map[string]any{"main": map[string]any{"target": map[string]any{"pipelines": []string{"echo"}}}},
			"queues":  map[string]any{"nightly": map[string]any{"max_jobs": 200}}, // queued jobs would run during a later attack
			"batches": map[string]any{"queue": "nightly"},
		},
	})
	must(t, err)
	path := filepath.Join(f.folder, "mesh.yaml")
	must(t, os.WriteFile(path, file, 0o600))
	m.member = &member{fleet: f, args: []string{"up", "--config", path}, public: m.ports[publicPort]}
	m.launch()
	m.awaitReady()
	m.ops = m.ports[opsPort]
	return m
}

var nextLine = regexp.MustCompile(`(?m)^# NextGC = (\d+)$`)

// heap returns the live heap, which is half of where the next collection comes: what a collection
// found that was in use, without the garbage that the attack has made since then.
func (m *attacked) heap(t *testing.T) int {
	t.Helper()
	status, page := m.fleet.send(m.operator, http.MethodGet, "http://"+m.ops+"/debug/pprof/heap?gc=1&debug=1")
	words := nextLine.FindStringSubmatch(page)
	if status != http.StatusOK || words == nil {
		t.Fatalf("the profile of the heap: %d: %.200s", status, page)
	}
	n, err := strconv.Atoi(words[1])
	must(t, err)
	return n / 2
}

// metric returns a metric as a number.
func (m *attacked) metric(t *testing.T, name string) float64 {
	t.Helper()
	status, page := m.fleet.send(m.operator, http.MethodGet, "http://"+m.ops+"/metrics")
	words := regexp.MustCompile(`(?m)^` + name + `(?:\{[^}]*\})? (\S+)$`).FindStringSubmatch(page)
	if status != http.StatusOK || words == nil {
		t.Fatalf("metric %s: %d: %.200s", name, status, page)
	}
	n, err := strconv.ParseFloat(words[1], 64)
	must(t, err)
	return n
}

// peak returns the highest resident memory since forgetPeak.
func (m *attacked) peak(t *testing.T) int {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.PID()))
	must(t, err)
	words := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(data)
	n, err := strconv.Atoi(string(words[1]))
	must(t, err)
	return n << 10
}

func (m *attacked) forgetPeak(t *testing.T) {
	t.Helper()
	must(t, os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", m.PID()), []byte("5"), 0))
}

// bystander dials from another address than attackers, who have but one.
var bystander = net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}

// bystanders are a tenant and probes, who call while the mesh is attacked.
type bystanders struct {
	stop func()

	mu     sync.Mutex
	calls  int
	worst  map[string]time.Duration
	failed map[string]string
}

// watch has bystanders call until stop, each over new connections.
func (m *attacked) watch() *bystanders {
	b := &bystanders{worst: map[string]time.Duration{}, failed: map[string]string{}}
	ctx, cancel := context.WithCancel(m.fleet.t.Context())
	var calling sync.WaitGroup
	b.stop = func() { cancel(); calling.Wait() }
	repeat := func(name string, call func(ctx context.Context) error) {
		calling.Go(func() {
			for ctx.Err() == nil {
				begin := time.Now()
				one, done := context.WithTimeout(ctx, 4*soonEnough)
				err := call(one)
				done()
				if ctx.Err() == nil {
					b.add(name, time.Since(begin), err)
				}
				_ = wait(ctx, 50*time.Millisecond)
			}
		})
	}
	kept := &http.Client{Transport: &http.Transport{DialContext: bystander.DialContext}}
	fresh := &http.Client{Transport: &http.Transport{DialContext: bystander.DialContext, DisableKeepAlives: true}}
	infer := func(client *http.Client) func(ctx context.Context) error {
		return func(ctx context.Context) error {
			r, _ := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+m.ports[publicPort]+"/v1/pipelines/echo:infer", strings.NewReader("hello"))
			r.Header = http.Header{"Authorization": {"Bearer " + tokenB}, "Content-Type": {"text/plain"}}
			return statusOK(client.Do(r))
		}
	}
	repeat("another tenant", infer(kept))
	repeat("another tenant, new connection", infer(fresh))
	for _, port := range []string{publicPort, adminPort, opsPort} {
		repeat(port+" /livez", func(ctx context.Context) error {
			r, _ := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+m.ports[port]+"/livez", http.NoBody)
			return statusOK(fresh.Do(r))
		})
	}
	for _, port := range []string{publicPort, grpcPort, stagePort} {
		repeat(port+" gRPC health", func(ctx context.Context) error {
			conn, err := grpc.NewClient(m.ports[port], grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
				return bystander.DialContext(ctx, "tcp", addr)
			}))
			if err != nil {
				return err
			}
			defer conn.Close()
			_, err = healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
			return err
		})
	}
	return b
}

func statusOK(r *http.Response, err error) error {
	if err != nil {
		return err
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err == nil && r.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", r.Status, text)
	}
	return err
}

func (b *bystanders) add(name string, took time.Duration, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls++
	b.worst[name] = max(b.worst[name], took)
	if err != nil {
		b.failed[name] = fmt.Sprintf("after %s: %v", took.Round(time.Millisecond), err)
	}
}

// outcome is what an attack has cost.
type outcome struct {
	report

	heap, peak int
	work       float64
	worst      time.Duration
}

// attack runs an attack, and fails the test where the mesh takes more than it may, or others are
// not served.
func (m *attacked) attack(t *testing.T, one row, most time.Duration) outcome {
	t.Helper()
	mostHeap, soon := one.bound(), soonEnough
	if len(one.attacks) > 1 {
		soon *= 2 // they take turns on the processors
	}
	for range 2 { // pools keep what they have for two collections
		_ = m.heap(t)
	}
	m.forgetPeak(t)
	resident := max(m.idleMemory, m.memory())
	others := m.watch()
	before := m.metric(t, "process_cpu_seconds_total")
	done, end := m.carryOut(t, order{Rows: one.attacks, Most: most})
	_ = wait(t.Context(), 100*time.Millisecond) // what was sent is read
	out := outcome{report: done, work: m.metric(t, "process_cpu_seconds_total") - before, heap: min(m.heap(t), m.heap(t)) - m.idleHeap}
	others.stop()
	end()
	out.work -= float64(others.calls) * m.callWork
	out.peak = m.peak(t) - resident
	if out.heap > mostHeap {
		t.Errorf("the live heap grew by %d MiB, more than %d", out.heap>>20, mostHeap>>20)
	}
	if out.peak > 2*mostHeap {
		t.Errorf("resident memory grew by %d MiB, more than %d", out.peak>>20, 2*mostHeap>>20)
	}
	for name, why := range others.failed {
		t.Errorf("%s failed %s", name, why)
	}
	for name, took := range others.worst {
		out.worst = max(out.worst, took)
		if took > soon {
			t.Errorf("%s took %s", name, took)
		}
	}
	for end := time.Now().Add(10 * time.Second); ; {
		held := m.metric(t, "stagemesh_gateway_request_bytes")
		if held == 0 {
			return out
		}
		if time.Now().After(end) {
			t.Errorf("%.0f bytes stay held", held)
			return out
		}
		_ = wait(t.Context(), 20*time.Millisecond)
	}
}

func (o outcome) String() string {
	return fmt.Sprintf("heap +%d MiB, resident +%d MiB, %d KiB sent, %.2f s of CPU, others wait %s", o.heap>>20, o.peak>>20, o.Sent>>10, o.work, o.worst.Round(time.Millisecond))
}

// Each attack alone; `make soak` has all of them, the short form one for each shape and port.
func TestNoAttackTakesMoreThanItsShare(t *testing.T) {
	m := newAttacked(t)
	most := pick(100*time.Millisecond, 2*time.Second)
	a := &attacker{ports: m.ports, until: time.Now().Add(10 * time.Second)}
	for _, good := range goodCalls() {
		good.send(a, 4)
		before, raw := m.metric(t, "process_cpu_seconds_total"), 0
		for range 16 { // one after the other: the memory has no room for all, and a refusal costs little
			raw += good.send(a, 1)
		}
		m.work = max(m.work, (m.metric(t, "process_cpu_seconds_total")-before)/float64(raw))
	}
	a.end()
	before, others := m.metric(t, "process_cpu_seconds_total"), m.watch()
	_ = wait(t.Context(), time.Second)
	others.stop()
	m.callWork = (m.metric(t, "process_cpu_seconds_total") - before) / float64(others.calls)
	_ = m.heap(t) // pools keep what they have for a while
	m.idleHeap, m.idleMemory, m.idleRoutines = m.heap(t), m.memory(), int(m.metric(t, "go_goroutines"))
	t.Logf("idle: heap %d MiB, resident %d MiB, %d goroutines; a good byte takes %.1f ns", m.idleHeap>>20, m.idleMemory>>20, m.idleRoutines, m.work*1e9)
	sent := 0
	for _, one := range chosen(rows()) {
		t.Run(one.name, func(t *testing.T) {
			out := m.attack(t, one, most)
			sent += out.Sent
			t.Log(out)
			if per := out.work / float64(max(out.Raw, 1)); len(one.attacks) == 1 && out.Raw > 1<<20 && per > mostWork*m.work {
				t.Errorf("a byte takes %.0f ns, %.0f times a good one's", per*1e9, per/m.work)
			}
		})
	}
	if sent < 100<<20 {
		t.Errorf("all attacks sent %d MiB", sent>>20)
	}
	testbed.Eventually(t, "its goroutines return", func() bool { return int(m.metric(t, "go_goroutines")) < m.idleRoutines+100 })
}
