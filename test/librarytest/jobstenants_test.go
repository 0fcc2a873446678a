package librarytest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

func TestTenantSubmitsToItsQueuesOnly(t *testing.T) {
	t.Parallel()
	model := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"usage": {"prompt_tokens": 1000, "completion_tokens": 10}}`)
	}))
	t.Cleanup(model.Close)
	m := meshtest.FromFile(t, meshtest.Parse(t, fmt.Sprintf(`
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}, token_file: %q}
stages: {echo: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: e, stage: echo}], queue: nightly}}
jobs:
  pools: {main: {target: {pipelines: [p, q]}}, llm: {target: {http: {url: %q}}}}
  queues: {nightly: {pool: main}, prompts: {pool: llm}}
  tenants: {acme: {weight: 2, queues: [prompts]}}
  rates: {currency: EUR, stages: {echo: {price: 1, watts: 300}}, pools: {llm: {prompt_tokens: 1000, completion_tokens: 100000}}}
`, testbed.SecretFile(t, "of-acme acme\nof-all all\n"), model.URL)), stagemesh.FileSettings{Dispatcher: true})
	if err := m.AddStage(stagemesh.Stage{Name: "refuse", Runner: inproc.New(inproc.Settings{}, func(_ context.Context, _ runner.Batch, sink runner.Sink) error {
		return sink.SetOutcome(0, runner.Failed(fault.New(fault.InvalidInput, "refused")))
	})}); err != nil {
		t.Fatal(err)
	}
	if err := m.AddPipeline(pipeline.Pipeline{Name: "q", Steps: []pipeline.Step{{Name: "r", Stage: "refuse"}}}); err != nil {
		t.Fatal(err)
	}
	meshtest.Start(t, m)
	call := func(tenant, method, path string, headers ...string) (int, string) {
		t.Helper()
		response, body := jobCall(t, m, method, path, "{}", append(headers, "Authorization", "Bearer of-"+tenant)...)
		return response.StatusCode, body
	}
	for queue, method := range map[string]string{"nightly": http.MethodPost, "nosuch": http.MethodGet} {
		status, body := call("acme", method, "/v1/queues/"+queue+"/jobs")
		if want := `no queue \"` + queue + `\"; there are prompts"`; status != http.StatusNotFound || !strings.Contains(body, want) || reasonOf(body) != "UNKNOWN_QUEUE" {
			t.Errorf("%d %s", status, body)
		}
	}
	if status, body := call("acme", http.MethodPost, "/v1/pipelines/p:infer", "Prefer", "respond-async"); status != http.StatusOK || body != "{}" {
		t.Errorf("a preference that nothing can be made of: %d %s", status, body)
	}
	// usage submits a job, and returns its usage once it has ended.
	usage := func(tenant, path string) (u struct {
		Usage struct {
			Attempts, BytesIn, BytesOut int
			RunnerSeconds, Cost, Joules float64
			Currency                    string
		}
	},
	) {
		t.Helper()
		status, body := call(tenant, http.MethodPost, path)
		var job struct{ ID string }
		if err := json.Unmarshal([]byte(body), &job); err != nil || status != http.StatusAccepted {
			t.Fatalf("%d %s", status, body)
		}
		if status, body := call(tenant, http.MethodGet, "/v1/jobs/"+job.ID+"/result?wait=30s"); status == http.StatusAccepted {
			t.Fatalf("%d %s", status, body)
		}
		_, body = call(tenant, http.MethodGet, "/v1/jobs/"+job.ID)
		if err := json.Unmarshal([]byte(strings.ReplaceAll(body, "_", "")), &u); err != nil {
			t.Fatalf("%v of %s", err, body)
		}
		return u
	}
	if u := usage("acme", "/v1/queues/prompts/jobs?path=/v1/chat/completions").Usage; u.Attempts != 1 || u.BytesIn != 2 || u.BytesOut != 59 || u.Cost != 2 || u.Currency != "EUR" {
		t.Errorf("a call: %+v", u)
	}
	if u := usage("all", "/v1/queues/nightly/jobs").Usage; u.BytesIn != 2 || u.BytesOut != 2 || u.RunnerSeconds <= 0 || u.Cost != u.RunnerSeconds || u.Joules != 300*u.RunnerSeconds {
		t.Errorf("a request: %+v", u)
	}
	if u := usage("all", "/v1/queues/nightly/jobs?pipeline=q").Usage; u.BytesOut != 0 || u.RunnerSeconds <= 0 {
		t.Errorf("a request that failed: %+v", u)
	}
}
