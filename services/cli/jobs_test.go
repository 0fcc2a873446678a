package cli_test

import (
	"encoding/base64"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/jobs/dispatch"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/cli"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

const jobID = `[a-z]+\.[0-9a-f-]{36}`

// jobsFile is the digits mesh with the queues nightly and, of one job, small.
func jobsFile(t *testing.T) *meshfile.File {
	t.Helper()
	file := meshtest.Load(t, filepath.Join(digits, "mesh.yaml"))
	file.Jobs = dispatch.Config{
		Pools: map[string]dispatch.PoolConfig{"main": {Target: dispatch.TargetConfig{Pipelines: []string{"digits"}}}},
		Queues: map[string]dispatch.QueueConfig{
			"nightly": {}, "small": {JobQueueSettings: store.JobQueueSettings{MaxJobs: 1}},
		},
	}
	return file
}

// jobsMesh starts the mesh of jobsFile and returns the address of its gateway.
func jobsMesh(t *testing.T, dispatches bool) string {
	t.Helper()
	m := meshtest.FromFile(t, jobsFile(t), stagemesh.FileSettings{Dispatcher: dispatches})
	return meshtest.Start(t, m).URL()
}

func TestJobsAreSubmittedAndWaitedFor(t *testing.T) {
	t.Parallel()
	address := jobsMesh(t, true)
	noImage := testbed.WriteFile(t, "body", "no image")
	out, err := run(t, "jobs", "submit", "nightly", image("07-9.png"), noImage, "--wait", "--attribute", "run=7", "-a", address)
	if !errors.Is(err, cli.ErrFailed) || !strings.HasSuffix(err.Error(), ": 1 of 2") {
		t.Errorf("got %v, %s", err, out)
	}
	match(t, out, `FILE +JOB +PIPELINE +STATE +AGE +ATTEMPTS +DETAILS`,
		`07-9\.png +`+jobID+` +digits +succeeded +\d+s +1 +labels=\[9 .*`,
		filepath.Base(noImage)+` +`+jobID+` +digits +failed +\d+s +1 +UNSUPPORTED_MEDIA_TYPE: .*`)
	done := strings.Fields(strings.Split(out, "\n")[1])[1]
	for _, verb := range []string{"get", "wait"} {
		out, err = run(t, "jobs", verb, done, "-a", address)
		if err != nil {
			t.Fatal(err)
		}
		want := []string{`JOB +PIPELINE +STATE +AGE +ATTEMPTS +DETAILS`, done + ` +digits +succeeded .* labels=\[9 .*`}
		if verb == "get" {
			want = append(want, `usage: 1 attempts; queued .* bytes in, .* out`)
		}
		match(t, out, want...)
	}
	out, err = run(t, "jobs", "get", done, "--json", "-a", address)
	var r inferencev1.GetJobResponse
	if jsonErr := protojson.Unmarshal([]byte(out), &r); err != nil || jsonErr != nil || len(r.GetInfer().GetOutputs()) != 2 || r.GetJob().GetAttributes()["run"] != "7" {
		t.Errorf("got %s, %v, %v", out, err, jsonErr)
	}
	if out, err = run(t, "jobs", "watch", done, "-a", address); err != nil || out != "succeeded\n" {
		t.Errorf("got %v, %s", err, out)
	}
	out, err = run(t, "jobs", "list", "nightly", "--ended", "-a", address)
	if err != nil || strings.Count(out, "\n") != 3 {
		t.Errorf("got %v, %s", err, out)
	}
	if out, err = run(t, "jobs", "cancel", done, "-a", address); err != nil {
		t.Fatal(err)
	}
	match(t, out, `JOB .*`, done+` +digits +succeeded .*`)
}

func TestJobsWaitWithoutADispatcher(t *testing.T) {
	t.Parallel()
	address := jobsMesh(t, false)
	submit := []string{"jobs", "submit", "nightly", image("07-9.png"), "--idempotency-key", "nine", "--ttl", "6h", "-a", address}
	first, err := run(t, submit...)
	if err != nil {
		t.Fatal(err)
	}
	match(t, first, `FILE .*`, `07-9\.png +`+jobID+` +digits +queued +\d+s +0 +expires in 5h`)
	waiting := strings.Fields(strings.Split(first, "\n")[1])[1]
	if again, err := run(t, submit...); err != nil || !strings.Contains(again, waiting) {
		t.Errorf("with the same key: got %v, %s, want job %s", err, again, waiting)
	}
	if _, err = run(t, "jobs", "wait", waiting, "--timeout", "50ms", "-a", address); err == nil || err.Error() != "--timeout: not all jobs have ended within 50ms" {
		t.Errorf("wait: got %v", err)
	}
	out, err := run(t, "jobs", "list", "nightly", "-a", address)
	if err != nil {
		t.Fatal(err)
	}
	match(t, out, `JOB .*`, waiting+` +digits +queued .*`)
	const gone = "nightly.0192d3f4-1c2a-7000-8000-000000000000"
	out, err = run(t, "jobs", "cancel", gone, waiting, "-a", address)
	if err == nil || !strings.HasPrefix(err.Error(), "GONE: ") {
		t.Errorf("cancel: got %v", err)
	}
	match(t, out, `JOB .*`, gone+` +- .* GONE: .*`, waiting+` +digits +cancelled .*`)
	if out, err = run(t, "jobs", "cancel", waiting, "-a", address); err != nil {
		t.Fatal(err)
	}
	match(t, out, `JOB .*`, waiting+` +digits +cancelled +\d+s +0 +CANCELLED: .*`)
	out, err = run(t, "jobs", "submit", "small", image("07-9.png"), image("00-1.png"), "-a", address)
	if !errors.Is(err, cli.ErrFailed) {
		t.Errorf("a full queue: got %v", err)
	}
	match(t, out, `FILE .*`, `07-9\.png +`+jobID+` .*`, `00-1\.png +- .* QUEUE_FULL: queue small is full`)
}

func TestDeadJobIsReplayedWithAnotherBody(t *testing.T) {
	t.Parallel()
	target := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if body, _ := io.ReadAll(r.Body); string(body) != "fixed" {
			http.Error(w, "cannot read it", http.StatusInternalServerError)
		}
	}))
	t.Cleanup(target.Close)
	file := jobsFile(t)
	file.Jobs.Pools["http"] = dispatch.PoolConfig{Target: dispatch.TargetConfig{HTTP: &dispatch.HTTPTarget{URL: target.URL}}}
	file.Jobs.Queues = map[string]dispatch.QueueConfig{"other": {Pool: "main"}, "calls": {Pool: "http", Attempts: 1}}
	m := meshtest.FromFile(t, file, stagemesh.FileSettings{Dispatcher: true})
	address := meshtest.Start(t, m).URL()
	if out, err := run(t, "jobs", "submit", "calls", testbed.WriteFile(t, "body", "broken"), "--path", "/a", "--wait", "-a", address); !errors.Is(err, cli.ErrFailed) {
		t.Fatalf("got %v, %s", err, out)
	}
	dead := func(args ...string) string {
		t.Helper()
		out, err := run(t, append(append([]string{"dead-letters"}, args...), "-a", m.AdminURL())...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	listed := dead("list", "--queue", "calls")
	match(t, listed, `NUMBER .*`, `\d+ +\d+s +queue calls +- +TARGET_FAILED +1 +`+jobID)
	if out := dead("list", "--queue", "other"); out != "" {
		t.Errorf("of another queue: %s", out)
	}
	number := strings.Fields(strings.Split(listed, "\n")[1])[0]
	replayed := dead("replay", number, "--body", testbed.WriteFile(t, "body", "fixed"))
	match(t, replayed, `dead letter `+number+` runs again as job `+jobID)
	fields := strings.Fields(replayed)
	if out, err := run(t, "jobs", "wait", fields[len(fields)-1], "-a", address); err != nil || !strings.Contains(out, "succeeded") {
		t.Errorf("got %v, %s", err, out)
	}
	if out := dead("delete", "--all", "--queue", "calls"); out != "" {
		t.Errorf("after the replay: %s", out)
	}
}

func TestBadUseOfJobsIsExplained(t *testing.T) {
	t.Parallel()
	address := jobsMesh(t, false)
	file := image("07-9.png")
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"no file":        {[]string{"submit", "nightly"}, "give a QUEUE and at least one FILE; see stagemesh jobs submit --help"},
		"two of a key":   {[]string{"submit", "nightly", file, file, "--idempotency-key", "k"}, "--idempotency-key: needs exactly one FILE, not 2"},
		"no time":        {[]string{"submit", "nightly", file, "--deadline", "noon"}, `--deadline: "noon" is not a time such as 2006-01-02T15:04:05Z; see stagemesh jobs submit --help`},
		"no queue":       {[]string{"list", "nope"}, `UNKNOWN_QUEUE: there is no queue "nope"; there are nightly small`},
		"no ID":          {[]string{"get", "x"}, `INVALID_REQUEST: `},
		"past retention": {[]string{"cancel", "nightly.0192d3f4-1c2a-7000-8000-000000000000"}, "GONE: job nightly.0192d3f4-1c2a-7000-8000-000000000000"},
	} {
		args := append([]string{"jobs"}, c.args...)
		if name != "no file" {
			args = append(args, "-a", address)
		}
		if out, err := run(t, args...); err == nil || !strings.HasPrefix(err.Error(), c.want) || out != "" {
			t.Errorf("%s: got %q, %v, want %s", name, out, err, c.want)
		}
	}
	out, err := run(t, "jobs", "submit", "nightly", file, "--ttl", "-1s", "-a", address)
	if !errors.Is(err, cli.ErrFailed) || !strings.Contains(out, "INVALID_REQUEST: ttl: ") {
		t.Errorf("a negative ttl: got %v, %s", err, out)
	}
}

func TestWebhookSecretOfATenantIsPrinted(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	file, secret := filepath.Join(folder, "mesh.yaml"), "whsec_"+base64.StdEncoding.EncodeToString(make([]byte, 32))
	save(t, filepath.Join(folder, "secret"), secret)
	save(t, file, echoes+"jobs:\n  pools: {main: {target: {pipelines: [p]}}}\n  queues: {q: {}}\n  webhooks: {secret_files: [secret], tenants: {own: {secret_files: [secret]}}}\n")
	out, err := run(t, "jobs", "webhook-secret", "billing", "-c", file)
	if err != nil || !strings.HasPrefix(out, "whsec_") || strings.Contains(out, secret) || strings.Count(out, "\n") != 1 {
		t.Errorf("%q, %v", out, err)
	}
	for tenant, want := range map[string]string{"own": "tenants.own.secret_files", "A b": "tenant name"} {
		if out, err := run(t, "jobs", "webhook-secret", tenant, "-c", file); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %q, %v", tenant, out, err)
		}
	}
}
