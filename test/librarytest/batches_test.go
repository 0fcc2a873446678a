package librarytest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// batchBed is a mesh with batches.
type batchBed struct {
	*stagemesh.Mesh

	t     *testing.T
	meter *testbed.Counts
	token string
}

// startBatches starts a mesh whose batches go to a target, in YAML, of a pool with one job at a
// time.
func startBatches(t *testing.T, target string, gateway ...string) *batchBed {
	t.Helper()
	return startBatchesOf(t, "nightly", "", target, gateway...)
}

// startBatchesOf is startBatches with another queue, and keys of the section nats.
func startBatchesOf(t *testing.T, queue, nats, target string, gateway ...string) *batchBed {
	t.Helper()
	meter := &testbed.Counts{}
	m := meshtest.FromFile(t, meshtest.Parse(t, `
mesh: m
nats: {`+nats+`}
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}`+strings.Join(gateway, "")+`}
stages: {echo: {runner: {echo: {}}}}
pipelines: {p: {steps: [{name: e, stage: echo}]}}
jobs:
  pools: {main: {target: `+target+`, max_in_flight: 4}}
  max_bytes: 64MiB
  queues: {nightly: {max_jobs: 300, max_bytes: 64MiB}, other: {max_bytes: 64MiB}}
  tenants: {barred: {queues: [other]}}
  batches: {queue: `+queue+`, max_bytes: 64MiB}
`), stagemesh.FileSettings{Dispatcher: true, Meter: meter})
	return &batchBed{Mesh: meshtest.Start(t, m), t: t, meter: meter}
}

// call sends a request, and decodes the answer's JSON into out unless that is nil.
func (b *batchBed) call(method, path, contentType string, body io.Reader, out any) (status int, answer string) {
	b.t.Helper()
	r, err := http.NewRequestWithContext(b.t.Context(), method, b.URL()+path, body)
	if err != nil {
		b.t.Fatal(err)
	}
	r.Header.Set("Content-Type", contentType)
	r.Header.Set("Authorization", "Bearer "+b.token)
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		b.t.Fatal(err)
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err == nil && out != nil {
		err = json.Unmarshal(data, out)
	}
	if err != nil {
		b.t.Fatalf("%s %s: %v: %s", method, path, err, data)
	}
	return response.StatusCode, string(data)
}

type fileDocument struct {
	ID, Object, Filename, Purpose string
	Bytes                         int64
	Expires                       int64 `json:"expires_at"`
	Created                       int64 `json:"created_at"`
}

// upload stores a file; fields are pairs of a name and a value, and come after it.
func (b *batchBed) upload(content string, fields ...string) (file fileDocument, status int, answer string) {
	b.t.Helper()
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	part, _ := form.CreateFormFile("file", "in.jsonl")
	_, _ = io.WriteString(part, content)
	for i := 0; i < len(fields); i += 2 {
		_ = form.WriteField(fields[i], fields[i+1])
	}
	_ = form.Close()
	status, answer = b.call("POST", "/v1/files", form.FormDataContentType(), &body, &file)
	return file, status, answer
}

type batchDocument struct {
	ID, Status  string
	OutputFile  string `json:"output_file_id"`
	ErrorFile   string `json:"error_file_id"`
	CompletedAt int64  `json:"completed_at"`
	Metadata    map[string]string
	Errors      struct{ Data []batchErrorDocument }
	Counts      struct{ Total, Completed, Failed int } `json:"request_counts"`
}

type batchErrorDocument struct {
	Code, Param string
	Line        int
}

const completions = "/v1/chat/completions"

// create uploads lines and begins their batch.
func (b *batchBed) create(window, content string) string {
	b.t.Helper()
	file, status, answer := b.upload(content, "purpose", "batch")
	if status != http.StatusOK {
		b.t.Fatalf("%d %s", status, answer)
	}
	var batch batchDocument
	body := fmt.Sprintf(`{"input_file_id": %q, "endpoint": %q, "completion_window": %q, "metadata": {"k": "v"}}`, file.ID, completions, window)
	if status, answer := b.call("POST", "/v1/batches", "application/json", strings.NewReader(body), &batch); status != http.StatusOK || batch.Status != "validating" {
		b.t.Fatalf("%d %s", status, answer)
	}
	return batch.ID
}

