// Package fleet tests a mesh of real processes: a broker, hosts, gateways and a registry
// that are killed, paused, stopped and restarted while requests flow. The client of each
// test knows the answer to every request.
//
// The processes are this test's own program, run again as `stagemesh gateway`, as
// `stagemesh stage` with a kind of runner that records what it runs, or as a broker. The
// registry is a real Consul agent, the fleet's broker, or none. Every fleet's mesh has its
// own name, so the tests that do not harm Consul share one agent.
//
// Tests run alone if they hold a time of about a second to a bound. The others are
// parallel.
package fleet

import (
	"bytes"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// soak is true for the long forms of the tests: make soak.
var soak = flag.Bool("soak", false, "run the long forms")

// pick returns the value for the short form or for the long form.
func pick[T any](short, long T) T {
	if *soak {
		return long
	}
	return short
}

func TestMain(m *testing.M) {
	if os.Getenv(programVariable) != "" {
		os.Exit(program(os.Args[1:])) //nolint:forbidigo // this is main
	}
	if order := os.Getenv(attackVariable); order != "" {
		if err := attack(order); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // this is main
		}
		os.Exit(0) //nolint:forbidigo // this is main
	}
	// More would compete for the processor, and several tests bound times.
	testbed.Tests{Parallel: 4, End: sharedConsul.End}.Main(m)
}

// sharedConsul is the Consul agent of the fleets whose tests do not harm it.
var sharedConsul testbed.SharedConsul

// fleet is a broker, and the hosts and gateways of one mesh. It ends with its test.
type fleet struct {
	t        testing.TB
	folder   string
	mesh     pipeline.MeshName
	registry []any
	// brokers are one, or a cluster; broker is the first of them.
	broker  *member
	brokers []*member
	// linked is true where each host and gateway reaches the broker by a link of its own.
	linked bool
	// program is that of the members that are launched from now on; "" is the test's own.
	program string
	// recordsStalls is true where members record late timers, for which they wake up all the time.
	recordsStalls bool

	mu              sync.Mutex
	hosts, gateways []*member
}

// The registries of a fleet, as the mesh file has them.
var (
	brokerRegistry any = map[string]any{"nats": struct{}{}}
	noRegistry     any = map[string]any{"none": true}
)

func consulRegistry(a *testbed.ConsulAgent) any {
	return map[string]any{"consul": map[string]any{"address": a.Addr()}}
}

// newFleet returns a fleet with a broker only. Its members use the registries in turn;
// without one they use the shared Consul agent.
func newFleet(t testing.TB, registry ...any) *fleet {
	t.Helper()
	return newFleetOn(t, 1, registry...)
}

// newFleetOn is newFleet with a cluster of that many brokers.
func newFleetOn(t testing.TB, brokers int, registry ...any) *fleet {
	t.Helper()
	if len(registry) == 0 {
		agent, err := sharedConsul.Agent()
		if err != nil {
			t.Fatal(err)
		}
		registry = []any{consulRegistry(agent)}
	}
	f := &fleet{t: t, folder: t.TempDir(), mesh: pipeline.MeshName("fleet-" + uuid.NewString()[:8]), registry: registry}
	routes, err := testbed.FreePorts(brokers)
	must(t, err)
	for i := range brokers {
		args := []string{"broker", "--folder", filepath.Join(f.folder, brokerName(i))}
		if brokers > 1 {
			args = append(args, "--name", brokerName(i), "--cluster", fmt.Sprint(routes[i]))
			for _, port := range routes {
				args = append(args, fmt.Sprint(port))
			}
		}
		f.brokers = append(f.brokers, &member{fleet: f, args: args})
	}
	f.broker = f.brokers[0]
	for _, broker := range f.brokers {
		broker.launch()
	}
	for _, broker := range f.brokers {
		broker.awaitReady()
	}
	return f
}

func brokerName(i int) string { return fmt.Sprintf("broker-%d", i) }

func (f *fleet) url() string {
	var urls []string
	for _, broker := range f.brokers {
		urls = append(urls, "nats://"+broker.address())
	}
	return strings.Join(urls, ",")
}

// hostSpec describes a host of a stage that answers each text with the text and the name
// of the run: no two runs give the same answer. A text that begins with holdPrefix holds
// the runner until the item is cancelled.
type hostSpec struct {
	// stage is "echo" if it is empty.
	stage string
	// run is how long a batch takes.
	run time.Duration
	// chunks is the number of messages before each answer, spread over run. If there are
	// any the host answers items one by one, slots of them at once, and idle is its idle
	// timeout, or 0 for the default.
	chunks, slots int
	idle          time.Duration
	// tensor is the size in bytes of the tensor that answers each item instead of a text.
	tensor int
}

