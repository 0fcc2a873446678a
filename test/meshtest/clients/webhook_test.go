package clients

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

func TestStandardWebhooksVerifiesWebhooksOfJobs(t *testing.T) {
	t.Parallel()
	tools := installTools(t)
	type call struct {
		Headers map[string]string `json:"headers"`
		Body    string            `json:"body"`
	}
	calls := make(chan call, 1)
	receiver := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got := call{Headers: map[string]string{}, Body: string(body)}
		for name := range r.Header {
			got.Headers[name] = r.Header.Get(name)
		}
		calls <- got
	}))
	t.Cleanup(receiver.Close)
	secret := func(fill byte) string {
		return "whsec_" + base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{fill}, 32))
	}
	file, err := meshfile.Parse("m.yaml", fmt.Appendf(nil, `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages: {echo: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: e, stage: echo}]}}
jobs:
  pools: {main: {target: {pipelines: [p]}}}
  queues: {nightly: {}}
  webhooks: {secret_files: [%s, %s], allow: [127.0.0.1]}
`, testbed.SecretFile(t, secret(1)), testbed.SecretFile(t, secret(2))), "", runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	m := meshtest.FromFile(t, file, stagemesh.FileSettings{Dispatcher: true})
	meshtest.Start(t, m)
	response, err := http.Post(m.URL()+"/v1/queues/nightly/jobs?webhook="+receiver.URL, "text/plain", strings.NewReader("a"))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var job struct{ ID string }
	if err := json.NewDecoder(response.Body).Decode(&job); err != nil || response.StatusCode != http.StatusAccepted {
		t.Fatal(response.StatusCode, err)
	}
	got := testbed.Receive(t, "the webhook", calls)
	verify := func(c call) string {
		data, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), tools.python, "-B", "verify_webhook.py", secret(1), secret(2), secret(3))
		cmd.Dir, cmd.Stdin = "python", bytes.NewReader(data)
		return run(t, cmd)
	}
	ended := "job.succeeded " + job.ID + "\n"
	if out := verify(got); out != ended+ended+"No matching signature found\n" {
		t.Errorf("it prints %q", out)
	}
	got.Body = strings.Replace(got.Body, "succeeded", "failed", 1)
	if out := verify(got); out != strings.Repeat("No matching signature found\n", 3) {
		t.Errorf("of another body it prints %q", out)
	}
}
