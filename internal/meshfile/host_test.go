package meshfile_test

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/discovery/natskv"
	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/bus"
	"github.com/stagemesh/stagemesh/internal/credentials"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/services/onnx"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
)

func mustParse(t *testing.T, text string) *meshfile.File {
	t.Helper()
	f, err := parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// host returns a stage's settings, apart from the runner.
func host(t *testing.T, f *meshfile.File, stage string) stagehost.Settings {
	t.Helper()
	out, err := f.Host(stage)
	if err != nil {
		t.Fatal(err)
	}
	if out.Runner == nil {
		t.Fatal("there is no runner")
	}
	out.Runner = nil
	return out
}

func TestEveryShippedRunnerIsBuilt(t *testing.T) {
	t.Parallel()
	f := mustParse(t, `
mesh: m
stages:
  image-decode: {runner: {image_decode: {width: 8, height: 4, concurrency: 2}}}
  onnx: {runner: {onnx: {model: m.onnx, concurrency: 3, axes: {sequence: 128}, batch_axis: 1}}}
  onnx-models: {runner: {onnx_models: {max_rows: 8, concurrency: 11}}, models: {root: models}}
  model-server: {runner: {model_server: {address: "unix:/run/s", control: repository, data_address: "[::1]:9000", concurrency: 10}}}
  top-k: {runner: {top_k: {labels: [0, one, 2], concurrency: 4}}}
  echo: {runner: {echo: {concurrency: 5}}}
  echo-models: {runner: {echo_models: {concurrency: 12}}, models: {}}
  echo-of-nothing: {runner: {echo: }}
  sleep: {runner: {sleep: {base: 5ms, per_item: 1ms, concurrency: 6}}}
  burn: {runner: {burn: {duration: 1ms, concurrency: 7}}}
  stream: {runner: {stream: {chunks: 3, concurrency: 9}}}
  worker: {runner: {worker: {command: [go, run, .], workers: 2, concurrency: 8}}}
`)
	want := map[string]int{"image-decode": 2, "onnx": 3, "top-k": 4, "echo": 5, "echo-models": 12, "echo-of-nothing": 1, "sleep": 6, "burn": 7, "stream": 9, "model-server": 10, "onnx-models": 11, "worker": 16}
	for stage, concurrency := range want {
		s, err := f.Host(stage)
		if err != nil {
			t.Errorf("%s: %v", stage, err)
			continue
		}
		if got := s.Runner.Concurrency(); got != concurrency {
			t.Errorf("%s: got a concurrency of %d, want %d", stage, got, concurrency)
		}
	}
	if got, kinds := len(want)-1, len(runners.All()); got != kinds {
		t.Errorf("%d of %d kinds are made here", got, kinds)
	}
}

// What a runner says by itself, or the file of it, is known before anything starts.
func TestStreamingStageMustBeLast(t *testing.T) {
	t.Parallel()
	const pipelines = `
pipelines:
  right: {steps: [{name: echo, stage: echo}, {name: talk, stage: talk}]}
  wrong: {steps: [{name: talk, stage: talk}, {name: echo, stage: echo}]}
`
	for name, talk := range map[string]string{
		"a runner in the process":   "{runner: {stream: {chunks: 3}}}",
		"a worker of which is said": "{runner: {worker: {command: [x]}}, batch: {mode: stream}}",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := parse("mesh: m\nstages:\n  echo: {runner: {echo: {}}}\n  talk: " + talk + pipelines)
			if err == nil || !strings.Contains(err.Error(), "pipelines.wrong.steps[0].stage: the stage talk streams its reply") || strings.Contains(err.Error(), "right") {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestEveryHostHasItsOwnRunner(t *testing.T) {
	t.Parallel()
	f := mustParse(t, good)
	one, err := f.Host("a")
	two, err2 := f.Host("a")
	if err != nil || err2 != nil || one.Runner == two.Runner {
		t.Errorf("got %v and %v, %v, %v", one.Runner, two.Runner, err, err2)
	}
}

func TestMinimalStageHasDefaults(t *testing.T) {
	t.Parallel()
	got := host(t, mustParse(t, good), "a")
	want := stagehost.Settings{Mesh: "m", Stage: "a", Config: stagehost.Config{Batch: stagehost.DefaultBatch()}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	f := mustParse(t, good)
	if f.OpsListen() != "127.0.0.1:9090" || f.Joinable() || f.NATS.Broker != (credentials.Broker{}) || f.NATS.StoreDir != "" {
		t.Errorf("got %s, %v, %v, %q", f.OpsListen(), f.Joinable(), f.NATS.Broker, f.NATS.StoreDir)
	}
	if routes, err := f.Routes(); err != nil || len(routes) != 0 {
		t.Errorf("got %v, %v", routes, err)
	}
}

func TestStageSettingsAreApplied(t *testing.T) {
	t.Parallel()
	f := mustParse(t, `
mesh: m
nats: {url: "nats://b:4222", credentials_file: keys/m.creds}
gateway: {max_timeout: 1m}
ops: {listen: "127.0.0.1:9191"}
results: {retention: 2h, max_bytes: 3MiB, replicas: 3, version: 4}
dead_letters: {retention: 48h, max_bytes: 5MiB, replicas: 5, version: 6}
idempotency: {retention: 90m, max_bytes: 7MiB, replicas: 7, version: 8}
stages:
  a:
    runner: {echo: {}}
    hosts: 3
    batch: {mode: window, max_size: 8, max_bytes: 1MiB, max_wait: 20ms, by: [language]}
    max_in_flight: 100
    queue: {durabilities: [file], max_items: 10, max_bytes: 2MiB, ack_wait: 3s, replicas: 3, version: 2}
    crash_limit: 5
    listen: 127.0.0.1:8081
    drain_timeout: 4s
`)
	want := stagehost.Settings{
		Config: stagehost.Config{
			Batch:       batch.Settings{Mode: batch.Window, MaxSize: 8, MaxBytes: 1 << 20, MaxWait: 20 * time.Millisecond, By: []string{"language"}},
			MaxInFlight: 100,
			Queue: stagehost.QueueSettings{
				Durabilities: []pipeline.Durability{pipeline.File}, MaxItems: 10, MaxBytes: 2 << 20, MaxAge: time.Minute,
				AckWait: 3 * time.Second, Replicas: 3, Version: 2,
			},
			CrashLimit: 5, Listen: "127.0.0.1:8081", DrainTimeout: 4 * time.Second,
		},
		Mesh: "m", Stage: "a",
		Bus:         bus.Settings{URL: "nats://b:4222", Auth: credentials.Broker{CredentialsFile: filepath.Join("testdata", "keys", "m.creds")}},
		Results:     store.Settings{Retention: 2 * time.Hour, MaxBytes: 3 << 20, Replicas: 3, Version: 4},
		DeadLetters: store.Settings{Retention: 48 * time.Hour, MaxBytes: 5 << 20, Replicas: 5, Version: 6},
	}
	if got := host(t, f, "a"); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	if f.OpsListen() != "127.0.0.1:9191" || !f.Joinable() || f.Stages["a"].Hosts != 3 {
		t.Errorf("got %s, %v, %d", f.OpsListen(), f.Joinable(), f.Stages["a"].Hosts)
	}
}

// Zero is a value for a time to wait, and none for a size.
func TestPartsOfAStageAreRead(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "total.json"), []byte(`{"type": "number"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := meshfile.Parse("m.yaml", []byte(`
mesh: m
stages:
  a:
    runner: {echo: {}}
    inputs:
      - name: order
        content_types: [application/json]
        description: what is bought
        schema:
          type: object
          properties: {price: {type: number, minimum: 0, maximum: 0.5}, paid: {const: true}}
      - {name: weights, datatype: FP32, shape: [-1, 3], optional: true}
      - {name: scale, datatype: FP64, shape: []}
    outputs:
      - {name: total, schema_file: total.json}
`), folder, runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	got := host(t, f, "a")
	wantInputs := []runner.PartSpec{
		{
			Name: "order", ContentTypes: []string{"application/json"}, Description: "what is bought",
			Schema: json.RawMessage(`{"properties":{"paid":{"const":true},"price":{"maximum":0.5,"minimum":0,"type":"number"}},"type":"object"}`),
		},
		{Name: "weights", Datatype: tensor.FP32, Shape: []int64{-1, 3}, Optional: true},
		{Name: "scale", Datatype: tensor.FP64, Shape: []int64{}},
	}
	if !reflect.DeepEqual(got.Inputs, wantInputs) {
		t.Errorf("got %+v", got.Inputs)
	}
	if want := []runner.PartSpec{{Name: "total", Schema: json.RawMessage(`{"type": "number"}`)}}; !reflect.DeepEqual(got.Outputs, want) {
		t.Errorf("got %+v", got.Outputs)
	}
}

// What a file says of some inputs of a runner is no reason to refuse a pipeline that
// feeds others.
func TestPipelineIsCheckedAgainstKnownSpecs(t *testing.T) {
	t.Parallel()
	const text = `
mesh: m
stages:
  a: {runner: {top_k: {k: 1, labels: [a, b]}}, outputs: [{name: labels, shape: [1, 1], datatype: BYTES}]}
  b: {runner: {worker: {command: [x]}}, inputs: [{name: one, datatype: BOOL, shape: [9]}]}
  c: {runner: {top_k: {k: 1, labels: [a, b]}}, inputs: [{name: scores, shape: [-1, 2], datatype: FP32}]}
pipelines:
  p: {steps: [{name: a, stage: a}, {name: b, stage: b, inputs: {another: labels}}]}
`
	mustParse(t, text)
	if _, err := parse(text + "  q: {steps: [{name: a, stage: a}, {name: c, stage: c, inputs: {scores: labels}}]}\n"); err == nil || !strings.Contains(err.Error(), "pipelines.q") {
		t.Errorf("got %v", err)
	}
}

func TestPartialBatchKeepsDefaults(t *testing.T) {
	t.Parallel()
	f := mustParse(t, "mesh: m\nstages:\n  a: {runner: {echo: {}}, batch: {max_wait: 0s}}\n  b: {runner: {echo: {}}, batch: {max_size: 1}}\n")
	want := stagehost.DefaultBatch()
	want.MaxWait = 0
	if got := host(t, f, "a").Batch; !reflect.DeepEqual(got, want) {
		t.Errorf("a: got %+v, want %+v", got, want)
	}
	want = stagehost.DefaultBatch()
	want.MaxSize = 1
	if got := host(t, f, "b").Batch; !reflect.DeepEqual(got, want) {
		t.Errorf("b: got %+v, want %+v", got, want)
	}
}

func TestPipelinesAreRead(t *testing.T) {
	t.Parallel()
	f := mustParse(t, good+`
pipelines:
  q: {steps: [{name: s, stage: a}]}
  p:
    timeout: 5s
    durability: memory
    keep: [image]
    max_in_flight: 7
    wait_for_capacity: true
    steps:
    - name: one
      stage: a
      model: m
      version: "2"
      inputs: {x: pixels}
      parameters: {flag: true, whole: 3, real: 0.5, word: x, quote: "3"}
    - {name: two, stage: a, alias: best}
`)
	got, err := f.Routes()
	if err != nil {
		t.Fatal(err)
	}
	want := []pipeline.Pipeline{
		{
			Name: "p", Timeout: 5 * time.Second, Durability: pipeline.Memory, Keep: []string{"image"},
			MaxInFlight: 7, WaitForCapacity: true,
			Steps: []pipeline.Step{
				{
					Name: "one", Stage: "a", Model: payload.ModelRef{Model: "m", Version: "2"}, Inputs: map[string]string{"x": "pixels"},
					Parameters: payload.Parameters{
						"flag": payload.Bool(true), "whole": payload.Int64(3), "real": payload.Double(0.5),
						"word": payload.String("x"), "quote": payload.String("3"),
					},
				},
				{Name: "two", Stage: "a", Model: payload.ModelRef{Alias: "best"}},
			},
		},
		{Name: "q", Steps: []pipeline.Step{{Name: "s", Stage: "a"}}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
}

func TestPipelineMayBeDurableWhereItsStagesAre(t *testing.T) {
	t.Parallel()
	f := mustParse(t, `
mesh: m
nats: {listen: "127.0.0.1:4222"}
stages:
  both: {runner: {echo: {}}}
  file: {runner: {echo: {}}, queue: {durabilities: [file]}}
  memory: {runner: {echo: {}}, queue: {durabilities: [memory]}}
pipelines:
  d: {durability: file, steps: [{name: b, stage: both}, {name: f, stage: file}, {name: e, stage: elsewhere}]}
  m: {steps: [{name: b, stage: both}, {name: m, stage: memory}]}
`)
	got, err := f.Routes()
	if err != nil || got[0].Durability != pipeline.File || got[1].Durability != pipeline.DurabilityUnset {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestReserveCountsExistingQueues(t *testing.T) {
	t.Parallel()
	memory, file := []pipeline.Durability{pipeline.Memory}, []pipeline.Durability{pipeline.File}
	const starts, each = 16 << 20, 256 << 20
	const kept = starts + 3*each // results, dead letters and idempotency keys
	for name, test := range map[string]struct {
		queues  []stagehost.QueueSettings
		results store.Settings
		letters store.Settings
		keys    store.Settings
		want    meshfile.Reserve
	}{
		"no queue":          {},
		"a default queue":   {queues: []stagehost.QueueSettings{{}}, want: meshfile.Reserve{Memory: 128 << 20, Store: 128<<20 + kept}},
		"in memory alone":   {queues: []stagehost.QueueSettings{{Durabilities: memory, MaxBytes: 3}}, want: meshfile.Reserve{Memory: 3, Store: starts + 2*each}},
		"one on file":       {queues: []stagehost.QueueSettings{{Durabilities: memory, MaxBytes: 3}, {Durabilities: file, MaxBytes: 5}}, want: meshfile.Reserve{Memory: 3, Store: 5 + kept}},
		"what else is kept": {queues: []stagehost.QueueSettings{{Durabilities: file, MaxBytes: 5}}, results: store.Settings{MaxBytes: 7}, letters: store.Settings{MaxBytes: 11}, keys: store.Settings{MaxBytes: 13}, want: meshfile.Reserve{Store: 5 + 7 + 11 + 13 + starts}},
	} {
		if got := meshfile.ReserveOf(test.queues, test.results, test.letters, test.keys); got != test.want {
			t.Errorf("%s: got %+v, want %+v", name, got, test.want)
		}
	}
}

func TestReserveCountsARegistryOfTheBroker(t *testing.T) {
	t.Parallel()
	one := meshfile.Reserve{Memory: 1, Store: 2}
	for name, test := range map[string]struct {
		of   meshfile.RegistryConfig
		want meshfile.Reserve
	}{
		"none":          {meshfile.RegistryConfig{None: true}, one},
		"Consul":        {meshfile.RegistryConfig{Consul: &meshfile.Consul{}}, meshfile.Reserve{Memory: 1, Store: 2 + 64<<20}},
		"by default":    {meshfile.RegistryConfig{}, meshfile.Reserve{Memory: 1 + 8<<20, Store: 2 + 64<<20}},
		"with settings": {meshfile.RegistryConfig{NATS: &natskv.Settings{MaxTableBytes: 3, MaxInstancesBytes: 5}}, meshfile.Reserve{Memory: 6, Store: 5}},
	} {
		if got := one.Registry(test.of); got != test.want {
			t.Errorf("%s: got %+v, want %+v", name, got, test.want)
		}
	}
}

func TestStageOfAnotherProcessMayBeAStep(t *testing.T) {
	t.Parallel()
	steps := "pipelines:\n  p: {steps: [{name: s, stage: elsewhere}]}\n"
	for _, broker := range []string{"nats: {url: \"nats://b\"}\n", "nats: {listen: \"127.0.0.1:4222\"}\n"} {
		if _, err := parse(good + broker + steps); err != nil {
			t.Errorf("%s: %v", broker, err)
		}
	}
}

func TestPathsAreRelativeToTheFile(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("labels.txt", "zero\none\n")
	write("mesh.yaml", `
mesh: m
nats: {store_dir: store}
stages:
  here: {runner: {top_k: {labels_file: labels.txt}}}
  there: {runner: {top_k: {labels_file: `+filepath.Join(folder, "labels.txt")+`}}}
  model: {runner: {onnx: {model: nowhere.onnx}}}
`)
	f, err := meshfile.Load(filepath.Join(folder, "mesh.yaml"), runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := f.NATS.StoreDir, filepath.Join(folder, "store"); got != want {
		t.Errorf("got the folder %s, want %s", got, want)
	}
	model, err := f.Host("model")
	if err != nil {
		t.Fatal(err)
	}
	err = model.Runner.Start(t.Context())
	if path := filepath.Join(folder, "nowhere.onnx"); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v, want that %s is missing", err, path)
	}
}

// A program of one stage does not have the runners of the others.
func TestProgramReadsOnlyItsOwnStage(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "mesh.yaml")
	text := `mesh: m
stages:
  decode: {runner: {image_decode: {width: 8, height: 8}}}
  classify: {runner: {onnx: {model: m.onnx}}, batch: {max_size: -1}}
  bad: {runner: {image_decode: {}}, hosts: 100}
pipelines:
  p: {steps: []}
`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := meshfile.Read(path, meshfile.KindOf("image_decode", runners.NewImageDecode))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Host("decode"); err != nil {
		t.Error(err)
	}
	for stage, want := range map[string]string{
		"classify": path + ":4:23: stages.classify.runner.onnx: this program has no such runner; it has image_decode\n" + path + ":4:55: stages.classify.batch.max_size: ",
		"nowhere":  path + `:2:1: stages: there is no stage "nowhere"; there are bad, classify, decode`,
		"bad":      path + ":5:18: stages.bad.runner.image_decode: width: 0 is not between 1 and 65535\n" + path + ":5:37: stages.bad.hosts: 100 is not",
	} {
		if _, err := f.Host(stage); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: got %v\nwant %s", stage, err, want)
		}
	}
}

func TestSharedSettingsAreAlwaysChecked(t *testing.T) {
	t.Parallel()
	path := testbed.MeshFile(t, "mesh: M\nnats: {url: b, listen: x}\n")
	_, err := meshfile.Read(path, meshfile.KindOf("top_k", runners.NewTopK), meshfile.KindOf("onnx", onnx.New))
	if err == nil || len(strings.Split(err.Error(), "\n")) != 3 {
		t.Errorf("got %v", err)
	}
	if _, err := meshfile.Read(path + ".nope"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	if _, err := meshfile.Load(path + ".nope"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestLaterErrorPointsIntoTheFile(t *testing.T) {
	t.Parallel()
	f := mustParse(t, good+"gateway:\n  metadata: [x]\n")
	got := f.At(errors.New("gateway.metadata: x is bad"))
	if want := "m.yaml:5:3: gateway.metadata: x is bad"; got.Error() != want {
		t.Errorf("got %v, want %s", got, want)
	}
}

func TestBrokerFromAFlagKeepsTheFilesSecrets(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ nats, broker, want string }{
		"a token":                     {"token_file: token", "nats://b:4222", ""},
		"credentials":                 {"credentials_file: c", "nats://b:4222", ""},
		"trust":                       {"ca_file: ca.pem", "nats://b:4222", ""},
		"what is of one that listens": {"listen: \":0\", store_dir: s, token_file: token", "nats://b:4222", ""},
		"nobody is reached":           {"token_file: token", "", "nats.token_file: "},
		"two who":                     {"token_file: token", "nats://u:pw@b:4222", "nats.token_file: the user in url says already who this is"},
	} {
		path := testbed.MeshFile(t, "mesh: m\nnats: {"+test.nats+"}\n")
		f, err := meshfile.Flags{Broker: test.broker}.Read(path)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) || err == nil && (f.NATS.URL != test.broker || f.NATS.Listen != "") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSecretFilesOfAllSectionsAreKnown(t *testing.T) {
	t.Parallel()
	const text = `
mesh: m
nats: {url: "tls://b:4222", token_file: f-nats, cert_file: c, key_file: f-nats-key, ca_file: a}
gateway: {token_file: f-tokens, cert_file: c, key_file: f-key, admin: {token_file: f-admin, cert_file: c, key_file: f-admin-key}}
registry: {consul: {address: "consul:8500", tls: true, token_file: f-consul, cert_file: c, key_file: f-consul-key, ca_file: a}}
tracing: {endpoint: "https://spans:4318", headers_file: f-headers}
stages:
  a: {runner: {echo: {}}, listen: "127.0.0.1:0", token_file: f-stage, cert_file: c, key_file: f-stage-key, client_ca_file: a}
jobs:
  pools: {llm: {target: {http: {url: "https://llm", token_file: f-llm, cert_file: c, key_file: f-llm-key, ca_file: a}}}}
  queues: {nightly: {}}
  webhooks: {secret_files: [f-hook1, f-hook2], tenants: {own: {secret_files: [f-own]}}}
`
	want := []string{"f-admin", "f-admin-key", "f-consul", "f-consul-key", "f-headers", "f-hook1", "f-hook2", "f-key", "f-llm", "f-llm-key", "f-nats", "f-nats-key", "f-own", "f-stage", "f-stage-key", "f-tokens"}
	for i, name := range want {
		want[i] = filepath.Join("testdata", name)
	}
	if got := mustParse(t, text).SecretFiles(); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	path := testbed.MeshFile(t, "mesh: m\nnats: {url: \"nats://u:pw@b:4222\"}\n")
	for broker, want := range map[string][]string{"": {path}, "nats://c:4222": nil} {
		f, err := meshfile.Flags{Broker: broker}.Read(path)
		if got := f.SecretFiles(); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %q, %v", broker, got, err)
		}
	}
}
