package librarytest

import (
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

const closedQueue = `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages: {echo: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: e, stage: echo}]}}
jobs:
  pools: {main: {target: {pipelines: [p]}, gate: {constant: {value: 0}}}}
  queues: {nightly: {}}
`

func startClosed(t *testing.T, section string) *stagemesh.Mesh {
	t.Helper()
	m := meshtest.FromFile(t, meshtest.Parse(t, closedQueue+section), stagemesh.FileSettings{Dispatcher: true})
	return meshtest.Start(t, m)
}

func webhooksSection(t *testing.T, allow string) string {
	t.Helper()
	secret := testbed.SecretFile(t, "whsec_"+base64.StdEncoding.EncodeToString(make([]byte, 32)))
	return "  webhooks: {secret_files: [" + secret + "], allow: [" + allow + "]}\n"
}

func TestCancelledJobCallsItsWebhook(t *testing.T) {
	t.Parallel()
	bodies := make(chan string, 1)
	receiver := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		bodies <- string(body)
	}))
	t.Cleanup(receiver.Close)
	m := startClosed(t, webhooksSection(t, "127.0.0.1"))
	response, body := jobCall(t, m, http.MethodPost, "/v1/queues/nightly/jobs?webhook="+url.QueryEscape(receiver.URL), "a")
	if response.StatusCode != http.StatusAccepted || strings.Contains(body, receiver.URL) {
		t.Fatal(response.StatusCode, body)
	}
	at := response.Header.Get("Location")
	if response, body := jobCall(t, m, http.MethodDelete, at, ""); response.StatusCode != http.StatusOK {
		t.Fatal(response.StatusCode, body)
	}
	var got struct {
		Type string
		Data struct{ ID, Reason string }
	}
	text := testbed.Receive(t, "the webhook", bodies)
	if err := json.Unmarshal([]byte(text), &got); err != nil || got.Type != "job.cancelled" || "/v1/jobs/"+got.Data.ID != at || got.Data.Reason != "CANCELLED" {
		t.Errorf("%s, %v", text, err)
	}
}

func TestBadWebhookIsRefusedAtTheSubmit(t *testing.T) {
	t.Parallel()
	m := startClosed(t, webhooksSection(t, "10.0.0.1"))
	without := startClosed(t, "")
	for name, c := range map[string]struct {
		mesh        *stagemesh.Mesh
		path, field string
	}{
		"private":       {m, "nightly/jobs?webhook=https://192.168.0.1/", "webhook: "},
		"mapped":        {m, "nightly/jobs?webhook=https://[::ffff:127.0.0.1]/", "webhook: "},
		"localhost":     {m, "nightly/jobs?webhook=https://localhost/", "webhook: "},
		"no TLS":        {m, "nightly/jobs?webhook=http://example.com", "webhook: "},
		"no section":    {without, "nightly/jobs?webhook=https://example.com", "webhook: "},
		"its own queue": {m, "webhooks/jobs?path=/a", "queue: "},
	} {
		response, body := jobCall(t, c.mesh, http.MethodPost, "/v1/queues/"+c.path, "a")
		if response.StatusCode != http.StatusBadRequest || !strings.Contains(body, `"INVALID_REQUEST"`) || !strings.Contains(body, c.field) {
			t.Errorf("%s: %d %s", name, response.StatusCode, body)
		}
	}
	if response, body := jobCall(t, m, http.MethodGet, "/v1/queues/nightly/jobs", ""); response.StatusCode != http.StatusOK || strings.Contains(body, "queued") {
		t.Errorf("%d %s", response.StatusCode, body)
	}
}
