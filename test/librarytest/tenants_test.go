package librarytest

import (
	"bufio"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// startTenants starts a mesh of the tenants a and b with jobs and batches, whose sections gateway,
// jobs and results have more keys.
func startTenants(t *testing.T, gateway, jobs, more string) *stagemesh.Mesh {
	t.Helper()
	m := meshtest.FromFile(t, meshtest.Parse(t, fmt.Sprintf(`
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}, token_file: %q%s}
stages: {echo: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: e, stage: echo}]}}
jobs: {%s}
%s`, testbed.SecretFile(t, "of-a a\nof-b b\n"), gateway, jobs, more)), stagemesh.FileSettings{Dispatcher: true})
	return meshtest.Start(t, m)
}

const plainJobs = `pools: {main: {target: {pipelines: [p]}}}, queues: {q: {}}, batches: {queue: q}`

// as makes a call of a tenant, and returns the status and the body of its answer.
func as(t *testing.T, m *stagemesh.Mesh, tenant, method, path, body string, headers ...string) (int, string) {
	t.Helper()
	response, text := jobCall(t, m, method, path, body, append(headers, "Authorization", "Bearer of-"+tenant)...)
	return response.StatusCode, text
}

// submitAs submits a job of a tenant, and returns its path.
func submitAs(t *testing.T, m *stagemesh.Mesh, tenant, body string) string {
	t.Helper()
	status, text := as(t, m, tenant, http.MethodPost, "/v1/queues/q/jobs", body)
	_, id, _ := strings.Cut(text, `"id":"`)
	id, _, _ = strings.Cut(id, `"`)
	if status != http.StatusAccepted || id == "" {
		t.Fatalf("%d %s", status, text)
	}
	return "/v1/jobs/" + id
}

// open sends the head of a request of tenant a on a connection of its own that receives little.
func open(t *testing.T, m *stagemesh.Mesh, request string, headers ...string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(m.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.(*net.TCPConn).SetReadBuffer(4 << 10)
	head := append([]string{request + " HTTP/1.1", "Host: m", "Authorization: Bearer of-a"}, headers...)
	if _, err := io.WriteString(conn, strings.Join(head, "\r\n")+"\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	return conn
}

func TestStoredBytesCountUntilTheyAreWritten(t *testing.T) {
	t.Parallel()
	m := startTenants(t, ", max_payload: 7MiB, max_in_flight_bytes: 35MiB", plainJobs, "")
	job := submitAs(t, m, "a", strings.Repeat("x", 7<<20-100))
	if status, text := as(t, m, "a", http.MethodGet, job+"/result?wait=30s", ""); status != http.StatusOK || len(text) < 6<<20 {
		t.Fatalf("%d, %d bytes", status, len(text))
	}
	testbed.Eventually(t, "a read beyond the budget is rejected", func() bool {
		open(t, m, "GET "+job+"/result")
		status, text := as(t, m, "a", http.MethodGet, job+"/result", "")
		return status == http.StatusTooManyRequests && reasonOf(text) == "OVERLOADED"
	})
}

func TestUploadsReserveWhatArrives(t *testing.T) {
	t.Parallel()
	m := startTenants(t, ", max_in_flight_bytes: 20MiB", plainJobs, "")
	for path, kind := range map[string]string{"/v1/files": "multipart/form-data; boundary=xx", "/v1/queues/q/jobs": "application/x-ndjson"} {
		for range 30 {
			conn := open(t, m, "POST "+path, "Content-Type: "+kind, "Content-Length: 1000000", "Expect: 100-continue")
			if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.Contains(line, "100 Continue") {
				t.Fatalf("%s: %q %v; uploads of which nothing has arrived hold the budget", path, line, err)
			}
		}
	}
	if status, text := as(t, m, "b", http.MethodPost, "/v1/pipelines/p:infer", strings.Repeat("x", 1<<20)); status != http.StatusOK {
		t.Errorf("another tenant gets %d %s", status, text)
	}
}

// upload stores a file of a tenant.
func uploadAs(t *testing.T, m *stagemesh.Mesh, tenant, content string) (status int, answer string) {
	t.Helper()
	var form strings.Builder
	w := multipart.NewWriter(&form)
	_ = w.WriteField("purpose", "batch")
	part, _ := w.CreateFormFile("file", "in.jsonl")
	_, _ = io.WriteString(part, content)
	_ = w.Close()
	return as(t, m, tenant, http.MethodPost, "/v1/files", form.String(), "Content-Type", w.FormDataContentType())
}

func TestTenantLeavesSpaceForOthers(t *testing.T) {
	t.Parallel()
	infer := func(headers func(i int) []string, size int) func(t *testing.T, m *stagemesh.Mesh, tenant string, i int) (int, string) {
		return func(t *testing.T, m *stagemesh.Mesh, tenant string, i int) (int, string) {
			return as(t, m, tenant, http.MethodPost, "/v1/pipelines/p:infer", strings.Repeat("x", size), headers(i)...)
		}
	}
	for name, test := range map[string]struct {
		more, jobs, reason string
		store              func(t *testing.T, m *stagemesh.Mesh, tenant string, i int) (int, string)
	}{
		"results": {
			more: "results: {max_bytes: 1MiB}", reason: "OVERLOADED",
			store: infer(func(int) []string { return []string{"Stagemesh-Durability", "file"} }, 32<<10),
		},
		"idempotency keys": {
			more: "idempotency: {max_bytes: 64KiB}", reason: "OVERLOADED",
			store: infer(func(i int) []string { return []string{"Idempotency-Key", fmt.Sprint(i)} }, 1),
		},
		"records of jobs": {
			jobs: "max_bytes: 1MiB, ", reason: "QUEUE_FULL",
			store: func(t *testing.T, m *stagemesh.Mesh, tenant string, _ int) (int, string) {
				status, text := as(t, m, tenant, http.MethodPost, "/v1/queues/q/jobs", strings.Repeat("x", 32<<10))
				if _, id, ok := strings.Cut(text, `"id":"`); ok && status == http.StatusAccepted {
					id, _, _ = strings.Cut(id, `"`)
					as(t, m, tenant, http.MethodGet, "/v1/jobs/"+id+"/result?wait=30s", "")
				}
				return status, text
			},
		},
		"files": {
			jobs: "batches: {queue: q, max_bytes: 4MiB}, ", reason: "QUEUE_FULL",
			store: func(t *testing.T, m *stagemesh.Mesh, tenant string, _ int) (int, string) {
				return uploadAs(t, m, tenant, strings.Repeat("x", 128<<10))
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := startTenants(t, "", test.jobs+"pools: {main: {target: {pipelines: [p]}}}, queues: {q: {}}", test.more)
			status, text := 0, ""
			for i := 0; i < 1000 && status < http.StatusBadRequest; i++ {
				status, text = test.store(t, m, "a", i)
			}
			reason := reasonOf(text)
			if strings.Contains(text, `"code":"queue_full"`) { // in the form of the OpenAI API
				reason = "QUEUE_FULL"
			}
			if status != http.StatusTooManyRequests || reason != test.reason || !strings.Contains(text, "this tenant keeps") {
				t.Fatalf("a tenant that stores on gets %d %s", status, text)
			}
			if status, text := test.store(t, m, "b", 0); status >= http.StatusBadRequest {
				t.Errorf("another tenant gets %d %s", status, text)
			}
		})
	}
}

func TestBatchesOfOneTenantHoldUpNoOthers(t *testing.T) {
	t.Parallel()
	blocked := make(chan struct{})
	model := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if body, _ := io.ReadAll(r.Body); strings.Contains(string(body), `"model":"a"`) {
			<-blocked
		}
		_, _ = io.WriteString(w, "{}")
	}))
	t.Cleanup(model.Close)
	m := startTenants(t, "", `pools: {llm: {target: {http: {url: "`+model.URL+`"}}, max_in_flight: 2, limits: [{by: tenant, concurrency: 1}]}}, queues: {q: {max_jobs: 20}}, batches: {queue: q}`, "")
	t.Cleanup(func() { close(blocked) })
	batch := func(tenant string, lines int) string {
		t.Helper()
		var in strings.Builder
		for i := range lines {
			fmt.Fprintf(&in, `{"custom_id":"%d","method":"POST","url":"/v1/c","body":{"model":%q}}`+"\n", i, tenant)
		}
		status, text := uploadAs(t, m, tenant, in.String())
		_, id, _ := strings.Cut(text, `"id":"`)
		id, _, _ = strings.Cut(id, `"`)
		if status == http.StatusOK {
			status, text = as(t, m, tenant, http.MethodPost, "/v1/batches", fmt.Sprintf(`{"input_file_id":%q,"endpoint":"/v1/c","completion_window":"24h"}`, id))
		}
		_, id, _ = strings.Cut(text, `"id":"`)
		id, _, _ = strings.Cut(id, `"`)
		if status != http.StatusOK {
			t.Fatalf("%d %s", status, text)
		}
		return "/v1/batches/" + id
	}
	for range 8 {
		batch("a", 50)
	}
	job := func(tenant string) (int, string) {
		return as(t, m, tenant, http.MethodPost, "/v1/queues/q/jobs?path=/v1/c", `{"model":"`+tenant+`"}`, "Content-Type", "application/json")
	}
	testbed.Eventually(t, "the batches of a use up its share of the queue", func() bool {
		status, text := job("a")
		return status == http.StatusTooManyRequests && reasonOf(text) == "QUEUE_FULL"
	})
	path := batch("b", 3)
	testbed.Eventually(t, "the batch of b completes", func() bool {
		_, text := as(t, m, "b", http.MethodGet, path, "")
		return strings.Contains(text, `"status":"completed"`)
	})
	if status, text := job("b"); status != http.StatusAccepted {
		t.Errorf("a job of b gets %d %s", status, text)
	}
}
