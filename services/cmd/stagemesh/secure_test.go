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
	return write(t, fmt.Sprintf(`mesh: m
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
	host.ready(t)
	testbed.Eventually(t, "the gateway is ready", func() bool { return gateway.out.Has("\n") })
	words := secureLine.FindStringSubmatch(gateway.out.String())
	if words == nil {
		t.Fatalf("it printed %q", gateway.out.String())
	}
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
	for _, p := range []*process{host, gateway} {
		p.signal(t, syscall.SIGTERM)
		if err := testbed.Receive(t, "its end", p.ended); err != nil {
			t.Errorf("it ended with %v", err)
		}
		if text := p.out.String() + p.errOut.String(); strings.Contains(text, "sesame") || strings.Contains(text, "simsim") {
			t.Errorf("it says a secret:\n%s", text)
		}
	}
}

var operationsLine = regexp.MustCompile(`operations port listens" address=(\S+)`)

// readiness returns what a program that is not ready says of itself.
func (p *process) readiness(t *testing.T) string {
	t.Helper()
	testbed.Eventually(t, "it has an operations port", func() bool { return operationsLine.MatchString(p.errOut.String()) })
	status, body := testbed.Get(t, "http://"+operationsLine.FindStringSubmatch(p.errOut.String())[1]+"/readyz")
	if status != http.StatusServiceUnavailable {
		t.Errorf("readyz: %d %s", status, body)
	}
	return body
}

// told waits until a program says something in its log and in its readiness.
func (p *process) told(t *testing.T, want string) {
	t.Helper()
	testbed.Eventually(t, "the log says "+want, func() bool { return p.errOut.Has(want) })
	testbed.Eventually(t, "/readyz says "+want, func() bool { return strings.Contains(p.readiness(t), want) })
}

func TestProgramsReportBrokerRejections(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	broker := testbed.StartBroker(t, func(o *server.Options) {
		o.TLSConfig, o.Authorization = authority.Server("127.0.0.1"), "open-sesame"
	})
	stages := "gateway: {listen: \"127.0.0.1:0\", admin: {listen: \"127.0.0.1:0\"}}\nstages: {a: {runner: {echo: {}}}}\n"
	refused := write(t, fmt.Sprintf("mesh: m\nnats: {url: %q, token_file: %q, ca_file: %q}\n", broker.URL(), testbed.SecretFile(t, "sesame-secret"), authority.File)+stages)
	strange := write(t, fmt.Sprintf("mesh: m\nnats: {url: %q, token_file: %q}\n", broker.URL(), testbed.SecretFile(t, "open-sesame"))+stages)
	for want, file := range map[string]string{"see nats.token_file and nats.credentials_file": refused, "nats.ca_file names a file": strange} {
		for _, p := range []*process{start(t, "gateway", "-c", file), start(t, "stage", "-c", file, "a")} {
			p.told(t, want)
			p.signal(t, syscall.SIGTERM)
			if err := testbed.Receive(t, "its end", p.ended); err != nil || p.errOut.Has("sesame") || p.out.String() != "" {
				t.Errorf("it ended with %v and said %s%s", err, p.out.String(), p.errOut.String())
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
	file := write(t, fmt.Sprintf(`mesh: m
nats: {url: %q}
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
registry: {consul: {address: %q, ca_file: %q}}
stages: {a: {runner: {echo: {}}}}
`, testbed.StartBroker(t).URL(), agent.Listener.Addr(), testbed.NewAuthority(t).File))
	const want = "registry.consul.ca_file names a file with the certificate"
	host := start(t, "stage", "-c", file, "a")
	host.told(t, want)
	gateway := start(t, "gateway", "-c", file)
	gateway.told(t, want)
}
