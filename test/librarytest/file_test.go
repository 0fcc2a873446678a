package librarytest

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

func TestMeshOfAFileTakesMoreStages(t *testing.T) {
	t.Parallel()
	m := meshtest.FromFile(t, meshtest.Parse(t, `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages:
  echo: {runner: {echo: {}}, hosts: 2, listen: "127.0.0.1:0"}
  sleep: {runner: {sleep: {base: 1ms}}, batch: {max_size: 4}}
pipelines:
  p: {steps: [{name: s, stage: sleep}, {name: e, stage: echo}]}
`), stagemesh.FileSettings{})
	if err := m.AddStage(stagemesh.Stage{Name: "sign", Runner: sign("me")}); err != nil {
		t.Fatal(err)
	}
	if err := m.AddPipeline(pipeline.Pipeline{Name: "q", Steps: []pipeline.Step{{Name: "e", Stage: "echo"}, {Name: "s", Stage: "sign"}}}); err != nil {
		t.Fatal(err)
	}
	if err := m.Validate(); err != nil {
		t.Fatal(err)
	}
	meshtest.Start(t, m)
	if m.URL() == "" {
		t.Error("there is no address")
	}
	expect(t, m, "p", "to", "to")
	expect(t, m, "q", "to", "to me")
	hosts := map[string]bool{}
	testbed.Eventually(t, "both hosts have answered", func() bool {
		answer, err := m.Infer(t.Context(), &request.Request{Pipeline: "stage:echo", Inputs: []payload.Part{payload.OfBlob("", "text/plain", nil)}})
		if err != nil {
			t.Fatal(err)
		}
		hosts[string(answer.Timeline.Steps[0].Host)] = true
		return len(hosts) == 2
	})
}

