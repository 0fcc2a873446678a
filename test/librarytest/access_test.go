package librarytest

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// closed is the file of a mesh whose broker listens with TLS and wants a token; %s is
// the section nats.
const closed = `
mesh: m
nats: {%s}
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
registry: {nats: {}}
stages:
  echo: {runner: {echo: {}}}
  sleep: {runner: {sleep: {base: 1ms}}}
pipelines:
  p: {steps: [{name: s, stage: sleep}, {name: e, stage: echo}]}
`

func TestProcessesJoinBrokerWithTLSAndToken(t *testing.T) {
	t.Parallel()
	authority := testbed.NewAuthority(t)
	cert, key := authority.Certificate("127.0.0.1")
	token := testbed.SecretFile(t, "open-sesame\n")
	with := func(nats string, stages ...string) (*stagemesh.Mesh, *testbed.Log) {
		log := &testbed.Log{}
		m := meshtest.FromFile(t, meshtest.Parse(t, fmt.Sprintf(closed, nats)), stagemesh.FileSettings{Stages: stages, Logger: slog.New(slog.NewTextHandler(log, nil))})
		return m, log
	}
	own, ownLog := with(fmt.Sprintf("listen: 127.0.0.1:0, listen_cert_file: %q, listen_key_file: %q, token_file: %q, ca_file: %q", cert, key, token, authority.File), "echo")
	meshtest.Start(t, own)
	url := own.BrokerURL()
	if !strings.HasPrefix(url, "tls://127.0.0.1:") || strings.Contains(url, "sesame") {
		t.Errorf("it listens at %s", url)
	}
	joined, joinedLog := with(fmt.Sprintf("url: %q, token_file: %q, ca_file: %q", url, token, authority.File), "sleep")
	meshtest.Start(t, joined)
	expect(t, own, "p", "hello", "hello")
	expect(t, joined, "p", "hello", "hello")
	for name, test := range map[string]struct{ nats, want string }{
		"another token": {fmt.Sprintf("token_file: %q, ca_file: %q", testbed.SecretFile(t, "sesame-secret"), authority.File), "see nats.token_file"},
		"no token":      {fmt.Sprintf("ca_file: %q", authority.File), "see nats.token_file"},
		"no trust":      {fmt.Sprintf("token_file: %q", token), "nats.ca_file names a file"},
	} {
		refused, log := with(fmt.Sprintf("url: %q, ", url)+test.nats, "sleep")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- refused.Start(ctx) }()
		testbed.Eventually(t, name+": its log says so", func() bool { return strings.Contains(log.String(), test.want) })
		testbed.Eventually(t, name+": it is not ready, and says why", func() bool {
			err := refused.Ready()
			return err != nil && strings.Contains(err.Error(), test.want)
		})
		cancel()
		if err := testbed.Receive(t, "the end", ended); err == nil {
			t.Errorf("%s: it has started", name)
		}
		if strings.Contains(log.String(), "sesame") {
			t.Errorf("%s: a token is in the log:\n%s", name, log)
		}
	}
	if text := ownLog.String() + joinedLog.String(); strings.Contains(text, "sesame") {
		t.Errorf("a token is in a log:\n%s", text)
	}
}

