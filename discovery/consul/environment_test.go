package consul_test

import (
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/discovery/consul"
	"github.com/stagemesh/stagemesh/mesh/tlstest"
)

// agent answers as one whose table is empty, and hands on what it was asked.
func agent(asked chan<- *http.Request) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- r
		w.Header().Set("X-Consul-Index", "1")
		_, _ = w.Write([]byte("[]")) // the test fails without it
	})
}

func serveTLS(t *testing.T, authority *tlstest.Authority, handler http.Handler) (address string) {
	t.Helper()
	s := httptest.NewUnstartedServer(handler)
	s.TLS = authority.Server("127.0.0.1")
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	s.StartTLS()
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// It changes the environment, so it runs before the tests that run beside each other.
func TestTheEnvironmentSaysNothingOfConsul(t *testing.T) {
	authority := tlstest.New(t)
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
	asked := make(chan *http.Request, 8)
	plain := httptest.NewServer(agent(asked))
	t.Cleanup(plain.Close)
	if _, err := client(t, plain.Listener.Addr().String()).List(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
	if r := <-asked; strings.Contains(fmt.Sprint(r.Header, r.URL), "sesame") || strings.Contains(r.URL.RawQuery, "else") || r.Header.Get("X-Consul-Token") != "" {
		t.Errorf("it is asked %s with %v", r.URL, r.Header)
	}
	stranger := serveTLS(t, authority, agent(asked))
	_, err := client(t, stranger, func(s *consul.Settings) { s.Token, s.TLS.Enabled = "open", true }).List(t.Context(), "")
	if err == nil || !strings.Contains(err.Error(), "registry.consul.ca_file") || len(asked) > 0 {
		t.Errorf("whom nobody vouches for: %v, asked %d times", err, len(asked))
	}
	trusted := client(t, stranger, func(s *consul.Settings) { s.Token, s.TLS.CAFile = "open", authority.File })
	if _, err := trusted.List(t.Context(), ""); err != nil {
		t.Errorf("whom the settings trust: %v", err)
	}
	if r := <-asked; r.Header.Get("X-Consul-Token") != "open" {
		t.Errorf("it is asked with %v", r.Header)
	}
}

func TestTheTokenIsForTheAgentAndNotForWhereItPointsTo(t *testing.T) {
	t.Parallel()
	asked := make(chan *http.Request, 8)
	plain := httptest.NewServer(agent(asked))
	t.Cleanup(plain.Close)
	authority := tlstest.New(t)
	address := serveTLS(t, authority, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, plain.URL+r.URL.Path, http.StatusTemporaryRedirect)
	}))
	_, err := client(t, address, func(s *consul.Settings) { s.Token, s.TLS.CAFile = "open", authority.File }).List(t.Context(), "")
	if err == nil || !strings.Contains(err.Error(), "307") || len(asked) > 0 {
		t.Errorf("%v, asked %d times", err, len(asked))
	}
}

func TestAnAgentIsAskedAtASocket(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan *http.Request, 8)
	s := httptest.NewUnstartedServer(agent(asked))
	_ = s.Listener.Close() // the other one is served
	s.Listener = listener
	s.Start()
	t.Cleanup(s.Close)
	if _, err := client(t, "unix://"+path, func(s *consul.Settings) { s.Token = "open" }).List(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
	if r := <-asked; r.Header.Get("X-Consul-Token") != "open" {
		t.Errorf("it is asked with %v", r.Header)
	}
}
