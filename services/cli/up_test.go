package cli_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/cli"
	"github.com/stagemesh/stagemesh/services/runners"
)

// process is the command up, or another that serves, while it runs.
type process struct {
	out, errOut testbed.Log
	stop        context.CancelFunc
	ended       chan error
}

func up(t *testing.T, args ...string) *process {
	t.Helper()
	return start(t, append([]string{"up"}, args...)...)
}

func start(t *testing.T, args ...string) *process {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	p := &process{stop: cancel, ended: make(chan error, 1)}
	go func() {
		p.ended <- command(ctx, strings.NewReader(""), &p.out, &p.errOut, args...)
	}()
	t.Cleanup(cancel)
	return p
}

// end stops the process and returns what it fails with.
func (p *process) end(t *testing.T) error {
	t.Helper()
	p.stop()
	return testbed.Receive(t, "the end of up", p.ended)
}

// readyLine is what up prints.
var readyLine = regexp.MustCompile(`^mesh (\S+) is ready: (http://\S+) \((?:docs: (http://\S+), )?admin: (https?://\S+), operations: (http://\S+)\); stop with Ctrl-C\n$`)

// ready waits for the line and returns where callers and operators ask.
func (p *process) ready(t *testing.T) (address, operations string) {
	t.Helper()
	words := p.readyLine(t)
	return words[2], words[5]
}

// admin waits for the line and returns where the admin port is.
func (p *process) admin(t *testing.T) string {
	t.Helper()
	return p.readyLine(t)[4]
}

// docs waits for the line and returns where the page is, empty where it says nothing
// of one.
func (p *process) docs(t *testing.T) string {
	t.Helper()
	return p.readyLine(t)[3]
}

func (p *process) readyLine(t *testing.T) []string {
	t.Helper()
	testbed.Eventually(t, "the mesh is ready", func() bool {
		select {
		case err := <-p.ended:
			t.Fatalf("it ended: %v\n%s", err, p.errOut.String())
		default:
		}
		return p.out.Has("\n")
	})
	words := readyLine.FindStringSubmatch(p.out.String())
	if words == nil {
		t.Fatalf("it printed %q", p.out.String())
	}
	return words
}

const freePorts = "gateway: {listen: \"127.0.0.1:0\", admin: {listen: \"127.0.0.1:0\"}}\nops: {listen: \"127.0.0.1:0\"}\n"

const echoes = "mesh: m\nstages:\n  a: {runner: {echo: {}}}\npipelines:\n  p: {steps: [{name: s, stage: a}]}\n"

func TestInsecureAllowsOpenAddressesOfTheFile(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "mesh.yaml")
	save(t, file, strings.ReplaceAll(echoes+freePorts, "127.0.0.1", "0.0.0.0"))
	if _, err := run(t, "up", "--config", file); err == nil || !strings.Contains(err.Error(), "other machines can reach 0.0.0.0:0") {
		t.Errorf("without the flag it ended with %v", err)
	}
	p := up(t, "--config", file, "--insecure")
	p.ready(t)
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

func TestInsecureKeepsHostCheckOfLoopbackPorts(t *testing.T) {
	t.Parallel()
	for flag, isOpen := range map[string]bool{"--insecure": false, "--any-host": true} {
		file := filepath.Join(t.TempDir(), "mesh.yaml")
		save(t, file, echoes+freePorts)
		p := up(t, "--config", file, flag)
		public, operations := p.ready(t)
		for _, url := range []string{public + "/nothing", p.admin(t) + "/nothing", operations + "/metrics"} {
			r := testbed.Request(t, http.MethodGet, url, nil)
			r.Host, r.Close = "evil.example", true
			answer, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			if err := answer.Body.Close(); err != nil {
				t.Error(err)
			}
			if refused := answer.StatusCode == http.StatusUnauthorized || answer.StatusCode == http.StatusForbidden; refused == isOpen {
				t.Errorf("%s, %s: %s", flag, url, answer.Status)
			}
		}
		if err := p.end(t); err != nil {
			t.Error(err)
		}
	}
}

