package cli_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// adder is a worker that adds a number to what it gets.
const adder = `import array

from stagemesh import InvalidInput, Tensor, Worker, serve


class Add(Worker):
    inputs = {"%s": Tensor("FP32", [-1, 1])}
    outputs = {"sum": Tensor("FP32", [-1, 1])}

    def predict(self, batch):
        x = batch["%s"]
        for i in range(batch.rows):
            if x[i, 0] < 0:
                batch.fail(i, InvalidInput("x", "is negative"))
        sums = array.array("f", (x[i, 0] + %d for i in range(batch.rows)))
        return {"sum": memoryview(sums).cast("B").cast("f", [batch.rows, 1])}


serve(Add, arrays="buffer")
`

func addTo(input string, n int) string { return fmt.Sprintf(adder, input, input, n) }

func TestCheckReportsOnAWorker(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "my_adder.py")
	save(t, path, addTo("x", 1))
	if out, err := run(t, "check", path, "--max-size", "2"); err != nil || !strings.Contains(out, "nothing is wrong") {
		t.Errorf("got %q, %v", out, err)
	}
	save(t, path, strings.Replace(addTo("x", 1), "sums = ", "sums = 1 / 0 + ", 1))
	if out, err := run(t, "check", path); err == nil || !strings.Contains(out, "found something wrong") {
		t.Errorf("got %q, %v", out, err)
	}
}

// save writes the file of a worker as an editor does, under another name first.
func save(t *testing.T, path, text string) {
	t.Helper()
	early := path + "~"
	if err := os.WriteFile(early, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(early, path); err != nil {
		t.Fatal(err)
	}
}

func TestUpNamesTheFlagOfAMeshFile(t *testing.T) {
	t.Parallel()
	path := testbed.MeshFile(t, echoes)
	if _, err := run(t, "up", path); err == nil || !strings.HasSuffix(err.Error(), "stagemesh up -c "+path) {
		t.Errorf("got %v", err)
	}
}

func upWorker(t *testing.T, path string, args ...string) *process {
	t.Helper()
	return up(t, append([]string{path, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--ops", "127.0.0.1:0"}, args...)...)
}

var workerLine = regexp.MustCompile(`^my-adder is ready: (http://\S+/v1/pipelines/my-adder:infer) \(docs: http://\S+/docs, operations: (http://\S+)\); stop with Ctrl-C\n(curl .*)\n$`)

// served waits for the lines that say that a worker is served, the nth time, and
// returns where operators ask, and the line to copy.
func (p *process) served(t *testing.T, nth int) (operations, curl string) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(p.errOut.String())
		}
	})
	testbed.Eventually(t, "the worker is served", func() bool {
		select {
		case err := <-p.ended:
			t.Fatalf("it ended: %v\n%s", err, p.errOut.String())
		default:
		}
		return strings.Count(p.out.String(), "\n") == 2*nth
	})
	lines := strings.SplitAfter(p.out.String(), "\n")
	words := workerLine.FindStringSubmatch(strings.Join(lines[2*(nth-1):2*nth], ""))
	if words == nil {
		t.Fatalf("it printed %q", p.out.String())
	}
	return words[2], words[3]
}

// shell runs a line that a person would copy.
func shell(t *testing.T, line string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "bash", "-c", line+" --silent --show-error")
	cmd.Stderr = t.Output()
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return string(out)
}

func TestUpServesAWorkerWithoutAFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "my_adder.py")
	save(t, path, addTo("x", 1))
	p := upWorker(t, path, "--workers", "2")
	operations, line := p.served(t, 1)
	if got := shell(t, line); !strings.Contains(got, `"data":[1]`) {
		t.Errorf("%s answers %s", line, got)
	}
	if got := shell(t, strings.Replace(line, `"data":[0]`, `"data":[-1]`, 1)); !strings.Contains(got, "is negative") || !strings.Contains(got, "INVALID_INPUT") {
		t.Errorf("a bad input is answered with %s", got)
	}
	_, page := testbed.Get(t, operations+"/metrics")
	for _, series := range []string{
		`stagemesh_worker_state{\S*host="[^"]+",\S*stage="my-adder",state="READY",worker="1"} 1`,
		`stagemesh_worker_state{\S*stage="my-adder",state="STARTUP",worker="0"} 0`,
		`stagemesh_worker_transitions_total{failed="false",\S*stage="my-adder",state="READY",worker="0"} 1`,
		`stagemesh_worker_start_seconds_count{\S*stage="my-adder",worker="1"} 1`,
		`stagemesh_worker_batches_total{\S*outcome="ended",stage="my-adder",worker="[01]"} [12]`,
	} {
		if !regexp.MustCompile(`(?m)^` + series + `$`).MatchString(page) {
			t.Errorf("the metrics do not have %s", series)
		}
	}
	if t.Failed() {
		t.Log(page)
	}
	if err := p.end(t); err != nil {
		t.Error(err)
	}
	if n := strings.Count(p.errOut.String(), "the worker is READY"); n != 2 {
		t.Errorf("%d workers were ready", n)
	}
}

