package main_test

import (
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// securedFile is the file of a mesh that has secrets everywhere; whoever runs the
// broker listens, and the others join.
func securedFile(t *testing.T, authority *testbed.Authority, token, callers string) string {
	t.Helper()
	cert, key := authority.Certificate("127.0.0.1")
	return testbed.MeshFile(t, fmt.Sprintf(`mesh: m
nats: {listen: ":0", listen_cert_file: %[1]q, listen_key_file: %[2]q, token_file: %[3]q, ca_file: %[4]q}
gateway: {token_file: %[5]q, cert_file: %[1]q, key_file: %[2]q}
registry: {nats: {}}
stages: {a: {runner: {echo: {}}, listen: "127.0.0.1:0", cert_file: %[1]q, key_file: %[2]q}}
pipelines: {p: {steps: [{name: a, stage: a}]}}
`, cert, key, token, authority.File, callers))
}

var secureLine = regexp.MustCompile(`is ready on (https://\S+) \(admin: http://`)

func TestProgramsJoinBrokerWithTLSAndToken(t *testing.T) {
	t.Parallel()
	authority, token := testbed.NewAuthority(t), testbed.SecretFile(t, "open-sesame\n")
	broker := testbed.StartBroker(t, func(o *server.Options) {
		o.TLSConfig, o.Authorization = authority.Server("127.0.0.1"), "open-sesame"
	})
	file := securedFile(t, authority, token, testbed.SecretFile(t, "open-simsim"))
	host := start(t, "stage", "-c", file, "a", "--nats", broker.URL())
	gateway := start(t, "gateway", "-c", file, "--nats", broker.URL(), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
	host.Match(readyLine)
	words := gateway.Match(secureLine)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: authority.Roots}}}
	for token, want := range map[string]int{"open-simsim": http.StatusOK, "open-sesame": http.StatusUnauthorized} {
		request := testbed.Request(t, http.MethodPost, words[1]+"/v1/pipelines/p:infer", strings.NewReader("hello"))
		request.Header.Set("Content-Type", "text/plain")
		request.Header.Set("Authorization", "Bearer "+token)
		response, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		if response.Body.Close(); err != nil || response.StatusCode != want {
			t.Errorf("%s: %s %s, %v", token, response.Status, body, err)
		}
	}
	for _, p := range []*testbed.Process{host, gateway} {
		p.Signal(syscall.SIGTERM)
		if err := p.Wait(); err != nil {
			t.Errorf("it ended with %v", err)
		}
		if text := p.Out.String() + p.Err.String(); strings.Contains(text, "sesame") || strings.Contains(text, "simsim") {
			t.Errorf("it says a secret:\n%s", text)
		}
	}
}

var operationsLine = regexp.MustCompile(`operations port listens" address=(\S+)`)

// readiness returns what a program that is not ready says of itself.
func readiness(t *testing.T, p *testbed.Process) string {
	t.Helper()
	status, body := testbed.Get(t, "http://"+p.Match(operationsLine)[1]+"/readyz")
	if status != http.StatusServiceUnavailable {
		t.Errorf("readyz: %d %s", status, body)
	}
	return body
}

// told waits until a program says something in its log and in its readiness.
func told(t *testing.T, p *testbed.Process, want string) {
	t.Helper()
	testbed.Eventually(t, "the log says "+want, func() bool { return p.Err.Has(want) })
	testbed.Eventually(t, "/readyz says "+want, func() bool { return strings.Contains(readiness(t, p), want) })
}

func TestProgramsReportBrokerRejections(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	broker := testbed.StartBroker(t, func(o *server.Options) {
		o.TLSConfig, o.Authorization = authority.Server("127.0.0.1"), "open-sesame"
	})
	stages := "gateway: {listen: \"127.0.0.1:0\", admin: {listen: \"127.0.0.1:0\"}}\nstages: {a: {runner: {echo: {}}}}\n"
	refused := testbed.MeshFile(t, fmt.Sprintf("mesh: m\nnats: {url: %q, token_file: %q, ca_file: %q}\n", broker.URL(), testbed.SecretFile(t, "sesame-secret"), authority.File)+stages)
	strange := testbed.MeshFile(t, fmt.Sprintf("mesh: m\nnats: {url: %q, token_file: %q}\n", broker.URL(), testbed.SecretFile(t, "open-sesame"))+stages)
	for want, file := range map[string]string{"see nats.token_file and nats.credentials_file": refused, "nats.ca_file names a file": strange} {
		for _, p := range []*testbed.Process{start(t, "gateway", "-c", file), start(t, "stage", "-c", file, "a")} {
			told(t, p, want)
			p.Signal(syscall.SIGTERM)
			if err := p.Wait(); err != nil || p.Err.Has("sesame") || p.Out.String() != "" {
				t.Errorf("it ended with %v and said %s%s", err, p.Out.String(), p.Err.String())
			}
		}
	}
}

// A stranger has the place of the agent.
func TestProgramsReportUntrustedConsul(t *testing.T) {
	t.Parallel()
	agent := httptest.NewUnstartedServer(http.NotFoundHandler())
	agent.TLS = testbed.NewAuthority(t).Server("127.0.0.1")
	agent.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	agent.StartTLS()
	t.Cleanup(agent.Close)
	file := testbed.MeshFile(t, fmt.Sprintf(`mesh: m
nats: {url: %q}
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
registry: {consul: {address: %q, ca_file: %q}}
stages: {a: {runner: {echo: {}}}}
`, testbed.StartBroker(t).URL(), agent.Listener.Addr(), testbed.NewAuthority(t).File))
	const want = "registry.consul.ca_file names a file with the certificate"
	host := start(t, "stage", "-c", file, "a")
	told(t, host, want)
	gateway := start(t, "gateway", "-c", file)
	told(t, gateway, want)
}