func TestSecretThatOthersReadIsAWarning(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	file, token := filepath.Join(folder, "mesh.yaml"), filepath.Join(folder, "token")
	save(t, file, strings.Replace(echoes+freePorts, "gateway: {", "gateway: {token_file: token, ", 1))
	save(t, token, "open-sesame")
	for mode, warns := range map[os.FileMode]bool{0o644: true, 0o640: true, 0o600: false, 0o400: false} {
		if err := os.Chmod(token, mode); err != nil {
			t.Fatal(err)
		}
		p := up(t, "--config", file)
		p.ready(t)
		if err := p.end(t); err != nil {
			t.Error(err)
		}
		var lines []string
		for line := range strings.Lines(p.errOut.String()) {
			if strings.Contains(line, "chmod 600 "+token) {
				lines = append(lines, line)
			}
		}
		if (len(lines) == 1) != warns || warns && (!strings.Contains(lines[0], fmt.Sprintf("mode=%04o", mode)) || !strings.Contains(lines[0], "WARN")) {
			t.Errorf("%04o: %q", mode, lines)
		}
	}
}

func TestUpPrintsTheDocsAddress(t *testing.T) {
	t.Parallel()
	file := testbed.MeshFile(t, echoes+freePorts)
	p := up(t, "--config", file)
	page := p.docs(t)
	if page == "" {
		t.Fatalf("it printed %q", p.out.String())
	}
	if status, body := testbed.Get(t, page); status != http.StatusOK || !strings.Contains(body, "docs.js") {
		t.Errorf("%s: got %d, %s", page, status, body)
	}
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

func TestUpPrintsNoAddressOfDisabledDocs(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "mesh.yaml")
	off := strings.Replace(freePorts, "gateway: {", "gateway: {docs: false, ", 1)
	if err := os.WriteFile(file, []byte(echoes+off), 0o600); err != nil {
		t.Fatal(err)
	}
	p := up(t, "--config", file)
	if page := p.docs(t); page != "" {
		t.Errorf("it says %s", page)
	}
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

func TestUpServesTheMeshUntilItIsStopped(t *testing.T) {
	t.Parallel()
	p := up(t, "--config", testbed.CopyFolder(t, os.DirFS(digits), "mesh.yaml", func(text string) string { return text + freePorts }))
	address, operations := p.ready(t)
	out, err := run(t, "infer", "digits", image("07-9.png"), "-a", address)
	if err != nil || !strings.Contains(out, "labels=[9 ") {
		t.Errorf("got %s, %v", out, err)
	}
	for path, want := range map[string]string{
		"/livez": "ok\n", "/readyz": "ok\n", "/metrics": `stagemesh_gateway_requests_total{pipeline="digits",reason="OK"} 1`,
		"/debug/pprof/": "goroutine",
	} {
		if status, body := testbed.Get(t, operations+path); status != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: got %d without %q", path, status, want)
		}
	}
	if _, err := run(t, "dead-letters", "list", "-a", p.admin(t)); err != nil {
		t.Errorf("the admin port: %v", err)
	}
	if err := p.end(t); err != nil {
		t.Errorf("it ended with %v", err)
	}
	for _, gone := range []string{address, operations, p.admin(t)} {
		if conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(gone, "http://")); err == nil {
			conn.Close()
			t.Errorf("somebody listens at %s still", gone)
		}
	}
	if !p.errOut.Has("level=INFO msg=drained") {
		t.Errorf("it does not say that it has drained:\n%s", p.errOut.String())
	}
}

