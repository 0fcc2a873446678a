package meshtest_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// Callers use plain HTTP with a key for each text, through two gateways, and a pipeline
// of two stages without a file queue. Each text runs once, and a key with another text is
// a mismatch.
func TestIdempotentRequestRunsOnceThroughAnyGateway(t *testing.T) {
	t.Parallel()
	const keys, each = 10, 10
	var one, two counts
	bed := meshtest.New(t)
	memory := func(s *stagehost.Settings) { s.Queue.Durabilities = []pipeline.Durability{pipeline.Memory} }
	bed.Host("one", appendName("one", time.Millisecond, &one), memory)
	bed.Host("two", appendName("two", time.Millisecond, &two), memory)
	listen := func(s *gateway.Settings) { s.Listen = "127.0.0.1:0" }
	pipelines := []pipeline.Pipeline{testbed.Pipeline("both", "one", "two")}
	gateways := []meshtest.Gateway{bed.Gateway(pipelines, listen), bed.Gateway(pipelines, listen)}
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	client := &http.Client{Transport: transport, Timeout: testbed.Patience}
	send := func(g meshtest.Gateway, key, text string) (status int, body, id string) {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+g.Addr().String()+"/v1/pipelines/both:infer", strings.NewReader(text))
		if err != nil {
			t.Error(err)
			return 0, "", ""
		}
		request.Header.Set("Content-Type", "text/plain")
		request.Header.Set("Idempotency-Key", key)
		response, err := client.Do(request)
		if err != nil {
			t.Error(err)
			return 0, "", ""
		}
		defer response.Body.Close()
		data, err := io.ReadAll(response.Body)
		if err != nil {
			t.Error(err)
		}
		return response.StatusCode, string(data), response.Header.Get("Stagemesh-Request-Id")
	}
	var answers sync.Map
	var calls sync.WaitGroup
	for i := range keys * each {
		calls.Go(func() {
			key := fmt.Sprint("key ", i%keys)
			status, body, id := send(gateways[i/keys%2], key, key)
			if status != http.StatusOK || body != key+">one>two" {
				t.Errorf("%s: %d %s", key, status, body)
			}
			if first, ok := answers.LoadOrStore(key, id); ok && first != id {
				t.Errorf("%s: the answers of requests %s and %s", key, first, id)
			}
		})
	}
	calls.Wait()
	if one.items.Load() != keys || two.items.Load() != keys {
		t.Errorf("%d keys ran %d and %d times", keys, one.items.Load(), two.items.Load())
	}
	for _, g := range gateways {
		if status, body, _ := send(g, "key 0", "another text"); status != http.StatusConflict || !strings.Contains(body, "IDEMPOTENCY_MISMATCH") {
			t.Errorf("got %d %s", status, body)
		}
	}
}
