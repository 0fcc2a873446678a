package cli_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// benched is the file of a mesh that bench starts.
const benched = `mesh: echoes
nats: {store_dir: kept}
stages:
  one: {runner: {echo: {}}, hosts: 2, listen: "127.0.0.1:1"}
  two: {runner: {echo: {}}}
  words: {runner: {stream: {chunks: 3, every: 1ms}}}
  full: {runner: {sleep: {base: 200ms}}, batch: {max_size: 1}, max_in_flight: 7, queue: {max_items: 1}}
pipelines:
  both: {steps: [{name: one, stage: one}, {name: two, stage: two}]}
`

// reported returns the JSON report and the text of stagemesh bench.
func reported(t *testing.T, args ...string) (load.Report, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "report.json")
	out, err := run(t, append(append([]string{"bench"}, args...), "--json", path)...)
	if err != nil {
		t.Fatal(err)
	}
	text := testbed.ReadFile(t, path)
	return readReport(t, text), out
}

// readReport reads a report as JSON.
func readReport(t *testing.T, text []byte) (r load.Report) {
	t.Helper()
	if err := json.Unmarshal(text, &r); err != nil || r.Version != load.ReportVersion {
		t.Fatalf("version %d, %v", r.Version, err)
	}
	return r
}

func TestBenchMeasuresARunningMeshInEveryProtocol(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	for _, protocol := range []string{"grpc", "connect", "http", "oip"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			r, out := reported(t, "digits", image("00-1.png"), image("07-9.png"), "-a", address, "--protocol", protocol, "--warmup", "20ms", "--requests", "40", "--concurrency", "2,4")
			if len(r.Runs) != 2 || r.Subject.Place != load.Elsewhere || r.Subject.Protocol != protocol || r.Machine.Cores == 0 {
				t.Fatalf("got %+v", r)
			}
			for _, run := range r.Runs {
				if run.Answered != 40 || run.Failed != 0 || len(run.Steps) != 3 || run.Latency.P50MS <= 0 || run.Total.Count != 40 || run.Generator.CPUMS <= 0 || run.Generator.Shared {
					t.Errorf("got %+v", run)
				}
			}
			for _, want := range []string{"pipeline digits by " + protocol, "2 CALLERS", "4 CALLERS", "LATENCY", "classify queue", "outside", "BATCHES", "ALL RUNS"} {
				if !strings.Contains(out, want) {
					t.Errorf("there is no %q in\n%s", want, out)
				}
			}
		})
	}
}

func TestBenchStartsTheMeshOfAFile(t *testing.T) {
	t.Parallel()
	path := testbed.MeshFile(t, benched)
	r, _ := reported(t, "both", "--payload", "1KiB", "--mesh", path, "--rate", "200", "--arrivals", "poisson", "--warmup", "50ms",
		"--requests", "60", "--deadline", "1m", "--durability", "file", "--priority", "1")
	run := r.Runs[0]
	if r.Subject.Place != load.InProcess || r.Subject.File != path || run.Answered != 60 || !run.Generator.Shared {
		t.Errorf("got %+v", r)
	}
	if samples := run.Process.Samples; len(samples) == 0 || samples[0].HeapMB <= 0 || samples[0].Goroutines == 0 {
		t.Errorf("the process has samples %+v", samples)
	}
	if run.Goodput == nil || run.Goodput.Answers != 60 || run.Load.Arrivals != "poisson" || run.Load.RatePerS != 200 {
		t.Errorf("got %+v", run)
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(path), "kept")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it touched the mesh's store: %v", err)
	}
}

func TestBenchMeasuresChunks(t *testing.T) {
	t.Parallel()
	r, out := reported(t, "stage:words", "--payload", "5", "--mesh", testbed.MeshFile(t, benched), "--streams", "--warmup", "0s", "--requests", "20", "--concurrency", "2")
	if s := r.Runs[0].Stream; s == nil || s.Chunks != 60 || s.Gap.P50MS <= 0 || !strings.Contains(out, "gap between chunks") {
		t.Errorf("got %+v\n%s", s, out)
	}
}

func TestBenchSeparatesRefusals(t *testing.T) {
	t.Parallel()
	r, out := reported(t, "stage:full", "--payload", "1", "--mesh", testbed.MeshFile(t, benched), "--warmup", "500ms", "--rate", "100", "--requests", "100")
	run := r.Runs[0]
	if run.Answered == 0 || run.Failed == 0 || run.Answered+run.Failed != 100 || run.Refusals.Count != run.Failed || run.Refusals.P50MS >= run.Latency.P50MS {
		t.Errorf("got %+v", run)
	}
	if !strings.Contains(out, "(refused)") || !strings.Contains(out, "refusals") {
		t.Errorf("it printed\n%s", out)
	}
}

func TestBenchPrintsJSONInsteadOfText(t *testing.T) {
	t.Parallel()
	out, err := run(t, "bench", "stage:label", "--tensor", "scores=FP32[1,10]", "-a", mesh(t), "--warmup", "0s", "--requests", "5", "--json", "-")
	if err != nil {
		t.Fatal(err)
	}
	if r := readReport(t, []byte(out)); r.Runs[0].Answered != 5 || r.Subject.Payload != "scores=FP32[1,10]" || r.Subject.Bytes != 40 {
		t.Errorf("got %+v", r)
	}
}

