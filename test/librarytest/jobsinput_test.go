package librarytest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/uuid"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stagemesh/stagemesh/internal/testbed"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// startJobs starts a mesh with the queue nightly for pipeline p, which echoes, and small of ten
// jobs.
func startJobs(t *testing.T, dispatches bool, options ...string) *stagemesh.Mesh {
	t.Helper()
	m := meshtest.FromFile(t, meshtest.Parse(t, `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}, max_payload: 64KiB`+strings.Join(options, "")+`}
stages: {echo: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: e, stage: echo}]}, other: {steps: [{name: e, stage: echo}]}}
jobs:
  pools: {main: {target: {pipelines: [p]}}}
  queues: {nightly: {}, small: {max_jobs: 10}}
`), stagemesh.FileSettings{Dispatcher: dispatches})
	return meshtest.Start(t, m)
}

// jobCall sends text, and returns the answer and its body.
func jobCall(t *testing.T, m *stagemesh.Mesh, method, path, body string, headers ...string) (testbed.Response, string) {
	t.Helper()
	return testbed.Call(t, http.DefaultClient, method, m.URL()+path, body, append([]string{"Content-Type", "text/plain"}, headers...)...)
}

func reasonOf(body string) string {
	var f struct {
		Error struct{ Reason string } `json:"error"`
	}
	_ = json.Unmarshal([]byte(body), &f) // then it has none
	return f.Error.Reason
}

func TestBadJobsAreRefused(t *testing.T) {
	t.Parallel()
	m := startJobs(t, false)
	const submit = "/v1/queues/nightly/jobs"
	past := time.Now().Add(-time.Minute).UTC().Format(time.RFC3339)
	for name, c := range map[string]struct {
		method, path, body string
		status             int
		reason             string
	}{
		"unknown queue":              {"POST", "/v1/queues/nope/jobs", "a", 404, "UNKNOWN_QUEUE"},
		"list of an unknown queue":   {"GET", "/v1/queues/nope/jobs", "", 404, "UNKNOWN_QUEUE"},
		"unknown pipeline":           {"POST", submit + "?pipeline=nope", "a", 404, "UNKNOWN_PIPELINE"},
		"pipeline of another queue":  {"POST", submit + "?pipeline=other", "a", 400, "INVALID_REQUEST"},
		"negative ttl":               {"POST", submit + "?ttl=-1s", "a", 400, "INVALID_REQUEST"},
		"unknown query key":          {"POST", submit + "?wrong=1", "a", 400, "INVALID_REQUEST"},
		"past deadline":              {"POST", submit + "?deadline=" + past, "a", 400, "INVALID_REQUEST"},
		"malformed deadline":         {"POST", submit + "?deadline=noon", "a", 400, "INVALID_REQUEST"},
		"payload over the limit":     {"POST", submit, strings.Repeat("a", 64<<10+1), 413, "PAYLOAD_TOO_LARGE"},
		"body over the limit":        {"POST", submit, strings.Repeat("a", 1<<20), 413, "PAYLOAD_TOO_LARGE"},
		"long attribute":             {"POST", submit + "?attributes.a=" + strings.Repeat("b", 65), "a", 400, "INVALID_REQUEST"},
		"path of a mesh's queue":     {"POST", submit + "?path=/x", "a", 400, "INVALID_REQUEST"},
		"ID that is none":            {"GET", "/v1/jobs/x", "", 400, "INVALID_REQUEST"},
		"job that never was":         {"GET", "/v1/jobs/nightly." + uuid.Must(uuid.NewV7()).String(), "", 404, "NOT_FOUND"},
		"job past its retention":     {"GET", "/v1/jobs/nightly.0192d3f4-1c2a-7000-8000-000000000000", "", 410, "GONE"},
		"result past its retention":  {"GET", "/v1/jobs/nightly.0192d3f4-1c2a-7000-8000-000000000000/result", "", 410, "GONE"},
		"explain of what never was":  {"GET", "/v1/jobs/nightly." + uuid.Must(uuid.NewV7()).String() + "/explain", "", 404, "NOT_FOUND"},
		"events of what never was":   {"GET", "/v1/jobs/nightly." + uuid.Must(uuid.NewV7()).String() + "/events", "", 404, "NOT_FOUND"},
		"events past the retention":  {"GET", "/v1/jobs/nightly.0192d3f4-1c2a-7000-8000-000000000000/events", "", 410, "GONE"},
		"cancel of what never was":   {"DELETE", "/v1/jobs/nightly." + uuid.Must(uuid.NewV7()).String(), "", 404, "NOT_FOUND"},
		"another method":             {"PUT", submit, "a", 405, "INVALID_REQUEST"},
		"malformed page":             {"GET", submit + "?after=x", "", 400, "INVALID_REQUEST"},
		"path that there is not":     {"GET", "/v1/queues/nightly/nope", "", 404, "NOT_FOUND"},
		"job of a queue that is not": {"GET", "/v1/jobs/nope." + uuid.Must(uuid.NewV7()).String(), "", 404, "UNKNOWN_QUEUE"},
	} {
		response, body := jobCall(t, m, c.method, c.path, c.body)
		if response.StatusCode != c.status || reasonOf(body) != c.reason {
			t.Errorf("%s: got %d %s, want %d %s", name, response.StatusCode, body, c.status, c.reason)
		}
	}
	client := inferencev1connect.NewJobServiceClient(http.DefaultClient, m.URL())
	if _, err := client.SubmitJob(t.Context(), connect.NewRequest(&inferencev1.SubmitJobRequest{Queue: "nightly"})); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("without a payload: %v", err)
	}
	if response, body := jobCall(t, m, "GET", submit, ""); response.StatusCode != 200 || !strings.HasPrefix(body, `{"jobs":[]`) {
		t.Errorf("something was stored: %d %s", response.StatusCode, body)
	}
}