func (b *batchBed) batch(id string) (out batchDocument) {
	b.t.Helper()
	if status, answer := b.call("GET", "/v1/batches/"+id, "", nil, &out); status != http.StatusOK {
		b.t.Fatalf("%d %s", status, answer)
	}
	return out
}

// await returns the batch once it has that status.
func (b *batchBed) await(id, status string) (out batchDocument) {
	b.t.Helper()
	before := batchDocument{}
	testbed.Eventually(b.t, "the batch is "+status, func() bool {
		before, out = out, b.batch(id)
		if out.Counts.Completed < before.Counts.Completed || out.Counts.Failed < before.Counts.Failed {
			b.t.Fatalf("counts fall: %+v, %+v", before, out)
		}
		return out.Status == status
	})
	return out
}

// resultDocument is a line of an output or error file.
type resultDocument struct {
	ID       string
	CustomID string `json:"custom_id"`
	Response *struct {
		StatusCode int    `json:"status_code"`
		RequestID  string `json:"request_id"`
		Body       any
	}
	Error *struct{ Code, Message string }
}

// lines returns the lines of a file, by custom ID.
func (b *batchBed) lines(file string) map[string]resultDocument {
	b.t.Helper()
	out := map[string]resultDocument{}
	if file == "" {
		return out
	}
	status, text := b.call("GET", "/v1/files/"+file+"/content", "", nil, nil)
	if status != http.StatusOK {
		b.t.Fatalf("%d %s", status, text)
	}
	for line := range strings.Lines(text) {
		var one resultDocument
		if err := json.Unmarshal([]byte(line), &one); err != nil {
			b.t.Fatalf("%v: %s", err, line)
		}
		if _, again := out[one.CustomID]; again {
			b.t.Errorf("%s stands twice", one.CustomID)
		}
		out[one.CustomID] = one
	}
	return out
}

// lineOf returns a line of an input file.
func lineOf(id, body string) string {
	return fmt.Sprintf(`{"custom_id": %q, "method": "POST", "url": %q, "body": %s}`+"\n", id, completions, body)
}

func TestBatchRunsThroughAPipeline(t *testing.T) {
	t.Parallel()
	b := startBatches(t, "{pipelines: [p]}")
	id := b.create("24h", lineOf("a", `{"model": "p", "n": 1}`)+"\n"+lineOf("b", `{"model": "none"}`)+lineOf("c", `{"model": "p"}`))
	batch := b.await(id, "completed")
	if batch.Counts.Total != 3 || batch.Counts.Completed != 2 || batch.Counts.Failed != 1 || batch.CompletedAt == 0 || batch.Metadata["k"] != "v" {
		t.Errorf("%+v", batch)
	}
	done, failed := b.lines(batch.OutputFile), b.lines(batch.ErrorFile)
	if a := done["a"]; len(done) != 2 || a.Response == nil || a.Response.StatusCode != 200 || a.Response.RequestID == "" || a.Error != nil || !reflect.DeepEqual(a.Response.Body, map[string]any{"model": "p", "n": 1.0}) {
		t.Errorf("%+v", done)
	}
	if got := failed["b"]; len(failed) != 1 || got.Response != nil || got.Error.Code != "UNKNOWN_PIPELINE" {
		t.Errorf("%+v", failed)
	}
}

func TestBatchOfAnHTTPTarget(t *testing.T) {
	t.Parallel()
	model := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if strings.Contains(string(body), "bad") {
			http.Error(w, "no such model", http.StatusNotFound)
			return
		}
		fmt.Fprintf(w, `{"path": %q, "type": %q,`+"\n"+`"body": %s}`, r.URL.Path, r.Header.Get("Content-Type"), body)
	}))
	t.Cleanup(model.Close)
	b := startBatches(t, `{http: {url: "`+model.URL+`"}}`)
	batch := b.await(b.create("24h", lineOf("a", `{"model": "x"}`)+lineOf("b", `{"model": "bad"}`)), "completed")
	want := map[string]any{"path": completions, "type": "application/json", "body": map[string]any{"model": "x"}}
	if done := b.lines(batch.OutputFile); len(done) != 1 || !reflect.DeepEqual(done["a"].Response.Body, want) {
		t.Errorf("%+v", done)
	}
	if failed := b.lines(batch.ErrorFile); len(failed) != 1 || failed["b"].Response.StatusCode != 404 || failed["b"].Response.Body != "no such model\n" || failed["b"].Error != nil {
		t.Errorf("%+v", failed)
	}
}