// Ctrl-C ends the context.
func TestInterruptedBenchReports(t *testing.T) {
	t.Parallel()
	var received atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { received.Add(1) }))
	t.Cleanup(server.Close)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out testbed.Log
	ended := make(chan error, 1)
	go func() {
		ended <- command(ctx, strings.NewReader(""), &out, io.Discard, "bench", "digits", "--payload", "1", "-a", server.URL, "--protocol", "http", "--warmup", "0s", "--duration", "1h")
	}()
	testbed.Eventually(t, "it has sent some", func() bool { return received.Load() > 100 })
	cancel()
	if err := testbed.Receive(t, "its end", ended); err != nil || !out.Has("then it was interrupted") || !out.Has("LATENCY") {
		t.Errorf("got %v\n%s", err, out.String())
	}
}

func TestBenchNamesWrongArguments(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"nothing":             {nil, "give a PIPELINE, and FILEs, --payload or --tensor; see stagemesh bench --help"},
		"nothing to send":     {[]string{"digits"}, "give one input: FILEs, --payload or --tensor; see"},
		"two things to send":  {[]string{"digits", "f", "--payload", "1"}, "give one input: FILEs"},
		"no file":             {[]string{"digits", "nowhere.png"}, "open nowhere.png: "},
		"two loops":           {[]string{"digits", "f", "--rate", "1", "--concurrency", "1"}, "--rate: is for an open loop, and --concurrency for a closed one; give one"},
		"arrivals alone":      {[]string{"digits", "f", "--arrivals", "poisson"}, "--arrivals: is for --rate"},
		"a bound alone":       {[]string{"digits", "f", "--max-in-flight", "1"}, "--max-in-flight: is for --rate"},
		"odd arrivals":        {[]string{"digits", "--payload", "1", "--rate", "1", "--arrivals", "odd"}, `--arrivals: "odd" is neither constant nor poisson`},
		"no bound":            {[]string{"digits", "--payload", "1", "--rate", "1", "--max-in-flight", "-1"}, "--max-in-flight: -1 is not between"},
		"no callers":          {[]string{"digits", "--payload", "1", "--concurrency", "0"}, "--concurrency: 0 is not between 1 and"},
		"no rate":             {[]string{"digits", "--payload", "1", "--rate", "0"}, "--rate: 0 is not above 0"},
		"time runs back":      {[]string{"digits", "--payload", "1", "--duration", "-1s"}, "--duration: -1s is negative"},
		"a deadline before":   {[]string{"digits", "--payload", "1", "--deadline", "-1s"}, "--deadline: -1s is negative"},
		"no size":             {[]string{"digits", "--payload", "much"}, `--payload: "much" is not a size`},
		"too large":           {[]string{"digits", "--payload", "1GiB"}, "--payload: 1GiB is not between 0 and 64MiB"},
		"no tensor":           {[]string{"digits", "--tensor", "FP32"}, `--tensor: "FP32": use a datatype and a shape`},
		"no protocol":         {[]string{"digits", "--payload", "1", "--protocol", "soap"}, `--protocol: expected grpc, connect, http or oip, got "soap"`},
		"streams of others":   {[]string{"digits", "--payload", "1", "--protocol", "oip", "--streams"}, "--streams: not supported by oip"},
		"no durability":       {[]string{"digits", "--payload", "1", "--durability", "stone"}, `--durability: "stone": use memory or file`},
		"two meshes":          {[]string{"digits", "--payload", "1", "--mesh", "m.yaml", "-a", "x"}, "--address: is for a running mesh, and --mesh starts one"},
		"no mesh":             {[]string{"digits", "--payload", "1", "--mesh", "nowhere.yaml"}, "--mesh: open nowhere.yaml: "},
		"no place for JSON":   {[]string{"digits", "--payload", "1", "--json", "nowhere/x.json"}, "--json: open nowhere/x.json: "},
		"nobody":              {[]string{"digits", "--payload", "1", "-a", "127.0.0.1:1"}, "cannot connect to http://127.0.0.1:1: the first request failed: "},
		"no address":          {[]string{"digits", "--payload", "1", "-a", "ftp://x"}, `--address: "ftp://x" is not an address`},
		"an unknown pipeline": {[]string{"nope", "--payload", "1", "-a", address}, "the first request failed: "},
		"a bad input":         {[]string{"digits", "--payload", "1", "-a", address}, "the first request failed: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, err := run(t, append([]string{"bench"}, test.args...)...)
			if err == nil || !strings.HasPrefix(err.Error(), test.want) || out != "" {
				t.Errorf("got %q, %v", out, err)
			}
		})
	}
}

func TestBenchFailsWithoutAnswers(t *testing.T) {
	t.Parallel()
	out, err := run(t, "bench", "stage:nope", "--payload", "1", "-a", mesh(t), "--warmup", "0s", "--requests", "5")
	if err == nil || !strings.Contains(err.Error(), "no request was answered") || !strings.Contains(out, "NO_CAPACITY (refused)") {
		t.Errorf("got %v\n%s", err, out)
	}
}
