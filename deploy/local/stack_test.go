package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/examples/digits"
	"github.com/stagemesh/stagemesh/internal/process"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestMain(m *testing.M) {
	if flag := os.Getenv("STACK_TEST_PROGRAM"); flag != "" {
		os.Args = []string{os.Args[0], flag}
		main()
		return
	}
	goleak.VerifyTestMain(m)
}

// programs returns the paths of the programs that the stack runs, and promtool last.
func programs(t *testing.T) []string {
	t.Helper()
	paths, err := testbed.Tools("stack-programs")
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

// prepare returns the stack on free ports.
func prepare(t *testing.T) *stack {
	t.Helper()
	published := []string{"GATEWAY_PORT", "JAEGER_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT"}
	ports, err := testbed.FreePorts(len(published))
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range published {
		t.Setenv(name, strconv.Itoa(ports[i]))
	}
	project, err := load(t.Context(), "", filepath.Join(root, "docker-compose.yml"))
	if err != nil {
		t.Fatal(err)
	}
	programs, err := programsOf(programs(t))
	if err != nil {
		t.Fatal(err)
	}
	var log testbed.Log
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(log.String())
		}
	})
	return newStack(project, programs, t.TempDir(), &log)
}

// read sends one of the fifty images to a gateway, and returns an error unless the answer is
// right.
func read(ctx context.Context, gateway string, number int) error {
	names, err := digits.FS.ReadDir("images")
	if err != nil {
		return err
	}
	name := names[number%len(names)].Name()
	image, err := digits.FS.ReadFile("images/" + name)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, gateway+"/v1/pipelines/digits:infer", bytes.NewReader(image))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "image/png")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	var answer struct {
		Outputs []struct{ Data []any }
	}
	if err == nil {
		err = json.Unmarshal(body, &answer)
	}
	digit, _, _ := strings.Cut(name[3:], ".")
	if err != nil || response.StatusCode != http.StatusOK || answer.Outputs[0].Data[0] != digit {
		return fmt.Errorf("%s: %s %s: %w", name, response.Status, body, err)
	}
	return nil
}

// readAll sends each of the fifty images to a gateway, and fails the test unless all answers are right.
func readAll(t *testing.T, gateway string) {
	t.Helper()
	for number := range 50 {
		if err := read(t.Context(), gateway, number); err != nil {
			t.Error(err)
		}
	}
}

// checkShows checks that each panel of a dashboard shows something of the stage.
func (d dashboard) checkShows(t *testing.T, name, stage string, ask func(*testing.T, string) []float64) {
	t.Helper()
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			query := strings.NewReplacer("$__rate_interval", "15s", "$stage", stage).Replace(target.Expr)
			testbed.Eventually(t, name+" shows "+p.Title, func() bool { return len(ask(t, query)) > 0 })
		}
	}
}

// query returns the values of a query to the stack's Prometheus.
func (s *stack) query(t *testing.T, query string) []float64 {
	t.Helper()
	return ask(t, s.url("prometheus", 9090), query)
}

func ask(t *testing.T, prometheus, query string) []float64 {
	t.Helper()
	status, body := testbed.Get(t, prometheus+"/api/v1/query?query="+url.QueryEscape(query))
	var answer struct {
		Data struct {
			Result []struct{ Value [2]any }
		}
	}
	if err := json.Unmarshal([]byte(body), &answer); err != nil || status != http.StatusOK {
		t.Fatalf("%s: %d %s: %v", query, status, body, err)
	}
	var out []float64
	for _, r := range answer.Data.Result {
		value, err := strconv.ParseFloat(fmt.Sprint(r.Value[1]), 64)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, value)
	}
	return out
}

// awaitTargets waits until a Prometheus scrapes as many processes of ours, and no target is down.
func awaitTargets(t *testing.T, prometheus string, want int) {
	t.Helper()
	begin := time.Now()
	testbed.Eventually(t, fmt.Sprintf("%d targets are up", want), func() bool {
		status, body := testbed.Get(t, prometheus+"/api/v1/targets?state=active")
		return status == http.StatusOK && strings.Count(body, `"health":`) == want && strings.Count(body, `"health":"up"`) == want
	})
	if took := time.Since(begin); took > 15*time.Second {
		t.Errorf("Prometheus took %s to find %d targets", took, want)
	}
}

