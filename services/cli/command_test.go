package cli_test

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestConfigCheckTakesAGoodFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(digits, "mesh.yaml")
	out, err := run(t, "config", "check", path)
	if want := "stage classify: Go, on the CPU\n" + path + ": mesh digits is fine: 3 stages, 1 pipeline\n"; err != nil || out != want {
		t.Errorf("got %q, %v, want %q", out, err, want)
	}
}

func TestConfigCheckKnowsABrokerOfAFlag(t *testing.T) {
	t.Parallel()
	path := testbed.MeshFile(t, "mesh: m\nresults: {replicas: 3}\nstages: {a: {runner: {echo: {}}}}\n")
	if _, err := run(t, "config", "check", path); err == nil || !strings.Contains(err.Error(), "3 copies need a cluster of brokers") {
		t.Errorf("without a broker: %v", err)
	}
	if _, err := run(t, "config", "check", "--nats", "nats://broker:4222", path); err != nil {
		t.Error(err)
	}
}

func TestConfigCheckReportsErrorsWithPlaces(t *testing.T) {
	t.Parallel()
	const stages = "mesh: m\nstages:\n  a: {runner: {echo: {}}}\n"
	for name, test := range map[string]struct {
		text string
		want []string
	}{
		"two mistakes": {
			"mesh: m\nstages:\n  a:\n    runner: {ecco: {}}\n    batch: {max_size: 0x}\n",
			[]string{`:5:23: stages.a.batch.max_size: "0x" is not a whole number`, ":4:14: stages.a.runner.ecco: this program has no such runner"},
		},
		"two mistakes of meaning": {
			"mesh: m\nstages:\n  a:\n    runner: {ecco: {}}\n    hosts: 99\n",
			[]string{":4:14: stages.a.runner.ecco: this program has no such runner", ":5:5: stages.a.hosts: 99 is not between 1 and 64"},
		},
		"mistakes of all kinds": {
			"mesh: m\nnats: {listen: \"127.0.0.1:0\", max_payload: 1}\nstages:\n  decode: {runner: {image_decode: {width: 8, height: 8}}, hosts: 99}\n  label: {runner: {top_k: {labels: [a]}}, batch: {max_wait: 5}}\n" +
				"pipelines:\n  p: {steps: [{name: one, stage: decode}, {name: two, stage: label}]}\n  q: {steps: []}\n",
			[]string{":5:61: stages.label.batch.max_wait", ":2:31: nats.max_payload", ":4:59: stages.decode.hosts: 99", ":8:7: pipelines.q.steps", ":7:43: pipelines.p.steps[1].inputs.scores"},
		},
		"steps that do not fit": {
			"mesh: m\nnats: {listen: \"127.0.0.1:0\"}\nstages:\n  decode: {runner: {image_decode: {width: 8, height: 8, channels: grey, layout: flat}}}\n  label: {runner: {top_k: {k: 3, labels: [a, b, c]}}}\n" +
				"pipelines:\n  p:\n    steps:\n      - {name: one, stage: decode}\n      - {name: two, stage: label}\n      - {name: three, stage: elsewhere}\n",
			[]string{":10:9: pipelines.p.steps[1].inputs.scores: the stage label takes scores, a tensor FP32[-1 3], and is given pixels, a tensor FP32[1 64]"},
		},
		"a parameter that is not read": {
			"mesh: m\nstages:\n  label: {runner: {top_k: {labels: [a, b, c]}}}\npipelines:\n  p:\n    steps: [{name: one, stage: label, parameters: {kk: 9}}]\n",
			[]string{":6:52: pipelines.p.steps[0].parameters.kk: the stage label reads no such parameter; it reads none"},
		},
		"models of a runner that has one": {
			"mesh: m\nstages:\n  a:\n    runner: {echo: {}}\n    models: {}\n",
			[]string{":5:5: stages.a.models: the runner of this stage has one model; leave the section out"},
		},
		"models in several workers": {
			"mesh: m\nstages:\n  a:\n    runner: {worker: {command: [python3, a.py], workers: 2}}\n    models: {}\n",
			[]string{":4:5: stages.a.runner: workers: a stage with models has one worker or one gang on a host, not 2; start more hosts"},
		},
		"origins":        {stages + "gateway:\n  allow_origins: [\"*\", \"http://x\"]\n", []string{`:5:19: gateway.allow_origins[0]: "*" allows every origin`}},
		"a misspelt key": {stages + "gateway: {max_paylod: 1MiB}\n", []string{`:4:11: gateway: "max_paylod" is not a key here; there are admin, allow_origins,`}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := testbed.MeshFile(t, test.text)
			out, err := run(t, "config", "check", path)
			if err == nil || out != "" {
				t.Fatalf("got %q, %v", out, err)
			}
			lines := strings.Split(err.Error(), "\n")
			if len(lines) != len(test.want) {
				t.Fatalf("got %d lines: %v", len(lines), err)
			}
			for i, want := range test.want {
				if !strings.HasPrefix(lines[i], path+want) {
					t.Errorf("got  %s\nwant %s", lines[i], path+want)
				}
			}
		})
	}
	if _, err := run(t, "config", "check", "nowhere.yaml"); err == nil || !strings.Contains(err.Error(), "nowhere.yaml: no such file") {
		t.Errorf("got %v", err)
	}
	if _, err := run(t, "config", "check"); err == nil || err.Error() != "give one FILE to check; see stagemesh config check --help" {
		t.Errorf("got %v", err)
	}
}