func TestUpHasLogFlags(t *testing.T) {
	t.Parallel()
	p := up(t, "-c", testbed.MeshFile(t, echoes+freePorts), "--log-format", "json", "--log-level", "error")
	p.ready(t)
	if err := p.end(t); err != nil || p.errOut.String() != "" {
		t.Errorf("got %v and the log\n%s", err, p.errOut.String())
	}
	p = up(t, "-c", testbed.MeshFile(t, echoes+freePorts), "--log-format", "json")
	p.ready(t)
	if err := p.end(t); err != nil || !strings.HasPrefix(p.errOut.String(), `{"time":`) {
		t.Errorf("got %v and the log\n%s", err, p.errOut.String())
	}
	for flag, value := range map[string]string{"--log-format": "xml", "--log-level": "loud"} {
		if _, err := run(t, "up", "-c", testbed.MeshFile(t, echoes), flag, value); err == nil || !strings.HasPrefix(err.Error(), flag+": ") {
			t.Errorf("got %v", err)
		}
	}
}

func TestUpNamesTheOccupiedAddress(t *testing.T) {
	t.Parallel()
	taken := testbed.Listen(t)
	address := taken.Addr().String()
	for name, test := range map[string]struct{ file, want string }{
		"gateway":    {echoes + "gateway: {listen: \"" + address + "\", admin: {listen: \"127.0.0.1:0\"}}\nops: {listen: \"127.0.0.1:0\"}\n", "gateway.listen: listen tcp " + address + ": bind: address already in use"},
		"admin":      {echoes + "gateway: {listen: \"127.0.0.1:0\", admin: {listen: \"" + address + "\"}}\nops: {listen: \"127.0.0.1:0\"}\n", "gateway.admin.listen: listen tcp " + address + ": bind: address already in use"},
		"operations": {echoes + "gateway: {listen: \"127.0.0.1:0\", admin: {listen: \"127.0.0.1:0\"}}\nops: {listen: \"" + address + "\"}\n", "ops.listen: listen tcp " + address + ": bind: address already in use"},
		"broker":     {echoes + freePorts + "nats: {listen: \"" + address + "\"}\n", "the broker in the process did not start: nats.listen: Error listening on port: " + address},
		"stage":      {strings.Replace(echoes, "a: {", "a: {listen: \""+address+"\", ", 1) + freePorts, "stages.a.listen: listen tcp " + address + ": bind: address already in use"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := run(t, "up", "-c", testbed.MeshFile(t, test.file), "--log-level", "error")
			if err == nil || !strings.HasPrefix(err.Error(), test.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("got  %v\nwant %s", err, test.want)
			}
		})
	}
}

func TestUpReportsWaitingForTheBroker(t *testing.T) {
	t.Parallel()
	p := up(t, "-c", testbed.MeshFile(t, echoes+freePorts+"nats: {url: \"nats://user:hush@127.0.0.1:1\"}\n"))
	testbed.Eventually(t, "it says what it waits for", func() bool {
		return p.errOut.Has(`level=INFO msg="waiting for the broker" url=nats://user:xxxxx@127.0.0.1:1`) && p.errOut.Has(`level=WARN msg="not ready; trying again"`)
	})
	operations := regexp.MustCompile(`msg="operations port listens" address=(\S+)`).FindStringSubmatch(p.errOut.String())
	if operations == nil {
		t.Fatalf("the log does not say where operators may ask:\n%s", p.errOut.String())
	}
	if status, body := testbed.Get(t, "http://"+operations[1]+"/readyz"); status != http.StatusServiceUnavailable || !strings.Contains(body, "the broker is disconnected") {
		t.Errorf("readyz: got %d, %s", status, body)
	}
	if err := p.end(t); err != nil {
		t.Errorf("it ended with %v", err)
	}
	if p.out.String() != "" || p.errOut.Has("hush") {
		t.Errorf("it printed %q and logged\n%s", p.out.String(), p.errOut.String())
	}
}

