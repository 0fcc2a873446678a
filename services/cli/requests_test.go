package cli_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/encoding/protojson"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/services/cli"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

const id = `[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}`

// inferDurable returns the id of a durable request for the labels of an image.
func inferDurable(t *testing.T, address string) string {
	t.Helper()
	out, err := run(t, "infer", "digits", image("07-9.png"), "--durability", "file", "-a", address)
	if err != nil {
		t.Fatal(err)
	}
	match(t, out, `FILE +REQUEST +TIME +ANSWER`, `07-9\.png +`+id+` +[0-9.]+ ms +labels=\[9 .*`)
	return strings.Fields(strings.Split(out, "\n")[1])[1]
}

func TestResultPrintsTheStoredAnswer(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	request := inferDurable(t, address)
	for range 2 {
		out, err := run(t, "get", "result", request, "-a", address)
		if err != nil {
			t.Fatal(err)
		}
		match(t, out, `REQUEST +TIME +ANSWER`, request+` +[0-9.]+ ms +labels=\[9 .*`)
	}
	out, err := run(t, "get", "result", request, "--wait", "1s", "--timeline", "-a", address)
	if err != nil {
		t.Fatal(err)
	}
	match(t, out, `REQUEST +TIME +ANSWER`, request+` +.*`, ` +decode: .*`, ` +classify: .*`, ` +label: .*`)
	out, err = run(t, "get", "result", request, "--json", "-a", address)
	if err != nil {
		t.Fatal(err)
	}
	var answer inferencev1.InferResponse
	if err := protojson.Unmarshal([]byte(out), &answer); err != nil || answer.GetRequestId() != request || len(answer.GetOutputs()) != 2 {
		t.Errorf("got %s, %v", out, err)
	}
}

func TestInferWithKeyRunsOnce(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	var first string
	for range 2 {
		out, err := run(t, "infer", "digits", image("07-9.png"), "--idempotency-key", "nine", "-a", address)
		if err != nil {
			t.Fatal(err)
		}
		match(t, out, `FILE +REQUEST +TIME +ANSWER`, `07-9\.png +`+id+` +[0-9.]+ ms +labels=\[9 .*`)
		request := strings.Fields(strings.Split(out, "\n")[1])[1]
		if first != "" && request != first {
			t.Errorf("the answers of requests %s and %s", first, request)
		}
		out, err = run(t, "get", "result", "--pipeline", "digits", "--idempotency-key", "nine", "-a", address)
		if err != nil {
			t.Fatal(err)
		}
		match(t, out, `REQUEST +TIME +ANSWER`, request+` +[0-9.]+ ms +labels=\[9 .*`)
		first = request
	}
	out, err := run(t, "infer", "digits", image("00-1.png"), "--idempotency-key", "nine", "-a", address)
	if !errors.Is(err, cli.ErrFailed) || !strings.Contains(out, "IDEMPOTENCY_MISMATCH: ") {
		t.Errorf("with another image: got %v, %s", err, out)
	}
	if _, err := run(t, "infer", "digits", image("00-1.png"), image("07-9.png"), "--idempotency-key", "x", "-a", address); err == nil || err.Error() != "--idempotency-key: needs exactly one FILE, not 2" {
		t.Errorf("of two files: got %v", err)
	}
}

func TestMissingResultIsExplained(t *testing.T) {
	t.Parallel()
	address := mesh(t)
	unknown := uuid.NewString()
	begin := time.Now()
	for _, wait := range []string{"0s", "50ms"} {
		out, err := run(t, "get", "result", unknown, "--wait", wait, "-a", address)
		if want := "NOT_FOUND: request " + unknown + " has no stored result"; err == nil || !strings.HasPrefix(err.Error(), want) || out != "" {
			t.Errorf("got %q, %v", out, err)
		}
	}
	if took := time.Since(begin); took < 50*time.Millisecond {
		t.Errorf("it has not waited: %s", took)
	}
	noImage := testbed.WriteFile(t, "body", "no image")
	out, err := run(t, "infer", "digits", noImage, "--durability", "file", "--json", "-a", address)
	var failure struct{ Error, RequestID string }
	if jsonErr := json.Unmarshal([]byte(out), &failure); jsonErr != nil || !errors.Is(err, cli.ErrFailed) || failure.RequestID == "" {
		t.Fatalf("got %q, %v, %v", out, err, jsonErr)
	}
	out, err = run(t, "get", "result", failure.RequestID, "-a", address)
	if err == nil || !strings.HasPrefix(err.Error(), "UNSUPPORTED_MEDIA_TYPE at stage decode: ") || err.Error() != failure.Error || out != "" {
		t.Errorf("got %q, %v, want %s", out, err, failure.Error)
	}
}

