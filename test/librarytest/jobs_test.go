package librarytest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/jobs/dispatch"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/test/meshtest"
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
	m := meshtest.FromFile(t, meshtest.Parse(t, `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages: {echo: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: e, stage: echo}]}}
jobs:
  pools: {llm: {target: {http: {url: "`+model.URL+`"}}}, mesh: {target: {pipelines: [p]}, gate: {mesh: {}, budget: {ready: {stage: echo}, each: 4}}}}
  queues: {nightly: {pool: llm}, others: {pool: mesh}}
`), stagemesh.FileSettings{Dispatcher: true})
	meshtest.Start(t, m)
	call := func(method, path, body string) (status int, answer string) {
		t.Helper()
		response, answer := testbed.Call(t, http.DefaultClient, method, m.URL()+path, body, "Content-Type", "application/json", "Authorization", "Bearer of-the-caller")
		return response.StatusCode, answer
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
	for body, contentType := range map[string]string{
		"--b\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\nwords\r\n--b--\r\n": "multipart/form-data; boundary=b",
		`{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}`:     "application/json",
	} {
		response, answer := jobCall(t, m, http.MethodPost, "/v1/queues/nightly/jobs?path=/x", body, "Content-Type", contentType)
		var job struct{ ID string }
		if err := json.Unmarshal([]byte(answer), &job); err != nil || response.StatusCode != http.StatusAccepted {
			t.Fatalf("%d %s", response.StatusCode, answer)
		}
		if status, answer := call(http.MethodGet, "/v1/jobs/"+job.ID+"/result?wait=30s", ""); status != http.StatusOK || answer != "POST /x "+contentType+` ""`+body {
			t.Errorf("%d %s", status, answer)
		}
	}
	if status, answer := call(http.MethodPost, "/v1/queues/nightly/jobs", `{}`); status != http.StatusBadRequest {
		t.Errorf("a request to a pipeline: %d %s", status, answer)
	}
	for _, query := range []string{
		"path=/%ff", "path=/%0a", "path=x", "path=/../x", "path=/..%2fx", "path=/%252e%252e/x", "path=/a%23b", "path=/a%23",
		"path=/&pipeline=p", "path=/&outputs=a", "path=/&parameters.z=1", "path=/&steps.e.z=1",
	} {
		if status, answer := call(http.MethodPost, "/v1/queues/nightly/jobs?"+query, `{}`); status != http.StatusBadRequest || reasonOf(answer) != "INVALID_REQUEST" {
			t.Errorf("%s: %d %s", query, status, answer)
		}
	}
	for _, header := range []string{"Stagemesh-Timeout: 1s", "Stagemesh-Durability: file", "Stagemesh-Wait-For-Capacity: true"} {
		name, value, _ := strings.Cut(header, ": ")
		if response, answer := jobCall(t, m, http.MethodPost, "/v1/queues/nightly/jobs?path=/", `{}`, name, value); response.StatusCode != http.StatusBadRequest || reasonOf(answer) != "INVALID_REQUEST" {
			t.Errorf("%s: %d %s", header, response.StatusCode, answer)
		}
	}
	id = submit("/v1/queues/others/jobs", `{"a": 1}`)
	if status, answer := call(http.MethodGet, "/v1/jobs/"+id+"/result?wait=30s", ""); status != http.StatusOK || answer != `{"a": 1}` {
		t.Errorf("%d %s", status, answer)
	}
	var place struct {
		Pool, Hold string
		Since      time.Time
		Job        struct {
			Usage map[string]float64
		}
	}
	status, answer := call(http.MethodGet, "/v1/jobs/"+id+"/explain", "")
	if err := json.Unmarshal([]byte(answer), &place); err != nil || status != http.StatusOK || place.Pool != "mesh" || place.Hold != "ended" || place.Since.IsZero() {
		t.Errorf("%d %s: %v", status, answer, err)
	}
	if u := place.Job.Usage; u["closed_seconds"] > u["queued_seconds"] {
		t.Errorf("the gate was closed for longer than the job waited: %v", u)
	}
}

// startWaiting starts a mesh on a broker, without a dispatcher.
func startWaiting(t *testing.T, broker string) *stagemesh.Mesh {
	t.Helper()
	m := meshtest.FromFile(t, meshtest.Parse(t, `
mesh: m
nats: {url: "`+broker+`"}
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages: {echo: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: e, stage: echo}], queue: nightly}}
jobs:
  pools: {main: {target: {pipelines: [p]}}}
  queues: {nightly: {}}
`), stagemesh.FileSettings{})
	return meshtest.Start(t, m)
}

