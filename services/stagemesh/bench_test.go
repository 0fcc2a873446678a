package stagemesh_test

import (
	"context"
	"encoding/xml"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/bus/bustest"
	"github.com/stagemesh/stagemesh/services/bench/report"
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

// reported returns the report that a run of bench leaves in a file.
func reported(t *testing.T, args ...string) (report.Report, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "report.json")
	out, err := run(t, append(append([]string{"bench"}, args...), "--json", path)...)
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	r, err := report.ReadJSON(file)
	if err != nil {
		t.Fatal(err)
	}
	return r, out
}

func TestBenchAsksARunningMeshInEveryProtocol(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	for _, protocol := range []string{"grpc", "connect", "http", "oip"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			r, out := reported(t, "digits", image("00-1.png"), image("07-9.png"), "-a", address, "--protocol", protocol, "--warmup", "20ms", "--requests", "40", "--concurrency", "2,4")
			if len(r.Runs) != 2 || r.Subject.Place != report.Elsewhere || r.Subject.Protocol != protocol || r.Machine.Cores == 0 {
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
	path := write(t, benched)
	for name, test := range map[string]struct {
		args  []string
		place string
	}{
		"in this process": {nil, report.InProcess},
		"as processes":    {[]string{"--processes"}, report.Processes},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			picture := filepath.Join(t.TempDir(), "picture.svg")
			args := append([]string{
				"both", "--payload", "1KiB", "--mesh", path, "--rate", "200", "--arrivals", "poisson", "--warmup", "50ms",
				"--requests", "60", "--deadline", "1m", "--durability", "file", "--priority", "1", "--plot", picture,
			}, test.args...)
			r, _ := reported(t, args...)
			run := r.Runs[0]
			if r.Subject.Place != test.place || r.Subject.File != path || run.Answered != 60 || run.Generator.Shared != (test.place == report.InProcess) {
				t.Errorf("got %+v", r)
			}
			if samples := run.Process.Samples; len(samples) == 0 || samples[0].HeapMB <= 0 || samples[0].Goroutines == 0 {
				t.Errorf("of the process it says %+v", samples)
			}
			if run.Goodput == nil || run.Goodput.Answers != 60 || run.Load.Arrivals != "poisson" || run.Load.RatePerS != 200 {
				t.Errorf("got %+v", run)
			}
			svg, err := os.ReadFile(picture)
			var any struct{ XMLName xml.Name }
			if err != nil || xml.Unmarshal(svg, &any) != nil || any.XMLName.Local != "svg" {
				t.Errorf("the picture is %q, %v", svg, err)
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(path), "kept")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("it touched what the mesh keeps: %v", err)
			}
		})
	}
}

func TestBenchSetsABaselineBesideTheMesh(t *testing.T) {
	t.Parallel()
	path := write(t, benched)
	for name, test := range map[string]struct {
		args []string
		runs int
	}{
		"in this process":         {[]string{"both", "--concurrency", "1,4"}, 2},
		"as processes, on a file": {[]string{"both", "--processes", "--durability", "file", "--rate", "200"}, 1},
		"one stage, by connect":   {[]string{"stage:one", "--protocol", "connect", "--concurrency", "4"}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, out := reported(t, append(test.args, "--mesh", path, "--payload", "1KiB", "--baseline", "--pairs", "3", "--warmup", "20ms", "--requests", "40")...)
			if len(r.Runs) != test.runs || len(r.Baseline) != test.runs || len(r.Comparisons) != test.runs {
				t.Fatalf("got %d runs, %d of the baseline, %d comparisons", len(r.Runs), len(r.Baseline), len(r.Comparisons))
			}
			for i, c := range r.Comparisons {
				if len(c.Pairs) != 3 || c.Throughput.Min <= 0 || c.Throughput.Median < c.Throughput.Min || c.P50.Max < c.P50.Median {
					t.Errorf("got %+v", c)
				}
				for _, p := range c.Pairs {
					if p.Mesh.Answered != 40 || p.Baseline.Answered != 40 {
						t.Errorf("got %+v", p)
					}
				}
				// The baseline has no timelines: that of the mesh is not taken for it.
				if len(r.Runs[i].Steps) == 0 || len(r.Baseline[i].Steps) != 0 {
					t.Errorf("steps of mesh %d, of the baseline %d", len(r.Runs[i].Steps), len(r.Baseline[i].Steps))
				}
			}
			if !strings.Contains(out, "MESH / BASELINE") || !strings.Contains(out, "medians of 3 pairs") {
				t.Errorf("it printed\n%s", out)
			}
		})
	}
}