// Deeper than this a body is not JSON, and as deep it fits no line.
func TestDeepAnswerIsAStringInTheOutput(t *testing.T) {
	t.Parallel()
	const depth = 9_999
	deep := strings.Repeat("[", depth) + strings.Repeat("]", depth)
	model := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, deep) }))
	t.Cleanup(model.Close)
	b := startBatches(t, `{http: {url: "`+model.URL+`"}}`)
	done := b.await(b.create("24h", lines(1)), "completed")
	if _, content := b.call("GET", "/v1/files/"+done.OutputFile+"/content", "", nil, nil); !strings.Contains(content, `"body":"`+deep+`"`) {
		t.Errorf("%.300s", content)
	}
}

func TestBadInputFileFailsItsBatch(t *testing.T) {
	t.Parallel()
	b := startBatches(t, "{pipelines: [p]}")
	good := lineOf("a", `{"model": "p"}`)
	for name, c := range map[string]struct {
		content string
		want    []batchErrorDocument
	}{
		"empty":         {"\n \n", []batchErrorDocument{{Code: "empty_file"}}},
		"bad JSON":      {good + "{\n\n{]", []batchErrorDocument{{"invalid_json_line", "", 2}, {"invalid_json_line", "", 4}}},
		"twice":         {good + good, []batchErrorDocument{{"duplicate_custom_id", "custom_id", 2}}},
		"no ID":         {lineOf("", `{"model": "p"}`), []batchErrorDocument{{"missing_required_parameter", "custom_id", 1}}},
		"double member": {`{"custom_id": "b", "custom_id": "c"}`, []batchErrorDocument{{"invalid_json_line", "", 1}}},
		"other types":   {`{"custom_id": 1}` + "\n" + lineOf("b", `{"model": 1}`), []batchErrorDocument{{"invalid_type", "custom_id", 1}, {"invalid_type", "body.model", 2}}},
		"method":        {strings.Replace(good, "POST", "GET", 1), []batchErrorDocument{{"invalid_method", "method", 1}}},
		"url":           {strings.Replace(good, "chat/", "", 1), []batchErrorDocument{{"invalid_url", "url", 1}}},
		"no model":      {lineOf("a", `{}`), []batchErrorDocument{{"missing_required_parameter", "body.model", 1}}},
		"no body":       {`{"custom_id": "a", "method": "POST", "url": "` + completions + `"}`, []batchErrorDocument{{"missing_required_parameter", "body.model", 1}}},
		"stream":        {lineOf("a", `{"model": "p", "stream": true}`), []batchErrorDocument{{"invalid_request", "body.stream", 1}}},
		"too many":      {lines(50_001), []batchErrorDocument{{"too_many_requests", "", 50_001}}},
		"too long":      {good + strings.Repeat("x", 9<<20), []batchErrorDocument{{"line_too_long", "", 2}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := &batchBed{Mesh: b.Mesh, t: t}
			if got := b.await(b.create("24h", c.content), "failed"); !reflect.DeepEqual(got.Errors.Data, c.want) || got.Counts.Total != 0 {
				t.Errorf("%+v", got)
			}
		})
	}
}

// lines returns that many good requests.
func lines(n int) string {
	var out strings.Builder
	for i := range n {
		out.WriteString(lineOf(fmt.Sprint(i), `{"model": "p"}`))
	}
	return out.String()
}

