package main_test

import (
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// gatewayLine is what the program of a gateway prints.
var gatewayLine = regexp.MustCompile(`^gateway of mesh (\S+) is ready on (http://\S+) \(admin: (http://\S+), operations: (http://\S+)\)\n$`)

// busyGateway is what a gateway shows that has a request.
var busyGateway = regexp.MustCompile(`(?m)^stagemesh_gateway_request_bytes\S* [1-9]`)

// serving waits for that line and returns where callers and operators may ask.
func serving(t *testing.T, gateway *testbed.Process) (public, operations string) {
	t.Helper()
	words := gateway.Match(gatewayLine)
	if words[1] != string(meshtest.Mesh) {
		t.Fatalf("it printed %q", gateway.Out.String())
	}
	return words[2], words[4]
}

// post returns what the gateway at the address answers, or why there is nothing.
func post(t *testing.T, url, text string) (status int, body string, err error) {
	t.Helper()
	request := testbed.Request(t, http.MethodPost, url, strings.NewReader(text))
	request.Header.Set("Content-Type", "text/plain")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	return response.StatusCode, string(answer), err
}

// Containers say it with the environment.
func TestVariablesStandForFlags(t *testing.T) {
	t.Setenv("STAGEMESH_LISTEN", "8080")
	file := testbed.MeshFile(t, "mesh: m\nstages: {a: {runner: {echo: {}}}}\n")
	for name, args := range map[string][]string{
		"gateway": {"-c", file, "--nats", "b"},
		"stage":   {"-c", file, "--nats", "b", "a"},
	} {
		p := start(t, name, args...)
		want := `stagemesh: --listen: "8080" is not an address`
		if err := p.Wait(); err == nil || !strings.HasPrefix(p.Err.String(), want) || !p.Err.Has("(set by STAGEMESH_LISTEN)") {
			t.Errorf("got %v and %q, want %q", err, p.Err.String(), want)
		}
	}
}

// The stage is another process, and the gateway knows nothing of what it runs.
func TestGatewayRunsAsAProcess(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	const text = `mesh: %s
gateway: {listen: "127.0.0.1:1", admin: {listen: "127.0.0.1:1"}}
stages:
  nap: {runner: {sleep: {base: 500ms}}}
pipelines:
  rest: {steps: [{name: nap, stage: nap}]}
  work: {steps: [{name: work, stage: worker}]}
`
	// Flags go before the file, which names no broker and ports that nobody gets.
	file := testbed.MeshFile(t, fmt.Sprintf(text, meshtest.Mesh))
	host := start(t, "stage", "--config", file, "nap", "--nats", bed.Broker.URL())
	gateway := start(t, "gateway", "--config", file, "--nats", bed.Broker.URL(), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
	host.Match(readyLine)
	public, operations := serving(t, gateway)
	if status, body := testbed.Get(t, operations+"/readyz"); status != http.StatusOK {
		t.Errorf("readyz: %d %s", status, body)
	}
	status, body, err := post(t, public+"/v1/pipelines/work:infer", "x")
	if err != nil || status != http.StatusServiceUnavailable || !strings.Contains(body, "NO_CAPACITY") {
		t.Errorf("a stage without hosts: %d %s, %v", status, body, err)
	}
	type answer struct {
		status int
		body   string
		err    error
	}
	inside := make(chan answer, 1)
	go func() {
		status, body, err := post(t, public+"/v1/pipelines/rest:infer", "to rest")
		inside <- answer{status, body, err}
	}()
	testbed.Eventually(t, "the call is inside", func() bool {
		_, body := testbed.Get(t, operations+"/metrics")
		return busyGateway.MatchString(body)
	})
	gateway.Signal(syscall.SIGTERM)
	if a := testbed.Receive(t, "the answer", inside); a.err != nil || a.status != http.StatusOK || a.body != "to rest" {
		t.Errorf("a call inside got %+v", a)
	}
	if err := gateway.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
}

func TestGatewayReportsErrors(t *testing.T) {
	t.Parallel()
	file := testbed.MeshFile(t, "mesh: m\nstages: {a: {runner: {echo: {}}}}\npipelines: {p: {steps: [{name: a, stage: a}]}}\n")
	open := testbed.MeshFile(t, "mesh: m\nnats: {url: \"nats://b\"}\ngateway: {admin: {listen: \"0.0.0.0:9000\"}}\nstages: {a: {runner: {echo: {}}}}\n")
	many := testbed.MeshFile(t, "mesh: m\nnats: {listen: \"127.0.0.1:0\"}\ngateway: {max_in_flight: -1}\nstages: {a: {runner: {echo: {}}}}\n")
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"no broker":      {[]string{"-c", file}, "stagemesh: --nats: is missing, and so is nats.url in the file; "},
		"a bad broker":   {[]string{"-c", file, "--nats", "nats://"}, "stagemesh: --nats: expected the URL of a broker"},
		"a bad address":  {[]string{"-c", file, "--nats", "b", "--listen", "8080"}, `stagemesh: --listen: "8080" is not an address`},
		"an open port":   {[]string{"-c", open}, "stagemesh: " + open + ":3:"},
		"a bad section":  {[]string{"-c", many, "--nats", "b"}, "stagemesh: " + many + ":3:11: gateway.max_in_flight: -1"},
		"a port by flag": {[]string{"-c", file, "--nats", "b", "--admin", "0.0.0.0:9000"}, "stagemesh: --admin: listen: other machines can reach 0.0.0.0:9000"},
		"a public port":  {[]string{"-c", file, "--nats", "b", "--listen", ":9000"}, "stagemesh: " + file + ":"},
		"an ops port":    {[]string{"-c", file, "--nats", "b", "--ops", ":9000"}, "stagemesh: --ops: other machines can reach :9000; listen on 127.0.0.1"},
		"a password":     {[]string{"-c", file, "--nats", "nats://u:hush@b"}, "stagemesh: --nats: other users of this machine can read a password"},
		"an argument":    {[]string{"x"}, `stagemesh: unknown command "x"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := start(t, "gateway", test.args...)
			if err := p.Wait(); err == nil || !strings.HasPrefix(p.Err.String(), test.want) {
				t.Errorf("got %v and %q, want %q", err, p.Err.String(), test.want)
			}
		})
	}
}
