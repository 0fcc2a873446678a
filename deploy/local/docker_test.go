package main

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/types"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// engine is a Docker engine of the test's own, with Compose and buildx. Nothing is pulled: images
// that only a registry has are stand-ins under their names, with the same users and programs. The
// compiler in the build is one too; it copies the program that this machine has built.
type engine struct {
	t       *testing.T
	client  string
	compose string
	// env is the environment of both.
	env []string
}

// startEngine starts an engine on a socket and a folder of its own.
func startEngine(t *testing.T) *engine {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), root+"/.ci/docker").CombinedOutput(); err != nil {
		t.Fatalf("this test cannot run here: %s", out)
	}
	tools, err := testbed.Tools("docker-tools")
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	socket, plugins := "unix://"+folder+"/docker.sock", filepath.Join(folder, "config", "cli-plugins")
	e := &engine{t: t, compose: tools[0], env: append(os.Environ(), "DOCKER_HOST="+socket, "DOCKER_CONFIG="+filepath.Join(folder, "config"), "DOCKER_BUILDKIT=1", "COMPOSE_PROFILES=", "COMPOSE_ANSI=never")}
	if e.client, err = exec.LookPath("docker"); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.MkdirAll(plugins, 0o700), os.Symlink(tools[1], filepath.Join(plugins, "docker-buildx"))); err != nil {
		t.Fatal(err)
	}
	var log testbed.Log
	daemon := exec.Command("dockerd", "--host", socket, "--data-root", folder+"/data", "--exec-root", folder+"/exec", "--pidfile", folder+"/pid") //nolint:noctx // it is stopped below
	daemon.Stdout, daemon.Stderr = &log, &log
	daemon.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = daemon.Process.Signal(syscall.SIGTERM) // it stops its containers
		_ = daemon.Wait()                          // it says nothing of how its children ended
		if t.Failed() {
			text := log.String()
			t.Log(text[max(0, len(text)-4000):])
		}
	})
	testbed.Eventually(t, "the engine answers", func() bool {
		return e.command(t.Context(), e.client, "info").Run() == nil
	})
	return e
}

func (e *engine) command(ctx context.Context, program string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir, cmd.Env = root, e.env
	return cmd
}

// docker runs the client and returns its output.
func (e *engine) docker(args ...string) string {
	e.t.Helper()
	return e.output(e.client, args...)
}

// do runs a verb of Compose on the stack and returns its output.
func (e *engine) do(args ...string) string {
	e.t.Helper()
	return e.output(e.compose, args...)
}

func (e *engine) output(program string, args ...string) string {
	e.t.Helper()
	cmd := e.command(e.t.Context(), program, args...)
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		e.t.Fatalf("%s %q: %v\n%s%s", filepath.Base(program), args, err, out, &errOut)
	}
	return strings.TrimSpace(string(out))
}

// standIn is an image made of programs of this machine.
type standIn struct {
	// changes are instructions of a Dockerfile.
	changes []string
	// programs are paths here, with their libraries, by the path in the image; scripts are texts, and
	// trees folders of Python modules.
	programs, scripts, trees map[string]string
	// folders have an owner, or may be written by everybody where that is 0.
	folders map[string]int
}

