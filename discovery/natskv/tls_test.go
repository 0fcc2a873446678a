package natskv_test

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"google.golang.org/grpc"
	grpccredentials "google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestBrokerTLSErrorsNameTheSetting(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	b := broker(t, func(o *server.Options) {
		o.TLSConfig, o.TLSTimeout = authority.Server("127.0.0.1"), 5
	})
	plain := broker(t)
	with := func(url string, auth credentials.Broker) error {
		_, err := client(t, settings(url, func(s *natskv.Settings) { s.Auth = auth })).Get(t.Context(), "a")
		return err
	}
	if err := with(b.ClientURL(), credentials.Broker{CAFile: authority.File}); !errors.Is(err, discovery.ErrNotFound) {
		t.Errorf("one that is trusted: %v", err)
	}
	for name, test := range map[string]struct {
		url, ca, want string
	}{
		"no authority":      {b.ClientURL(), "", "; nats.ca_file names a file"},
		"another authority": {b.ClientURL(), testbed.NewAuthority(t).File, "; nats.ca_file names a file"},
		"another name":      {strings.Replace(b.ClientURL(), "127.0.0.1", "localhost", 1), authority.File, "; nats.url has to name the broker as its certificate does"},
		"no TLS":            {plain.ClientURL(), authority.File, "; the broker has no TLS, which nats.ca_file"},
	} {
		if err := with(test.url, credentials.Broker{CAFile: test.ca}); !errors.Is(err, discovery.ErrUnavailable) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTokenIsSent(t *testing.T) {
	t.Parallel()
	b := broker(t, func(o *server.Options) { o.Authorization = "open-sesame" })
	for name, test := range map[string]struct {
		token string
		want  error
	}{
		"the token": {testbed.SecretFile(t, "open-sesame\n"), discovery.ErrNotFound},
		"another":   {testbed.SecretFile(t, "sesame-secret"), discovery.ErrDenied},
		"none":      {"", discovery.ErrDenied},
	} {
		_, err := client(t, settings(b.ClientURL(), func(s *natskv.Settings) { s.Auth.TokenFile = test.token })).Get(t.Context(), "a")
		if !errors.Is(err, test.want) || errors.Is(test.want, discovery.ErrDenied) && (!strings.Contains(err.Error(), "nats.token_file") || strings.Contains(err.Error(), "sesame")) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := natskv.New(settings(b.ClientURL(), func(s *natskv.Settings) { s.Auth.TokenFile = "nowhere" })); !errors.Is(err, discovery.ErrInvalid) || !strings.Contains(err.Error(), "nats.token_file: open nowhere") {
		t.Errorf("a file that is not there: %v", err)
	}
}

// The client reports each rejection, and callers receive it.
func TestRepeatedRejectionsAreNotLogged(t *testing.T) {
	t.Parallel()
	options := brokerOptions(t.TempDir())
	options.Authorization = "open-sesame"
	s, err := startBroker(options)
	if err != nil {
		t.Fatal(err)
	}
	url := s.ClientURL()
	log := &testbed.Log{}
	c := client(t, settings(url, func(s *natskv.Settings) {
		s.Auth.TokenFile, s.Logger = testbed.SecretFile(t, "open-sesame"), slog.New(slog.NewTextHandler(log, nil))
	}))
	_, err = c.Get(t.Context(), "a")
	options.Port = s.Addr().(*net.TCPAddr).Port
	s.Shutdown()
	s.WaitForShutdown()
	if !errors.Is(err, discovery.ErrNotFound) {
		t.Fatal(err)
	}
	options.Authorization = "sesame-secret"
	other, err := startBroker(options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		other.Shutdown()
		other.WaitForShutdown()
	})
	testbed.Eventually(t, "it is refused again", func() bool {
		seen, err := other.Varz(nil)
		return err == nil && seen.TotalConnections >= 3
	})
	if _, err := c.Get(t.Context(), "a"); !errors.Is(err, discovery.ErrDenied) || !strings.Contains(err.Error(), "nats.token_file") {
		t.Errorf("it is unavailable for %v", err)
	}
	if text := log.String(); strings.Contains(text, "registry's broker") || strings.Contains(text, "sesame") {
		t.Errorf("it logs\n%s", text)
	}
}

// serveHealth serves gRPC health with TLS. It returns the address, and a counter of the
// handshakes.
func serveHealth(t *testing.T, shown *tls.Config) (address string, begun *atomic.Int64) {
	t.Helper()
	begun = &atomic.Int64{}
	shown.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		begun.Add(1)
		return nil, nil
	}
	listener := testbed.Listen(t)
	server := grpc.NewServer(grpc.Creds(grpccredentials.NewTLS(shown)))
	serving := health.NewServer()
	serving.SetServingStatus("i", healthv1.HealthCheckResponse_SERVING)
	healthv1.RegisterHealthServer(server, serving)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener) // it is stopped
	}()
	t.Cleanup(func() {
		server.Stop()
		<-served
	})
	return listener.Addr().String(), begun
}

func TestInstanceIsHealthyOnlyWithItsCertificate(t *testing.T) {
	t.Parallel()
	b := broker(t)
	authority := testbed.NewAuthority(t)
	staleCert, staleKey := authority.Expired("127.0.0.1")
	for name, test := range map[string]struct {
		shown *tls.Config
		// want is "" where it is healthy.
		want string
	}{
		"its own":              {authority.Server("127.0.0.1"), ""},
		"of another authority": {testbed.NewAuthority(t).Server("127.0.0.1"), "; the process at the address has a certificate of another authority"},
		"for another name":     {authority.Server("stage.example"), "; the server_name of a stage is the name in its certificate"},
		"expired":              {testbed.ServerTLS(t, staleCert, staleKey), "; the certificate of the stage's cert_file is expired"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			log := &testbed.Log{}
			c := client(t, settings(b.ClientURL(), func(s *natskv.Settings) { s.Logger = slog.New(slog.NewTextHandler(log, nil)) }))
			service := strings.ReplaceAll(name, " ", "-")
			snapshot := newRecorder[discovery.Snapshot]()
			background(t, func(ctx context.Context) error { return c.Watch(ctx, service, snapshot) })
			address, checks := serveHealth(t, test.shown)
			instance := discovery.Instance{Service: service, ID: "i", Address: address, TLS: &tls.Config{RootCAs: authority.Roots, MinVersion: tls.VersionTLS12}}
			background(t, func(ctx context.Context) error { return c.Announce(ctx, instance, func(error) {}) })
			healthy := func() bool {
				for len(snapshot.updates) > 0 {
					if len((<-snapshot.updates).Instances) > 0 {
						return true
					}
				}
				return false
			}
			if test.want == "" {
				testbed.Eventually(t, "it is healthy", healthy)
				return
			}
			testbed.Eventually(t, "the log has the reason", func() bool { return strings.Contains(log.String(), test.want) })
			// After these checks it could have been logged again.
			before := checks.Load()
			testbed.Eventually(t, "it is checked again", func() bool { return checks.Load() >= before+4 })
			if healthy() || strings.Count(log.String(), test.want) != 1 {
				t.Errorf("it is healthy or logs\n%s", log)
			}
		})
	}
}