func TestConfigCheckTakesAFileOfPipelines(t *testing.T) {
	t.Parallel()
	path := testbed.MeshFile(t, "pipelines:\n  p: {steps: [{name: one, stage: elsewhere}]}\n")
	if out, err := run(t, "config", "check", path); err != nil || !strings.HasPrefix(out, path+": 1 pipeline without a mesh, fine") {
		t.Errorf("got %q, %v", out, err)
	}
	path = testbed.MeshFile(t, "pipelines:\n  p: {steps: []}\n  q: {timeout: -1s, steps: []}\n")
	_, err := run(t, "config", "check", path)
	if err == nil || !strings.Contains(err.Error(), ":2:6: pipelines.p") && !strings.Contains(err.Error(), "pipelines.q") {
		t.Errorf("got %v", err)
	}
}

func TestVersionNamesTheProgramAndThePlatform(t *testing.T) {
	t.Parallel()
	out, err := run(t, "version")
	words := strings.Fields(out)
	if err != nil || len(words) < 6 || words[0] != "stagemesh" || words[2] != runtime.Version() || words[3] != runtime.GOOS+"/"+runtime.GOARCH || words[4] != "(commit" {
		t.Errorf("got %q, %v", out, err)
	}
	if out, err := run(t, "--version"); err != nil || !strings.Contains(out, words[1]) {
		t.Errorf("--version: got %q, %v", out, err)
	}
}

func TestHelpAndCompletionKnowEveryVerb(t *testing.T) {
	t.Parallel()
	help, err := run(t, "help")
	if err != nil {
		t.Fatal(err)
	}
	for _, verb := range []string{"up", "infer", "get", "cancel", "status", "pipelines", "dead-letters", "client", "bench", "check", "config", "import", "version", "completion"} {
		if !strings.Contains(help, "\n  "+verb+" ") {
			t.Errorf("help does not know %s:\n%s", verb, help)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if out, err := run(t, "completion", shell); err != nil || !strings.Contains(out, "stagemesh") {
			t.Errorf("%s: got %d bytes, %v", shell, len(out), err)
		}
	}
	if _, err := run(t, "nope"); err == nil || !strings.Contains(err.Error(), `unknown command "nope"`) {
		t.Errorf("got %v", err)
	}
	if _, err := run(t, "config", "chek"); err == nil || !strings.Contains(err.Error(), `unknown command "chek"`) {
		t.Errorf("got %v", err)
	}
	if _, err := run(t, "up", "--nope"); err == nil || err.Error() != "unknown flag: --nope; see stagemesh up --help" {
		t.Errorf("got %v", err)
	}
}

func TestConfigCheckNamesTheEngine(t *testing.T) {
	t.Parallel()
	path := testbed.MeshFile(t, "mesh: m\nstages:\n  a: {runner: {onnx: {model: m.onnx, engine: go}}}\n  b: {runner: {onnx: {model: m.onnx, python: ./none}}}\n  c: {runner: {onnx: {model: m.onnx, python: ./none, threads: 2}}}\n  d: {runner: {echo: {}}}\n  e: {runner: {onnx_models: {engine: go}}, models: {root: .}}\nregistry: {nats: {}}\n")
	if err := os.WriteFile(filepath.Join(filepath.Dir(path), "m.onnx"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	python := filepath.Join(filepath.Dir(path), "none")
	why := python + " does not import onnxruntime: fork/exec " + python + ": no such file or directory; to install it: " + python + " -m pip install onnxruntime\n"
	want := "stage a: Go, on the CPU\nstage b: Go, on the CPU, which is far slower for most models: " + why +
		"stage c: it would not start here: engine: go has no providers, threads, graph_optimization, cache, outputs, batch_axis and replicas; use auto or onnxruntime: " + why + "stage e: Go, on the CPU\n"
	if out, err := run(t, "config", "check", path); err != nil || !strings.HasPrefix(out, want) {
		t.Errorf("got %v, %s\nwant %s", err, out, want)
	}
}

// A stage that no other process can serve runs here, and needs its files here.
func TestConfigCheckLooksForModelsAndWorkers(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct{ runner, want string }{
		"a worker":  {`worker: {command: [python3, -u, gone.py, other.py]}`, ":4:23: stages.a.runner.worker.command: there is no file %s/gone.py"},
		"a program": {`worker: {command: [./gone]}`, ":4:23: stages.a.runner.worker.command: there is no file %s/gone"},
		"a model":   {`onnx: {model: gone.onnx}`, ":4:21: stages.a.runner.onnx.model: there is no file %s/gone.onnx"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			text := "mesh: m\nstages:\n  a:\n    runner: {" + row.runner + "}\n"
			path := testbed.MeshFile(t, text)
			want := path + fmt.Sprintf(row.want, filepath.Dir(path))
			if out, err := run(t, "config", "check", path); err == nil || out != "" || err.Error() != want {
				t.Errorf("got  %v %s\nwant %s", err, out, want)
			}
			path = testbed.MeshFile(t, text+"nats: {url: \"nats://b\"}\n")
			want = path + fmt.Sprintf(row.want, filepath.Dir(path))
			var out, warnings testbed.Log
			if err := command(t.Context(), strings.NewReader(""), &out, &warnings, "config", "check", path); err != nil || !strings.Contains(warnings.String(), want) || !strings.Contains(out.String(), "is fine") {
				t.Errorf("got %v, %s, %s", err, out.String(), warnings.String())
			}
			_ = os.WriteFile(filepath.Join(filepath.Dir(path), "gone.py"), nil, 0o600)
			_ = os.WriteFile(filepath.Join(filepath.Dir(path), "gone"), nil, 0o600)
			_ = os.WriteFile(filepath.Join(filepath.Dir(path), "gone.onnx"), nil, 0o600)
			warnings = testbed.Log{}
			if err := command(t.Context(), strings.NewReader(""), &out, &warnings, "config", "check", path); err != nil || warnings.String() != "" {
				t.Errorf("with the file: %v, %s", err, warnings.String())
			}
		})
	}
}