// images returns the stand-ins by their names.
func (e *engine) images(project *types.Project, programs map[string]string) map[string]standIn {
	e.t.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		e.t.Fatal(err)
	}
	tools := map[string]string{"/bin/busybox": busybox}
	shell := func(more map[string]string) map[string]string {
		for path, program := range tools {
			more[path] = program
		}
		return more
	}
	image := func(service string) string { return project.Services[service].Image }
	const path = "ENV PATH=/usr/local/bin:/usr/bin:/bin"
	return map[string]standIn{
		"golang:1.26.8-alpine": {
			changes:  []string{path},
			programs: shell(map[string]string{"/prebuilt": programs["stagemesh"], "/etc/ssl/certs/ca-certificates.crt": "/etc/ssl/certs/ca-certificates.crt"}),
			// It fails where the context has more than the program needs.
			scripts: map[string]string{"/usr/local/bin/go": `#!/bin/sh
[ "$1" = mod ] && { [ -f go.sum ]; exit; }
[ -f services/cmd/stagemesh/main.go ] && [ ! -e docs ] && [ ! -e docker-compose.yml ] || exit 1
while [ "$1" != -o ]; do shift; done
cp /prebuilt "$2"`},
			folders: map[string]int{"/tmp": 0},
		},
		image("nats"): {
			changes: []string{path, `ENTRYPOINT ["docker-entrypoint.sh"]`}, programs: shell(map[string]string{"/usr/local/bin/nats-server": programs["nats"]}),
			scripts: map[string]string{"/usr/local/bin/docker-entrypoint.sh": "#!/bin/sh\nset -e\nif [ \"${1#-}\" != \"$1\" ]; then set -- nats-server \"$@\"; fi\nexec \"$@\""},
			folders: map[string]int{"/tmp": 0, "/var/tmp": 0},
		},
		image("consul"): {
			changes: []string{path, `ENTRYPOINT ["docker-entrypoint.sh"]`, "VOLUME /consul/data"}, programs: shell(map[string]string{"/bin/consul": programs["consul"]}),
			scripts: map[string]string{"/usr/local/bin/docker-entrypoint.sh": "#!/bin/sh\nset -e\n[ \"$1\" = agent ] && set -- consul \"$@\"\n[ -n \"${CONSUL_DISABLE_PERM_MGMT+x}\" ] || exec su -s /bin/sh consul -c \"$*\"\nexec \"$@\""},
			folders: map[string]int{"/tmp": 0, "/consul/data": 100},
		},
		image("jaeger"): {
			changes: []string{`ENTRYPOINT ["/cmd/jaeger"]`, "USER 10001", "VOLUME /tmp"}, programs: shell(map[string]string{"/cmd/jaeger": programs["jaeger"]}),
			folders: map[string]int{"/tmp": 0},
		},
		image("prometheus"): {
			changes: []string{`ENTRYPOINT ["/bin/prometheus"]`, "USER 65534:65534", "VOLUME /prometheus"}, programs: shell(map[string]string{"/bin/prometheus": programs["prometheus"]}),
			folders: map[string]int{"/prometheus": 65534},
		},
		// It only answers its health check.
		image("grafana"): {
			changes: []string{path, `ENTRYPOINT ["/run.sh"]`, "USER 472"}, programs: shell(map[string]string{}),
			scripts: map[string]string{"/public/api/health": "{}", "/run.sh": "#!/bin/sh\ntrap \"exit 0\" TERM\nbusybox httpd -f -p 3000 -h /public &\nwait"},
			folders: map[string]int{"/tmp": 0, "/var/lib/grafana": 472},
		},
	}
}

// python returns the stand-in of Python's image. Its pip knows the packages that the images install.
func (e *engine) python() standIn {
	e.t.Helper()
	venv, err := testbed.Tools("onnxruntime")
	if err != nil {
		e.t.Fatal(err)
	}
	paths := strings.Fields(e.output(venv[0], "-c", "import os, sys, sysconfig; print(os.path.realpath(sys.executable), *(sysconfig.get_path(p) for p in ('stdlib', 'purelib')))"))
	program, library, packages := paths[0], paths[1], paths[2]
	home := "/usr/local/lib/" + filepath.Base(library)
	trees := map[string]string{home: library}
	for _, name := range []string{"numpy", "numpy.libs", "onnxruntime", "flatbuffers", "google", "packaging"} {
		trees["/packages/"+name] = filepath.Join(packages, name)
	}
	busybox, err := exec.LookPath("busybox")
	install, err2 := exec.LookPath("install")
	if err := errors.Join(err, err2); err != nil {
		e.t.Fatal(err)
	}
	return standIn{
		changes: []string{"ENV PATH=/usr/local/bin:/usr/bin:/bin", "ENV PYTHONPATH=" + home + "/installed"}, trees: trees,
		programs: map[string]string{"/bin/busybox": busybox, "/usr/bin/install": install, "/usr/local/bin/python3": program},
		scripts: map[string]string{"/usr/local/bin/pip": `#!/bin/sh
[ "$1 $2" = "install --no-cache-dir" ] || exit 1
mkdir -p ` + home + `/installed && cp -r /packages/numpy* ` + home + `/installed
case "$*" in *onnxruntime*) cp -r /packages/* ` + home + `/installed;; esac`},
		folders: map[string]int{"/tmp": 0},
	}
}