// endless starts a mesh and in it a durable request that runs until it is called
// off; its caller is gone.
func endless(t *testing.T) (address, id string) {
	t.Helper()
	runs := make(chan struct{}, 1)
	stage := stagemesh.Stage{Name: "endless", Runner: inproc.Each(inproc.Settings{}, func(ctx context.Context, _ runner.Item) ([]payload.Part, error) {
		runs <- struct{}{}
		<-ctx.Done()
		return nil, ctx.Err()
	})}
	m, err := stagemesh.New(stagemesh.Settings{Gateway: gateway.Settings{Config: gateway.Config{Listen: "127.0.0.1:0"}}})
	if err := errors.Join(err, m.AddStage(stage)); err != nil {
		t.Fatal(err)
	}
	address = meshtest.Start(t, m).URL()
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	left := make(chan error, 1)
	go func() {
		_, err := m.Infer(ctx, &request.Request{
			Pipeline: "stage:endless", Durability: pipeline.File,
			Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("x"))},
		})
		left <- err
	}()
	testbed.Receive(t, "run", runs)
	leave()
	f := fault.From(testbed.Receive(t, "caller's leave", left))
	return address, f.Metadata["request_id"]
}

// Its ID reaches the caller only with the answer.
func TestRunningRequestIsListedAndCancelledByItsKey(t *testing.T) {
	t.Parallel()
	runs := make(chan struct{}, 1)
	stage := stagemesh.Stage{Name: "endless", Runner: inproc.Each(inproc.Settings{}, func(ctx context.Context, _ runner.Item) ([]payload.Part, error) {
		runs <- struct{}{}
		<-ctx.Done()
		return nil, ctx.Err()
	})}
	m, err := stagemesh.New(stagemesh.Settings{Gateway: gateway.Settings{Config: gateway.Config{Listen: "127.0.0.1:0", Admin: gateway.Admin{Listen: "127.0.0.1:0"}}}})
	if err := errors.Join(err, m.AddStage(stage)); err != nil {
		t.Fatal(err)
	}
	address := meshtest.Start(t, m).URL()
	list := func(args ...string) string {
		out, err := run(t, append([]string{"status", "--requests", "--admin", m.AdminURL()}, args...)...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	if out := list(); out != "there is no request in flight\n" {
		t.Errorf("before: %s", out)
	}
	left := make(chan error, 1)
	go func() {
		_, err := m.Infer(t.Context(), &request.Request{
			Pipeline: "stage:endless", Durability: pipeline.File, IdempotencyKey: "order 7",
			Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("x"))},
		})
		left <- err
	}()
	testbed.Receive(t, "run", runs)
	var listed string
	testbed.Eventually(t, "the host answers in time", func() bool {
		listed = list("--stage", "endless")
		return strings.Contains(listed, "a worker runs it")
	})
	match(t, listed, `REQUEST +AGE +LEFT +PIPELINE +STAGES +STATE +HOST +GATEWAY +QUEUE +TENANT +KEY`,
		id+` +\d+s +\d+s +stage:endless +\[endless\] +a worker runs it \(\d+s\) +`+id+` +`+id+` +file +- +order 7`)
	if out := list("--stage", "other"); out != "there is no request in flight\n" {
		t.Errorf("of another stage: %s", out)
	}
	if out, err := run(t, "cancel", "--pipeline", "stage:endless", "--idempotency-key", "order 7", "-a", address); err != nil || !strings.Contains(out, `with the key "order 7"`) {
		t.Errorf("cancel: %s, %v", out, err)
	}
	if f := fault.From(testbed.Receive(t, "end of the call", left)); f.Reason != fault.Cancelled {
		t.Errorf("it ended with %v", f)
	}
	testbed.Eventually(t, "the host leaves it", func() bool { return list("--json") == "{}\n" })
}

