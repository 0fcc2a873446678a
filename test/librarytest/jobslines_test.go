package librarytest

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/stagemesh/stagemesh/internal/testbed"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"
)

// lineAnswer is the answer to one line.
type lineAnswer struct {
	ID, State string
	Line      int
	Error     struct{ Reason string }
}

func lineAnswers(t *testing.T, body string) (out []lineAnswer) {
	t.Helper()
	for line := range strings.Lines(body) {
		var a lineAnswer
		if err := json.Unmarshal([]byte(line), &a); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		out = append(out, a)
	}
	return out
}

const linesType = "application/x-ndjson"

func TestBadLineFailsAlone(t *testing.T) {
	t.Parallel()
	m := startJobs(t, true)
	large := `"` + strings.Repeat("a", 64<<10) + `"`
	tooLong := `"` + strings.Repeat("a", 8<<20) + `"`
	body := strings.Join([]string{`{"a": 1}`, `{"a"`, "", "  ", large, tooLong, `{"a": 7}`, `{"a": 8}`}, "\n")
	response, answer := jobCall(t, m, "POST", "/v1/queues/nightly/jobs?attributes.from=file", body, "Content-Type", linesType)
	got := lineAnswers(t, answer)
	if response.StatusCode != 200 || response.Header.Get("Content-Type") != linesType || len(got) != 6 {
		t.Fatalf("%d %v %s", response.StatusCode, response.Header, answer)
	}
	for i, want := range []struct {
		line   int
		reason string
	}{{}, {2, "INVALID_REQUEST"}, {5, "PAYLOAD_TOO_LARGE"}, {6, "PAYLOAD_TOO_LARGE"}, {}, {}} {
		if a := got[i]; a.Line != want.line || a.Error.Reason != want.reason || (a.ID == "") != (want.reason != "") {
			t.Errorf("answer %d: %+v, want %+v", i, a, want)
		}
	}
	for i, want := range map[int]string{0: `{"a": 1}`, 4: `{"a": 7}`, 5: `{"a": 8}`} {
		if response, body := jobCall(t, m, "GET", "/v1/jobs/"+got[i].ID+"/result?wait=30s", ""); response.StatusCode != 200 || body != want {
			t.Errorf("%d %s, want %s", response.StatusCode, body, want)
		}
	}
}

func TestUploadOfBadLinesIsRefused(t *testing.T) {
	t.Parallel()
	m := startJobs(t, false)
	for name, c := range map[string]struct {
		path, body, encoding string
		status               int
		reason               string
	}{
		"nothing":             {"/v1/queues/nightly/jobs", "", "", 400, "INVALID_REQUEST"},
		"empty lines":         {"/v1/queues/nightly/jobs", "\n\n", "", 400, "INVALID_REQUEST"},
		"unknown query":       {"/v1/queues/nightly/jobs?nope=1", "1\n", "", 400, "INVALID_REQUEST"},
		"compressed":          {"/v1/queues/nightly/jobs", "1\n", "gzip", 415, "UNSUPPORTED_MEDIA_TYPE"},
		"unknown queue":       {"/v1/queues/nope/jobs", "1\n", "", 200, "UNKNOWN_QUEUE"},
		"past deadline":       {"/v1/queues/nightly/jobs?deadline=2020-01-01T00:00:00Z", "1\n", "", 200, "INVALID_REQUEST"},
		"path of a mesh's":    {"/v1/queues/nightly/jobs?path=/x", "1\n", "", 200, "INVALID_REQUEST"},
		"key over its bounds": {"/v1/queues/nightly/jobs", "1\n", "", 200, "INVALID_REQUEST"},
	} {
		headers := []string{"Content-Type", linesType, "Content-Encoding", c.encoding}
		if name == "key over its bounds" {
			headers = append(headers, "Idempotency-Key", strings.Repeat("k", 255))
		}
		response, body := jobCall(t, m, "POST", c.path, c.body, headers...)
		if response.StatusCode != c.status || reasonOf(body) != c.reason {
			t.Errorf("%s: %d %s", name, response.StatusCode, body)
		}
	}
}

