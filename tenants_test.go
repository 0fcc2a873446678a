package stagemesh_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// startTenants starts a mesh of the tenants a and b with jobs and batches, whose sections gateway,
// jobs and results have more keys.
func startTenants(t *testing.T, gateway, jobs, more string) *stagemesh.Mesh {
	t.Helper()
	m, err := stagemesh.FromFile(parse(t, fmt.Sprintf(`
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}, token_file: %q%s}
stages: {echo: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: e, stage: echo}]}}
jobs: {%s}
%s`, testbed.SecretFile(t, "of-a a\nof-b b\n"), gateway, jobs, more)), stagemesh.FileSettings{Dispatcher: true})
	if err != nil {
		t.Fatal(err)
	}
	return start(t, m)
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
