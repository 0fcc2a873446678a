package gateway_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
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
	testbed.Background(t, g.Run)
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

// lateHosts is a table whose hosts are not received until they are released.
type lateHosts struct {
	discovery.Table

	released chan struct{}
}

func (l lateHosts) Observe(ctx context.Context, below discovery.Key, o discovery.Observer[discovery.Change]) error {
	if below == "hosts" {
		select {
		case <-l.released:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return l.Table.Observe(ctx, below, o)
}

// A gateway that knows its pipelines, but not the hosts, is not ready.
func TestGatewayWaitsForTheHosts(t *testing.T) {
	t.Parallel()
	broker, released := testbed.StartBroker(t), make(chan struct{})
	store := table(t, broker)
	g, err := gateway.New(settings(t, broker.URL(), func(s *gateway.Settings) {
		s.Registry = &gateway.Registry{Watcher: store, Table: lateHosts{store, released}}
	}))
	if err != nil {
		t.Fatal(err)
	}
	testbed.Background(t, g.Run)
	testbed.Eventually(t, "it waits for the hosts alone", func() bool {
		err := g.Ready()
		return errors.Is(err, discovery.ErrNotLoaded) && strings.Contains(err.Error(), "the hosts")
	})
	close(released)
	patient, leave := context.WithTimeout(t.Context(), testbed.Patience)
	defer leave()
	if err := errors.Join(g.WaitReady(patient), g.Ready()); err != nil {
		t.Fatal(err)
	}
}
