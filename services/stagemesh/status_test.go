package stagemesh_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"

	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
)

const listed = `mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
ops: {listen: "127.0.0.1:0"}
registry: {nats: {}}
stages:
  add: {runner: {worker: {command: [python3, add.py], workers: 2}}, listen: "127.0.0.1:0"}
  echo: {runner: {echo: {}}, hosts: 2}
`

func TestStatusShowsWhoServesTheMesh(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	save(t, filepath.Join(folder, "add.py"), addTo("x", 1))
	save(t, filepath.Join(folder, "mesh.yaml"), listed)
	p := up(t, "--config", filepath.Join(folder, "mesh.yaml"))
	admin := p.admin(t)
	status := func(args ...string) string {
		out, err := run(t, append([]string{"status", "--admin", admin}, args...)...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	row := regexp.MustCompile(`(?m)^add +\S+ +ready +0/160 +0/2 +\S+ +2/2 +\S+ +127\.0\.0\.1:\d+ +\d+s$`)
	bustest.Eventually(t, "all hosts are ready", func() bool {
		out := status()
		return row.MatchString(out) && strings.Count(out, "\necho ") == 2 && strings.Count(out, " ready ") == 3
	})
	if out := status("--stage", "echo"); strings.Contains(out, "add") || strings.Count(out, "\n") != 3 {
		t.Errorf("of one stage it shows\n%s", out)
	}
	for line := range strings.Lines(status("--json")) {
		var host adminv1.HostStatus
		if err := protojson.Unmarshal([]byte(line), &host); err != nil || !host.GetAlive() || host.GetRecord().GetMesh() != "m" {
			t.Errorf("a line is %s: %v", line, err)
		}
	}
	pid := regexp.MustCompile(`the worker is READY.* pids=\[(\d+)\]`).FindStringSubmatch(p.errOut.String())
	// Without its file it stays dead.
	if err := os.Remove(filepath.Join(folder, "add.py")); err != nil {
		t.Fatal(err)
	}
	kill(t, pid[1])
	bustest.Eventually(t, "a worker is not ready", func() bool {
		out := status("--stage", "add")
		return strings.Contains(out, " 1/2 ") && strings.Contains(out, "worker ") && strings.Contains(out, "exit code 2")
	})
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

func kill(t *testing.T, pid string) {
	t.Helper()
	n, err := strconv.Atoi(pid)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(n, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

func TestStatusSaysWhatItNeeds(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "mesh.yaml")
	if err := os.WriteFile(path, []byte(strings.Replace(listed[:strings.Index(listed, "  add:")]+"  echo: {runner: {echo: {}}}\n", "registry: {nats: {}}\n", "", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	p := up(t, "--config", path)
	_, err := run(t, "status", "--admin", p.admin(t))
	if err == nil || !strings.Contains(err.Error(), "the mesh has no registry") {
		t.Errorf("it ended with %v", err)
	}
	if err := p.end(t); err != nil {
		t.Error(err)
	}
	if _, err := run(t, "status", "--stage", "A"); err == nil || !strings.Contains(err.Error(), "--stage") {
		t.Errorf("it ended with %v", err)
	}
}