func TestQueueTakesExactlyItsJobs(t *testing.T) {
	t.Parallel()
	m := startJobs(t, false)
	var accepted, full atomic.Int32
	var submits sync.WaitGroup
	for range 20 {
		submits.Go(func() {
			response, body := jobCall(t, m, "POST", "/v1/queues/small/jobs", "a")
			switch {
			case response.StatusCode == http.StatusAccepted:
				accepted.Add(1)
			case response.StatusCode == http.StatusTooManyRequests && reasonOf(body) == "QUEUE_FULL" && response.Header.Get("Retry-After") != "":
				full.Add(1)
			default:
				t.Errorf("got %d %v %s", response.StatusCode, response.Header, body)
			}
		})
	}
	if submits.Wait(); accepted.Load() != 10 || full.Load() != 10 {
		t.Errorf("%d accepted, %d refused", accepted.Load(), full.Load())
	}
}

func TestIdempotencyKeyOfAJob(t *testing.T) {
	t.Parallel()
	m := startJobs(t, true)
	first, ended := "", false
	for range 3 {
		response, body := jobCall(t, m, "POST", "/v1/queues/nightly/jobs", "a", "Idempotency-Key", "k")
		if at := response.Header.Get("Location"); response.StatusCode != http.StatusAccepted || first != "" && at != first {
			t.Errorf("got %d at %s, first %s: %s", response.StatusCode, at, first, body)
		}
		first = response.Header.Get("Location")
		response, body = jobCall(t, m, "POST", "/v1/queues/nightly/jobs", "b", "Idempotency-Key", "k")
		if reasonOf(body) != "IDEMPOTENCY_MISMATCH" {
			t.Errorf("another payload, job ended %t: %d %s", ended, response.StatusCode, body)
		}
		if response, body = jobCall(t, m, "GET", first+"/result?wait=30s", ""); response.StatusCode != 200 || body != "a" {
			t.Errorf("got %d %s", response.StatusCode, body)
		}
		ended = true
	}
}