func TestBrokerWithWrongFilesDoesNotStart(t *testing.T) {
	t.Parallel()
	cert, key := testbed.NewAuthority(t).Certificate("127.0.0.1")
	for name, test := range map[string]struct{ nats, want string }{
		"a certificate": {fmt.Sprintf("listen_cert_file: %q, listen_key_file: %q", key, key), "nats.listen_cert_file: tls: "},
		"no key":        {fmt.Sprintf("listen_cert_file: %q, listen_key_file: /nowhere", cert), "nats.listen_key_file: open /nowhere: "},
		"a token":       {`token_file: "/nowhere"`, "nats.token_file: open /nowhere: "},
		"an empty one":  {fmt.Sprintf("listen_cert_file: %q, listen_key_file: %q, token_file: %q", cert, key, testbed.SecretFile(t, "\n")), "there is no token in it"},
	} {
		m := meshtest.FromFile(t, meshtest.Parse(t, fmt.Sprintf(closed, "listen: 127.0.0.1:0, "+test.nats)), stagemesh.FileSettings{Stages: []string{"echo"}})
		if err := m.Start(t.Context()); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The mesh has nothing running yet that would have to be stopped.
func TestGatewayFilesAreReadBeforeTheStart(t *testing.T) {
	t.Parallel()
	for section, gateway := range map[string]string{
		"gateway":       `{listen: "127.0.0.1:0", token_file: /nowhere, admin: {listen: "127.0.0.1:0"}}`,
		"gateway.admin": `{listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0", token_file: /nowhere}}`,
	} {
		text := "mesh: m\ngateway: " + gateway + "\nstages: {a: {runner: {echo: {}}}}\npipelines: {p: {steps: [{name: a, stage: a}]}}\n"
		log := &testbed.Log{}
		m := meshtest.FromFile(t, meshtest.Parse(t, text), stagemesh.FileSettings{Logger: slog.New(slog.NewTextHandler(log, nil))})
		if err := m.Start(t.Context()); err == nil || !strings.HasPrefix(err.Error(), section+".token_file: open /nowhere: ") || log.String() != "" {
			t.Errorf("%s: %v, after\n%s", section, err, log)
		}
	}
}

// caller calls the public port of a mesh over plain HTTP, with a token.
type caller struct {
	t          *testing.T
	url, token string
}

// reply is a response whose body may still come.
type reply struct {
	status int
	id     string
	body   io.Reader
}

// send returns the response. Its body is closed when the test ends.
func (c caller) send(method, path, key, body string) reply {
	c.t.Helper()
	r, err := http.NewRequestWithContext(c.t.Context(), method, c.url+path, strings.NewReader(body))
	if err != nil {
		c.t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+c.token)
	r.Header.Set("Content-Type", "text/plain")
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	response, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(r)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { response.Body.Close() })
	return reply{response.StatusCode, response.Header.Get("Stagemesh-Request-Id"), response.Body}
}

// expect checks a whole response.
func (c caller) expect(got reply, status int, text string) {
	c.t.Helper()
	body, err := io.ReadAll(got.body)
	if err != nil || got.status != status || !strings.Contains(string(body), text) {
		c.t.Errorf("%s: %d %s, %v; want %d %s", c.token, got.status, body, err, status, text)
	}
}

func TestTenantsShareNoKeysResultsOrCancels(t *testing.T) {
	t.Parallel()
	settings := stagemesh.Settings{Gateway: gateway.Settings{Config: gateway.Config{
		Listen: "127.0.0.1:0", Access: gateway.Access{TokenFile: testbed.SecretFile(t, "of-a a\nalso-of-a a\nof-b b\nof-nobody\n")},
	}}}
	done := make(chan struct{})
	held := inproc.New(inproc.Settings{Concurrency: 3}, func(_ context.Context, b runner.Batch, sink runner.Sink) error {
		item := b.Items[0]
		if err := sink.Chunk(0, item.Inputs); err != nil {
			return err
		}
		select {
		case <-done:
		case <-item.Cancelled:
		}
		return sink.SetOutcome(0, runner.Output(item.Inputs...))
	})
	m := meshtest.Start(t, newMesh(t, settings, stagemesh.Stage{Name: "held", Runner: held}))
	owner, same, other, nobody := caller{t, m.URL(), "of-a"}, caller{t, m.URL(), "also-of-a"}, caller{t, m.URL(), "of-b"}, caller{t, m.URL(), "of-nobody"}
	// Each runs its own request of the one key, and gets its first chunk.
	begin := func(c caller) reply { return c.send(http.MethodPost, "/v1/pipelines/all:stream", "order-1", c.token) }
	first, second, third := begin(owner), begin(other), begin(nobody)
	path := "/v1/requests/" + first.id
	for _, c := range []caller{other, nobody} {
		c.expect(c.send(http.MethodDelete, path, "", ""), http.StatusNoContent, "")
	}
	close(done)
	owner.expect(first, http.StatusOK, "event: done")
	other.expect(second, http.StatusOK, "event: done")
	nobody.expect(third, http.StatusOK, "event: done")
	same.expect(same.send(http.MethodGet, path+"/result", "", ""), http.StatusOK, "of-a")
	for _, c := range []caller{other, nobody} {
		c.expect(c.send(http.MethodGet, path+"/result", "", ""), http.StatusNotFound, "NOT_FOUND")
	}
}

func TestBrokerTokenIsReplacedWithoutARestart(t *testing.T) {
	t.Parallel()
	token := testbed.SecretFile(t, "open-sesame\n")
	m := meshtest.FromFile(t, meshtest.Parse(t, fmt.Sprintf(closed, fmt.Sprintf("listen: 127.0.0.1:0, token_file: %q", token))), stagemesh.FileSettings{})
	meshtest.Start(t, m)
	connects := func(token string) bool {
		nc, err := nats.Connect(m.BrokerURL(), nats.Token(token))
		if err == nil {
			nc.Close()
		}
		return err == nil
	}
	if !connects("open-sesame") || connects("open-simsim") {
		t.Fatal("the token is not that of the file")
	}
	if err := os.WriteFile(token, []byte("open-simsim\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the new token alone is accepted", func() bool { return connects("open-simsim") && !connects("open-sesame") })
	expect(t, m, "p", "hello", "hello")
}
