package workers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/cli"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// programVariable makes the test's program the command stagemesh.
const programVariable = "STAGEMESH_WORKERS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(programVariable) == "" {
		// More would compete for the processor, and several tests bound times.
		testbed.Tests{Parallel: 4}.Main(m)
		return
	}
	if err := cli.New().ExecuteContext(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "stagemesh:", err)
		os.Exit(1) //nolint:forbidigo // this is main
	}
	os.Exit(0) //nolint:forbidigo // this is main
}

// upProgram is `stagemesh up FILE` in a process of its own.
type upProgram struct {
	*testbed.Process
	t testing.TB
	// url is where the worker is called, ops the operations port, admin the admin port.
	url, ops, admin string
	// temp is its folder for temporary files.
	temp  string
	files files
}

var adminLine = regexp.MustCompile(`address=(\S+) port=gateway.admin.listen`)

var readyLine = regexp.MustCompile(`is ready: (http://\S+:infer) \(docs: \S+, operations: (http://\S+)\)`)

// up starts the command with a worker of testdata, and waits until it is ready.
func up(t testing.TB, file string, options map[string]any, args ...string) *upProgram {
	t.Helper()
	p := &upProgram{t: t, temp: shortTemp(t), files: files{t: t, folder: t.TempDir()}}
	cmd := exec.Command(os.Args[0], append([]string{
		"up", testFile(t, file), "--options", string(p.files.options(options)),
		"--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--ops", "127.0.0.1:0",
	}, args...)...)
	cmd.Env = append(os.Environ(), programVariable+"=1", "GORACE=atexit_sleep_ms=0", "PYTHONDONTWRITEBYTECODE=", "TMPDIR="+p.temp)
	t.Cleanup(func() {
		for _, pid := range p.files.pids() {
			if testbed.IsRunning(pid) {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	})
	p.Process = testbed.StartProcess(t, cmd)
	words := p.Match(readyLine)
	p.url, p.ops = words[1], words[2]
	p.admin = "http://" + p.Match(adminLine)[1]
	return p
}

// shortTemp returns a temporary folder whose path is short enough for sockets.
func shortTemp(t testing.TB) string {
	t.Helper()
	folder, err := os.MkdirTemp("", "t") //nolint:usetesting // paths of sockets have to be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	return folder
}

// response is the status and the body of an answer; the status is 0 if the connection
// broke.
type response struct {
	status int
	body   string
}

// post sends a text; the channel receives its answer.
func (p *upProgram) post(text string) <-chan response {
	out := make(chan response, 1)
	go func() { out <- p.send(http.MethodPost, p.url, text) }()
	return out
}

// ready returns the answer of /readyz.
func (p *upProgram) ready() response { return p.send(http.MethodGet, p.ops+"/readyz", "") }

// status returns what `stagemesh status` prints.
func (p *upProgram) status() string {
	p.t.Helper()
	cmd := exec.CommandContext(p.t.Context(), os.Args[0], "status", "--admin", p.admin)
	cmd.Env = append(os.Environ(), programVariable+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		p.t.Errorf("status: %v: %s", err, out)
	}
	return string(out)
}

func (p *upProgram) awaitUnready() {
	p.t.Helper()
	testbed.Eventually(p.t, "the program is not ready", func() bool { return p.ready().status == http.StatusServiceUnavailable })
}

// send sends a text with headers, each a name and a value.
func (p *upProgram) send(method, url, text string, headers ...string) response {
	request, err := http.NewRequestWithContext(p.t.Context(), method, url, strings.NewReader(text))
	if err != nil {
		return response{0, err.Error()}
	}
	request.Header.Set("Content-Type", "text/plain")
	for pair := range slices.Chunk(headers, 2) {
		request.Header.Set(pair[0], pair[1])
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Do(request)
	if err != nil {
		return response{0, err.Error()}
	}
	defer answer.Body.Close()
	data, err := io.ReadAll(answer.Body)
	if err != nil {
		return response{0, err.Error()}
	}
	return response{answer.StatusCode, string(data)}
}

// checkNothingLeft fails the test if one of the processes runs for long, or if there are
// temporary files of a program that has cleaned up.
func (p *upProgram) checkNothingLeft(pids []int, cleaned bool) {
	p.t.Helper()
	// orphanBound is how long a worker may outlive its host.
	const orphanBound = 2 * time.Second
	begin := time.Now()
	for _, pid := range pids {
		testbed.Eventually(p.t, fmt.Sprintf("process %d ends", pid), func() bool { return !testbed.IsRunning(pid) })
	}
	if took := time.Since(begin); took > orphanBound {
		p.t.Errorf("processes ran for %s more", took)
	}
	if left, err := os.ReadDir(p.temp); cleaned && (err != nil || len(left) > 0) {
		p.t.Errorf("the program leaves %v, %v", left, err)
	}
}

// parents has each worker start two processes of its own, one of them in a session of
// its own.
var parents = map[string]any{"child": true}

// One worker is idle, one is in the middle of a batch, and both have children.
func TestNoWorkerOutlivesTheProgram(t *testing.T) {
	t.Parallel()
	p := up(t, "obedient.py", parents, "--workers", "2")
	broken := p.post("wait for ever")
	p.files.await("run", "wait for ever")
	pids := p.files.pids()
	if len(pids) != 6 {
		t.Fatalf("the program has workers %v", pids)
	}
	p.Kill()
	p.checkNothingLeft(p.files.pidsOf("start"), false)
	// The next host kills the children that have a session of their own.
	start(t, spec{file: "obedient.py", worker: func(s *worker.Settings) { s.TempDir = p.temp }})
	p.checkNothingLeft(pids, false)
	if a := testbed.Receive(t, "the caller's end", broken); a.status != 0 {
		t.Errorf("the caller of a killed program gets %v", a)
	}
}

func TestTerminatedProgramAnswersAndLeavesNothing(t *testing.T) {
	t.Parallel()
	p := up(t, "obedient.py", parents, "--workers", "2")
	last := p.post("wait go")
	p.files.await("run", "wait go")
	pids := p.files.pids()
	p.Signal(syscall.SIGTERM)
	p.awaitUnready()
	p.files.setFlag("go")
	if a := testbed.Receive(t, "answer", last); a.status != http.StatusOK || a.body != "wait go" {
		t.Errorf("the request in flight is answered with %v", a)
	}
	if err := p.Wait(); err != nil {
		t.Errorf("it ends with %v", err)
	}
	p.checkNothingLeft(pids, true)
}

func TestSecondSignalEndsProgramAtOnce(t *testing.T) {
	t.Parallel()
	p := up(t, "obedient.py", parents)
	last := p.post("wait for ever")
	p.files.await("run", "wait for ever")
	pids := p.files.pids()
	p.Signal(syscall.SIGTERM)
	p.awaitUnready()
	p.Signal(syscall.SIGTERM)
	if a := testbed.Receive(t, "answer", last); a.status != http.StatusServiceUnavailable || !strings.Contains(a.body, "SHUTTING_DOWN") {
		t.Errorf("the request in flight is answered with %v", a)
	}
	if failure, ok := errors.AsType[*exec.ExitError](p.Wait()); ok && failure.ExitCode() < 0 {
		t.Errorf("the signal ended it: %v", failure)
	}
	p.checkNothingLeft(pids, true)
}

// The worker was ready once, and crashes at each start from then on.
func TestCrashLoopIsReportedAndRecovers(t *testing.T) {
	t.Parallel()
	p := up(t, "obedient.py", nil)
	if a := p.ready(); a.status != http.StatusOK {
		t.Fatalf("ready: %v", a)
	}
	p.files.setFlag("broken")
	// It crashes the ready worker, and no later one.
	sent, waiting := time.Now(), p.post("die once")
	var reason response
	testbed.Eventually(t, "the program reports why it is not ready", func() bool {
		reason = p.ready()
		return reason.status == http.StatusServiceUnavailable && strings.Contains(reason.body, "again and again") && strings.Contains(reason.body, "the model is broken")
	})
	t.Logf("not ready: %v", reason)
	p.files.clearFlag("broken")
	testbed.Eventually(t, "the program is ready again", func() bool { return p.ready().status == http.StatusOK })
	a := testbed.Receive(t, "answer", waiting)
	isLate := time.Since(sent) > bus.DefaultHostGrace && strings.Contains(a.body, "NO_CAPACITY") // the crashes took long
	if !isLate && (a.status != http.StatusOK || a.body != "die once") {
		t.Errorf("an earlier caller gets %v", a)
	}

	p.files.setFlag("broken")
	started := p.files.pidsOf("start")
	if err := syscall.Kill(started[len(started)-1], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	// Once the host has left the stage, new callers are rejected at once.
	testbed.Eventually(t, "callers are rejected", func() bool {
		a := p.send(http.MethodPost, p.url, "hello")
		return a.status == http.StatusServiceUnavailable && strings.Contains(a.body, "NO_CAPACITY")
	})
	p.files.clearFlag("broken")
	testbed.Eventually(t, "it serves again", func() bool {
		return p.send(http.MethodPost, p.url, "hello") == response{http.StatusOK, "hello"}
	})
}

// All settings are the defaults.
func TestHungWorkerIsShownAndReplaced(t *testing.T) {
	t.Parallel()
	p := up(t, "obedient.py", nil)
	hung := make(chan response, 1)
	// It outlives the 10 s after which its batch is late.
	go func() { hung <- p.send(http.MethodPost, p.url, "wait for ever", "Stagemesh-Timeout", "17s") }()
	p.files.await("run", "wait for ever")
	begin := time.Now()
	beside := p.post("hello")
	const late = "far longer than batches do"
	testbed.Eventually(t, "/readyz shows the batch", func() bool { return strings.Contains(p.ready().body, late) })
	testbed.Eventually(t, "the status shows the batch", func() bool { return strings.Contains(p.status(), late) })
	t.Log(p.Err.Line(t, "level=WARN", late, "requests=["))
	if a := testbed.Receive(t, "answer", hung); a.status != http.StatusGatewayTimeout || !strings.Contains(a.body, "DEADLINE_EXCEEDED") {
		t.Errorf("the caller that hangs the worker gets %v", a)
	}
	if a := testbed.Receive(t, "answer", beside); a.status != http.StatusOK || a.body != "hello" {
		t.Errorf("a caller beside it gets %v", a)
	}
	t.Logf("it waited %s", time.Since(begin))
	t.Log(p.Err.Line(t, "the worker is ERROR", "nobody waits for"))
	testbed.Eventually(t, "/readyz shows nothing more", func() bool { return p.ready() == response{http.StatusOK, "ok\n"} })
	// Nobody is blamed: the same text may run again.
	again := p.post("wait go")
	p.files.setFlag("go")
	if a := testbed.Receive(t, "answer", again); a.status != http.StatusOK {
		t.Errorf("the next gets %v", a)
	}
}

// The worker was ready once, and cannot be started again.
func TestCallersLearnWhyNoWorkerStarts(t *testing.T) {
	t.Parallel()
	p := up(t, "obedient.py", nil)
	inFlight := p.post("wait for ever")
	running := p.files.await("run", "wait for ever")
	p.files.setFlag("broken")
	waiting := p.post("hello")
	if err := syscall.Kill(running.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	for name, from := range map[string]<-chan response{"in flight": inFlight, "that waits": waiting, "afterwards": p.post("hello")} {
		a := testbed.Receive(t, "answer", from)
		if a.status != http.StatusServiceUnavailable || !strings.Contains(a.body, "NO_CAPACITY") || !strings.Contains(a.body, "the model is broken") {
			t.Errorf("the request %s is answered with %v after %s", name, a, time.Since(begin))
		}
		t.Logf("%s: %s after %s", name, a.body, time.Since(begin))
	}
	testbed.Eventually(t, "later requests are rejected with the cause", func() bool {
		a := p.send(http.MethodPost, p.url, "hello")
		return a.status == http.StatusServiceUnavailable && strings.Contains(a.body, "NO_CAPACITY") && strings.Contains(a.body, "the model is broken")
	})
}

// Requests that wait for a later step learn it too. Those on file wait for a worker.
func TestCallersLearnWhyNoWorkerOfALaterStepStarts(t *testing.T) {
	t.Parallel()
	good := testbed.ReadFile(t, testFile(t, "obedient.py"))
	path := filepath.Join(t.TempDir(), "saved.py")
	save := func(text []byte) {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	save(good)
	m := start(t, spec{
		worker: func(s *worker.Settings) { s.Command[len(s.Command)-1] = path },
		host:   func(s *stagehost.Settings) { s.HostGrace = time.Second },
	})
	for _, other := range []pipeline.StageName{"first", "last"} {
		m.Host(other, inproc.Each(inproc.Settings{}, func(_ context.Context, item runner.Item) ([]payload.Part, error) { return item.Inputs, nil }))
	}
	m.gateway = m.Gateway([]pipeline.Pipeline{testbed.Pipeline("three", "first", stage, "last")})
	steps := func(r *request.Request) { r.Pipeline = "three" }
	onFile := func(r *request.Request) { steps(r); r.Durability = pipeline.File }

	from := []<-chan answer{m.send(t.Context(), "wait for ever", steps)}
	running := m.files.await("run", "wait for ever")
	save([]byte("def broken(:\n"))
	for _, text := range texts("waits", 8) {
		from = append(from, m.send(t.Context(), text, steps))
	}
	durable := m.send(t.Context(), "durable", onFile)
	if err := syscall.Kill(running.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	for _, answer := range from {
		a := m.receive(answer)
		a.checkFault(t, fault.NoCapacity, "the last start failed: worker 0")
		if a.fault != nil && a.fault.Stage != stage {
			t.Errorf("%q failed at stage %q", a.text, a.fault.Stage)
		}
	}
	t.Logf("all are answered after %s", time.Since(begin))
	save(good)
	m.receive(durable).checkEcho(t)
}
