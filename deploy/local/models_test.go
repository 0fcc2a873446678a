package main

import (
	"bufio"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/examples/digits"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// besideTheStack are the dashboards of what the stack does not have: models, jobs, workers, and a
// broker in the process.
var besideTheStack = []string{"models.json", "jobs.json", "operations.json"}

// runBeside runs a program until the test ends.
func runBeside(t *testing.T, folder, program string, args ...string) *bufio.Reader {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Dir, cmd.Stderr = folder, &testbed.Log{}
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Wait() // it is interrupted as the test ends
		if t.Failed() {
			t.Logf("%s: %s", program, cmd.Stderr)
		}
	})
	return bufio.NewReader(out)
}

func TestDashboardsShowModelsJobsAndWorkers(t *testing.T) {
	paths := programs(t)
	ports, err := testbed.FreePorts(2)
	if err != nil {
		t.Fatal(err)
	}
	ops, prometheus := fmt.Sprintf("127.0.0.1:%d", ports[0]), fmt.Sprintf("127.0.0.1:%d", ports[1])
	folder := t.TempDir()
	network, err := digits.FS.ReadFile("digits.onnx")
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"digits.onnx": string(network),
		"mesh.yaml": `
mesh: models
stages:
  read:
    runner: {onnx_models: {engine: go, max_rows: 1}}
    models: {capacity: 4MiB, default_size: 128KiB, root: .}
    queue: {ack_wait: 1s}
  echo: {runner: {worker: {command: [python3, echo.py]}}}
pipelines:
  echo: {steps: [{name: echo, stage: echo}]}
jobs:
  pools:
    main: {target: {pipelines: [echo]}, gate: {constant: {value: 0.9}}}
    shut: {target: {pipelines: [echo]}, gate: {constant: {value: 0}}}
  queues:
    nightly: {pool: main}
    held: {pool: shut}
models:
  one: {stage: read, source: digits.onnx}
`,
		"echo.py":        "from stagemesh import Text, Worker, serve\n\n\nclass Echo(Worker):\n    arrays = \"buffer\"\n    inputs = outputs = {\"text\": Text()}\n\n    def predict(self, batch):\n        return {\"text\": batch[\"text\"]}\n\n\nserve(Echo)\n",
		"prometheus.yml": "global: {scrape_interval: 1s}\nscrape_configs: [{job_name: stagemesh, static_configs: [{targets: [\"" + ops + "\"]}]}]\n",
	} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	line, err := runBeside(t, folder, paths[0], "up", "--config", "mesh.yaml", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--ops", ops).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	gateway := regexp.MustCompile(`http://\S+`).FindString(line)
	runBeside(t, folder, paths[4], "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--web.listen-address="+prometheus)
	testbed.Eventually(t, "Prometheus is ready", func() bool {
		response, err := http.Get("http://" + prometheus + "/-/ready")
		if err != nil {
			return false
		}
		_ = response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	body := `{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [` + strings.Repeat("0,", 63) + `0]}]}`
	shown := dashboards(t)
	for _, name := range besideTheStack {
		shown[name].checkShows(t, name, "read", func(t *testing.T, query string) []float64 {
			t.Helper()
			for _, call := range [][3]string{
				{"/v1/pipelines/model:one:infer", "application/json", body}, {"/v1/queues/nightly/jobs", "text/plain", "hello"},
			} {
				response, err := http.Post(gateway+call[0], call[1], strings.NewReader(call[2]))
				if err != nil {
					t.Fatal(err)
				}
				_ = response.Body.Close()
			}
			return ask(t, "http://"+prometheus, query)
		})
	}
}
