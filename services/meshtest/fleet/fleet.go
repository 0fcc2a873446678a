package fleet

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// Registry is where the members of a fleet say that they are there.
type Registry struct {
	// Consul are the addresses of agents, which the members have in turn. None means
	// that the registry is in the fleet's broker.
	Consul []string
}

// HostSpec is one host of a stage that gives back each text, and behind it the
// name of the run that did: no two runs give the same answer. A text that begins
// with Hold holds the runner until nobody wants it any more.
type HostSpec struct {
	Stage pipeline.StageName
	// Base is how long a batch takes.
	Base time.Duration
	// Chunks is how many messages come before each answer, over the time that
	// the batch takes. With any the host answers items one by one, Slots of them at
	// a time, and may be silent for Idle; 0 is the host's default.
	Chunks int
	Slots  int
	Idle   time.Duration
	// Record is the file that says what ran; the fleet chooses it.
	Record string
}

// GatewaySpec is one gateway.
type GatewaySpec struct {
	Pipelines []pipeline.Pipeline
	// Listen is its address; empty means any port, which a restart keeps.
	Listen string
	// DrainDelay is how long it serves on when it is told to stop.
	DrainDelay time.Duration
}

// Fleet is a broker and the members that were started. It ends with its test.
type Fleet struct {
	t        testing.TB
	folder   string
	mesh     pipeline.MeshName
	registry Registry
	broker   *Member

	mu       sync.Mutex
	started  int
	records  []string
	gateways []*Member
}

// New returns a fleet of a broker alone. Its mesh has a name of its own, so that
// several fleets may have one registry.
func New(t testing.TB, r Registry) *Fleet {
	t.Helper()
	f := &Fleet{t: t, folder: t.TempDir(), mesh: pipeline.MeshName("fleet-" + uuid.NewString()[:8]), registry: r}
	f.broker = f.launch("broker", member{Broker: &brokerSpec{Port: -1, Folder: filepath.Join(f.folder, "broker")}})
	f.broker.AwaitReady()
	_, port, err := net.SplitHostPort(f.broker.Addr())
	if err != nil {
		t.Fatal(err)
	}
	if f.broker.spec.Broker.Port, err = strconv.Atoi(port); err != nil {
		t.Fatal(err)
	}
	return f
}

// Broker returns the broker's process.
func (f *Fleet) Broker() *Member { return f.broker }

// URL returns where the broker is.
func (f *Fleet) URL() string { return "nats://" + f.broker.Addr() }

// Host starts a host and returns when it is ready.
func (f *Fleet) Host(s HostSpec) *Member {
	f.t.Helper()
	m := f.LaunchHost(s)
	m.AwaitReady()
	return m
}

// LaunchHost starts a host.
func (f *Fleet) LaunchHost(s HostSpec) *Member {
	f.t.Helper()
	f.mu.Lock()
	s.Record = filepath.Join(f.folder, fmt.Sprintf("ran-%d", len(f.records)))
	f.records = append(f.records, s.Record)
	f.mu.Unlock()
	return f.launch("host of "+string(s.Stage), f.join(member{Host: &s}))
}

// Gateway starts a gateway and returns when it is ready.
func (f *Fleet) Gateway(s GatewaySpec) *Member {
	f.t.Helper()
	m := f.LaunchGateway(s)
	m.AwaitReady()
	return m
}

// LaunchGateway starts a gateway.
func (f *Fleet) LaunchGateway(s GatewaySpec) *Member {
	f.t.Helper()
	if s.Listen == "" {
		s.Listen = anyPort
	}
	m := f.launch("gateway", f.join(member{Gateway: &s}))
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gateways = append(f.gateways, m)
	return m
}

// join tells a member where the others are.
func (f *Fleet) join(spec member) member {
	f.mu.Lock()
	defer f.mu.Unlock()
	spec.Mesh, spec.URL = f.mesh, f.URL()
	if agents := f.registry.Consul; len(agents) > 0 {
		spec.Consul = agents[f.started%len(agents)]
	}
	f.started++
	return spec
}

func (f *Fleet) gatewayAddrs() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []string
	for _, m := range f.gateways {
		if addr := m.Addr(); addr != "" {
			out = append(out, addr)
		}
	}
	return out
}

// Runs returns the ids of the requests that were run for each text, by any host,
// as often as they were.
func (f *Fleet) Runs() map[string][]string {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	out := map[string][]string{}
	for _, name := range f.records {
		for line := range strings.Lines(f.record(name)) {
			id, text, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
			out[text] = append(out[text], id)
		}
	}
	return out
}

// Ends returns when a host heard of each text that nobody wants it any more, where it
// ran.
func (f *Fleet) Ends() map[string]time.Time {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	out := map[string]time.Time{}
	for _, name := range f.records {
		for line := range strings.Lines(f.record(name + endsSuffix)) {
			at, text, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
			nanos, err := strconv.ParseInt(at, 10, 64)
			if err != nil {
				f.t.Fatalf("%s: %v", name, err)
			}
			out[text] = time.Unix(0, nanos)
		}
	}
	return out
}

func (f *Fleet) record(name string) string {
	f.t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		f.t.Fatal(err)
	}
	return string(data)
}

func (f *Fleet) launch(name string, spec member) *Member {
	f.t.Helper()
	m := &Member{fleet: f, name: name, spec: spec}
	m.Launch()
	f.t.Cleanup(m.end)
	return m
}
