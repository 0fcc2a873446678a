package natskv_test

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"google.golang.org/grpc"
	grpccredentials "google.golang.org/grpc/credentials"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestBrokerTLSErrorsNameTheSetting(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	b := testbed.StartBroker(t, func(o *server.Options) {
		o.TLSConfig, o.TLSTimeout = authority.Server("127.0.0.1"), 5
	})
	plain := testbed.StartBroker(t)
	with := func(url string, auth credentials.Broker) error {
		_, err := client(t, settings(url, func(s *natskv.Settings) { s.Auth = auth })).Get(t.Context(), "a")
		return err
	}
	if err := with(b.URL(), credentials.Broker{CAFile: authority.File}); !errors.Is(err, discovery.ErrNotFound) {
		t.Errorf("one that is trusted: %v", err)
	}
	for name, test := range map[string]struct {
		url, ca, want string
	}{
		"no authority":      {b.URL(), "", "; nats.ca_file names a file"},
		"another authority": {b.URL(), testbed.NewAuthority(t).File, "; nats.ca_file names a file"},
		"another name":      {strings.Replace(b.URL(), "127.0.0.1", "localhost", 1), authority.File, "; nats.url has to name the broker as its certificate does"},
		"no TLS":            {plain.URL(), authority.File, "; the broker has no TLS, which nats.ca_file"},
	} {
		if err := with(test.url, credentials.Broker{CAFile: test.ca}); !errors.Is(err, discovery.ErrUnavailable) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTokenIsSent(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t, func(o *server.Options) { o.Authorization = "open-sesame" })
	for name, test := range map[string]struct {
		token string
		want  error
	}{
		"the token": {testbed.SecretFile(t, "open-sesame\n"), discovery.ErrNotFound},
		"another":   {testbed.SecretFile(t, "sesame-secret"), discovery.ErrDenied},
		"none":      {"", discovery.ErrDenied},
	} {
		_, err := client(t, settings(b.URL(), func(s *natskv.Settings) { s.Auth.TokenFile = test.token })).Get(t.Context(), "a")
		if !errors.Is(err, test.want) || errors.Is(test.want, discovery.ErrDenied) && (!strings.Contains(err.Error(), "nats.token_file") || strings.Contains(err.Error(), "sesame")) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := natskv.New(settings(b.URL(), func(s *natskv.Settings) { s.Auth.TokenFile = "nowhere" })); !errors.Is(err, discovery.ErrInvalid) || !strings.Contains(err.Error(), "nats.token_file: open nowhere") {
		t.Errorf("a file that is not there: %v", err)
	}
}

// The client reports each rejection, and callers receive it.
func TestRepeatedRejectionsAreNotLogged(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t, func(o *server.Options) { o.Authorization = "open-sesame" })
	log := &testbed.Log{}
	c := client(t, settings(b.URL(), func(s *natskv.Settings) {
		s.Auth.TokenFile, s.Logger = testbed.SecretFile(t, "open-sesame"), slog.New(slog.NewTextHandler(log, nil))
	}))
	if _, err := c.Get(t.Context(), "a"); !errors.Is(err, discovery.ErrNotFound) {
		t.Fatal(err)
	}
	b.Stop()
	b.Change(func(o *server.Options) { o.Authorization = "sesame-secret" })
	b.Restore()
	testbed.Eventually(t, "it is refused again", func() bool { return b.Connections() >= 4 }) // the first warmed it up
	if _, err := c.Get(t.Context(), "a"); !errors.Is(err, discovery.ErrDenied) || !strings.Contains(err.Error(), "nats.token_file") {
		t.Errorf("it is unavailable for %v", err)
	}
	if text := log.String(); strings.Contains(text, "registry's broker") || strings.Contains(text, "sesame") {
		t.Errorf("it logs\n%s", text)
	}
}

func TestInstanceIsHealthyOnlyWithItsCertificate(t *testing.T) {
	t.Parallel()
	b := testbed.StartBroker(t)
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
			c := client(t, settings(b.URL(), func(s *natskv.Settings) { s.Logger = slog.New(slog.NewTextHandler(log, nil)) }))
			service := strings.ReplaceAll(name, " ", "-")
			snapshot := newRecorder[discovery.Snapshot]()
			testbed.Background(t, func(ctx context.Context) error { return c.Watch(ctx, service, snapshot) })
			var checks atomic.Int64
			test.shown.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
				checks.Add(1)
				return nil, nil
			}
			address, serving, _ := testbed.ServeHealth(t, grpc.Creds(grpccredentials.NewTLS(test.shown)))
			serving.SetServingStatus("i", healthv1.HealthCheckResponse_SERVING)
			instance := discovery.Instance{Service: service, ID: "i", Address: address, TLS: &tls.Config{RootCAs: authority.Roots, MinVersion: tls.VersionTLS12}}
			testbed.Background(t, func(ctx context.Context) error { return c.Announce(ctx, instance, func(error) {}) })
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
