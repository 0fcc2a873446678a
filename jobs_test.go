package stagemesh_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh"
)

func TestQueueOfAnHTTPTargetThroughThePublicPort(t *testing.T) {
	t.Parallel()
	model := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Content-Type", "text/plain")
		fmt.Fprintf(w, "%s %s %s %q", r.Method, r.URL, r.Header.Get("Content-Type"), r.Header.Get("Authorization"))
		_, _ = w.Write(body)
	}))
	t.Cleanup(model.Close)
	m, err := stagemesh.FromFile(parse(t, `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages: {echo: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: e, stage: echo}]}}
jobs:
  pools: {llm: {target: {http: {url: "`+model.URL+`"}}}, mesh: {target: {pipelines: [p]}, gate: {mesh: {}, budget: {ready: {stage: echo}, each: 4}}}}
  queues: {nightly: {pool: llm}, others: {pool: mesh}}
`), stagemesh.FileSettings{Dispatcher: true})
	if err != nil {
		t.Fatal(err)
	}
	start(t, m)
	call := func(method, path, body string) (status int, answer string) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), method, m.URL()+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Authorization", "Bearer of-the-caller")
		response, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		data, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		return response.StatusCode, string(data)
	}
	submit := func(path, body string) (id string) {
		t.Helper()
		status, answer := call(http.MethodPost, path, body)
		var job struct{ ID string }
		if err := json.Unmarshal([]byte(answer), &job); err != nil || status != http.StatusAccepted {
			t.Fatalf("%d %s", status, answer)
		}
		return job.ID
	}
	id := submit("/v1/queues/nightly/jobs?path=/v1/chat/completions%3Fa=b", `{"model": "m"}`)
	if status, answer := call(http.MethodGet, "/v1/jobs/"+id+"/result?wait=30s", ""); status != http.StatusOK || answer != `POST /v1/chat/completions?a=b application/json ""{"model": "m"}` {
		t.Errorf("%d %s", status, answer)
	}
	if status, answer := call(http.MethodPost, "/v1/queues/nightly/jobs", `{}`); status != http.StatusBadRequest {
		t.Errorf("a request to a pipeline: %d %s", status, answer)
	}
	id = submit("/v1/queues/others/jobs", `{"a": 1}`)
	if status, answer := call(http.MethodGet, "/v1/jobs/"+id+"/result?wait=30s", ""); status != http.StatusOK || answer != `{"a": 1}` {
		t.Errorf("%d %s", status, answer)
	}
	if status, answer := call(http.MethodGet, "/v1/jobs/"+id+"/explain", ""); status != http.StatusOK || !strings.Contains(answer, `"pool":"mesh","hold":"ended","since":`) {
		t.Errorf("%d %s", status, answer)
	}
}
