package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// batchFleet is a jobsFleet whose members process batches too.
type batchFleet struct {
	*jobsFleet

	client *http.Client
	// processor is the member that processes batches.
	processor *member
}

func newBatchFleet(t *testing.T, gateways int) *batchFleet {
	t.Helper()
	f := &batchFleet{
		jobsFleet: &jobsFleet{t: t, fleet: newFleet(t, brokerRegistry), accepted: map[string]string{}},
		client:    &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
	}
	f.stage = f.host(hostSpec{run: 10 * time.Millisecond, chunks: 1, slots: 8 * jobsInFlight})
	f.jobs = map[string]any{
		"pools":   map[string]any{"main": map[string]any{"target": map[string]any{"pipelines": []string{"echo"}}, "max_in_flight": jobsInFlight}},
		"queues":  map[string]any{"nightly": map[string]any{}},
		"batches": map[string]any{"queue": "nightly", "max_bytes": "512MiB"},
	}
	for range gateways {
		f.gatewayOf(f.spec(true))
	}
	f.awaitProcessor()
	return f
}

// awaitProcessor waits until another member than the last one processes batches.
func (f *batchFleet) awaitProcessor() {
	f.t.Helper()
	before := f.processor
	testbed.Eventually(f.t, "a gateway processes batches", func() bool {
		for _, m := range f.gateways {
			if m != before && m.Err.Has("processes batches") {
				f.processor = m
				return true
			}
		}
		return false
	})
}

// call sends a request to a gateway, and decodes its answer.
func (f *batchFleet) call(method, path, contentType string, body io.Reader, out any) {
	f.t.Helper()
	r, err := http.NewRequestWithContext(f.t.Context(), method, "http://"+f.gateways[0].address()+path, body)
	if err != nil {
		f.t.Fatal(err)
	}
	r.Header.Set("Content-Type", contentType)
	answer, err := f.client.Do(r)
	if err != nil {
		f.t.Fatal(err)
	}
	defer answer.Body.Close()
	data, err := io.ReadAll(answer.Body)
	if err == nil {
		err = json.Unmarshal(data, out)
	}
	if err != nil || answer.StatusCode != http.StatusOK {
		f.t.Fatalf("%s %s: %v: %d %s", method, path, err, answer.StatusCode, data)
	}
}

// upload stores a file.
func (f *batchFleet) upload(content io.Reader) (id string) {
	f.t.Helper()
	from, to := io.Pipe()
	form := multipart.NewWriter(to)
	go func() {
		part, err := form.CreateFormFile("file", "in.jsonl")
		if err == nil {
			_, err = io.Copy(part, content)
		}
		if err == nil {
			err = form.WriteField("purpose", "batch")
		}
		if err == nil {
			err = form.Close()
		}
		_ = to.CloseWithError(err)
	}()
	var file struct{ ID string }
	f.call(http.MethodPost, "/v1/files", form.FormDataContentType(), from, &file)
	return file.ID
}

type fleetBatch struct {
	ID, Status string
	Output     string                                 `json:"output_file_id"`
	Errors     string                                 `json:"error_file_id"`
	Counts     struct{ Total, Completed, Failed int } `json:"request_counts"`
}

// create begins a batch of that many lines; every tenth fails.
func (f *batchFleet) create(name string, lines int) string {
	f.t.Helper()
	var content strings.Builder
	for i := range lines {
		model := "echo"
		if i%10 == 9 {
			model = "none"
		}
		fmt.Fprintf(&content, `{"custom_id": "%d", "method": "POST", "url": "/v1/embeddings", "body": {"model": %q, "input": "%s-%d"}}`+"\n", i, model, name, i)
	}
	body := fmt.Sprintf(`{"input_file_id": %q, "endpoint": "/v1/embeddings", "completion_window": "24h"}`, f.upload(strings.NewReader(content.String())))
	var batch fleetBatch
	f.call(http.MethodPost, "/v1/batches", "application/json", strings.NewReader(body), &batch)
	return batch.ID
}

// customIDs counts the lines of a file by their custom IDs.
func (f *batchFleet) customIDs(file string, counts map[string]int) (lines int) {
	f.t.Helper()
	status, text := f.get("http://" + f.gateways[0].address() + "/v1/files/" + file + "/content")
	if status != http.StatusOK {
		f.t.Fatalf("%d %s", status, text)
	}
	for line := range strings.Lines(text) {
		var one struct {
			ID string `json:"custom_id"`
		}
		if err := json.Unmarshal([]byte(line), &one); err != nil {
			f.t.Fatalf("%v: %s", err, line)
		}
		counts[one.ID]++
		lines++
	}
	return lines
}

// The kills meet each step of a batch: it is validated, expanded, awaited or finalized.
func TestBatchesSurviveTheirProcessors(t *testing.T) {
	t.Parallel()
	const lines = 200
	f := newBatchFleet(t, 3)
	var ids []string
	for kill := range pick(6, 20) {
		ids = append(ids, f.create(fmt.Sprint("batch-", kill), lines))
		must(t, wait(t.Context(), time.Duration(kill%6)*120*time.Millisecond))
		killed := f.processor
		killed.Kill()
		f.awaitProcessor()
		killed.start()
	}
	for _, id := range ids {
		var batch fleetBatch
		testbed.Eventually(t, "the batch has completed", func() bool {
			f.call(http.MethodGet, "/v1/batches/"+id, "", nil, &batch)
			return batch.Status == "completed"
		})
		counts := map[string]int{}
		completed, failed := f.customIDs(batch.Output, counts), f.customIDs(batch.Errors, counts)
		if completed != lines*9/10 || failed != lines/10 || len(counts) != lines || batch.Counts.Completed != completed || batch.Counts.Failed != failed || batch.Counts.Total != lines {
			t.Errorf("%d and %d lines, %d custom IDs: %+v", completed, failed, len(counts), batch)
		}
	}
	for text, runs := range f.runs() {
		if len(runs) != 1 {
			t.Errorf("%s ran %d times", text, len(runs))
		}
	}
}

// Not parallel: other tests would take the time of the upload.
func TestUploadTakesLittleMemory(t *testing.T) {
	f := newBatchFleet(t, 1)
	const size = 200 << 20
	gateway := f.gateways[0]
	before, most := gateway.memory(), 0
	uploading, stop := context.WithCancel(t.Context())
	var watch sync.WaitGroup
	watch.Go(func() {
		for wait(uploading, 10*time.Millisecond) == nil {
			most = max(most, gateway.memory())
		}
	})
	id := f.upload(io.LimitReader(zeros{}, size))
	stop()
	watch.Wait()
	used := most - before
	if t.Logf("%d MiB", used>>20); used > 64<<20 {
		t.Errorf("the gateway took %d bytes", used)
	}
	var file struct{ Bytes int }
	if f.call(http.MethodGet, "/v1/files/"+id, "", nil, &file); file.Bytes != size {
		t.Errorf("%d bytes", file.Bytes)
	}
}

// zeros is endless.
type zeros struct{}

// Read implements io.Reader.
func (zeros) Read(buf []byte) (int, error) { clear(buf); return len(buf), nil }