func TestBrokerLimitsAreTheReservedOnes(t *testing.T) {
	t.Parallel()
	m := meshtest.Start(t, meshtest.FromFile(t, meshtest.Parse(t, `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
nats: {max_memory: 11MiB, max_store: 92MiB}
registry: {nats: {}}
results: {max_bytes: 2MiB}
dead_letters: {max_bytes: 3MiB}
idempotency: {max_bytes: 4MiB}
stages:
  one: {runner: {echo: {}}, queue: {max_bytes: 1MiB}}
  two: {runner: {echo: {}}, queue: {max_bytes: 2MiB}}
pipelines:
  p: {steps: [{name: one, stage: one}, {name: two, stage: two}]}
`), stagemesh.FileSettings{}))
	expect(t, m, "p", "to", "to")
	request := durable("to")
	request.Pipeline, request.IdempotencyKey = "p", "key"
	answer, err := m.Infer(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	if got := result(t, m, answer.RequestID); got != "to" {
		t.Errorf("got %q", got)
	}
}

func TestFileFixesWhatCallersMaySet(t *testing.T) {
	t.Parallel()
	m := meshtest.Start(t, meshtest.FromFile(t, meshtest.Parse(t, `
mesh: m
gateway: {listen: "127.0.0.1:0", stage_pipelines: false, admin: {listen: "127.0.0.1:0"}}
stages:
  a: {runner: {echo: {}}}
pipelines:
  all: {steps: [{name: fixed, stage: a, parameters: {k: 3}, locked: true}, {name: free, stage: a, parameters: {k: 3}}]}
`), stagemesh.FileSettings{}))
	word := payload.Parameters{"k": payload.Int64(4)}
	step := func(name pipeline.StepName, p payload.Parameters) map[pipeline.StepName]pipeline.StepOptions {
		return map[pipeline.StepName]pipeline.StepOptions{name: {Parameters: p}}
	}
	for name, test := range map[string]struct {
		edit func(*stagemesh.Request)
		want string
	}{
		"nothing":          {func(*stagemesh.Request) {}, ""},
		"a free step":      {func(r *stagemesh.Request) { r.Steps = step("free", word) }, ""},
		"another name":     {func(r *stagemesh.Request) { r.Parameters = payload.Parameters{"other": payload.Int64(4)} }, ""},
		"a locked step":    {func(r *stagemesh.Request) { r.Steps = step("fixed", word) }, "INVALID_REQUEST: steps.fixed.parameters.k: pipeline all locks it"},
		"every step":       {func(r *stagemesh.Request) { r.Parameters = word }, "INVALID_REQUEST: parameters.k: pipeline all locks it in step fixed"},
		"the stage itself": {func(r *stagemesh.Request) { r.Pipeline = "stage:a" }, "UNKNOWN_PIPELINE: "},
	} {
		r := &stagemesh.Request{Pipeline: "all", Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("to"))}}
		test.edit(r)
		_, err := m.Infer(t.Context(), r)
		got := ""
		if err != nil {
			got = string(fault.From(err).Reason) + ": " + fault.From(err).Message
		}
		if (got == "") != (test.want == "") || !strings.HasPrefix(got, test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

func TestMemoryOnlyMeshRejectsDurableRequests(t *testing.T) {
	t.Parallel()
	m := meshtest.Start(t, meshtest.FromFile(t, meshtest.Parse(t, `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages:
  a: {runner: {echo: {}}, queue: {durabilities: [memory]}, crash_limit: 1}
pipelines:
  all: {steps: [{name: a, stage: a}]}
`), stagemesh.FileSettings{}))
	expect(t, m, "all", "to", "to")
	_, err := m.Infer(t.Context(), durable("to"))
	if fault.From(err).Reason != fault.NotSupported {
		t.Errorf("got %v", err)
	}
}

func TestProcessMayRunSomeStagesOfAFile(t *testing.T) {
	t.Parallel()
	const text = `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
nats: {listen: "127.0.0.1:0"}
stages:
  one: {runner: {echo: {}}}
  two: {runner: {echo: {}}}
pipelines:
  p: {steps: [{name: one, stage: one}, {name: two, stage: two}]}
`
	first := meshtest.Start(t, meshtest.FromFile(t, meshtest.Parse(t, text), stagemesh.FileSettings{Stages: []string{"one"}}))
	expect(t, first, "stage:one", "to", "to")
	_, err := ask(t, first, "p", "to")
	if f := fault.From(err); f.Reason != fault.NoCapacity || f.Stage != "two" {
		t.Errorf("got %v", err)
	}
	rest := meshtest.Parse(t, text)
	rest.NATS = meshfile.NATS{URL: first.BrokerURL()}
	second := meshtest.Start(t, meshtest.FromFile(t, rest, stagemesh.FileSettings{Stages: []string{"two"}}))
	expect(t, second, "p", "to", "to")
	gateway := meshtest.FromFile(t, rest, stagemesh.FileSettings{Stages: []string{}})
	meshtest.Start(t, gateway)
	expect(t, gateway, "p", "to", "to")
}

func TestUnreachableStagesCannotBeLeftOut(t *testing.T) {
	t.Parallel()
	f := meshtest.Parse(t, "mesh: m\nstages:\n  one: {runner: {echo: {}}}\n  two: {runner: {echo: {}}}\n")
	if _, err := stagemesh.FromFile(f, stagemesh.FileSettings{Stages: []string{"one"}}); !errors.Is(err, stagemesh.ErrAlone) {
		t.Errorf("got %v", err)
	}
	f = meshtest.Parse(t, "mesh: m\nnats: {url: \"nats://b\"}\nstages:\n  one: {runner: {echo: {}}}\n")
	for stage, want := range map[string]string{
		"three": `m.yaml:3:1: stages: there is no stage "three"; there are one`,
	} {
		if _, err := stagemesh.FromFile(f, stagemesh.FileSettings{Stages: []string{stage}}); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
	if _, err := stagemesh.FromFile(f, stagemesh.FileSettings{Stages: []string{"one", "one"}}); err == nil || !strings.Contains(err.Error(), "there is one of that name") {
		t.Errorf("got %v", err)
	}
}

func TestOpenAdminPortIsRejectedWithItsPlace(t *testing.T) {
	t.Parallel()
	for admin, want := range map[string]string{
		`{listen: ":9080"}`:                    "m.yaml:4:19: gateway.admin.listen: other machines can reach :9080; name a file with a token in token_file, listen on 127.0.0.1, or set insecure: true",
		`{cert_file: x}`:                       "m.yaml:4:19: gateway.admin.cert_file: has no key; name its file in key_file",
		`{listen: "127.0.0.1:0", key_file: x}`: "m.yaml:4:42: gateway.admin.key_file: has no certificate; name its file in cert_file",
		`{listen: ":0", token_file: t}`:        "",
	} {
		f := meshtest.Parse(t, "mesh: m\nstages:\n  a: {runner: {echo: {}}}\ngateway: {admin: "+admin+"}\n")
		if _, err := stagemesh.FromFile(f, stagemesh.FileSettings{}); err == nil && want != "" || err != nil && err.Error() != want {
			t.Errorf("%s: got %v", admin, err)
		}
	}
}

func TestAdminPortFilesAreRelativeToTheFile(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	f, err := meshfile.Parse("m.yaml", []byte("mesh: m\nstages:\n  a: {runner: {echo: {}}}\ngateway: {listen: \"127.0.0.1:0\", admin: {listen: \"127.0.0.1:0\", token_file: token}}\n"), folder, runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	m := meshtest.FromFile(t, f, stagemesh.FileSettings{})
	want := "gateway.admin.token_file: open " + filepath.Join(folder, "token") + ": no such file"
	if err := m.Start(t.Context()); err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %v", err)
	}
	meshtest.Stop(t, m)
	if err := os.WriteFile(filepath.Join(folder, "token"), []byte("open-sesame"), 0o600); err != nil {
		t.Fatal(err)
	}
	meshtest.Start(t, meshtest.FromFile(t, f, stagemesh.FileSettings{}))
}

// What a file adds to its runners holds.
func TestFileSchemasAndStreamLimitsHold(t *testing.T) {
	t.Parallel()
	m := meshtest.Start(t, meshtest.FromFile(t, meshtest.Parse(t, `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages:
  order:
    runner: {echo: {}}
    inputs: [{name: order, content_types: [application/json], schema: {type: object, required: [items]}}]
  talk:
    runner: {stream: {chunks: 3, every: 10m}}
    stream: {first_chunk_timeout: 50ms}
`), stagemesh.FileSettings{}))
	for stage, test := range map[string]struct {
		text string
		want fault.Reason
	}{
		"stage:order": {`{"item": []}`, fault.SchemaViolation},
		"stage:talk":  {`{}`, fault.RunnerStalled},
	} {
		_, err := m.Infer(t.Context(), &request.Request{Pipeline: stage, Inputs: []payload.Part{payload.OfBlob("", "application/json", []byte(test.text))}})
		if f := fault.From(err); err == nil || f.Reason != test.want {
			t.Errorf("%s answered %v, want %s", stage, err, test.want)
		}
	}
}