func TestPageOfLargeJobsEndsEarly(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	m := startWaiting(t, broker.URL())
	jobs := store.NewJobs(broker.Connect("m"), store.Settings{})
	if err := errors.Join(jobs.Ensure(t.Context()), jobs.EnsureQueue(t.Context(), "nightly", store.JobQueueSettings{})); err != nil {
		t.Fatal(err)
	}
	const large = 4 << 20
	const first = store.MaxPageBytes / large
	for range first + 1 {
		waits, ended := pipeline.NewJobID("nightly"), pipeline.NewJobID("nightly")
		_, _, err := jobs.Submit(t.Context(), waits, "", store.JobHeader{Deadline: time.Now().Add(time.Hour)}, &meshv1.QueuedJob{
			Job: new(inferencev1.Job), Payload: &meshv1.QueuedJob_Http{Http: &inferencev1.HttpCall{Body: make([]byte, large)}},
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := jobs.PutRecord(t.Context(), ended, "", 0, &meshv1.JobRecord{
			Job: &inferencev1.Job{State: inferencev1.JobState_JOB_STATE_SUCCEEDED}, Result: &meshv1.JobRecord_Http{Http: &inferencev1.HttpAnswer{Body: make([]byte, large)}},
		}); err != nil {
			t.Fatal(err)
		}
	}
	for _, kind := range []string{"jobs", "results"} {
		var page struct {
			Jobs []any
			Next uint64
		}
		for _, want := range []int{first, 1} {
			response, body := jobCall(t, m, "GET", fmt.Sprintf("/v1/queues/nightly/%s?limit=1000&after=%d", kind, page.Next), "")
			page.Next = 0
			if err := json.Unmarshal([]byte(body), &page); err != nil || response.StatusCode != http.StatusOK || len(page.Jobs) != want || (page.Next == 0) != (want == 1) {
				t.Errorf("%s: %d %s, want %d jobs", kind, response.StatusCode, body, want)
			}
		}
	}
}

func TestMaxTokensOfACallAreSpent(t *testing.T) {
	t.Parallel()
	finish := make(chan struct{})
	model := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-finish }))
	t.Cleanup(model.Close)
	m := meshtest.FromFile(t, meshtest.Parse(t, fmt.Sprintf(`
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages: {echo: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: e, stage: echo}]}}
jobs:
  pools: {llm: {target: {http: {url: %q}}, gate: {constant: {}, budget: {baseline: 0, unit: tokens, each: 1000}}}}
  queues: {prompts: {}}
`, model.URL)), stagemesh.FileSettings{Dispatcher: true})
	meshtest.Start(t, m)
	t.Cleanup(func() { close(finish) })
	want := func(body, hold string) {
		t.Helper()
		response, answer := jobCall(t, m, http.MethodPost, "/v1/queues/prompts/jobs?path=/v1/chat/completions", body, "Content-Type", "application/json")
		testbed.Eventually(t, body+" is held by "+hold, func() bool {
			_, answer = jobCall(t, m, http.MethodGet, response.Header.Get("Location")+"/explain", "")
			return strings.Contains(answer, `"hold":"`+hold+`"`)
		})
	}
	want(`{"max_tokens": 200, "max_completion_tokens": 700, "model": "m"}`, "running")
	want(`{"max_tokens": 300.0}`, "full")
	want(`{"max_tokens": null}`, "full")
}

// A broker of its own has too little space for the queue.
func TestDispatcherSaysWhyItDoesNotStart(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t, func(o *server.Options) { o.JetStreamMaxStore = 2 << 30 })
	log := &testbed.Log{}
	m := meshtest.FromFile(t, meshtest.Parse(t, `
mesh: m
nats: {url: "`+broker.URL()+`"}
stages: {echo: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: e, stage: echo}]}}
jobs: {pools: {main: {target: {pipelines: [p]}}}, queues: {nightly: {max_bytes: 8GiB}}}
`), stagemesh.FileSettings{Dispatcher: true, Logger: slog.New(slog.NewTextHandler(log, nil))})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	started := make(chan error, 1)
	go func() { started <- m.Start(ctx) }()
	testbed.Eventually(t, "the dispatcher finds no space", func() bool { return strings.Contains(log.String(), "no streams for jobs") })
	cancel()
	if err := testbed.Receive(t, "the end", started); err == nil || !strings.Contains(err.Error(), "max_store is full: insufficient storage resources available") {
		t.Errorf("started with %v", err)
	}
}

func TestPoolAsksAGateOfTheProgram(t *testing.T) {
	t.Parallel()
	var freed, asked atomic.Int64
	gpuMemory := func(context.Context) (free, total int64, err error) {
		asked.Add(1)
		return freed.Load(), 100, nil
	}
	file := meshtest.Parse(t, `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages: {echo: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: e, stage: echo}]}}
jobs: {pools: {main: {target: {pipelines: [p]}, gate: {own: {name: gpu}, interval: 10ms}}}, queues: {nightly: {}}}
`)
	gates := map[string]dispatch.GateFunc{
		"gpu": func(ctx context.Context) (room float64, at time.Time, err error) {
			free, total, err := gpuMemory(ctx)
			return float64(free) / float64(total), time.Now(), err
		},
	}
	m, err := stagemesh.FromFile(file, stagemesh.FileSettings{Dispatcher: true, Gates: gates})
	if err != nil {
		t.Fatal(err)
	}
	m = meshtest.Start(t, m)
	id := submitJob(t, m, "", "x")
	state := func() string {
		_, body := jobCall(t, m, http.MethodGet, "/v1/jobs/"+id, "")
		return body
	}
	before := asked.Load()
	testbed.Eventually(t, "the gate is asked", func() bool { return asked.Load() > before+3 })
	if got := state(); !strings.Contains(got, `"queued"`) || !strings.Contains(got, `"attempts":0`) {
		t.Errorf("behind a closed gate it is %s", got)
	}
	freed.Store(90)
	testbed.Eventually(t, "the job runs", func() bool { return strings.Contains(state(), `"succeeded"`) })
}