// What a worker's author does all day: a mistake, its mending, another input.
func TestSavedWorkerRestarts(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "my_adder.py")
	save(t, path, addTo("x", 1))
	p := upWorker(t, path)
	_, line := p.served(t, 1)

	save(t, path, "def broken(:\n")
	testbed.Eventually(t, "the mistake is told", func() bool {
		return p.errOut.Has("the worker does not start") && p.errOut.Has("SyntaxError")
	})
	save(t, path, addTo("x", 2))
	testbed.Eventually(t, "the mended worker answers", func() bool { return strings.Contains(shell(t, line), `"data":[2]`) })

	save(t, path, addTo("y", 3))
	_, again := p.served(t, 2)
	if want := strings.Replace(line, `"name":"x"`, `"name":"y"`, 1); again != want {
		t.Errorf("with another input it prints\n%s, want\n%s", again, want)
	}
	if got := shell(t, again); !strings.Contains(got, `"data":[3]`) {
		t.Errorf("%s answers %s", again, got)
	}
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

// teller is a worker that streams word by word, so many texts at a time.
const teller = `from stagemesh import Text, Worker, serve


class Tell(Worker):
    inputs = {"x": Text()}
    outputs = {"word": Text()}
    examples = [{"x": "a b"}]
    concurrency = %d

    async def stream(self, item):
        for word in item["x"].split():
            yield {"word": word}


serve(Tell, arrays="buffer")
`

// A file is all that it takes: how many streams run is the class's to say, and to change.
func TestUpUsesTheWorkersConcurrency(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "my_adder.py")
	save(t, path, fmt.Sprintf(teller, 32))
	p := upWorker(t, path)
	_, line := p.served(t, 1)
	if got := shell(t, strings.Replace(line, ":infer", ":stream", 1)); strings.Count(got, "event: chunk") != 2 {
		t.Errorf("two words are told as %s", got)
	}
	save(t, path, fmt.Sprintf(teller, 100))
	p.served(t, 2)
	if err := p.end(t); err != nil {
		t.Error(err)
	}
	said := p.errOut.String()
	for _, slots := range []string{"slots=32", "slots=64"} {
		if !regexp.MustCompile(`(?m)msg=ready .*` + slots + `$`).MatchString(said) {
			t.Errorf("no host was ready with %s", slots)
		}
	}
	if t.Failed() {
		t.Log(said)
	}
}

// A save counts also while what was saved before starts, or hangs.
func TestSaveEndsHangingStart(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "my_adder.py")
	save(t, path, addTo("x", 1))
	p := upWorker(t, path)
	_, line := p.served(t, 1)
	save(t, path, "print('stuck', flush=True)\nimport time\ntime.sleep(3600)\n")
	testbed.Eventually(t, "the start hangs", func() bool { return p.errOut.Has("msg=stuck") })
	save(t, path, addTo("x", 2))
	testbed.Eventually(t, "the mended worker answers", func() bool { return strings.Contains(p.ask(t, line), `"data":[2]`) })
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