// host starts a host and waits until it is ready.
func (f *fleet) host(s hostSpec) *member {
	f.t.Helper()
	m := f.launchHost(s)
	m.awaitReady()
	return m
}

// slow starts a host whose batches take that long.
func (f *fleet) slow(run time.Duration) *member {
	f.t.Helper()
	return f.host(hostSpec{run: run})
}

func (f *fleet) launchHost(s hostSpec) *member {
	f.t.Helper()
	if s.stage == "" {
		s.stage = "echo"
	}
	m := &member{fleet: f, program: f.program, record: f.newFile("record"), link: f.newLink()}
	stage := map[string]any{"runner": map[string]any{runnerKind: map[string]any{
		"record": m.record, "run": s.run.String(), "chunks": s.chunks, "slots": s.slots, "tensor": s.tensor,
	}}}
	if n := len(f.brokers); n > 1 {
		stage["queue"] = map[string]any{"replicas": n, "durabilities": []string{"file"}}
	}
	if s.idle > 0 {
		stage["stream"] = map[string]any{"idle_timeout": s.idle.String()}
	}
	m.args = []string{"stage", s.stage, "--listen", anyPort, "--config", f.meshFile(m.link, "stages", map[string]any{s.stage: stage})}
	f.mu.Lock()
	f.hosts = append(f.hosts, m)
	f.mu.Unlock()
	m.launch()
	return m
}

// gatewaySpec describes a gateway.
type gatewaySpec struct {
	// pipelines are the stages on the route of each; none means "echo" with the stage "echo".
	pipelines map[string][]string
	// blocks are the steps of the pipeline "graph", of the stages of the others.
	blocks []any
	// drainDelay is how long it serves on after SIGTERM.
	drainDelay time.Duration
	env        []string
	// jobs is the section of that name; with dispatches the member is a dispatcher too.
	jobs       map[string]any
	dispatches bool
}

// gateway starts a gateway with the pipeline "echo", and waits until it is ready.
func (f *fleet) gateway() *member {
	f.t.Helper()
	return f.gatewayOf(gatewaySpec{})
}

func (f *fleet) gatewayOf(s gatewaySpec) *member {
	f.t.Helper()
	m := f.launchGateway(s)
	m.awaitReady()
	return m
}

func (f *fleet) launchGateway(s gatewaySpec) *member {
	f.t.Helper()
	if s.pipelines == nil {
		s.pipelines = map[string][]string{"echo": {"echo"}}
	}
	known, pipelines := map[string]any{}, map[string]any{}
	for name, stages := range s.pipelines {
		var steps []any
		for _, stage := range stages {
			steps = append(steps, map[string]any{"name": stage, "stage": stage})
			known[stage] = map[string]any{"runner": map[string]any{runnerKind: struct{}{}}}
		}
		pipelines[name] = map[string]any{"steps": steps}
	}
	if s.blocks != nil {
		pipelines["graph"] = map[string]any{"steps": s.blocks}
	}
	m := &member{fleet: f, program: f.program, env: s.env, link: f.newLink()}
	sections := []any{"stages", known, "pipelines", pipelines, "gateway", map[string]any{"drain_delay": s.drainDelay.String()}}
	if s.jobs != nil {
		sections = append(sections, "jobs", s.jobs)
	}
	m.args = []string{"gateway", "--admin", anyPort, "--config", f.meshFile(m.link, sections...)}
	if s.dispatches {
		m.args = append([]string{"up", "--stages", "", "--ops", anyPort}, m.args[1:]...)
	}
	m.launch()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gateways = append(f.gateways, m)
	return m
}

const anyPort = "127.0.0.1:0"

// newFile returns the path of an empty file.
func (f *fleet) newFile(name string) string {
	f.t.Helper()
	file, err := os.CreateTemp(f.folder, name+"-")
	if err != nil {
		f.t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		f.t.Fatal(err)
	}
	return file.Name()
}

// newLink returns a member's link to the broker, nil where the fleet has none.
func (f *fleet) newLink() *testbed.Link {
	if !f.linked {
		return nil
	}
	return testbed.StartLink(f.t, f.broker.address())
}

// meshFile writes a mesh file with these sections, as JSON, which YAML includes. A nil
// link is a direct connection to the broker.
func (f *fleet) meshFile(link *testbed.Link, sections ...any) string {
	f.t.Helper()
	url := f.url()
	if link != nil {
		url = "nats://" + link.Addr()
	}
	file := map[string]any{
		"mesh": f.mesh, "nats": map[string]any{"url": url},
		"registry": f.registry[(len(f.hosts)+len(f.gateways))%len(f.registry)],
	}
	if n := len(f.brokers); n > 1 {
		for _, store := range []string{"results", "idempotency", "dead_letters"} {
			file[store] = map[string]any{"replicas": n}
		}
	}
	for i := 0; i < len(sections); i += 2 {
		file[sections[i].(string)] = sections[i+1]
	}
	text, err := json.Marshal(file)
	if err != nil {
		f.t.Fatal(err)
	}
	path := f.newFile("mesh")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		f.t.Fatal(err)
	}
	return path
}

