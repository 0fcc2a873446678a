package jobs

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"

	jsonv2 "github.com/go-json-experiment/json"
	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/store"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// FuzzBatchLines holds two promises for any input file: each error is of a line of the file, and
// a file without errors has one job for each request, with an ID of its own.
func FuzzBatchLines(f *testing.F) {
	const good = `{"custom_id": "a", "method": "POST", "url": "/v1/x", "body": {"model": "p", "n": [1]}}` + "\n"
	for _, file := range []string{"", good, good + good, "\n" + good + `{"custom_id": 1}`, `{"body": "x"}`, "[]\r\n{", good[:20], `{"custom_id":"b","custom_id":"a","method":"POST","url":"/v1/x","body":{"model":"p"}} x`} {
		f.Add([]byte(file))
	}
	f.Fuzz(func(t *testing.T, file []byte) {
		check := batchCheck{endpoint: "/v1/x", seen: map[[16]byte]struct{}{}}
		if err := eachRequest(bytes.NewReader(file), linePlace{}, check.add); err != nil && !errors.Is(err, errBadBatch) || len(check.errs) > maxBatchErrors {
			t.Fatalf("%v, %d errors", err, len(check.errs))
		}
		lines, bad := bytes.Count(file, []byte("\n"))+1, map[int]bool{}
		for _, e := range check.errs {
			if e.Code == "" || e.Message == "" || e.Line < 1 || e.Line > lines || bad[e.Line] {
				t.Errorf("of %d lines: %+v", lines, e)
			}
			bad[e.Line] = true
		}
		if len(check.errs) > 0 {
			return
		}
		seen := map[string]bool{}
		_ = eachRequest(bytes.NewReader(file), linePlace{}, func(_ linePlace, text []byte) error {
			var line batchLine
			_ = jsonv2.Unmarshal(text, &line)
			seen[line.CustomID] = true
			for _, isHTTP := range []bool{false, true} {
				s := Service{}
				s.queues.Store(&map[pipeline.QueueName]queue{"q": {Queue: Queue{HTTP: isHTTP}}})
				b := batchRun{batchRunner: &batchRunner{Service: &s}, queue: "q", record: store.BatchRecord{Batch: store.Batch{Endpoint: "/v1/x"}}}
				job := b.jobOf(text)
				if call := job.GetHttp(); isHTTP && (call.GetPath() != "/v1/x" || !json.Valid(call.GetBody())) || !isHTTP && job.GetInfer().GetPipeline() == "" {
					t.Errorf("%s: %v", text, job)
				}
			}
			return nil
		})
		if len(seen) != check.requests {
			t.Errorf("%d IDs of %d requests", len(seen), check.requests)
		}
	})
}