// load imports a stand-in.
func (e *engine) load(name string, image standIn) {
	e.t.Helper()
	args := []string{"import"}
	for _, change := range image.changes {
		args = append(args, "--change", change)
	}
	cmd := e.command(e.t.Context(), e.client, append(args, "-", name)...)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		e.t.Fatal(err)
	}
	err = errors.Join(image.write(in), in.Close())
	if err := errors.Join(err, cmd.Wait()); err != nil {
		e.t.Fatalf("the stand-in of %s: %v\n%s", name, err, &log)
	}
}

// library is a line of ldd.
var library = regexp.MustCompile(`(?m)^\s*(?:\S+ => )?(/\S+) \(0x`)

// write writes the image's files as a tar.
func (s standIn) write(to io.Writer) error {
	w := tar.NewWriter(to)
	seen := map[string]bool{}
	add := func(header tar.Header, content io.Reader) error {
		header.Name = strings.TrimPrefix(header.Name, "/")
		if seen[header.Name] {
			return nil
		}
		seen[header.Name] = true
		err := w.WriteHeader(&header)
		if err == nil && content != nil {
			_, err = io.Copy(w, content)
		}
		return err
	}
	for path, owner := range s.folders {
		mode := int64(0o755)
		if owner == 0 {
			mode = 0o1777
		}
		if err := add(tar.Header{Typeflag: tar.TypeDir, Name: path + "/", Mode: mode, Uid: owner, Gid: owner}, nil); err != nil {
			return err
		}
	}
	for path, text := range s.scripts {
		if err := add(tar.Header{Typeflag: tar.TypeReg, Name: path, Mode: 0o755, Size: int64(len(text))}, strings.NewReader(text)); err != nil {
			return err
		}
	}
	paths := maps.Clone(s.programs)
	for image, folder := range s.trees {
		err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
			switch name := d.Name(); {
			case err != nil:
				return err
			case name == "site-packages" || name == "test" || name == "__pycache__":
				return fs.SkipDir
			case d.Type().IsRegular():
				paths[image+strings.TrimPrefix(path, folder)] = path
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	isThere := map[string]bool{}
	for _, program := range paths {
		isThere[program] = true
	}
	for path, program := range maps.Clone(paths) {
		if _, isProgram := s.programs[path]; !isProgram && !strings.Contains(path, ".so") {
			continue
		}
		out, _ := exec.Command("ldd", program).Output() //nolint:noctx // a static program has none, and ldd fails
		for _, found := range library.FindAllStringSubmatch(string(out), -1) {
			if needed := filepath.Clean(found[1]); !isThere[needed] {
				paths[needed], isThere[needed] = needed, true
			}
		}
	}
	for path, program := range paths {
		if err := func() error {
			f, err := os.Open(program)
			if err != nil {
				return err
			}
			defer f.Close()
			info, err := f.Stat()
			if err != nil {
				return err
			}
			return add(tar.Header{Typeflag: tar.TypeReg, Name: path, Mode: 0o755, Size: info.Size()}, f)
		}(); err != nil {
			return err
		}
	}
	if _, ok := s.programs["/bin/busybox"]; ok {
		for _, applet := range []string{"sh", "wget", "cp", "su", "mkdir"} {
			if err := add(tar.Header{Typeflag: tar.TypeSymlink, Name: "/bin/" + applet, Linkname: "/bin/busybox", Mode: 0o777}, nil); err != nil {
				return err
			}
		}
	}
	return w.Close()
}

// container is what the test reads of docker inspect.
type container struct {
	ID, Name string
	State    struct {
		Pid, ExitCode int
		FinishedAt    time.Time
		OOMKilled     bool
	}
	Config struct{ Labels map[string]string }
}

// containers returns the containers of the stack, stopped ones too, by service.
func (e *engine) containers() map[string][]container {
	e.t.Helper()
	var all []container
	ids := strings.Fields(e.docker("ps", "-aq", "--no-trunc"))
	if len(ids) > 0 {
		if err := json.Unmarshal([]byte(e.docker(append([]string{"inspect"}, ids...)...)), &all); err != nil {
			e.t.Fatal(err)
		}
	}
	out := map[string][]container{}
	for _, c := range all {
		service := c.Config.Labels["com.docker.compose.service"]
		out[service] = append(out[service], c)
	}
	return out
}

// checkPrivileges checks that no process is root or has a capability.
func (e *engine) checkPrivileges() {
	e.t.Helper()
	for service, all := range e.containers() {
		for _, c := range all {
			status := string(testbed.ReadFile(e.t, fmt.Sprintf("/proc/%d/status", c.State.Pid)))
			for _, want := range []string{"CapEff:\t0000000000000000\n", "CapBnd:\t0000000000000000\n", "NoNewPrivs:\t1\n"} {
				if !strings.Contains(status, want) {
					e.t.Errorf("%s: its process has not %q", service, want)
				}
			}
			if strings.Contains(status, "\nUid:\t0\t") {
				e.t.Errorf("%s runs as root", service)
			}
		}
	}
}

// traffic are callers of the fifty images, until stop. They note the reasons of refusals.
type traffic struct {
	stop    context.CancelFunc
	callers sync.WaitGroup
	right   atomic.Int64
	mu      sync.Mutex
	wrong   []string
}

func startTraffic(t *testing.T, gateway string) *traffic {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	l := &traffic{stop: stop}
	for caller := range 4 {
		l.callers.Go(func() {
			for number := caller; ctx.Err() == nil; number++ {
				if err := read(t.Context(), gateway, number); err != nil {
					l.mu.Lock()
					l.wrong = append(l.wrong, err.Error())
					l.mu.Unlock()
				} else {
					l.right.Add(1)
				}
			}
		})
	}
	t.Cleanup(func() { l.end() })
	return l
}

// awaitMore waits until as many more answers are right.
func (l *traffic) awaitMore(t *testing.T, more int64) {
	t.Helper()
	from := l.right.Load()
	testbed.Eventually(t, fmt.Sprintf("%d more right answers", more), func() bool { return l.right.Load() >= from+more })
}

func (l *traffic) end() []string {
	l.stop()
	l.callers.Wait()
	return l.wrong
}

func TestDockerRunsTheStack(t *testing.T) {
	e := startEngine(t)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	ports, err := testbed.FreePorts(4)
	if err != nil {
		t.Fatal(err)
	}
	e.env = append(e.env, fmt.Sprintf("GATEWAY_PORT=%d-%d", ports[0], ports[0]+9), "COMPOSE_PROFILES=monitoring",
		fmt.Sprintf("JAEGER_PORT=%d", ports[1]), fmt.Sprintf("PROMETHEUS_PORT=%d", ports[2]), fmt.Sprintf("GRAFANA_PORT=%d", ports[3]))
	built, err := programsOf(programs(t))
	if err != nil {
		t.Fatal(err)
	}
	for name, image := range e.images(loadVariant(t, "alone"), built) {
		e.load(name, image)
	}
	begin := time.Now()
	t.Cleanup(func() { _ = e.command(context.WithoutCancel(t.Context()), e.compose, "down", "-v", "-t", "5").Run() }) // the test may have failed
	e.do("up", "--build", "--wait")
	t.Logf("up took %s", time.Since(begin))
	first := e.containers()
	e.do("up", "--build", "--wait")
	second := e.containers()
	for _, service := range []string{"classify", "consul", "decode", "gateway", "grafana", "jaeger", "label", "nats", "prometheus"} {
		if was, now := first[service], second[service]; len(was) != 1 || len(now) != 1 || was[0].ID != now[0].ID {
			t.Errorf("a second up recreates %s: %v, %v", service, was, now)
		}
	}
	e.checkPrivileges()
	gateway := "http://" + e.do("port", "gateway", "8080")
	readAll(t, gateway)
	awaitTrace(t, "http://"+e.do("port", "jaeger", "16686"))
	awaitTargets(t, "http://"+e.do("port", "prometheus", "9090"), 4)

	scaled := startTraffic(t, gateway)
	e.do("up", "--wait", "--no-recreate", "--scale", "classify=3")
	scaled.awaitMore(t, 200)
	if screen := e.do("exec", "-T", "gateway", "stagemesh", "top", "--once"); !strings.Contains(screen, "classify") || !strings.Contains(screen, "5 hosts") {
		t.Errorf("stagemesh top shows\n%s", screen)
	}
	// The engine starts it again; what it had is delivered to another.
	if err := syscall.Kill(e.containers()["classify"][0].State.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	scaled.awaitMore(t, 200)
	e.do("up", "--wait", "--no-recreate", "--scale", "classify=1")
	scaled.awaitMore(t, 200)
	wrong := scaled.end()
	t.Logf("%d answers while a stage was scaled and killed", scaled.right.Load())
	if len(wrong) > 0 {
		t.Errorf("%d of %d requests failed while a stage was scaled and killed: %s", len(wrong), scaled.right.Load(), wrong[0])
	}

	restarted := startTraffic(t, gateway)
	restarted.awaitMore(t, 50)
	e.do("restart", "nats")
	restarted.awaitMore(t, 200)
	wrong = restarted.end()
	t.Logf("%d refusals and %d answers while the broker was restarted", len(wrong), restarted.right.Load())
	for _, text := range wrong {
		if !strings.Contains(text, "BROKER_UNAVAILABLE") && !strings.Contains(text, "QUEUE_LOST") {
			t.Errorf("a restart of the broker is answered by %s", text)
			break
		}
	}
	e.do("up", "--wait", "--no-recreate", "--scale", "gateway=2")
	if err := read(t.Context(), "http://"+e.do("port", "--index", "2", "gateway", "8080"), 0); err != nil {
		t.Errorf("a second gateway: %v", err)
	}
	e.checkStop()
	e.end()

	e.load("python:3.13-slim", e.python())
	e.env = append(e.env, "COMPOSE_PROFILES=")
	for _, variant := range []string{"python", "onnx"} {
		e.env = append(e.env, "COMPOSE_FILE=docker-compose.yml:deploy/compose/"+variant+".yml")
		e.do("up", "--build", "--wait")
		e.checkPrivileges()
		gateway := "http://" + e.do("port", "gateway", "8080")
		readAll(t, gateway)
		if image := e.do("ps", "--format", "{{.Image}}", "classify"); image != "stagemesh-"+variant+":dev" {
			t.Errorf("%s: classify is of the image %s", variant, image)
		}
		if status := e.do("exec", "-T", "gateway", "stagemesh", "status"); strings.Contains(status, "onnxruntime") != (variant == "onnx") {
			t.Errorf("%s: stagemesh status shows\n%s", variant, status)
		}
		if processes := e.do("top", "classify"); !strings.Contains(processes, "python3") {
			t.Errorf("%s: classify runs\n%s", variant, processes)
		}
		e.end()
	}
}

// end removes the stack, of which no volume is left.
func (e *engine) end() {
	e.t.Helper()
	e.do("down", "-v")
	if left := e.docker("volume", "ls", "-q"); left != "" {
		e.t.Errorf("volumes are left: %s", left)
	}
}

// checkStop stops the stack, and checks the order and how processes end.
func (e *engine) checkStop() {
	e.t.Helper()
	e.do("stop")
	stopped := e.containers()
	at := func(service string) time.Time { return stopped[service][0].State.FinishedAt }
	for _, pair := range [][2]string{{"gateway", "decode"}, {"gateway", "classify"}, {"gateway", "label"}, {"decode", "nats"}, {"label", "consul"}, {"gateway", "jaeger"}, {"classify", "jaeger"}} {
		if at(pair[0]).After(at(pair[1])) {
			e.t.Errorf("%s stopped after %s", pair[0], pair[1])
		}
	}
	for service, all := range stopped {
		for _, c := range all {
			// Consul ends with 1 after a signal.
			if c.State.ExitCode != 0 && service != "consul" || c.State.OOMKilled {
				e.t.Errorf("%s ended with %d, out of memory %t", service, c.State.ExitCode, c.State.OOMKilled)
			}
		}
	}
}
