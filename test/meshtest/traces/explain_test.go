package traces_test

import (
	"context"
	"net/http"
	"testing"

	"connectrpc.com/connect"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1/adminv1connect"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

func (b *bed) admin() adminv1connect.MeshServiceClient {
	transport := &http.Transport{}
	b.Cleanup(transport.CloseIdleConnections)
	return adminv1connect.NewMeshServiceClient(&http.Client{Transport: transport}, b.AdminURL())
}

// explainedTrace returns the trace that the report of a request names.
func (b *bed) explainedTrace(request string) string {
	b.Helper()
	response, err := b.admin().ExplainRequest(b.Context(), connect.NewRequest(&adminv1.ExplainRequestRequest{RequestId: request}))
	if err != nil {
		b.Fatal(err)
	}
	return response.Msg.GetReport().GetTraceId()
}

func TestExplainNamesTheTrace(t *testing.T) {
	t.Parallel()
	began, release := make(chan struct{}), make(chan struct{})
	b := start(t, nil, serves("one", inproc.Each(inproc.Settings{}, func(_ context.Context, item runner.Item) ([]payload.Part, error) {
		close(began)
		<-release
		return item.Inputs, nil
	})))
	r, ended := tracedRequest("x"), make(chan error, 1)
	go func() {
		_, err := b.Infer(context.Background(), r)
		ended <- err
	}()
	testbed.Receive(t, "a run", began)
	all, err := b.admin().ListRequests(t.Context(), connect.NewRequest(&adminv1.ListRequestsRequest{}))
	if err != nil || len(all.Msg.GetRequests()) != 1 {
		t.Fatalf("in flight are %v, %v", all, err)
	}
	id := all.Msg.GetRequests()[0].GetRequestId()
	testbed.Eventually(t, "its host names the trace", func() bool { return b.explainedTrace(id) == r.Trace.ID() })
	close(release)
	if err := testbed.Receive(t, "an answer", ended); err != nil {
		t.Fatal(err)
	}
	if got := b.explainedTrace(id); got != r.Trace.ID() {
		t.Errorf("a finished request has trace %q, want %s", got, r.Trace.ID())
	}
}

// A request that was not sampled and failed gets its trace as it ends.
func TestExplainNamesTheTraceOfAKeptRequest(t *testing.T) {
	t.Parallel()
	b := start(t, nil, serves("one", failing()))
	_, err := b.Infer(t.Context(), untracedRequest())
	id := fault.From(err).Metadata["request_id"]
	found := b.jaeger.Find(t, b.name+"-gateway", "infer", 1)
	if got, want := b.explainedTrace(id), found[0][0].Trace; got == "" || got != want {
		t.Errorf("it names trace %q, want %s", got, want)
	}
}