func TestBenchMeasuresChunks(t *testing.T) {
	t.Parallel()
	r, out := reported(t, "stage:words", "--payload", "5", "--mesh", write(t, benched), "--streams", "--warmup", "0s", "--requests", "20", "--concurrency", "2")
	if s := r.Runs[0].Stream; s == nil || s.Chunks != 60 || s.Gap.P50MS <= 0 || !strings.Contains(out, "gap between chunks") {
		t.Errorf("got %+v\n%s", s, out)
	}
}

func TestBenchTellsRefusalsApart(t *testing.T) {
	t.Parallel()
	r, out := reported(t, "stage:full", "--payload", "1", "--mesh", write(t, benched), "--warmup", "500ms", "--rate", "100", "--requests", "100")
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
	r, err := report.ReadJSON(strings.NewReader(out))
	if err != nil || r.Runs[0].Answered != 5 || r.Subject.Payload != "scores=FP32[1,10]" || r.Subject.Bytes != 40 {
		t.Errorf("got %+v, %v", r, err)
	}
}

// What Ctrl-C does is to end the context.
func TestBenchTellsWhatItMeasuredWhenItIsStopped(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	t.Cleanup(server.Close)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out log
	ended := make(chan error, 1)
	go func() {
		ended <- command(ctx, strings.NewReader(""), &out, io.Discard, "bench", "digits", "--payload", "1", "-a", server.URL, "--protocol", "http", "--warmup", "0s", "--duration", "1h")
	}()
	bustest.Eventually(t, "it has asked some", func() bool { return asked.Load() > 100 })
	cancel()
	if err := bustest.Receive(t, "its end", ended); err != nil || !out.has("then it was interrupted") || !out.has("LATENCY") {
		t.Errorf("got %v\n%s", err, out.String())
	}
}

func TestBenchSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"nothing":               {nil, "give a PIPELINE, and FILEs, --payload or --tensor; see stagemesh bench --help"},
		"nothing to send":       {[]string{"digits"}, "give one of FILEs, --payload and --tensor: what to send; see"},
		"two things to send":    {[]string{"digits", "f", "--payload", "1"}, "give one of FILEs"},
		"no file":               {[]string{"digits", "nowhere.png"}, "open nowhere.png: "},
		"two loops":             {[]string{"digits", "f", "--rate", "1", "--concurrency", "1"}, "--rate: is for callers who do not wait, and --concurrency for those who do; give one"},
		"a baseline of nothing": {[]string{"digits", "--payload", "1", "--baseline"}, "--baseline: is for a mesh that is started, whose broker it shares; name its file"},
		"pairs of nothing":      {[]string{"digits", "--payload", "1", "--pairs", "3"}, "--pairs: is for --baseline"},
		"no pairs":              {[]string{"digits", "--payload", "1", "--mesh", "m", "--baseline", "--pairs", "0"}, "--pairs: 0 is not between 1 and"},
		"a baseline of models":  {[]string{"digits", "--payload", "1", "--mesh", "m", "--baseline", "--protocol", "oip"}, "--protocol: the baseline speaks grpc and connect, not oip"},
		"a baseline in chunks":  {[]string{"digits", "--payload", "1", "--mesh", "m", "--baseline", "--streams"}, "--streams: the baseline does not"},
		"a baseline of two":     {[]string{"digits", "--tensor", "FP32[1]", "--tensor", "FP32[1]", "--mesh", "m", "--baseline"}, "--tensor: the baseline takes one input"},
		"arrivals alone":        {[]string{"digits", "f", "--arrivals", "poisson"}, "--arrivals: is for --rate"},
		"a bound alone":         {[]string{"digits", "f", "--max-in-flight", "1"}, "--max-in-flight: is for --rate"},
		"odd arrivals":          {[]string{"digits", "--payload", "1", "--rate", "1", "--arrivals", "odd"}, `--arrivals: "odd" is neither constant nor poisson`},
		"no bound":              {[]string{"digits", "--payload", "1", "--rate", "1", "--max-in-flight", "-1"}, "--max-in-flight: -1 is not between"},
		"no callers":            {[]string{"digits", "--payload", "1", "--concurrency", "0"}, "--concurrency: 0 is not between 1 and"},
		"no rate":               {[]string{"digits", "--payload", "1", "--rate", "0"}, "--rate: 0 is not above 0"},
		"time runs back":        {[]string{"digits", "--payload", "1", "--duration", "-1s"}, "--duration: -1s is negative"},
		"a deadline before":     {[]string{"digits", "--payload", "1", "--deadline", "-1s"}, "--deadline: -1s is negative"},
		"no size":               {[]string{"digits", "--payload", "much"}, `--payload: "much" is not a size`},
		"too large":             {[]string{"digits", "--payload", "1GiB"}, "--payload: 1GiB is not between 0 and 64MiB"},
		"no tensor":             {[]string{"digits", "--tensor", "FP32"}, `--tensor: "FP32": use a datatype and a shape`},
		"no protocol":           {[]string{"digits", "--payload", "1", "--protocol", "soap"}, `--protocol: "soap" is none of grpc, connect, http and oip`},
		"streams of others":     {[]string{"digits", "--payload", "1", "--protocol", "oip", "--streams"}, "--streams: the protocol cannot say it in oip"},
		"no durability":         {[]string{"digits", "--payload", "1", "--durability", "stone"}, `--durability: "stone": use memory or file`},
		"two meshes":            {[]string{"digits", "--payload", "1", "--mesh", "m.yaml", "-a", "x"}, "--address: is of a mesh that runs, and --mesh starts one"},
		"processes of none":     {[]string{"digits", "--payload", "1", "--processes"}, "--processes: is for a mesh that is started"},
		"no mesh":               {[]string{"digits", "--payload", "1", "--mesh", "nowhere.yaml"}, "--mesh: open nowhere.yaml: "},
		"no place for JSON":     {[]string{"digits", "--payload", "1", "--json", "nowhere/x.json"}, "--json: open nowhere/x.json: "},
		"no place to draw":      {[]string{"digits", "--payload", "1", "--plot", "nowhere/x.svg"}, "--plot: open nowhere/x.svg: "},
		"nobody":                {[]string{"digits", "--payload", "1", "-a", "127.0.0.1:1"}, "nobody answers at http://127.0.0.1:1: the first request failed: "},
		"no address":            {[]string{"digits", "--payload", "1", "-a", "ftp://x"}, `--address: "ftp://x" is no address`},
		"an unknown pipeline":   {[]string{"nope", "--payload", "1", "-a", address}, "the first request failed: "},
		"a bad input":           {[]string{"digits", "--payload", "1", "-a", address}, "the first request failed: "},
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

func TestBenchFailsWhereNothingIsAnswered(t *testing.T) {
	t.Parallel()
	out, err := run(t, "bench", "stage:nope", "--payload", "1", "-a", mesh(t), "--warmup", "0s", "--requests", "5")
	if err == nil || !strings.Contains(err.Error(), "there was no answer at all") || !strings.Contains(out, "NO_CAPACITY (refused)") {
		t.Errorf("got %v\n%s", err, out)
	}
}

// What stops the processes is the end of their input; a part that cannot start says why.
func TestBenchSaysWhichProcessFailed(t *testing.T) {
	t.Parallel()
	path := write(t, "mesh: m\nstages:\n  broken: {runner: {worker: {command: [\"false\"]}}, start_timeout: 2s}\n")
	_, err := run(t, "bench", "stage:broken", "--payload", "1", "--mesh", path, "--processes")
	if err == nil || !strings.HasPrefix(err.Error(), "a host of stage broken: ") {
		t.Errorf("got %v", err)
	}
}
