package fleet

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// modelHost starts a host that loads models of 1 MiB, with room for that many.
func (f *fleet) modelHost(room int) *member {
	f.t.Helper()
	m := &member{fleet: f, link: f.newLink()}
	m.args = []string{"stage", "score", "--listen", anyPort, "--config", f.meshFile(m.link, "stages", modelStage(room))}
	m.launch()
	m.awaitReady()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hosts = append(f.hosts, m)
	return m
}

func modelStage(room int) map[string]any {
	return map[string]any{"score": map[string]any{
		"runner": map[string]any{modelsKind: map[string]any{"load": "20ms", "run": "1ms"}},
		"models": map[string]any{"capacity": fmt.Sprintf("%dMiB", room+1), "default_size": "64KiB"},
	}}
}

// modelGateway starts a gateway that registers models of 1 MiB.
func (f *fleet) modelGateway(models int) *member {
	f.t.Helper()
	registered := map[string]any{}
	for i := range models {
		registered[fmt.Sprintf("m%d", i)] = map[string]any{"stage": "score", "size": "1MiB"}
	}
	m := &member{fleet: f, link: f.newLink()}
	m.args = []string{"gateway", "--admin", anyPort, "--config", f.meshFile(m.link, "stages", modelStage(models), "models", registered)}
	m.launch()
	m.awaitReady()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gateways = append(f.gateways, m)
	return m
}

// awaitModels waits until each model has answered once.
func (f *fleet) awaitModels(models int) {
	f.t.Helper()
	testbed.Eventually(f.t, "all models answer", func() bool {
		r := f.load(loadSpec{requests: models, inFlight: 8, models: models}).wait()
		return r.right == models
	})
}

// Hosts are killed, paused and restarted, and every answer is that of the model asked for.
func TestModelsSurviveTheirHosts(t *testing.T) {
	t.Parallel()
	const models = 60
	f := newFleet(t, brokerRegistry)
	for range 3 {
		f.modelHost(models)
	}
	f.modelGateway(models)
	f.modelGateway(models)
	f.awaitModels(models)
	l := f.load(loadSpec{inFlight: 16, models: models, timeout: 30 * time.Second})
	l.flow(500)
	for i := range pick(6, 30) {
		host := f.hosts[i%len(f.hosts)]
		switch i % 3 {
		case 0:
			host.Kill()
			l.flow(300)
			host.start()
		case 1:
			host.pause()
			l.flow(300)
			host.resume()
		default:
			restart(host)
		}
		l.flow(300)
	}
	l.finish().checkAllRight(t)
	// Nothing is left of the hosts that were killed.
	testbed.Eventually(t, "only queues of hosts exist", func() bool {
		for _, name := range f.streamNames() {
			_, host, ok := strings.Cut(name, "@")
			host, _, _ = strings.Cut(host, "_")
			if ok && !slices.ContainsFunc(f.hosts, func(m *member) bool { return m.address() == host }) {
				return false
			}
		}
		return true
	})
}
