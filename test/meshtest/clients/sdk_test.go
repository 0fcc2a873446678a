package clients

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/rest"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/python"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// newSecureMesh returns a mesh with TLS, the token "sesame", jobs, and the pipelines echo, slow, words
// and picture, which answers with the content type of its image.
func newSecureMesh(t *testing.T, listen, cert, key string) *stagemesh.Mesh {
	t.Helper()
	f, err := meshfile.Parse("mesh.yaml", fmt.Appendf(nil, `
mesh: m
gateway: {listen: %q, cert_file: %q, key_file: %q, token_file: %q, admin: {listen: "127.0.0.1:0"}}
stages: {echo: {runner: {echo: {}}}}
pipelines: {echo: {steps: [{name: e, stage: echo}]}}
jobs:
  pools: {main: {target: {pipelines: [echo, words, slow]}}}
  queues: {nightly: {}}
`, listen, cert, key, testbed.SecretFile(t, "sesame")), "", runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	m := meshtest.FromFile(t, f, stagemesh.FileSettings{Dispatcher: true})
	words, err := filepath.Abs("testdata/words.py")
	if err != nil {
		t.Fatal(err)
	}
	streaming, err := worker.New(worker.Settings{
		Command: []string{"python3", words}, Replicas: make([]worker.Replica, 1),
		Files: python.Files(), FilesPath: "PYTHONPATH", Limits: worker.Limits{StartLimit: testbed.Patience},
	})
	if err != nil {
		t.Fatal(err)
	}
	add(t, m, "words", streaming)
	add(t, m, "slow", inproc.Each(inproc.Settings{}, slow))
	if err := m.AddStage(stagemesh.Stage{
		Name: "picture", Config: stagehost.Config{DrainTimeout: time.Second},
		Inputs: []runner.PartSpec{{Name: "image", ContentTypes: []string{"image/png"}}},
		Runner: inproc.Each(inproc.Settings{}, func(_ context.Context, item runner.Item) ([]payload.Part, error) {
			return []payload.Part{payload.OfBlob("type", "text/plain", []byte(item.Inputs[0].Blob.ContentType))}, nil
		}),
	}); err != nil {
		t.Fatal(err)
	}
	return m
}

// secureMesh is a mesh of newSecureMesh, which ends with its test.
type secureMesh struct {
	*stagemesh.Mesh

	// listen is its address, host:port, and authority the file with the certificate that it is trusted by.
	listen, authority, cert, key string
}

func startSecureMesh(t *testing.T) *secureMesh {
	t.Helper()
	authority := testbed.NewAuthority(t)
	out := &secureMesh{listen: fmt.Sprintf("127.0.0.1:%d", testbed.FreePort(t)), authority: authority.File}
	out.cert, out.key = authority.Certificate("127.0.0.1")
	out.Mesh = newSecureMesh(t, out.listen, out.cert, out.key)
	if err := out.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { meshtest.Stop(t, out.Mesh) })
	return out
}

// run runs a test of a client and returns what it says. Where it prints the line "restart", the mesh
// restarts, and a line tells it so.
func (m *secureMesh) run(t *testing.T, cmd *exec.Cmd) (said string, err error) {
	t.Helper()
	var complaints, lines strings.Builder
	cmd.Stderr = &complaints
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for scanner := bufio.NewScanner(out); scanner.Scan(); {
		if scanner.Text() != "restart" {
			lines.WriteString(scanner.Text() + "\n")
			continue
		}
		meshtest.Stop(t, m.Mesh)
		m.Mesh = newSecureMesh(t, m.listen, m.cert, m.key)
		if err := m.Start(t.Context()); err != nil {
			t.Error(err)
			break
		}
		if _, err := fmt.Fprintln(in, "restarted"); err != nil {
			t.Error(err)
		}
	}
	err = cmd.Wait()
	return lines.String() + complaints.String(), err
}

// Python's client keeps its promises with a real gateway, over TLS and with a token, also while that
// gateway restarts; and it knows each reason as the front sends it.
func TestClientOfThePythonSDKKeepsItsPromises(t *testing.T) {
	t.Parallel()
	mesh := startSecureMesh(t)
	faults := httptest.NewServer(rest.New(&fronttest.Caller{Answer: func(_ context.Context, r *request.Request) (*request.Response, error) {
		return nil, fronttest.Fault(fault.Reason(r.Pipeline))
	}}, nil, transport.Settings{}))
	t.Cleanup(faults.Close)
	strict, strangers := serveMutualTLS(t)
	var reasons []string
	for _, r := range fault.Reasons() {
		reasons = append(reasons, string(r))
	}

	folder := t.TempDir()
	if err := os.CopyFS(folder, python.Files()); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "python3", "-B", "-W", "error::ResourceWarning", "-m", "unittest", "--verbose", "test_mesh")
	cmd.Dir = "python"
	cmd.Env = append(os.Environ(), "PYTHONPATH="+folder, "MESH=https://"+mesh.listen, "MESH_CA="+mesh.authority, "MESH_TOKEN=sesame",
		"MESH_FAULTS="+faults.URL, "MESH_REASONS="+strings.Join(reasons, " "))
	cmd.Env = append(cmd.Env, strict...)
	said, err := mesh.run(t, cmd)
	if err != nil || !strings.Contains(said, "\nOK\n") || slices.Contains(strings.Fields(said), "skipped") {
		t.Errorf("%v\n%s", err, said)
	}
	if n := strangers.Load(); n != 2 {
		t.Errorf("two calls without a certificate made %d connections, want 2: a refusal must not be retried", n)
	}
}

// serveMutualTLS serves a gateway's front to clients with a certificate. It returns where, and with which
// certificates, as the environment of a test, and the count of connections without one.
func serveMutualTLS(t *testing.T) (environment []string, strangers *atomic.Int64) {
	t.Helper()
	authority := testbed.NewAuthority(t)
	cert, key := authority.Certificate("client")
	server := httptest.NewUnstartedServer(rest.New(&fronttest.Caller{}, nil, transport.Settings{}))
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.TLS = authority.Server("127.0.0.1")
	server.TLS.ClientAuth, server.TLS.MinVersion = tls.RequireAnyClientCert, tls.VersionTLS13
	strangers = &atomic.Int64{}
	server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		switch state {
		case http.StateNew:
			strangers.Add(1)
		case http.StateActive:
			strangers.Add(-1)
		}
	}
	server.StartTLS()
	t.Cleanup(server.Close)
	return []string{"STRICT=" + server.URL, "STRICT_CA=" + authority.File, "STRICT_CERT=" + cert, "STRICT_KEY=" + key}, strangers
}