func TestUpJoinsABrokerThatComes(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	broker.Stop()
	p := up(t, "-c", testbed.MeshFile(t, echoes+freePorts+"nats: {url: \""+broker.URL()+"\"}\n"))
	testbed.Eventually(t, "it says what it waits for", func() bool { return p.errOut.Has("waiting for the broker") })
	broker.Restore()
	address, _ := p.ready(t)
	if out, err := run(t, "infer", "p", image("07-9.png"), "-a", address); err != nil || !strings.Contains(out, "bytes of image/png") {
		t.Errorf("got %s, %v", out, err)
	}
	if err := p.end(t); err != nil {
		t.Errorf("it ended with %v", err)
	}
}

func TestUpMayRunSomeStagesOfTheMesh(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	file := testbed.MeshFile(t, "mesh: m\nstages:\n  a: {runner: {echo: {}}}\n  b: {runner: {echo: {}}}\npipelines:\n  p: {steps: [{name: a, stage: a}, {name: b, stage: b}]}\n"+
		freePorts+"nats: {url: \""+broker.URL()+"\"}\n")
	for _, stages := range []string{"a", "b", ""} {
		p := up(t, "-c", file, "--stages", stages)
		address, _ := p.ready(t)
		out, err := run(t, "infer", "p", image("07-9.png"), "-a", address)
		if stages == "a" {
			if !errors.Is(err, cli.ErrFailed) || !strings.Contains(out, "NO_CAPACITY at stage b: ") {
				t.Errorf("with half of the mesh: got %s, %v", out, err)
			}
		} else if err != nil {
			t.Errorf("with all of it: got %s, %v", out, err)
		}
		t.Cleanup(func() {
			if err := p.end(t); err != nil {
				t.Errorf("it ended with %v", err)
			}
		})
	}
	if _, err := run(t, "up", "-c", file, "--stages", "c"); err == nil || !strings.Contains(err.Error(), `there is no stage "c"; there are a, b`) {
		t.Errorf("got %v", err)
	}
	if _, err := run(t, "up", "-c", testbed.MeshFile(t, echoes+freePorts), "--stages", "a"); !errors.Is(err, stagemesh.ErrAlone) || !strings.HasPrefix(err.Error(), "--stages: ") {
		t.Errorf("got %v", err)
	}
}

func TestUpIgnoresStagesOfOtherProcesses(t *testing.T) {
	t.Parallel()
	file := testbed.MeshFile(t, "mesh: m\nnats: {listen: \"127.0.0.1:0\"}\n"+freePorts+"stages:\n  a: {runner: {echo: {}}}\n  b: {runner: {top_k: {labels_file: elsewhere.txt}}}\n")
	p := up(t, "-c", file, "--stages", "a")
	p.ready(t)
	if err := p.end(t); err != nil {
		t.Errorf("it ended with %v", err)
	}
	for _, stages := range [][]string{nil, {"--stages", "a,b"}} {
		if _, err := run(t, append([]string{"up", "-c", file}, stages...)...); err == nil || !strings.Contains(err.Error(), "stages.b.runner.top_k.labels_file: ") {
			t.Errorf("%v: got %v", stages, err)
		}
	}
}

func TestUpNeedsAFile(t *testing.T) {
	t.Parallel()
	if _, err := run(t, "up", "-c", "nowhere.yaml"); err == nil || !strings.HasPrefix(err.Error(), "--config: open nowhere.yaml: no such file") {
		t.Errorf("got %v", err)
	}
	if _, err := run(t, "up", "extra"); err == nil {
		t.Error("it takes an argument")
	}
}

func TestMeshEndsWithTheErrorOfItsReady(t *testing.T) {
	t.Parallel()
	file, err := meshfile.Parse("m.yaml", []byte(echoes+freePorts), "", runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	broken := errors.New("nobody to tell")
	var mesh *stagemesh.Mesh
	p := stagemesh.Program{File: file, FileSettings: stagemesh.FileSettings{Logger: slog.New(slog.DiscardHandler)}, Ready: func(m *stagemesh.Mesh, _ net.Addr) error {
		mesh = m
		return broken
	}}
	if err := p.Run(t.Context()); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	if mesh.Ready() == nil {
		t.Error("the mesh serves on")
	}
}