func TestJobsOfAnotherTenantAreNotFound(t *testing.T) {
	t.Parallel()
	mine, others := strings.Repeat("a", 64), strings.Repeat("b", 64)
	file := testbed.WriteFile(t, "tokens", mine+" mine\n"+others+" others\n")
	m := startJobs(t, false, ", token_file: "+file)
	response, body := jobCall(t, m, "POST", "/v1/queues/nightly/jobs", "a", "Authorization", "Bearer "+mine)
	at := response.Header.Get("Location")
	if response.StatusCode != http.StatusAccepted {
		t.Fatalf("%d %s", response.StatusCode, body)
	}
	for _, c := range [][2]string{{"GET", at}, {"GET", at + "/result"}, {"GET", at + "/explain"}, {"GET", at + "/events"}, {"DELETE", at}} {
		if response, body := jobCall(t, m, c[0], c[1], "", "Authorization", "Bearer "+others); response.StatusCode != 404 || reasonOf(body) != "NOT_FOUND" {
			t.Errorf("%s by another tenant: %d %s", c, response.StatusCode, body)
		}
	}
	if _, body := jobCall(t, m, "GET", "/v1/queues/nightly/jobs", "", "Authorization", "Bearer "+others); strings.Contains(body, "queued") {
		t.Errorf("another tenant lists %s", body)
	}
	if _, body := jobCall(t, m, "GET", at, "", "Authorization", "Bearer "+mine); !strings.Contains(body, `"state":"queued"`) {
		t.Errorf("its own job: %s", body)
	}
}

func TestJobsOverEveryProtocol(t *testing.T) {
	t.Parallel()
	m := startJobs(t, true)
	conn := testbed.Dial(t, m.URL())
	byConnect := inferencev1connect.NewJobServiceClient(http.DefaultClient, m.URL())
	byGRPC := inferencev1.NewJobServiceClient(conn)
	request := &inferencev1.SubmitJobRequest{Queue: "nightly", Payload: &inferencev1.SubmitJobRequest_Infer{Infer: &inferencev1.InferRequest{
		Inputs: []*inferencev1.Part{{Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: "text/plain", Data: []byte("a")}}}},
	}}}
	one, err := byConnect.SubmitJob(t.Context(), connect.NewRequest(request))
	if err != nil {
		t.Fatal(err)
	}
	two, err := byGRPC.SubmitJob(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	response, _ := jobCall(t, m, "POST", "/v1/queues/nightly/jobs", "a")
	for _, id := range []string{one.Msg.GetJob().GetId(), two.GetJob().GetId(), strings.TrimPrefix(response.Header.Get("Location"), "/v1/jobs/")} {
		wait := &inferencev1.GetJobRequest{Id: id, Wait: durationpb.New(30 * time.Second)}
		got, err := byGRPC.GetJob(t.Context(), wait)
		if err != nil || string(got.GetInfer().GetOutputs()[0].GetBlob().GetData()) != "a" {
			t.Fatalf("by gRPC: %v, %v", got, err)
		}
		again, err := byConnect.GetJob(t.Context(), connect.NewRequest(wait))
		if err != nil || again.Msg.GetJob().GetState() != inferencev1.JobState_JOB_STATE_SUCCEEDED {
			t.Errorf("by Connect: %v, %v", again, err)
		}
		if response, body := jobCall(t, m, "GET", "/v1/jobs/"+id+"/result", ""); response.StatusCode != 200 || body != "a" {
			t.Errorf("by HTTP: %d %s", response.StatusCode, body)
		}
		if cancelled, err := byGRPC.CancelJob(t.Context(), &inferencev1.CancelJobRequest{Id: id}); err != nil || cancelled.GetJob().GetState() != inferencev1.JobState_JOB_STATE_SUCCEEDED {
			t.Errorf("a cancel after the end: %v, %v", cancelled, err)
		}
	}
	page, err := byGRPC.ListJobs(t.Context(), &inferencev1.ListJobsRequest{Queue: "nightly", Ended: true, Limit: 2})
	if err != nil || len(page.GetJobs()) != 2 || page.GetNext() == 0 {
		t.Fatalf("%v, %v", page, err)
	}
	_, body := jobCall(t, m, "GET", fmt.Sprintf("/v1/queues/nightly/results?after=%d", page.GetNext()), "")
	if strings.Count(body, `"state":"succeeded"`) != 1 {
		t.Errorf("the second page: %s", body)
	}
	listing, err := reflectionv1.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := listing.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	services, err := listing.Recv()
	if err != nil || !strings.Contains(services.String(), inferencev1connect.JobServiceName) {
		t.Errorf("reflection: %v, %v", services, err)
	}
	if err := listing.CloseSend(); err != nil {
		t.Error(err)
	}
}
