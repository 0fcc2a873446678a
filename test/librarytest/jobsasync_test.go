package librarytest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

func startAsync(t *testing.T) *stagemesh.Mesh {
	t.Helper()
	m := meshtest.FromFile(t, meshtest.Parse(t, `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages: {echo: {runner: {echo: {}}}, slow: {runner: {sleep: {base: 1m}}}}
pipelines:
  p: {steps: [{name: e, stage: echo}], queue: nightly}
  slow: {steps: [{name: s, stage: slow}], queue: nightly}
  plain: {steps: [{name: e, stage: echo}]}
jobs:
  pools: {main: {target: {pipelines: [p, slow]}}}
  queues: {nightly: {}}
`), stagemesh.FileSettings{Dispatcher: true})
	return meshtest.Start(t, m)
}

func TestPreferenceMakesASlowRequestAJob(t *testing.T) {
	t.Parallel()
	m := startAsync(t)
	for name, c := range map[string]struct {
		pipeline, prefer string
		status           int
		applied          string
	}{
		"in time":          {"p", "respond-async, wait=30", 200, "respond-async, wait=30"},
		"quoted":           {"p", `handling=lenient, Respond-Async; x, WAIT="30"`, 200, "respond-async, wait=30"},
		"slow":             {"slow", "respond-async, wait=1", 202, "respond-async, wait=1"},
		"at once":          {"slow", "respond-async", 202, "respond-async"},
		"unreadable wait":  {"slow", "respond-async, wait=soon", 202, "respond-async"},
		"wait alone":       {"p", "wait=5", 200, ""},
		"without a queue":  {"plain", "respond-async, wait=5", 200, ""},
		"of another thing": {"p", "return=minimal", 200, ""},
	} {
		response, body := jobCall(t, m, "POST", "/v1/pipelines/"+c.pipeline+":infer", "a", "Prefer", c.prefer)
		if response.StatusCode != c.status || response.Header.Get("Preference-Applied") != c.applied || c.status == 200 && body != "a" {
			t.Errorf("%s: %d %v %s", name, response.StatusCode, response.Header, body)
		}
		at := response.Header.Get("Location")
		if strings.HasPrefix(at, "/v1/jobs/nightly.") != (c.applied != "") {
			t.Errorf("%s: Location %q", name, at)
		}
		if c.status == http.StatusAccepted {
			if response, body := jobCall(t, m, "DELETE", at, ""); response.StatusCode != 200 {
				t.Errorf("%s: cancel %d %s", name, response.StatusCode, body)
			}
		}
	}
}

func TestWaitThatEndsWhileTheBrokerIsSilentReturnsTheJob(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(m *stagemesh.Mesh, job string) (testbed.Response, string){
		"result": func(m *stagemesh.Mesh, job string) (testbed.Response, string) {
			return jobCall(t, m, "GET", job+"/result?wait=1s", "")
		},
		"preference": func(m *stagemesh.Mesh, _ string) (testbed.Response, string) {
			return jobCall(t, m, "POST", "/v1/pipelines/p:infer", "a", "Prefer", "respond-async, wait=1")
		},
	} {
		broker := testbed.StartBroker(t)
		link := testbed.StartLink(t, strings.TrimPrefix(broker.URL(), "nats://"))
		m := startWaiting(t, "nats://"+link.Addr())
		t.Cleanup(link.Mend)
		submitted, _ := jobCall(t, m, "POST", "/v1/queues/nightly/jobs", "a")
		watcher, reads := broker.Client(), 0
		// The first read of a record finds the job before the wait, the second is the wait's first.
		if _, err := watcher.Subscribe("$JS.API.DIRECT.GET.m_job_records.>", func(*nats.Msg) {
			if reads++; reads == 2 {
				link.Drop()
			}
		}); err != nil {
			t.Fatal(err)
		}
		if err := watcher.Flush(); err != nil {
			t.Fatal(err)
		}
		response, body := call(m, submitted.Header.Get("Location"))
		if response.StatusCode != 202 || !strings.Contains(body, `"id":"nightly.`) || !strings.Contains(body, `"state":"queued"`) {
			t.Errorf("%s: %d %s", name, response.StatusCode, body)
		}
	}
}