func TestRepeatedUploadReturnsTheSameJobs(t *testing.T) {
	t.Parallel()
	m := startJobs(t, false)
	upload := func(body string) []lineAnswer {
		_, answer := jobCall(t, m, "POST", "/v1/queues/nightly/jobs", body, "Content-Type", linesType, "Idempotency-Key", "k")
		return lineAnswers(t, answer)
	}
	first, second := upload("1\n2\n"), upload("1\n2\n3\n")
	if len(first) != 2 || len(second) != 3 || first[0] != second[0] || first[1] != second[1] || first[0].ID == first[1].ID {
		t.Errorf("%v, then %v", first, second)
	}
	if third := upload("1\n4\n"); third[0] != first[0] || third[1].Error.Reason != "IDEMPOTENCY_MISMATCH" || third[1].Line != 2 {
		t.Errorf("another second line: %v", third)
	}
}

func TestUploadFillsAQueueExactly(t *testing.T) {
	t.Parallel()
	m := startJobs(t, false)
	_, answer := jobCall(t, m, "POST", "/v1/queues/small/jobs", strings.Repeat("1\n", 20), "Content-Type", linesType)
	if accepted, full := strings.Count(answer, `"state":"queued"`), strings.Count(answer, "QUEUE_FULL"); accepted != 10 || full != 10 {
		t.Errorf("%d accepted, %d refused", accepted, full)
	}
}

func TestUploadIsAnsweredWhileItIsSent(t *testing.T) {
	t.Parallel()
	m := startJobs(t, false)
	// All answers together are more than the gateway holds: each has 2 KiB of attributes.
	const lines = 2_500
	attributes := url.Values{}
	for i := range 16 {
		attributes.Set(fmt.Sprintf("attributes.%064d", i), strings.Repeat("a", 64))
	}
	sent, send := io.Pipe()
	go func() {
		for i := range lines {
			fmt.Fprintf(send, "%d\n", i)
		}
		_ = send.Close()
	}()
	r := testbed.Request(t, http.MethodPost, m.URL()+"/v1/queues/nightly/jobs?"+attributes.Encode(), sent)
	r.Header.Set("Content-Type", linesType)
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if n := strings.Count(string(data), `"state":"queued"`); err != nil || n != lines {
		t.Errorf("%d jobs, %v, the end of the answer is %s", n, err, data[max(0, len(data)-500):])
	}
}

func TestManyJobsInOneCall(t *testing.T) {
	t.Parallel()
	m := startJobs(t, false)
	client := inferencev1connect.NewJobServiceClient(http.DefaultClient, m.URL())
	job := func(queue string) *inferencev1.SubmitJobRequest {
		return &inferencev1.SubmitJobRequest{Queue: queue, Payload: &inferencev1.SubmitJobRequest_Infer{Infer: &inferencev1.InferRequest{
			Inputs: []*inferencev1.Part{{Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: "text/plain", Data: []byte("a")}}}},
		}}}
	}
	out, err := client.SubmitJobs(t.Context(), connect.NewRequest(&inferencev1.SubmitJobsRequest{Jobs: []*inferencev1.SubmitJobRequest{job("nightly"), job("nope"), {Queue: "nightly"}, job("small")}}))
	if err != nil {
		t.Fatal(err)
	}
	a := out.Msg.GetAnswers()
	if len(a) != 4 || a[0].GetJob().GetQueue() != "nightly" || a[1].GetFailure().GetReason() != "UNKNOWN_QUEUE" || a[2].GetFailure().GetReason() != "INVALID_REQUEST" || a[3].GetJob().GetQueue() != "small" {
		t.Errorf("%v", a)
	}
	for _, n := range []int{0, 1001} {
		if _, err := client.SubmitJobs(t.Context(), connect.NewRequest(&inferencev1.SubmitJobsRequest{Jobs: make([]*inferencev1.SubmitJobRequest, n)})); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%d jobs: %v", n, err)
		}
	}
}