// gatewayAddresses returns the addresses of the gateways that have been ready.
func (f *fleet) gatewayAddresses() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []string
	for _, m := range f.gateways {
		if addr := m.address(); addr != "" {
			out = append(out, addr)
		}
	}
	return out
}

// member is a process of the fleet, which may be started again after its end. Its methods
// must not overlap, but for address.
type member struct {
	*testbed.Process
	fleet *fleet
	args  []string
	env   []string
	// program is the test's own if it is empty.
	program string
	// link is its way to the broker in a linked fleet.
	link *testbed.Link
	// record is the file in which a host records its runs.
	record string
	// models is the folder of a host's worker of models.
	models string
	// stalls is the file in which the process records late timers, if the fleet does.
	stalls string

	mu sync.Mutex
	// public is the address of a broker or a gateway, the ID of a host.
	public, admin, ops string
}

// address returns where a gateway or a broker listens, or the ID of a host. It is empty
// before the member was ready for the first time.
func (m *member) address() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.public
}

// start starts a member that has ended, at the address that it had, and waits until it is
// ready.
func (m *member) start() {
	m.fleet.t.Helper()
	m.launch()
	m.awaitReady()
}

func (m *member) launch() {
	m.fleet.t.Helper()
	args := m.args
	if args[0] != "stage" {
		addr := m.address()
		if addr == "" {
			addr = fmt.Sprintf("127.0.0.1:%d", testbed.FreePort(m.fleet.t))
		}
		args = append([]string{args[0], "--listen", addr}, args[1:]...)
	}
	if m.fleet.recordsStalls && m.stalls == "" {
		m.stalls = m.fleet.newFile("stalls")
	}
	cmd := exec.Command(cmp.Or(m.program, os.Args[0]), args...)
	cmd.Env = append(append(os.Environ(), programVariable+"="+cmp.Or(m.stalls, noStalls)), m.env...)
	m.Process = testbed.StartProcess(m.fleet.t, cmd)
}

var (
	readyLine      = regexp.MustCompile(`is ready(?: on|:) (?:host |http://)?(\S+)(?: \((?:docs: \S+, )?(?:admin: http://(\S+), )?operations: http://(\S+)\))?`)
	operationsLine = regexp.MustCompile(`operations port listens" address=(\S+)`)
)

// awaitReady waits until a launched member is ready.
func (m *member) awaitReady() {
	m.fleet.t.Helper()
	words := m.Match(readyLine)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.public, m.admin, m.ops = words[1], words[2], words[3]
}

// awaitOperations waits until a launched member has an operations port.
func (m *member) awaitOperations() {
	m.fleet.t.Helper()
	words := m.Match(operationsLine)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ops = words[1]
}

func (m *member) pause()  { m.Signal(syscall.SIGSTOP) }
func (m *member) resume() { m.Signal(syscall.SIGCONT) }

// restart drains the members at once and starts them again.
func restart(members ...*member) {
	var stops sync.WaitGroup
	for _, m := range members {
		stops.Go(m.Stop)
	}
	stops.Wait()
	for _, m := range members {
		m.start()
	}
}

// get sends a request over a connection of its own. The status is 0 if there is no answer.
func (f *fleet) get(url string) (status int, body string) {
	f.t.Helper()
	return f.send(&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, http.MethodGet, url)
}

func (f *fleet) send(client *http.Client, method, url string) (status int, body string) {
	request, err := http.NewRequestWithContext(f.t.Context(), method, url, http.NoBody)
	if err != nil {
		return 0, err.Error()
	}
	response, err := client.Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err.Error()
	}
	return response.StatusCode, string(data)
}

// isReady reports what /readyz of a gateway's public port answers.
func (m *member) isReady() bool {
	status, _ := m.fleet.get("http://" + m.address() + "/readyz")
	return status == http.StatusOK
}

// unready returns why the member is not ready, by its operations port; "" if it is.
func (m *member) unready() string {
	status, body := m.fleet.get("http://" + m.ops + "/readyz")
	if status == http.StatusOK {
		return ""
	}
	return fmt.Sprintf("%d: %s", status, strings.TrimSpace(body))
}