// stuckTarget answers that many requests, and then none.
func stuckTarget(t *testing.T, answers int) string {
	t.Helper()
	free := make(chan struct{}, answers)
	for range answers {
		free <- struct{}{}
	}
	model := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		select {
		case <-free:
			_, _ = io.WriteString(w, "{}")
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(model.Close)
	return `{http: {url: "` + model.URL + `"}}`
}

// wantPartial checks the files of a batch of which that many lines have succeeded.
func (b *batchBed) wantPartial(batch batchDocument, total, completed int, code string) {
	b.t.Helper()
	done, failed := b.lines(batch.OutputFile), b.lines(batch.ErrorFile)
	if len(done) != completed || len(failed) != total-completed || batch.Counts.Total != total || batch.Counts.Completed != completed || batch.Counts.Failed != total-completed {
		b.t.Errorf("%d and %d lines: %+v", len(done), len(failed), batch)
	}
	for id, line := range failed {
		if _, both := done[id]; both || line.Error == nil || line.Error.Code != code {
			b.t.Errorf("%+v", line)
		}
	}
	outcome := strings.TrimPrefix(code, "batch_")
	testbed.Eventually(b.t, "the batch and its lines are counted", func() bool {
		return b.meter.Of("stagemesh.batch.ended status="+outcome) == 1 && b.meter.Of("stagemesh.batch.lines outcome=succeeded") == int64(completed) &&
			b.meter.Of("stagemesh.batch.lines outcome="+outcome) == int64(total-completed)
	})
}

func TestCancelledBatchKeepsPartialOutput(t *testing.T) {
	t.Parallel()
	b := startBatches(t, stuckTarget(t, 3))
	id := b.create("24h", lines(200))
	testbed.Eventually(t, "three lines are done", func() bool { return b.batch(id).Counts.Completed == 3 })
	var batch batchDocument
	for range 2 { // again is the same
		if status, answer := b.call("POST", "/v1/batches/"+id+"/cancel", "", nil, &batch); status != 200 || batch.Status != "cancelling" && batch.Status != "cancelled" {
			t.Fatalf("%d %s", status, answer)
		}
		if batch.Status == "cancelled" {
			break
		}
	}
	b.wantPartial(b.await(id, "cancelled"), 200, 3, "batch_cancelled")
	if status, answer := b.call("POST", "/v1/batches/"+id+"/cancel", "", nil, nil); status != 400 || !strings.Contains(answer, `"type":"invalid_request_error"`) {
		t.Errorf("%d %s", status, answer)
	}
}

func TestExpiredBatchKeepsPartialOutput(t *testing.T) {
	t.Parallel()
	b := startBatches(t, stuckTarget(t, 3))
	b.wantPartial(b.await(b.create("8s", lines(20)), "expired"), 20, 3, "batch_expired")
}

// refusingTarget answers requests while there are any left, and refuses those that come then.
func refusingTarget(t *testing.T, left *atomic.Int64) (target string, answered *atomic.Int64) {
	t.Helper()
	answered = new(atomic.Int64)
	model := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if left.Add(-1) < 0 {
			w.Header().Set("Retry-After", "3600")
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		answered.Add(1)
		_, _ = io.WriteString(w, "{}")
	}))
	t.Cleanup(model.Close)
	return `{http: {url: "` + model.URL + `"}}`, answered
}

// Batches that wait for room in the queue hold up no check of another.
func TestBatchIsValidatedBesideThoseThatWait(t *testing.T) {
	t.Parallel()
	target, _ := refusingTarget(t, new(atomic.Int64))
	b := startBatches(t, target)
	for range 5 {
		b.await(b.create("24h", lines(400)), "in_progress")
	}
}

func TestBatchKeepsItsQueue(t *testing.T) {
	t.Parallel()
	const total, first, atOnce = 50, 10, 4
	var left atomic.Int64
	target, answered := refusingTarget(t, &left)
	url := `url: "` + testbed.StartBroker(t).URL() + `"`
	left.Store(first)
	b := startBatchesOf(t, "nightly", url, target)
	id := b.create("24h", lines(total))
	testbed.Eventually(t, "some lines are done", func() bool { return b.batch(id).Counts.Completed == first })
	meshtest.Stop(t, b.Mesh)
	left.Store(1000)
	b = startBatchesOf(t, "other", url, target)
	if got := b.await(id, "completed"); got.Counts.Completed != total || len(b.lines(got.OutputFile)) != total {
		t.Errorf("%+v", got)
	}
	if n := answered.Load(); n > total+atOnce {
		t.Errorf("%d answers for %d lines, of which %d run at once", n, total, atOnce)
	}
}

