package traces_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

const threeStages = `
  publish one (producer, MESH-gateway)
    queue one (internal, MESH-one)
    process one (consumer, MESH-one)
      wait one (internal, MESH-one)
      run one (internal, MESH-one)
      publish two (producer, MESH-one)
        queue two (internal, MESH-two)
        process two (consumer, MESH-two)
          wait two (internal, MESH-two)
          run two (internal, MESH-two)
          publish three (producer, MESH-two)
            queue three (internal, MESH-three)
            process three (consumer, MESH-three)
              wait three (internal, MESH-three)
              run three (internal, MESH-three)
              reply (client, MESH-three)
`

// protocols send a request with a trace context.
func protocols(b *bed) map[string]func(of envelope.Trace) error {
	conn, err := grpc.NewClient(strings.TrimPrefix(b.URL(), "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = conn.Close() }) // nothing is on its way
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	message := &inferencev1.InferRequest{Pipeline: "p", Inputs: payload.ToProto(tracedRequest("x").Inputs)}
	byHTTP := func(path, contentType, body string) func(envelope.Trace) error {
		return func(of envelope.Trace) error {
			r, err := http.NewRequestWithContext(b.Context(), http.MethodPost, b.URL()+path, strings.NewReader(body))
			if err != nil {
				return err
			}
			r.Header.Set("Content-Type", contentType)
			r.Header.Set("Traceparent", of.Parent)
			response, err := client.Do(r)
			if err != nil {
				return err
			}
			if response.StatusCode != http.StatusOK {
				err = errors.New(response.Status)
			}
			return errors.Join(err, response.Body.Close())
		}
	}
	byConnect := func(options ...connect.ClientOption) func(envelope.Trace) error {
		return func(of envelope.Trace) error {
			r := connect.NewRequest(message)
			r.Header().Set("Traceparent", of.Parent)
			_, err := inferencev1connect.NewInferenceServiceClient(client, b.URL(), options...).Infer(b.Context(), r)
			return err
		}
	}
	return map[string]func(envelope.Trace) error{
		"http":     byHTTP("/v1/pipelines/p:infer", "text/plain", "x"),
		"oip":      byHTTP("/v2/models/p/infer", "application/json", `{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":["x"]}]}`),
		"connect":  byConnect(),
		"grpc-web": byConnect(connect.WithGRPCWeb()),
		"grpc": func(of envelope.Trace) error {
			ctx := metadata.AppendToOutgoingContext(b.Context(), "traceparent", of.Parent)
			_, err := inferencev1.NewInferenceServiceClient(conn).Infer(ctx, message)
			return err
		},
	}
}

func TestTraceOfEachProtocol(t *testing.T) {
	t.Parallel()
	b := start(t, nil, serves("one", echo()), serves("two", echo()), serves("three", echo()))
	send := protocols(b)
	rpc := "stagemesh.inference.v1.InferenceService/Infer"
	for name, want := range map[string]struct {
		span string
		tags map[string]any
	}{
		"http":     {"POST /v1/pipelines/{pipeline}:infer", map[string]any{"http.request.method": "POST", "http.route": "/v1/pipelines/{pipeline}:infer", "url.path": "/v1/pipelines/p:infer", "http.response.status_code": 200, "client.address": "127.0.0.1"}},
		"oip":      {"POST /v2/models/{model}/infer", map[string]any{"http.route": "/v2/models/{model}/infer", "http.response.status_code": 200}},
		"connect":  {rpc, map[string]any{"rpc.system.name": "connectrpc", "rpc.method": rpc, "rpc.response.status_code": "OK", "client.address": "127.0.0.1"}},
		"grpc-web": {rpc, map[string]any{"rpc.system.name": "grpc", "rpc.method": rpc, "rpc.response.status_code": "OK"}},
		"grpc":     {rpc, map[string]any{"rpc.system.name": "grpc", "rpc.method": rpc, "rpc.response.status_code": "OK", "server.address": "127.0.0.1"}},
	} {
		of := newTrace()
		if err := send[name](of); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		spans := b.tree(of, want.span+" (server, MESH-gateway)"+threeStages)
		root := b.one(spans, want.span)
		b.has(root, want.tags)
		b.has(root, map[string]any{"stagemesh.pipeline": "p", "stagemesh.durability": "memory", "error": nil})
		if root.Parent != "00f067aa0ba902b7" && root.Links == nil {
			t.Errorf("%s: the caller's span is not the parent of %+v", name, root)
		}
		b.has(b.one(spans, "process two"), map[string]any{
			"messaging.system": "nats", "messaging.operation.name": "process", "messaging.destination.name": b.name + ".stage.two.memory.normal",
			"messaging.message.conversation_id": root.Tags["stagemesh.request.id"], "stagemesh.step": "two", "stagemesh.delivery": 1,
		})
		b.has(b.one(spans, "run two"), map[string]any{"stagemesh.batch.size": 1})
	}
}

// In memory there is no queue.
func TestTraceOfLocalHops(t *testing.T) {
	t.Parallel()
	b := start(t, func(s *stagemesh.Settings, c *tracing.Config) {
		s.NoLocalHops, c.Endpoint, c.Protocol = false, jaeger(t).HTTP(), tracing.HTTP
	}, serves("one", echo()), serves("two", echo()))
	r := tracedRequest("x")
	if _, err := b.Infer(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	b.tree(r.Trace, `
infer (server, MESH-gateway)
  publish one (producer, MESH-gateway)
    process one (consumer, MESH-one)
      wait one (internal, MESH-one)
      run one (internal, MESH-one)
      publish two (producer, MESH-one)
        process two (consumer, MESH-two)
          wait two (internal, MESH-two)
          run two (internal, MESH-two)
          reply (client, MESH-two)
`)
}

// Batches of more items than the library's usual bound on links, of which one is not traced.
func TestBatchAndItemsLinkToEachOther(t *testing.T) {
	t.Parallel()
	const items = 150
	b := start(t, nil, serves("one", echo(), func(s *stagemesh.Stage) {
		s.Batch = batch.Settings{Mode: batch.Window, MaxSize: items, MaxWait: testbed.Patience}
	}))
	var callers sync.WaitGroup
	requests := make([]*request.Request, items)
	for i := range requests {
		requests[i] = tracedRequest("x")
		if i == 0 {
			requests[i].Trace = envelope.Trace{}
		}
		callers.Go(func() {
			if _, err := b.Infer(t.Context(), requests[i]); err != nil {
				t.Error(err)
			}
		})
	}
	callers.Wait()
	found := b.jaeger.Find(t, b.name+"-one", "batch one", 1)
	all := b.one(found[0], "batch one")
	b.has(all, map[string]any{"stagemesh.batch.size": items, "stagemesh.batch.rows": items, "stagemesh.batch.reason": "full"})
	if len(found) != 1 || len(all.Links) != items-1 || all.Parent != "" {
		t.Errorf("%d batches; it has %d links and the parent %q", len(found), len(all.Links), all.Parent)
	}
	links := map[string]bool{}
	for _, link := range all.Links {
		links[link] = true
	}
	for _, r := range requests[1:] {
		spans := b.spans(r.Trace, 7)
		process, run := b.one(spans, "process one"), b.one(spans, "run one")
		if !links[process.Trace+"/"+process.ID] {
			t.Errorf("the batch has no link to %s", process.ID)
		}
		if want := all.Trace + "/" + all.ID; len(run.Links) != 1 || run.Links[0] != want {
			t.Errorf("the run has the links %v, want %s", run.Links, want)
		}
	}
}

func TestCancelledRequest(t *testing.T) {
	t.Parallel()
	began := make(chan struct{})
	b := start(t, nil, serves("one", inproc.New(inproc.Settings{}, func(ctx context.Context, _ runner.Batch, _ runner.Sink) error {
		close(began)
		<-ctx.Done()
		return ctx.Err()
	})))
	r := tracedRequest("x")
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-began; cancel() }()
	if _, err := b.Infer(ctx, r); fault.From(err).Reason != fault.Cancelled {
		t.Fatal(err)
	}
	spans := b.spans(r.Trace, 6)
	b.has(b.one(spans, "infer"), map[string]any{"error.type": "CANCELLED", "error": nil})
	if events := b.one(spans, "process one").Events; len(events) != 1 || events[0] != "cancelled" {
		t.Errorf("events %v", events)
	}
}

func TestPassedDeadline(t *testing.T) {
	t.Parallel()
	b := start(t, nil, serves("one", inproc.New(inproc.Settings{}, func(ctx context.Context, _ runner.Batch, _ runner.Sink) error {
		<-ctx.Done()
		return ctx.Err()
	})))
	r := tracedRequest("x")
	r.Timeout = 2 * time.Second // so that it runs by then
	if _, err := b.Infer(t.Context(), r); fault.From(err).Reason != fault.DeadlineExceeded {
		t.Fatal(err)
	}
	spans := b.spans(r.Trace, 7)
	b.has(b.one(spans, "infer"), map[string]any{"error.type": "DEADLINE_EXCEEDED", "error": true})
	process := b.one(spans, "process one")
	b.has(process, map[string]any{"error.type": "DEADLINE_EXCEEDED", "error": true})
	if len(process.Events) != 1 || process.Events[0] != "expired" {
		t.Errorf("events %v", process.Events)
	}
}

// The batch runs in halves until the culprit is alone.
func TestPoisonInABatch(t *testing.T) {
	t.Parallel()
	const items = 4
	b := start(t, nil, serves("one", inproc.New(inproc.Settings{}, func(_ context.Context, batch runner.Batch, sink runner.Sink) error {
		for _, item := range batch.Items {
			if string(item.Inputs[0].Blob.Data) == "poison" {
				return errors.New("one is poison")
			}
		}
		for i, item := range batch.Items {
			_ = sink.SetOutcome(i, runner.Output(item.Inputs...)) // none is cancelled
		}
		return nil
	}), func(s *stagemesh.Stage) {
		s.Batch = batch.Settings{Mode: batch.Window, MaxSize: items, MaxWait: testbed.Patience}
	}))
	var callers sync.WaitGroup
	poison := tracedRequest("poison")
	for i := range items {
		r := poison
		if i > 0 {
			r = tracedRequest("x")
		}
		callers.Go(func() { _, _ = b.Infer(t.Context(), r) }) // one fails
	}
	callers.Wait()
	// Three waits and runs: of four, of two, alone.
	spans := b.spans(poison.Trace, 11)
	process := b.one(spans, "process one")
	b.has(process, map[string]any{"error.type": "RUNNER_FAILED", "error": true})
	if got := strings.Join(process.Events, " "); got != "retried retried" {
		t.Errorf("events %s", got)
	}
	if runs := spansNamed(spans, "run one"); len(runs) != 3 || runs[2].Tags["error"] != true || runs[2].Links != nil {
		t.Errorf("runs %+v", runs)
	}
}

func TestStreamHasItsFirstChunk(t *testing.T) {
	t.Parallel()
	spec := runner.Spec{Stream: true}
	b := start(t, nil, serves("one", inproc.Stream(inproc.Settings{Spec: spec}, func(_ context.Context, item runner.Item, send func(...payload.Part) error) ([]payload.Part, error) {
		return nil, errors.Join(send(item.Inputs...), send(item.Inputs...))
	})))
	r := tracedRequest("x")
	chunks := 0
	if _, err := b.Stream(t.Context(), r, func(request.Chunk) error { chunks++; return nil }); err != nil || chunks != 2 {
		t.Fatalf("%d chunks, %v", chunks, err)
	}
	if events := b.one(b.spans(r.Trace, 7), "run one").Events; len(events) != 1 || events[0] != "first chunk" {
		t.Errorf("events %v", events)
	}
}

// The trace of a durable request is complete though its caller has left.
func TestDurableRequestWhoseCallerLeft(t *testing.T) {
	t.Parallel()
	began, left := make(chan struct{}), make(chan struct{})
	b := start(t, nil, serves("one", inproc.Each(inproc.Settings{}, func(_ context.Context, item runner.Item) ([]payload.Part, error) {
		close(began)
		<-left
		return item.Inputs, nil
	})))
	r := tracedRequest("x")
	r.Durability = pipeline.File
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-began; cancel() }()
	if _, err := b.Infer(ctx, r); fault.From(err).Reason != fault.Cancelled {
		t.Fatal(err)
	}
	close(left)
	b.tree(r.Trace, `
infer (server, MESH-gateway)
  publish one (producer, MESH-gateway)
    queue one (internal, MESH-one)
    process one (consumer, MESH-one)
      wait one (internal, MESH-one)
      run one (internal, MESH-one)
      reply (client, MESH-one)
`)
}