// awaitTrace waits until a Jaeger has the whole tree of a request for a digit.
func awaitTrace(t *testing.T, jaeger string) {
	t.Helper()
	testbed.Eventually(t, "Jaeger has the whole tree of a request", func() bool {
		status, body := testbed.Get(t, jaeger+"/api/traces?service=digits-gateway&limit=1")
		complete := status == http.StatusOK && strings.Count(body, `"operationName":`) == 17
		for _, service := range []string{"gateway", "decode", "classify", "label"} {
			complete = complete && strings.Contains(body, `"serviceName":"digits-`+service+`"`)
		}
		return complete
	})
}

func TestStackServesScalesAndShowsMetrics(t *testing.T) {
	s := prepare(t)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	group, err := s.group(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	started(t, group)
	gateway := s.url("gateway", 8080)
	readAll(t, gateway)
	prometheus := s.url("prometheus", 9090)
	awaitTargets(t, prometheus, 4)
	awaitTrace(t, s.url("jaeger", 16686))

	loaded, end := context.WithCancel(t.Context())
	defer end()
	var callers sync.WaitGroup
	var answers atomic.Int64
	for caller := range 8 {
		callers.Go(func() {
			for number := caller; loaded.Err() == nil; number++ {
				if err := read(t.Context(), gateway, number); err != nil {
					t.Error(err)
					return
				}
				answers.Add(1)
			}
		})
	}
	var replicas []process.Part
	for _, replica := range []int{2, 3} {
		part, err := s.part("classify", replica)
		if err != nil {
			t.Fatal(err)
		}
		replicas = append(replicas, part)
	}
	added := process.New(slog.New(slog.DiscardHandler), replicas...)
	started(t, added)
	awaitTargets(t, prometheus, 6)
	testbed.Eventually(t, "each replica works", func() bool {
		return len(s.query(t, `rate(stagemesh_stage_items_total{stage="classify", outcome="output"}[15s]) > 0`)) == 3
	})
	shown := dashboards(t)
	for _, name := range besideTheStack {
		delete(shown, name)
	}
	for name, d := range shown {
		d.checkShows(t, name, "classify", s.query)
	}
	if err := added.Stop(); err != nil {
		t.Error(err)
	}
	awaitTargets(t, prometheus, 4)
	end()
	callers.Wait()
	t.Logf("%d answers", answers.Load())

	if err := group.Stop(); err != nil {
		t.Error(err)
	}
	if len(s.children) != 10 {
		t.Errorf("%d processes have run", len(s.children))
	}
	for _, c := range s.children {
		if pid := int(c.pid.Load()); pid == 0 {
			t.Errorf("%s has not started", c.name)
		} else if err := syscall.Kill(-pid, 0); !errors.Is(err, syscall.ESRCH) {
			t.Errorf("%s has left processes: %v", c.name, err)
		}
	}
}

// The first request finds no host, and gets its answer from hosts that are started for it.
func TestStackScalesFromZero(t *testing.T) {
	// On a busy machine three hosts start in more than the five seconds of the example.
	folder := t.TempDir()
	if err := os.CopyFS(folder, os.DirFS(filepath.Join(root, "examples/digits"))); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(folder, "mesh.yaml")
	text, err := os.ReadFile(file)
	if err == nil {
		err = os.WriteFile(file, bytes.ReplaceAll(text, []byte("timeout: 5s"), []byte("timeout: 50s")), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("STAGEMESH_MESH", folder)
	s := prepare(t)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	s.scales = true
	group, err := s.group(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	started(t, group)
	if n := len(s.children); n != 5 {
		t.Fatalf("%d processes run before the first request, want NATS, Consul, Jaeger, Prometheus and the gateway", n)
	}
	image, err := digits.FS.ReadFile("images/00-1.png")
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url("gateway", 8080)+"/v1/pipelines/digits:infer", bytes.NewReader(image))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "image/png")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(response.Body)
	_ = response.Body.Close()
	if activating := response.Header.Get("Stagemesh-Activating"); err != nil || response.StatusCode != http.StatusOK || !strings.Contains(activating, "decode") {
		t.Fatalf("%s %s, activating %q: %v", response.Status, body, activating, err)
	}
	if err := read(t.Context(), s.url("gateway", 8080), 7); err != nil {
		t.Error(err)
	}
	s.mu.Lock()
	replica := s.children[slices.IndexFunc(s.children, func(c *child) bool { return c.name == "label-1" })]
	s.mu.Unlock()
	testbed.Eventually(t, "the replica is healthy", replica.isHealthy.Load)
	killed := replica.pid.Load()
	if err := syscall.Kill(-int(killed), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "a replica that was killed is replaced", func() bool {
		return replica.pid.Load() != killed && replica.checkHealth(t.Context()) == nil
	})
	if err := read(t.Context(), s.url("gateway", 8080), 7); err != nil {
		t.Error(err)
	}
	if err := group.Stop(); err != nil {
		t.Error(err)
	}
	for _, c := range s.children {
		if err := syscall.Kill(-int(c.pid.Load()), 0); !errors.Is(err, syscall.ESRCH) {
			t.Errorf("%s has left processes: %v", c.name, err)
		}
	}
}

// started starts processes, which end with the test.
func started(t *testing.T, group *process.Group) {
	t.Helper()
	t.Cleanup(func() {
		if err := group.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := group.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestStackRefusesTakenPortsAndMissingPrograms(t *testing.T) {
	s := prepare(t)
	taken := testbed.Listen(t)
	_, port, _ := net.SplitHostPort(taken.Addr().String())
	s.project.Services["jaeger"].Ports[0].Published = port
	if _, err := s.group(t.Context()); err == nil || !strings.Contains(err.Error(), "JAEGER_PORT") {
		t.Errorf("a taken port: %v", err)
	}
	if _, err := programsOf([]string{"nowhere/consul"}); err == nil || !strings.Contains(err.Error(), "make stack builds it") {
		t.Errorf("a missing program: %v", err)
	}
	for _, scale := range []string{"nothing=2", "classify", "classify=-1", "gateway=2"} {
		if _, err := load(t.Context(), scale, filepath.Join(root, "docker-compose.yml")); err == nil || !strings.Contains(err.Error(), scale) {
			t.Errorf("--scale %s: %v", scale, err)
		}
	}
	if entries, err := os.ReadDir(s.folder); err != nil || len(entries) > 0 {
		t.Errorf("%q is left: %v", entries, err)
	}
}

// A process that ends before it is healthy stops the start, and what has started ends.
func TestStackEndsWhenProcessFails(t *testing.T) {
	s := prepare(t)
	s.programs["consul"] = "/bin/false"
	group, err := s.group(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := group.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "consul-1 has ended") {
		t.Errorf("got %v", err)
	}
}

func TestStackEndsWithItsTerminal(t *testing.T) {
	t.Parallel()
	// Else the program ignores SIGHUP where the test does, under nohup.
	hangUps := make(chan os.Signal, 1)
	signal.Notify(hangUps, syscall.SIGHUP)
	t.Cleanup(func() { signal.Stop(hangUps) })
	folder := t.TempDir()
	const services = "services: {idle: {image: sh, command: [-c, 'echo $$$$; while :; do sleep 0.1; echo x; done'], healthcheck: {test: [CMD, sh, -c, 'true']}}}"
	if err := os.WriteFile(filepath.Join(folder, "docker-compose.yml"), []byte(services), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, end := range map[string]func(*os.Process, io.Closer) error{
		"the terminal closes": func(p *os.Process, _ io.Closer) error { return p.Signal(syscall.SIGHUP) },
		"nobody reads":        func(_ *os.Process, output io.Closer) error { return output.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			program := exec.CommandContext(t.Context(), os.Args[0])
			program.Dir, program.Env = folder, append(os.Environ(), "STACK_TEST_PROGRAM=/bin/sh", "TMPDIR="+t.TempDir())
			output, err := program.StdoutPipe()
			if err == nil {
				err = program.Start()
			}
			if err != nil {
				t.Fatal(err)
			}
			lines, pid, isReady := bufio.NewScanner(output), 0, false
			for (pid == 0 || !isReady) && lines.Scan() {
				_, _ = fmt.Sscanf(lines.Text(), "idle-1 | %d", &pid) // other lines have none
				isReady = isReady || strings.Contains(lines.Text(), "ready:")
			}
			if err := end(program.Process, output); err != nil {
				t.Fatal(err)
			}
			if err := program.Wait(); err != nil {
				t.Error(err)
			}
			if err := syscall.Kill(pid, 0); pid == 0 || !errors.Is(err, syscall.ESRCH) {
				t.Errorf("process %d is left: %v", pid, err)
			}
		})
	}
}