func TestFilesAreKeptListedAndDeleted(t *testing.T) {
	t.Parallel()
	b := startBatches(t, "{pipelines: [p]}")
	content := strings.Repeat("0123456789", 50_000) // more than one chunk
	var ids []string
	for range 5 {
		file, status, answer := b.upload(content, "purpose", "batch", "expires_after[anchor]", "created_at", "expires_after[seconds]", "3600")
		if status != 200 || file.Bytes != 500_000 || file.Filename != "in.jsonl" || file.Expires-file.Created != 3600 || strings.Contains(answer, `"data"`) {
			t.Fatalf("%d %s", status, answer)
		}
		ids = append(ids, file.ID)
	}
	if status, got := b.call("GET", "/v1/files/"+ids[0]+"/content", "", nil, nil); status != 200 || got != content {
		t.Errorf("%d, %d bytes", status, len(got))
	}
	var deletes sync.WaitGroup
	var deleted atomic.Int64
	for range 8 { // at once
		deletes.Go(func() {
			switch status, answer := b.call("DELETE", "/v1/files/"+ids[4], "", nil, nil); {
			case status == 200 && answer == `{"deleted":true,"id":"`+ids[4]+`","object":"file"}`+"\n":
				deleted.Add(1)
			case status != 404:
				t.Errorf("%d %s", status, answer)
			}
		})
	}
	if deletes.Wait(); deleted.Load() != 1 {
		t.Errorf("%d deletes of one file", deleted.Load())
	}
	for order, want := range map[string][]string{
		"": {ids[3], ids[2], ids[1], ids[0]}, "&order=desc": {ids[3], ids[2], ids[1], ids[0]}, "&order=asc": ids[:4],
	} {
		var listed []string
		for after := ""; ; {
			var page struct {
				Data []fileDocument
				More bool   `json:"has_more"`
				Last string `json:"last_id"`
			}
			b.call("GET", "/v1/files?limit=3&purpose=batch"+order+"&after="+after, "", nil, &page)
			for _, file := range page.Data {
				listed = append(listed, file.ID)
			}
			if after = page.Last; !page.More {
				break
			}
		}
		if !reflect.DeepEqual(listed, want) {
			t.Errorf("%s: %v, not %v", order, listed, want)
		}
	}
	for _, path := range []string{"/v1/files/" + ids[4], "/v1/files/" + ids[4] + "/content", "/v1/files/file-1", "/v1/batches/batch_1", "/v1/files/" + ids[0] + "/other"} {
		if status, answer := b.call("GET", path, "", nil, nil); status != 404 || !strings.Contains(answer, `"code":"not_found"`) {
			t.Errorf("%s: %d %s", path, status, answer)
		}
	}
}

