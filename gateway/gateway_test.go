package gateway_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/metric/noop"
	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/gateway/call"
	"github.com/stagemesh/stagemesh/gateway/catalog"
	"github.com/stagemesh/stagemesh/mesh/bus"
	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// run runs a gateway on the broker, which stops with the test or before.
func run(t *testing.T, broker *bustest.Broker) (g *gateway.Gateway, stop func()) {
	t.Helper()
	c, err := catalog.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	g, err = gateway.New(gateway.Settings{
		Call: call.Settings{Mesh: "test", Gateway: "gateway", Catalog: c, Logger: slog.New(slog.DiscardHandler), Meter: noop.Meter{}},
		Bus:  bus.Settings{URL: broker.URL()}, Listen: "127.0.0.1:0",
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	stop = func() {
		cancel()
		if err := bustest.Receive(t, "the gateway's end", done); err != nil {
			t.Errorf("the gateway ended with %v", err)
		}
		done <- nil
	}
	t.Cleanup(stop)
	waiting, leave := context.WithTimeout(t.Context(), bustest.Patience)
	defer leave()
	if err := g.WaitReady(waiting); err != nil {
		t.Fatal(err)
	}
	return g, stop
}

// reasonOf sends a request and returns its status, and the reason where it
// failed.
func reasonOf(t *testing.T, client *http.Client, method, url string) (status int, reason fault.Reason) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var answer struct{ Error struct{ Reason fault.Reason } }
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, answer.Error.Reason
}

func TestAGatewayWithoutItsBrokerSaysSo(t *testing.T) {
	t.Parallel()
	broker := bustest.Start(t)
	g, _ := run(t, broker)
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	client, url := &http.Client{Transport: transport}, "http://"+g.Addr().String()
	if status, reason := reasonOf(t, client, http.MethodGet, url+"/readyz"); status != http.StatusOK {
		t.Errorf("ready: %d %s", status, reason)
	}
	if _, reason := reasonOf(t, client, http.MethodPost, url+"/v1/pipelines/stage:nowhere:infer"); reason != fault.NoCapacity {
		t.Errorf("without a host: %s", reason)
	}
	broker.Stop()
	bustest.Eventually(t, "the connection is lost", func() bool { return g.Ready() != nil })
	for method, path := range map[string]string{http.MethodGet: "/readyz", http.MethodPost: "/v1/pipelines/stage:nowhere:infer"} {
		if status, reason := reasonOf(t, client, method, url+path); status != http.StatusServiceUnavailable || reason != fault.BrokerUnavailable {
			t.Errorf("%s: %d %s", path, status, reason)
		}
	}
	broker.Restore()
	bustest.Eventually(t, "the gateway is ready again", func() bool { return g.Ready() == nil })
}

func TestAGatewayAnswersForRequestsThatItDoesNotKnow(t *testing.T) {
	t.Parallel()
	g, _ := run(t, bustest.Start(t))
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	client, url := &http.Client{Transport: transport}, "http://"+g.Addr().String()+"/v1/requests/0199aaaa-bbbb-7ccc-8ddd-eeeeffff0000"
	if status, reason := reasonOf(t, client, http.MethodGet, url+"/result?wait=10"); status != http.StatusNotFound || reason != fault.NotFound {
		t.Errorf("a result: %d %s", status, reason)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodDelete, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusNoContent {
		t.Errorf("calling off: %s", response.Status)
	}
	if status, reason := reasonOf(t, client, http.MethodDelete, url[:len(url)-1]); status != http.StatusBadRequest || reason != fault.InvalidRequest {
		t.Errorf("an id that is none: %d %s", status, reason)
	}
}

func TestAGatewayThatStopsSaysSo(t *testing.T) {
	t.Parallel()
	g, stop := run(t, bustest.Start(t))
	stop()
	if f := fault.From(g.Ready()); f.Reason != fault.ShuttingDown {
		t.Errorf("got %v", f)
	}
	_, err := g.Service().Infer(t.Context(), &call.Request{Pipeline: "stage:nowhere"})
	if f := fault.From(err); f.Reason != fault.ShuttingDown {
		t.Errorf("a call: %v", f)
	}
}
