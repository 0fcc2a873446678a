package consul_test

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/discovery/consul"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// agent answers like an agent with an empty table, and passes on the requests.
func agent(requests chan<- *http.Request) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests <- r
		w.Header().Set("X-Consul-Index", "1")
		_, _ = w.Write([]byte("[]")) // the test fails without it
	})
}

func serveTLS(t *testing.T, authority *testbed.Authority, handler http.Handler) (address string) {
	t.Helper()
	s := httptest.NewUnstartedServer(handler)
	s.TLS = authority.Server("127.0.0.1")
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	s.StartTLS()
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// It changes the environment, so it is not parallel.
func TestEnvironmentIsIgnored(t *testing.T) {
	authority := testbed.NewAuthority(t)
	for name, value := range map[string]string{
		"SSL_VERIFY": "false", "SSL": "true", "TOKEN": "sesame", "TOKEN_FILE": filepath.Join(t.TempDir(), "nowhere"), "AUTH": "open:sesame",
	} {
		t.Setenv("CONSUL_HTTP_"+name, value)
	}
	for name, value := range map[string]string{
		"CACERT": authority.File, "CLIENT_CERT": "nowhere", "CLIENT_KEY": "nowhere", "TLS_SERVER_NAME": "else", "NAMESPACE": "else", "PARTITION": "else",
	} {
		t.Setenv("CONSUL_"+name, value)
	}
	requests := make(chan *http.Request, 8)
	plain := httptest.NewServer(agent(requests))
	t.Cleanup(plain.Close)
	if _, err := client(t, plain.Listener.Addr().String()).Get(t.Context(), "a"); !errors.Is(err, discovery.ErrNotFound) {
		t.Fatal(err)
	}
	if r := <-requests; strings.Contains(fmt.Sprint(r.Header, r.URL), "sesame") || strings.Contains(r.URL.RawQuery, "else") || r.Header.Get("X-Consul-Token") != "" {
		t.Errorf("the request is %s with %v", r.URL, r.Header)
	}
	stranger := serveTLS(t, authority, agent(requests))
	_, err := client(t, stranger, func(s *consul.Settings) { s.Token, s.TLS.Enabled = "open", true }).Get(t.Context(), "a")
	if err == nil || !strings.Contains(err.Error(), "registry.consul.ca_file") || len(requests) > 0 {
		t.Errorf("an unknown authority: %v, %d requests", err, len(requests))
	}
	trusted := client(t, stranger, func(s *consul.Settings) { s.Token, s.TLS.CAFile = "open", authority.File })
	if _, err := trusted.Get(t.Context(), "a"); !errors.Is(err, discovery.ErrNotFound) {
		t.Errorf("a trusted authority: %v", err)
	}
	if r := <-requests; r.Header.Get("X-Consul-Token") != "open" {
		t.Errorf("the request has %v", r.Header)
	}
}

func TestTokenIsNotSentToRedirects(t *testing.T) {
	t.Parallel()
	requests := make(chan *http.Request, 8)
	plain := httptest.NewServer(agent(requests))
	t.Cleanup(plain.Close)
	authority := testbed.NewAuthority(t)
	address := serveTLS(t, authority, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, plain.URL+r.URL.Path, http.StatusTemporaryRedirect)
	}))
	_, err := client(t, address, func(s *consul.Settings) { s.Token, s.TLS.CAFile = "open", authority.File }).Get(t.Context(), "a")
	if err == nil || !strings.Contains(err.Error(), "307") || len(requests) > 0 {
		t.Errorf("%v, %d requests", err, len(requests))
	}
}

func TestAgentAtUnixSocket(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	requests := make(chan *http.Request, 8)
	s := httptest.NewUnstartedServer(agent(requests))
	_ = s.Listener.Close() // the other one is served
	s.Listener = listener
	s.Start()
	t.Cleanup(s.Close)
	if _, err := client(t, "unix://"+path, func(s *consul.Settings) { s.Token = "open" }).Get(t.Context(), "a"); !errors.Is(err, discovery.ErrNotFound) {
		t.Fatal(err)
	}
	if r := <-requests; r.Header.Get("X-Consul-Token") != "open" {
		t.Errorf("the request has %v", r.Header)
	}
}