func TestBadBatchRequestsNameTheField(t *testing.T) {
	t.Parallel()
	b := startBatches(t, "{pipelines: [p]}")
	file, _, _ := b.upload("x", "purpose", "batch")
	for name, c := range map[string]struct{ method, path, body, param string }{
		"window":         {"POST", "/v1/batches", `{"input_file_id": "` + file.ID + `", "endpoint": "/v1/x", "completion_window": "48h"}`, "completion_window"},
		"endpoint":       {"POST", "/v1/batches", `{"input_file_id": "` + file.ID + `", "endpoint": "x", "completion_window": "24h"}`, "endpoint"},
		"long endpoint":  {"POST", "/v1/batches", `{"input_file_id": "` + file.ID + `", "endpoint": "/` + strings.Repeat("x", 300) + `", "completion_window": "24h"}`, "endpoint"},
		"metadata":       {"POST", "/v1/batches", `{"input_file_id": "` + file.ID + `", "endpoint": "/v1/x", "completion_window": "24h", "metadata": {"k": "` + strings.Repeat("x", 513) + `"}}`, "metadata"},
		"anchor":         {"POST", "/v1/batches", `{"input_file_id": "` + file.ID + `", "endpoint": "/v1/x", "completion_window": "24h", "output_expires_after": {"anchor": "x"}}`, "output_expires_after.anchor"},
		"limit":          {"GET", "/v1/batches?limit=101", "", "limit"},
		"order":          {"GET", "/v1/files?order=up", "", "order"},
		"an empty limit": {"GET", "/v1/batches?limit=", "", "limit"},
		"an empty order": {"GET", "/v1/files?order=", "", "order"},
	} {
		if status, answer := b.call(c.method, c.path, "application/json", strings.NewReader(c.body), nil); status != 400 || !strings.Contains(answer, `"param":"`+c.param+`"`) {
			t.Errorf("%s: %d %s", name, status, answer)
		}
	}
	half := `{"input_file_id": "` + file.ID + `", "endpoint": "/v1/x", "completion_window": "24h", "metadata": {"k": "\ud800"}}`
	if status, answer := b.call("POST", "/v1/batches", "application/json", strings.NewReader(half), nil); status != 400 || !strings.Contains(answer, "surrogate") {
		t.Errorf("metadata with half a surrogate pair: %d %s", status, answer)
	}
	for name, c := range map[string]struct {
		param  string
		fields []string
	}{
		"purpose": {"purpose", []string{"purpose", "fine-tune"}},
		"seconds": {"expires_after.seconds", []string{"purpose", "batch", "expires_after[anchor]", "created_at", "expires_after[seconds]", "60"}},
	} {
		if _, status, answer := b.upload("x", c.fields...); status != 400 || !strings.Contains(answer, `"param":"`+c.param+`"`) {
			t.Errorf("%s: %d %s", name, status, answer)
		}
	}
}

func TestFilesAndBatchesBelongToTheirTenant(t *testing.T) {
	t.Parallel()
	b := startBatches(t, "{pipelines: [p]}", fmt.Sprintf(", token_file: %q", testbed.SecretFile(t, "secret-of-a a\nsecret-of-b b\n")))
	b.token = "secret-of-a"
	batch := b.await(b.create("24h", lines(1)), "completed")
	b.token = "secret-of-b"
	for _, call := range []string{"GET /v1/batches/" + batch.ID, "POST /v1/batches/" + batch.ID + "/cancel", "GET /v1/files/" + batch.OutputFile, "DELETE /v1/files/" + batch.OutputFile, "GET /v1/files/" + batch.OutputFile + "/content"} {
		method, path, _ := strings.Cut(call, " ")
		if status, answer := b.call(method, path, "", nil, nil); status != 404 {
			t.Errorf("%s: %d %s", call, status, answer)
		}
	}
	for _, path := range []string{"/v1/files", "/v1/batches"} {
		if status, answer := b.call("GET", path, "", nil, nil); status != 200 || answer != `{"object":"list","data":[],"has_more":false}`+"\n" {
			t.Errorf("%s: %d %s", path, status, answer)
		}
	}
	b.token = "another"
	if status, answer := b.call("GET", "/v1/files", "", nil, nil); status != 401 || !strings.Contains(answer, `"code":"unauthenticated"`) {
		t.Errorf("%d %s", status, answer)
	}
}

func TestBatchOfABarredTenantIsRefused(t *testing.T) {
	t.Parallel()
	b := startBatches(t, "{pipelines: [p]}", fmt.Sprintf(", token_file: %q", testbed.SecretFile(t, "secret-of-barred barred\n")))
	b.token = "secret-of-barred"
	file, _, _ := b.upload(lines(1), "purpose", "batch")
	body := fmt.Sprintf(`{"input_file_id": %q, "endpoint": %q, "completion_window": "24h"}`, file.ID, completions)
	if status, answer := b.call("POST", "/v1/batches", "application/json", strings.NewReader(body), nil); status != http.StatusNotFound || !strings.Contains(answer, `"code":"unknown_queue"`) {
		t.Errorf("%d %s", status, answer)
	}
	if _, answer := b.call("GET", "/v1/batches", "", nil, nil); answer != `{"object":"list","data":[],"has_more":false}`+"\n" {
		t.Error(answer)
	}
}
