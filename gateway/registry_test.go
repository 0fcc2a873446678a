package gateway_test

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// A gateway is not ready before it has loaded the registry, and stays ready during an
// outage.
func TestGatewayWaitsForRegistryOnce(t *testing.T) {
	t.Parallel()
	broker, other := testbed.StartBroker(t), testbed.StartBroker(t)
	other.Stop()
	store := table(t, other)
	g, err := gateway.New(settings(t, broker.URL(), func(s *gateway.Settings) {
		s.Registry = &gateway.Registry{Watcher: store, Table: store}
	}))
	if err != nil {
		t.Fatal(err)
	}
	background(t, g.Run)
	waiting, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := g.WaitReady(waiting); err == nil {
		t.Error("the gateway is ready before it has loaded the registry")
	}
	testbed.Eventually(t, "it reports what it waits for", func() bool { return errors.Is(g.Ready(), discovery.ErrNotLoaded) })
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	client, url := &http.Client{Transport: transport}, "http://"+g.Addr().String()+"/readyz"
	if status, reason := reasonOf(t, client, http.MethodGet, url); status != http.StatusServiceUnavailable || reason != fault.RegistryUnavailable {
		t.Errorf("without the registry: %d %s", status, reason)
	}
	other.Restore()
	patient, leave := context.WithTimeout(t.Context(), testbed.Patience)
	defer leave()
	if err := g.WaitReady(patient); err != nil {
		t.Fatal(err)
	}
	other.Stop()
	if status, reason := reasonOf(t, client, http.MethodGet, url); status != http.StatusOK {
		t.Errorf("during an outage: %d %s", status, reason)
	}
}