// count returns a metric of the member, as testbed.Metric does.
func (m *member) count(metric string, labels ...string) int {
	t := m.fleet.t
	t.Helper()
	status, page := m.fleet.get("http://" + m.ops + "/metrics")
	if status != http.StatusOK {
		t.Fatalf("metrics of %s: %d: %s", m.args[0], status, page)
	}
	return testbed.Metric(t, page, metric, labels...)
}

// sum returns a metric over several members.
func sum(members []*member, metric string, labels ...string) int {
	out := 0
	for _, m := range members {
		out += m.count(metric, labels...)
	}
	return out
}

// memory returns the resident memory of the member's process, in bytes.
func (m *member) memory() int {
	m.fleet.t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", m.PID()))
	if err != nil {
		m.fleet.t.Fatal(err)
	}
	pages := 0
	if _, err := fmt.Sscanf(string(data), "%d %d", new(int), &pages); err != nil {
		m.fleet.t.Fatal(err)
	}
	return pages * os.Getpagesize()
}

// lines returns the lines of a file, each split at its first space.
func (f *fleet) lines(path string) [][2]string {
	f.t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		f.t.Fatal(err)
	}
	var out [][2]string
	for line := range strings.Lines(string(data)) {
		first, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		out = append(out, [2]string{first, rest})
	}
	return out
}

// runs returns the number of runs of items that have begun at the host.
func (m *member) runs() int {
	m.fleet.t.Helper()
	data, err := os.ReadFile(m.record)
	must(m.fleet.t, err)
	return bytes.Count(data, []byte("\n"))
}

// runs returns the IDs of the requests that ran for each text, once for each run.
func (f *fleet) runs() map[string][]string {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	out := map[string][]string{}
	for _, m := range f.hosts {
		for _, line := range f.lines(m.record) {
			out[line[1]] = append(out[line[1]], line[0])
		}
	}
	return out
}

// reruns returns the number of runs of items that had run before.
func (f *fleet) reruns() int {
	f.t.Helper()
	again := 0
	for _, ids := range f.runs() {
		again += len(ids) - 1
	}
	return again
}

// cancellations returns when a host cancelled the run of each text.
func (f *fleet) cancellations() map[string]time.Time {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	out := map[string]time.Time{}
	for _, m := range f.hosts {
		for _, line := range f.lines(m.record + cancelledSuffix) {
			out[line[1]] = timeOf(f.t, line[0])
		}
	}
	return out
}

func timeOf(t testing.TB, nanos string) time.Time {
	t.Helper()
	n, err := strconv.ParseInt(nanos, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return time.Unix(0, n)
}

// worstStall returns how late timers were at most since then, in this process and in the
// members', together: an overloaded machine adds that to every measured time.
func worstStall(t *testing.T, since time.Time, here string, members ...*member) time.Duration {
	t.Helper()
	f := members[0].fleet
	out := time.Duration(0)
	for _, path := range append([]string{here}, stallFiles(members)...) {
		worst := time.Duration(0)
		for _, line := range f.lines(path) {
			late, err := time.ParseDuration(line[1])
			if err != nil {
				t.Fatal(err)
			}
			if timeOf(t, line[0]).After(since) {
				worst = max(worst, late)
			}
		}
		out += worst
	}
	return out
}

func stallFiles(members []*member) []string {
	var out []string
	for _, m := range members {
		out = append(out, m.stalls)
	}
	return out
}

// until waits until the condition holds, logs how long that took, and fails the test if
// it took longer than the bound.
func until(t *testing.T, what string, bound time.Duration, holds func() bool) {
	t.Helper()
	begin := time.Now()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for !holds() {
		if time.Since(begin) > testbed.Patience {
			t.Fatalf("%s: not within %s", what, testbed.Patience)
		}
		<-tick.C
	}
	took := time.Since(begin).Round(time.Millisecond)
	t.Logf("%s: after %s (may be %s)", what, took, bound)
	if took > bound {
		t.Errorf("%s: after %s, want %s", what, took, bound)
	}
}

// settled polls for as long as the bound, logs since when the condition holds, and fails
// the test if it does not hold at the end: what is repaired may break once more.
func settled(t *testing.T, what string, bound time.Duration, holds func() bool) {
	t.Helper()
	begin, broken := time.Now(), time.Duration(0)
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for now := begin; now.Sub(begin) < bound; now = <-tick.C {
		if !holds() {
			broken = time.Since(begin)
		}
	}
	t.Logf("%s: from %s on (may be %s)", what, broken.Round(time.Millisecond), bound)
	if !holds() {
		t.Errorf("%s: not within %s", what, bound)
	}
}

// pollEvery is how often a test polls the gateways for something that lasts.
const pollEvery = 50 * time.Millisecond

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
