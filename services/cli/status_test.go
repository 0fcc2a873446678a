package cli_test

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

const listed = `mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
ops: {listen: "127.0.0.1:0"}
registry: {nats: {}}
stages:
  add: {runner: {worker: {command: [python3, add.py], workers: 2}}, listen: "127.0.0.1:0"}
  echo: {runner: {echo: {}}, hosts: 2}
pipelines:
  both: {steps: [{name: one, stage: echo}, {name: two, stage: add}]}
  one: {steps: [{name: one, stage: echo}]}
`

func TestStatusShowsStagesAndHosts(t *testing.T) {
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
	rows := []*regexp.Regexp{
		regexp.MustCompile(`(?m)^both +echo > add +ready +file +\d+ +\d+s$`),
		regexp.MustCompile(`(?m)^add +ready +1/1 +0/160 +0 +2 +0/10000 +0/10000 +both$`),
		regexp.MustCompile(`(?m)^echo +ready +2/2 +0/192 +0 +2 +0/10000 +0/10000 +both, one$`),
		regexp.MustCompile(`(?m)^add +\S+ +ready +0/160 +0 +2 +\S+ +- +- +2/2 +- +\S+( +127\.0\.0\.1:\d+){2} +\d+s$`),
	}
	testbed.Eventually(t, "all is ready", func() bool {
		out := status()
		for _, row := range rows {
			if !row.MatchString(out) {
				return false
			}
		}
		return strings.Count(out, "\necho ") == 3
	})
	if _, err := run(t, "status", "--stage", "nope", "--admin", admin); err == nil || err.Error() != "--stage: there is no stage nope; there is add, echo" {
		t.Errorf("of no stage it ends with %v", err)
	}
	if out := status("--stage", "add"); strings.Contains(out, "\necho ") || strings.Contains(out, "one ") || !rows[1].MatchString(out) {
		t.Errorf("of one stage it shows\n%s", out)
	}
	var all struct {
		Pipelines []struct{ Pipeline struct{ Name string } }
		Stages    []struct{ Stage string }
		Hosts     []struct {
			Alive  bool
			Record struct{ Mesh string }
		}
	}
	if out := status("--json"); json.Unmarshal([]byte(out), &all) != nil || strings.Count(out, "\n") != 1 || len(all.Pipelines) != 2 || len(all.Stages) != 2 || len(all.Hosts) != 3 || !all.Hosts[0].Alive || all.Hosts[0].Record.Mesh != "m" {
		t.Errorf("in JSON it is %s", out)
	}
	pid := regexp.MustCompile(`the worker is READY.* pids=\[(\d+)\]`).FindStringSubmatch(p.errOut.String())
	// Without its file it stays dead.
	if err := os.Remove(filepath.Join(folder, "add.py")); err != nil {
		t.Fatal(err)
	}
	kill(t, pid[1])
	testbed.Eventually(t, "a worker is not ready", func() bool {
		out := status("--stage", "add")
		return strings.Contains(out, " 1/2 ") && strings.Contains(out, "worker ") && strings.Contains(out, "exit code 2")
	})
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

func TestStageOfTwoEnginesIsUnhealthy(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	save(t, filepath.Join(folder, "add.py"), strings.Replace(addTo("x", 1), "\n    def predict", `
    def setup(self, ctx):
        import os
        try:
            os.mkdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "first"))
            self.engine_name = "one 1.0, CPU"
        except FileExistsError:
            self.engine_name = "two, GPU"

    def predict`, 1))
	save(t, filepath.Join(folder, "mesh.yaml"), `mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
ops: {listen: "127.0.0.1:0"}
registry: {nats: {}}
stages: {add: {runner: {worker: {command: [python3, add.py]}}, hosts: 2}}
pipelines: {sum: {steps: [{name: add, stage: add}]}}
`)
	p := up(t, "--config", filepath.Join(folder, "mesh.yaml"))
	rows := []*regexp.Regexp{
		regexp.MustCompile(`(?m)^add +unhealthy +2/2 .* hosts run two engines: (one 1\.0, CPU|two, GPU) \(.+\), (one 1\.0, CPU|two, GPU) \(.+\); answers depend on the host$`),
		regexp.MustCompile(`(?m)^add .* 1/1 +one 1\.0, CPU `),
		regexp.MustCompile(`(?m)^add .* 1/1 +two, GPU `),
	}
	testbed.Eventually(t, "both engines are shown", func() bool {
		out, err := run(t, "status", "--admin", p.admin(t))
		return err == nil && !slices.ContainsFunc(rows, func(row *regexp.Regexp) bool { return !row.MatchString(out) })
	})
	out, err := run(t, "top", "--once", "--admin", p.admin(t))
	if err != nil || !strings.Contains(out, "\nstage add: hosts run two engines: ") {
		t.Errorf("top shows\n%s%v", out, err)
	}
	if out, err = run(t, "top", "--once", "--json", "--admin", p.admin(t)); err != nil || !strings.Contains(out, `"stage":"add","unhealthy":"hosts run two engines: `) {
		t.Errorf("top shows in JSON %s%v", out, err)
	}
	address, _ := p.ready(t) // the hosts serve it all the same
	if status, body := testbed.Get(t, address+"/readyz?pipeline=sum"); status != http.StatusOK {
		t.Errorf("the pipeline is not ready: %s", body)
	}
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

const unregistered = `mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
ops: {listen: "127.0.0.1:0"}
registry: {none: true}
stages: {echo: {runner: {echo: {}}}}
pipelines: {one: {steps: [{name: one, stage: echo}]}}
`

func TestStatusShowsOperationsAddresses(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "mesh.yaml")
	save(t, path, strings.Replace(unregistered, "registry: {none: true}\n", "", 1))
	p := up(t, "--config", path)
	_, operations := p.ready(t)
	operations = strings.TrimPrefix(operations, "http://")
	testbed.Eventually(t, "the host is listed", func() bool {
		out, err := run(t, "status", "--admin", p.admin(t))
		return err == nil && regexp.MustCompile(`(?m)^echo .* `+regexp.QuoteMeta(operations)+` +\S+$`).MatchString(out)
	})
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

func TestStatusWorksWithoutARegistry(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "mesh.yaml")
	save(t, path, unregistered)
	p := up(t, "--config", path)
	out, err := run(t, "status", "--admin", p.admin(t))
	if err != nil || !strings.Contains(out, "hosts are unknown: the mesh has no registry") ||
		!regexp.MustCompile(`(?m)^one +echo +ready +file +- +-$`).MatchString(out) || !regexp.MustCompile(`(?m)^echo +ready +0/0 .* one$`).MatchString(out) {
		t.Errorf("it shows\n%s%v", out, err)
	}
	if _, err := run(t, "pipelines", "delete", "one", "--admin", p.admin(t)); err == nil || !strings.Contains(err.Error(), "its pipelines are those of its file") {
		t.Errorf("a change ended with %v", err)
	}
	if err := p.end(t); err != nil {
		t.Error(err)
	}
	if _, err := run(t, "status", "--stage", "A"); err == nil || !strings.Contains(err.Error(), "--stage") {
		t.Errorf("it ended with %v", err)
	}
}