func TestFailureOfARequestThatBecameAJob(t *testing.T) {
	t.Parallel()
	m := startAsync(t)
	call := func(path, body string) (testbed.Response, string) {
		return jobCall(t, m, "POST", path, body, "Prefer", "respond-async, wait=30", "Idempotency-Key", "k")
	}
	if response, body := call("/v1/pipelines/p:infer", ""); response.StatusCode != 400 || reasonOf(body) != "INVALID_REQUEST" {
		t.Errorf("without a body: %d %s", response.StatusCode, body)
	}
	first, body := call("/v1/pipelines/p:infer", "a")
	second, _ := call("/v1/pipelines/p:infer", "a")
	if first.StatusCode != 200 || first.Header.Get("Location") != second.Header.Get("Location") {
		t.Errorf("%d %s, then %v", first.StatusCode, body, second)
	}
	if response, body := call("/v1/pipelines/p:infer", "b"); response.StatusCode != 409 || reasonOf(body) != "IDEMPOTENCY_MISMATCH" {
		t.Errorf("another payload: %d %s", response.StatusCode, body)
	}
	if response, body := jobCall(t, m, "POST", "/v1/pipelines/p:infer", "a", "Prefer", "respond-async, wait=30", "Stagemesh-Timeout", "-1s"); response.StatusCode != 400 || reasonOf(body) != "INVALID_REQUEST" {
		t.Errorf("no timeout: %d %s", response.StatusCode, body)
	}
}

func TestResultFeedWaitsForTheFirstEnd(t *testing.T) {
	t.Parallel()
	m := startJobs(t, true)
	feed := func(after uint64, wait string) (jobs []string, next uint64) {
		t.Helper()
		response, body := jobCall(t, m, "GET", fmt.Sprintf("/v1/queues/nightly/results?after=%d&wait=%s", after, wait), "")
		var page struct {
			Jobs []struct{ ID, State string }
			Next uint64
		}
		if err := json.Unmarshal([]byte(body), &page); err != nil || response.StatusCode != 200 {
			t.Fatalf("%d %s", response.StatusCode, body)
		}
		for _, job := range page.Jobs {
			jobs = append(jobs, job.ID+" "+job.State)
		}
		return jobs, page.Next
	}
	if jobs, next := feed(0, "1ms"); len(jobs) != 0 || next != 0 {
		t.Errorf("an empty queue: %v, %d", jobs, next)
	}
	var seen []string
	for after := uint64(0); len(seen) < 3; {
		type page struct {
			jobs []string
			next uint64
		}
		waited := make(chan page, 1)
		go func() {
			jobs, next := feed(after, "30s")
			waited <- page{jobs, next}
		}()
		response, _ := jobCall(t, m, "POST", "/v1/queues/nightly/jobs", "a")
		got := <-waited
		if want := strings.TrimPrefix(response.Header.Get("Location"), "/v1/jobs/") + " succeeded"; len(got.jobs) != 1 || got.jobs[0] != want || got.next <= after {
			t.Fatalf("after %d: %v, want %s", after, got, want)
		}
		seen, after = append(seen, got.jobs...), got.next
	}
	if all, _ := feed(0, "0"); !slices.Equal(all, seen) {
		t.Errorf("all are %v, seen were %v", all, seen)
	}
	for _, path := range []string{"/v1/queues/nightly/results?wait=-1s", "/v1/queues/nightly/results?wait=soon", "/v1/queues/nightly/jobs?wait=1s"} {
		if response, body := jobCall(t, m, "GET", path, ""); response.StatusCode != 400 || reasonOf(body) != "INVALID_REQUEST" {
			t.Errorf("%s: %d %s", path, response.StatusCode, body)
		}
	}
}
