package main_test

import (
	"encoding/json"
	"net/http"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// operationsOf returns the operations addresses that Consul has of a service's instances.
func operationsOf(t *testing.T, agent, service string) []string {
	t.Helper()
	status, body := testbed.Get(t, "http://"+agent+"/v1/health/service/"+service+"?passing")
	var found []struct {
		Service struct{ Meta map[string]string }
	}
	if err := json.Unmarshal([]byte(body), &found); err != nil || status != http.StatusOK {
		t.Fatalf("%d %s: %v", status, body, err)
	}
	var out []string
	for _, f := range found {
		out = append(out, f.Service.Meta["operations"])
	}
	return out
}

// Containers listen on all addresses, have no shell, and are found by monitoring in Consul.
func TestConsulListsReachableOperationsPorts(t *testing.T) {
	t.Parallel()
	bed, agent := meshtest.New(t), testbed.StartConsul(t)
	file := digitsFile(t)
	flags := []string{"--config", file, "--nats", bed.Broker.URL(), "--consul", agent.Addr(), "--ops", ":0", "--insecure", "--advertise", "127.0.0.2"}
	host := start(t, "stage", append(flags, "label")...)
	gateway := start(t, "gateway", append(flags, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")...)
	_, gatewayOps := serving(t, gateway)
	for service, operations := range map[string]string{"label": host.Match(readyLine)[4], "gateway": gatewayOps} {
		_, port, _ := strings.Cut(operations, "]:")
		want := "127.0.0.2:" + port
		testbed.Eventually(t, service+" is registered", func() bool {
			found := operationsOf(t, agent.Addr(), string(meshtest.Mesh)+"-"+service)
			return len(found) == 1 && found[0] == want
		})
		if status, _ := testbed.Get(t, "http://"+want+"/metrics"); status != http.StatusOK {
			t.Errorf("%s answers %d at the address that it registers", service, status)
		}
		if out, err := exec.Command(built.Path(t), "health", "--ops", ":"+port).CombinedOutput(); err != nil || string(out) != "ok\n" {
			t.Errorf("health of %s: %v, %s", service, err, out)
		}
	}
	for service, p := range map[string]*testbed.Process{"label": host, "gateway": gateway} {
		p.Signal(syscall.SIGTERM)
		if err := p.Wait(); err != nil {
			t.Errorf("%s ended with %v", service, err)
		}
		if found := operationsOf(t, agent.Addr(), string(meshtest.Mesh)+"-"+service); len(found) != 0 {
			t.Errorf("%s remains registered at %q", service, found)
		}
	}
}

func TestHealthFailsUnlessReady(t *testing.T) {
	t.Parallel()
	waiting := start(t, "stage", "--config", digitsFile(t), "--nats", "nats://127.0.0.1:1", "label", "--ops", "127.0.0.1:0")
	readiness(t, waiting)
	port := operationsLine.FindStringSubmatch(waiting.Err.String())[1]
	if out, err := exec.Command(built.Path(t), "health", "--ops", port).CombinedOutput(); err == nil || !strings.HasPrefix(string(out), "stagemesh: not ready: ") {
		t.Errorf("a host without a broker: %v, %s", err, out)
	}
	waiting.Signal(syscall.SIGTERM)
	if err := waiting.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
	for args, want := range map[string]string{port: "connection refused", "9090": "--ops: "} {
		if out, err := exec.Command(built.Path(t), "health", "--ops", args).CombinedOutput(); err == nil || !strings.Contains(string(out), want) {
			t.Errorf("health --ops %s: %v, %s", args, err, out)
		}
	}
}