func TestSaveDuringFirstStartRestarts(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	path, gate := filepath.Join(folder, "my_adder.py"), filepath.Join(folder, "gate")
	const waits = "print('waiting', flush=True)\nimport os, time\nwhile not os.path.exists(%q): time.sleep(0.01)\n"
	save(t, path, fmt.Sprintf(waits, gate)+addTo("x", 1))
	p := upWorker(t, path)
	testbed.Eventually(t, "the worker starts", func() bool { return p.errOut.Has("msg=waiting") })
	save(t, path, addTo("x", 2))
	save(t, gate, "")
	_, line := p.served(t, 1)
	testbed.Eventually(t, "what was saved answers", func() bool { return strings.Contains(p.ask(t, line), `"data":[2]`) })
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

// What a tool takes away for a moment was not saved; a link is saved where it leads.
func TestWorkerRestartsOnlyWithItsFile(t *testing.T) {
	t.Parallel()
	target, folder := filepath.Join(t.TempDir(), "real.py"), t.TempDir()
	path := filepath.Join(folder, "my_adder.py")
	save(t, target, addTo("x", 1))
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
	p := upWorker(t, path)
	_, line := p.served(t, 1)
	away := filepath.Join(folder, "away")
	if err := os.Rename(path, away); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(away, path); err != nil {
		t.Fatal(err)
	}
	save(t, target, addTo("x", 2))
	testbed.Eventually(t, "what was saved answers", func() bool { return strings.Contains(p.ask(t, line), `"data":[2]`) })
	if n := strings.Count(p.errOut.String(), "the worker was saved"); n != 1 {
		t.Errorf("it was restarted %d times", n)
	}
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

// ask is shell, while the worker may be away.
func (p *process) ask(t *testing.T, line string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "bash", "-c", line+" --silent --max-time 5").Output()
	if err != nil {
		return err.Error()
	}
	return string(out)
}

// scaler is a worker with several models, whose sources are numbers.
const scaler = `from stagemesh import ModelLimits, Text, Worker


class Scale(Worker):
    inputs = {"x": Text()}
    outputs = {"y": Text()}
    examples = [{"x": "7"}]
    models = ModelLimits(capacity=1 << 20, default_size=100)

    def load(self, model):
        return int(model.source)

    def predict_item(self, item):
        return {"y": str(item.model * int(item["x"]))}
`

func TestWorkerWithModelsIsCheckedAndServed(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "my_adder.py")
	save(t, path, scaler)
	if out, err := run(t, "check", path, "--model", "two=2", "--model", "ten=10"); err != nil || !strings.Contains(out, "ok    unloads and loads models: two, ten") {
		t.Errorf("got %q, %v", out, err)
	}
	for want, args := range map[string][]string{"--model ID=SOURCE": nil, "a model is not loaded: exception: ValueError": {"--model", "x=many"}} {
		if out, err := run(t, append([]string{"check", path}, args...)...); err == nil || !strings.Contains(out, want) {
			t.Errorf("got %q, %v, want %q", out, err, want)
		}
	}
	p := upWorker(t, path, "--model", "two=2", "--model", "ten=10")
	testbed.Eventually(t, "the worker is served", func() bool { return p.out.Has("\ncurl ") })
	_, line, _ := strings.Cut(strings.TrimSpace(p.out.String()), "\n")
	if got := shell(t, line); !strings.Contains(line, "model:two:infer") || got != "14" {
		t.Errorf("%s answers %s", line, got)
	}
	if got := shell(t, strings.Replace(line, "model:two", "model:ten", 1)); got != "70" {
		t.Errorf("the other model answers %s", got)
	}
	if err := p.end(t); err != nil {
		t.Error(err)
	}
}

func TestUpShowsAMistakeOnceAndWaitsForTheSave(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "my_adder.py")
	save(t, path, "import nothing_of_that_name\n")
	p := upWorker(t, path)
	testbed.Eventually(t, "the mistake is told", func() bool { return p.errOut.Has("the worker does not start") })
	save(t, path, addTo("x", 1))
	_, line := p.served(t, 1)
	save(t, path, "def broken(:\n")
	testbed.Eventually(t, "the next one is", func() bool { return strings.Count(p.errOut.String(), "the worker does not start") == 2 })
	save(t, path, addTo("x", 2))
	testbed.Eventually(t, "the mended worker answers", func() bool { return strings.Contains(p.ask(t, line), `"data":[2]`) })
	if err := p.end(t); err != nil {
		t.Error(err)
	}
	for _, mistake := range []string{"import nothing_of_that_name", "def broken(:"} {
		if n := strings.Count(p.errOut.String(), mistake); n != 1 {
			t.Errorf("%q is shown %d times", mistake, n)
		}
	}
}

func TestUpRejectsInvalidWorkers(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	text := filepath.Join(folder, "notes.txt")
	save(t, text, "no program")
	worker := filepath.Join(folder, "my_adder.py")
	save(t, worker, addTo("x", 1))
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"not there":            {[]string{filepath.Join(folder, "none.py")}, "no such file"},
		"a folder":             {[]string{folder}, "is a folder"},
		"no program":           {[]string{text}, "neither a Python file nor a program"},
		"two":                  {[]string{worker, worker}, "give one WORKER"},
		"a mesh as well":       {[]string{worker, "--config", "mesh.yaml"}, "either a WORKER or --config"},
		"options of none":      {[]string{"--options", "{}"}, "for a WORKER"},
		"options that are not": {[]string{worker, "--options", "{"}, "--options: must be a JSON object"},
		"a list of options":    {[]string{worker, "--options", "[1]"}, "--options: must be a JSON object"},
		"no workers":           {[]string{worker, "--workers", "0"}, "--workers"},
		"an address":           {[]string{worker, "--listen", "here"}, "--listen"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := run(t, append([]string{"up"}, test.args...)...)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("it ended with %v, want %q", err, test.want)
			}
		})
	}
}
