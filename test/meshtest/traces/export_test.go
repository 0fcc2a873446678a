package traces_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

// failing fails all items, and takes some time.
func failing() runner.Runner {
	return inproc.Each(inproc.Settings{}, func(context.Context, runner.Item) ([]payload.Part, error) {
		return nil, fault.New(fault.RunnerFailed, "it always fails")
	})
}

// untracedRequest returns a request whose caller does not trace it.
func untracedRequest() *request.Request {
	r := tracedRequest("x")
	r.Trace = envelope.Trace{}
	return r
}

// A request that nobody sampled is traced all the same when it has failed, or was slow.
func TestFailedAndSlowRequestsAreKept(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		runner runner.Runner
		keep   tracing.Keep
		tree   string
	}{
		"failed": {failing(), tracing.Keep{}, `
infer (server, MESH-gateway)
  queue one (internal, MESH-gateway)
  process one (internal, MESH-gateway)
    wait one (internal, MESH-gateway)
    run one (internal, MESH-gateway)
  queue two (internal, MESH-gateway)
  process two (internal, MESH-gateway)
    wait two (internal, MESH-gateway)
    run two (internal, MESH-gateway)
`},
		"slow": {echo(), tracing.Keep{SlowerThan: time.Nanosecond}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := start(t, func(s *stagemesh.Settings, _ *tracing.Config) { s.Gateway.Call.Sampling.Keep = test.keep },
				serves("one", echo()), serves("two", test.runner))
			if _, err := b.Infer(t.Context(), untracedRequest()); (err != nil) != (name == "failed") {
				t.Fatal(err)
			}
			found := b.jaeger.Find(t, b.name+"-gateway", "infer", 1)
			if test.tree != "" {
				want := strings.ReplaceAll(strings.TrimPrefix(test.tree, "\n"), "MESH", b.name)
				if got := testbed.Tree(found[0]); got != want {
					t.Errorf("the trace is\n%swant\n%s", got, want)
				}
			}
			b.has(b.one(found[0], "infer"), map[string]any{"stagemesh.rebuilt": true})
			if got := b.metrics(); !strings.Contains(got, `stagemesh_gateway_traces_total{why="`+map[string]string{"failed": "error", "slow": "slow"}[name]+`"} 1`) {
				t.Errorf("no trace is counted:\n%s", regexp.MustCompile(`.*traces_total.*`).FindAllString(got, -1))
			}
		})
	}
}

// What the callers ask for is within their bound.
func TestParentsAreBounded(t *testing.T) {
	t.Parallel()
	b := start(t, func(s *stagemesh.Settings, _ *tracing.Config) { s.Gateway.Call.Sampling.ParentsPerSecond = 1 }, serves("one", echo()))
	requests := make([]*request.Request, 5)
	for i := range requests {
		requests[i] = tracedRequest("x")
		if _, err := b.Infer(t.Context(), requests[i]); err != nil {
			t.Fatal(err)
		}
	}
	b.spans(requests[0].Trace, 7)
	if got := b.metrics(); !regexp.MustCompile(`stagemesh_gateway_traces_total\{why="parent"\} [12]\n`).MatchString(got) {
		t.Errorf("traces: %v", regexp.MustCompile(`.*traces_total.*`).FindAllString(got, -1))
	}
}

func TestExemplarsNameTheirTrace(t *testing.T) {
	t.Parallel()
	b := start(t, nil, serves("one", echo()))
	r := tracedRequest("x")
	if _, err := b.Infer(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	b.spans(r.Trace, 7)
	text := b.openMetrics()
	for _, name := range []string{"stagemesh_gateway_request_duration_seconds", "stagemesh_stage_queue_wait_seconds", "stagemesh_stage_batch_wait_seconds", "stagemesh_stage_run_seconds"} {
		if !regexp.MustCompile(name + `_bucket.* # \{.*trace_id="` + r.Trace.ID() + `"`).MatchString(text) {
			t.Errorf("%s has no exemplar of the trace", name)
		}
	}
}

func TestLogsNameTheTrace(t *testing.T) {
	t.Parallel()
	b := start(t, nil, serves("one", failing()))
	r := tracedRequest("x")
	if _, err := b.Infer(t.Context(), r); err == nil {
		t.Fatal("it did not fail")
	}
	for line := range strings.Lines(b.log.String()) {
		var entry map[string]any
		if json.Unmarshal([]byte(line), &entry) == nil && entry["msg"] == "request failed" && entry["trace_id"] == r.Trace.ID() {
			return
		}
	}
	t.Errorf("no line has the trace:\n%s", b.log)
}

// A receiver that is away, refuses, or never answers delays nothing.
func TestNobodyWaitsForTheReceiver(t *testing.T) {
	t.Parallel()
	hangs := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // to see its end
		<-r.Context().Done()
	}))
	defer hangs.Close()
	refuses := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusForbidden) }))
	defer refuses.Close()
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err = errors.Join(err, gone.Close()); err != nil {
		t.Fatal(err)
	}
	for name, url := range map[string]string{"away": "http://" + gone.Addr().String(), "refuses": refuses.URL, "hangs": hangs.URL} {
		t.Run(name, func(t *testing.T) {
			b := start(t, func(_ *stagemesh.Settings, c *tracing.Config) { c.Endpoint, c.Protocol = url, tracing.HTTP }, serves("one", echo()))
			requests := 20
			if name == "hangs" {
				requests = 2000 // of 7 spans: more than may wait
			}
			for range requests {
				r := tracedRequest("x")
				if _, err := b.Infer(t.Context(), r); err != nil {
					t.Fatal(err)
				}
			}
			if name != "hangs" {
				testbed.Eventually(t, "spans fail", func() bool {
					return strings.Contains(b.metrics(), `stagemesh_tracing_spans_total{outcome="failed"}`)
				})
				if n := bytes.Count([]byte(b.log.String()), []byte("spans are not exported")); n != 1 {
					t.Errorf("%d warnings", n)
				}
				return
			}
			if got := b.metrics(); !strings.Contains(got, `stagemesh_tracing_spans_total{outcome="dropped"}`) {
				t.Error("no span is counted as dropped")
			}
		})
	}
}
