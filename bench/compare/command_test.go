package compare_test

import (
	"bytes"
	"encoding/xml"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/bench/compare"
	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestMeshRunsAsProcesses(t *testing.T) {
	t.Parallel()
	path, picture := testbed.MeshFile(t, echoes), filepath.Join(t.TempDir(), "picture.svg")
	input := testbed.WriteFile(t, "input.txt", "some text")
	r, _ := measure(t, "both", input, "--mesh", path, "--processes", "--rate", "200", "--warmup", "50ms", "--requests", "60", "--durability", "file", "--plot", picture)
	run := r.Runs[0]
	if r.Subject.Place != load.Processes || r.Subject.File != path || run.Answered != 60 || run.Generator.Shared || len(run.Steps) != 2 {
		t.Errorf("got %+v", r)
	}
	svg, err := os.ReadFile(picture)
	var any struct{ XMLName xml.Name }
	if err != nil || xml.Unmarshal(svg, &any) != nil || any.XMLName.Local != "svg" {
		t.Errorf("the picture is %q, %v", svg, err)
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(path), "kept")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it touched the mesh's store: %v", err)
	}
}

func TestMeshAndBaselineAreCompared(t *testing.T) {
	t.Parallel()
	path := testbed.MeshFile(t, echoes)
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
			r, out := measure(t, append(test.args, "--mesh", path, "--payload", "1KiB", "--baseline", "--pairs", "3", "--warmup", "20ms", "--requests", "40")...)
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
				// Only answers of the mesh have timelines, so the two are not mixed up.
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

func TestMeshAndPeerAreCompared(t *testing.T) {
	t.Parallel()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r, out := measure(t, "stage:one", "--mesh", testbed.MeshFile(t, echoes), "--payload", "1KiB", "--protocol", "http", "--concurrency", "4",
		"--peer", program+" "+peerName, "--pairs", "2", "--warmup", "20ms", "--requests", "40")
	if len(r.Comparisons) != 1 || len(r.Comparisons[0].Pairs) != 2 || r.Comparisons[0].Pairs[1].Baseline.Answered != 40 || !strings.Contains(out, "MESH / PEER") {
		t.Errorf("got %+v, and it printed\n%s", r.Comparisons, out)
	}
}

func TestWrongArgumentsAreNamed(t *testing.T) {
	t.Parallel()
	broken := testbed.MeshFile(t, "mesh: m\nstages:\n  broken: {runner: {worker: {command: [\"false\"]}}, start_timeout: 2s}\n")
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"nothing":             {nil, "give a PIPELINE, and FILEs, --payload or --tensor"},
		"nothing to send":     {[]string{"p", "--mesh", "m"}, "give one input: FILEs, --payload or --tensor"},
		"no mesh":             {[]string{"p", "--payload", "1"}, "--mesh: name the file of the mesh to start"},
		"no file":             {[]string{"p", "--payload", "1", "--mesh", "nowhere.yaml"}, "--mesh: open nowhere.yaml: "},
		"no input":            {[]string{"p", "nowhere", "--mesh", "m"}, "open nowhere: "},
		"no place to draw":    {[]string{"p", "--payload", "1", "--mesh", "m", "--plot", "nowhere/x.svg"}, "--plot: open nowhere/x.svg: "},
		"pairs of nothing":    {[]string{"p", "--payload", "1", "--mesh", "m", "--pairs", "3"}, "--pairs: is for --baseline, --handler and --peer"},
		"no pairs":            {[]string{"p", "--payload", "1", "--mesh", "m", "--baseline", "--pairs", "0"}, "--pairs: 0 is not between 1 and"},
		"peer and baseline":   {[]string{"p", "--payload", "1", "--mesh", "m", "--baseline", "--peer", "it"}, "--handler and --peer: take the place of --baseline"},
		"handler and peer":    {[]string{"p", "--payload", "1", "--mesh", "m", "--handler", "--peer", "it"}, "--handler and --peer: take the place of --baseline"},
		"peer by grpc":        {[]string{"p", "--payload", "1", "--mesh", "m", "--peer", "it"}, "--peer: is for --protocol http"},
		"peer that fails":     {[]string{"both", "--payload", "1", "--mesh", testbed.MeshFile(t, echoes), "--protocol", "http", "--peer", "false"}, "the peer: EOF"},
		"baseline by oip":     {[]string{"p", "--payload", "1", "--mesh", "m", "--baseline", "--protocol", "oip"}, "--protocol: the baseline serves grpc and connect, and a handler http, not oip"},
		"baseline in chunks":  {[]string{"p", "--payload", "1", "--mesh", "m", "--baseline", "--streams"}, "--streams: the baseline does not"},
		"baseline of two":     {[]string{"p", "--tensor", "FP32[1]", "--tensor", "FP32[1]", "--mesh", "m", "--baseline"}, "--tensor: the baseline takes one input"},
		"process that fails":  {[]string{"stage:broken", "--payload", "1", "--mesh", broken, "--processes"}, "a host of stage broken: "},
		"first request fails": {[]string{"nope", "--payload", "1", "--mesh", testbed.MeshFile(t, echoes)}, "the first request failed: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			err := execute(t.Context(), &out, t.Output(), append([]string{"run"}, test.args...)...)
			if err == nil || !strings.HasPrefix(err.Error(), test.want) || out.Len() != 0 {
				t.Errorf("got %q, %v", out.String(), err)
			}
		})
	}
}

func TestOtherReportVersionIsRejected(t *testing.T) {
	t.Parallel()
	if _, err := compare.ReadJSON(strings.NewReader(`{"version": 2}`)); !errors.Is(err, compare.ErrVersion) || !strings.Contains(err.Error(), "it is 2, and this program reads 1") {
		t.Errorf("got %v", err)
	}
	if _, err := compare.ReadJSON(strings.NewReader(`no`)); err == nil || !strings.HasPrefix(err.Error(), "not a report: ") {
		t.Errorf("got %v", err)
	}
}

func TestFewAnswersHaveDecimals(t *testing.T) {
	t.Parallel()
	slow, _ := compare.Compare([]load.Run{{ThroughputPerS: 0.97}}, []load.Run{{ThroughputPerS: 0.783}})
	fast, _ := compare.Compare([]load.Run{{ThroughputPerS: 1340.7}}, []load.Run{{ThroughputPerS: 99.6}})
	var out bytes.Buffer
	if err := compare.WriteText(&out, compare.Report{Report: load.Report{}, Comparisons: []compare.Comparison{slow, fast}}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"0.97 / 0.78", "1341 / 99.6"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}
