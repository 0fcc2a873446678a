package gateway_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery/mirror"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// A gateway that has never heard of the registry says so, and one that has stays
// ready without it.
func TestAGatewayWaitsForTheRegistryOnce(t *testing.T) {
	t.Parallel()
	broker, other := bustest.Start(t), bustest.Start(t)
	other.Stop()
	store := background(t, other.URL())
	g, err := gateway.New(settings(t, broker.URL(), func(s *gateway.Settings) {
		s.Registry = &gateway.Registry{Watcher: store, Table: store}
	}))
	if err != nil {
		t.Fatal(err)
	}
	runUntilTheEnd(t, g.Run)
	waiting, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := g.WaitReady(waiting); err == nil {
		t.Error("it is ready before it has heard of the registry")
	}
	bustest.Eventually(t, "it says what it waits for", func() bool { return errors.Is(g.Ready(), mirror.ErrNotLoaded) })
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	client, url := &http.Client{Transport: transport}, "http://"+g.Addr().String()+"/readyz"
	if status, reason := reasonOf(t, client, http.MethodGet, url); status != http.StatusServiceUnavailable || reason != fault.RegistryUnavailable {
		t.Errorf("without the registry: %d %s", status, reason)
	}
	other.Restore()
	patient, leave := context.WithTimeout(t.Context(), bustest.Patience)
	defer leave()
	if err := g.WaitReady(patient); err != nil {
		t.Fatal(err)
	}
	other.Stop()
	if status, reason := reasonOf(t, client, http.MethodGet, url); status != http.StatusOK {
		t.Errorf("after it has heard of the registry: %d %s", status, reason)
	}
}

// background returns a registry whose connection lasts as long as the test.
func background(t *testing.T, url string) *natskv.Store {
	t.Helper()
	store, err := natskv.New(natskv.Settings{Mesh: "test", URL: url, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	runUntilTheEnd(t, store.Run)
	return store
}

func runUntilTheEnd(t *testing.T, run func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