func TestCancelCancelsARequest(t *testing.T) {
	t.Parallel()
	address, request := endless(t)
	if _, err := run(t, "get", "result", request, "-a", address); err == nil || !strings.HasPrefix(err.Error(), "NOT_FOUND: ") {
		t.Fatalf("got %v", err)
	}
	out, err := run(t, "cancel", request, "-a", address)
	if want := "the mesh was asked to cancel " + request + "; finished work stays finished\n"; err != nil || out != want {
		t.Errorf("got %q, %v", out, err)
	}
	if _, err := run(t, "get", "result", request, "--wait", "10s", "-a", address); err == nil || !strings.HasPrefix(err.Error(), "CANCELLED at stage endless: ") {
		t.Errorf("got %v", err)
	}
	// That it is done is not an error, nor that there is none.
	for _, request := range []string{request, uuid.NewString()} {
		if _, err := run(t, "cancel", request, "-a", address); err != nil {
			t.Error(err)
		}
	}
}

func TestRequestVerbsCheckTheirArguments(t *testing.T) {
	t.Parallel()
	good := uuid.NewString()
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"result of none":       {[]string{"get", "result"}, "give one REQUEST_ID; see stagemesh get result --help"},
		"result of two":        {[]string{"get", "result", good, good}, "give one REQUEST_ID; see stagemesh get result --help"},
		"result of no id":      {[]string{"get", "result", "x"}, `REQUEST_ID: "x" is not an ID such as 01a1fc37-9c70-7089-b8a4-eabc34a6f203; see stagemesh get result --help`},
		"a negative wait":      {[]string{"get", "result", good, "--wait", "-1s"}, "--wait: -1s is negative; see stagemesh get result --help"},
		"result of no mesh":    {[]string{"get", "result", good, "-a", "127.0.0.1:1"}, "cannot connect to http://127.0.0.1:1: "},
		"result of half a key": {[]string{"get", "result", "--idempotency-key", "x"}, "give one REQUEST_ID, or --pipeline and --idempotency-key; see stagemesh get result --help"},
		"cancel of both":       {[]string{"cancel", good, "--pipeline", "digits", "--idempotency-key", "x"}, "give one REQUEST_ID, or --pipeline and --idempotency-key; see stagemesh cancel --help"},
		"cancel of none":       {[]string{"cancel"}, "give one REQUEST_ID; see stagemesh cancel --help"},
		"cancel of no id":      {[]string{"cancel", "x"}, `REQUEST_ID: "x" is not an ID`},
		"cancel of no mesh":    {[]string{"cancel", good, "-a", "127.0.0.1:1"}, "cannot connect to http://127.0.0.1:1: "},
		"cancel nowhere":       {[]string{"cancel", good, "-a", "ftp://x"}, "--address: "},
		"a negative timeout":   {[]string{"infer", "p", "f", "--timeout", "-1s"}, "--timeout: -1s is negative"},
		"a nameless parameter": {[]string{"infer", "p", "f", "--parameter", "=1"}, `invalid argument "=1" for "--parameter" flag: must be name=value`},
		"a nameless and empty": {[]string{"infer", "p", "f", "--parameter", "="}, `invalid argument "=" for "--parameter" flag: must be name=value`},
		"one of a job":         {[]string{"jobs", "submit", "q", "f", "--parameter", "=1"}, `invalid argument "=1" for "--parameter" flag: must be name=value`},
		"a durability":         {[]string{"infer", "p", "f", "--durability", "disk"}, `--durability: "disk": use memory or file`},
	} {
		out, err := run(t, test.args...)
		if err == nil || !strings.HasPrefix(err.Error(), test.want) || out != "" {
			t.Errorf("%s: got %q, %v, want %s", name, out, err, test.want)
		}
	}
}
