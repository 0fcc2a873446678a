package gateway_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// read returns the document, and its tag.
func read(t *testing.T, client *http.Client, url string) (text, tag string) {
	t.Helper()
	r := testbed.Request(t, http.MethodGet, url+"/openapi.json", nil)
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("%s %s, %v", response.Status, data, err)
	}
	return string(data), response.Header.Get("ETag")
}

func TestDocumentFollowsPipelinesAndStages(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	store := table(t, broker)
	others, _ := following(t, store)
	g, _ := run(t, broker, func(s *gateway.Settings) {
		s.Registry = &gateway.Registry{Watcher: store, Table: store}
		s.Pipelines = []pipeline.Pipeline{testbed.Pipeline("first", "a")}
	})
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	client := &http.Client{Transport: transport}
	text, tag := read(t, client, g.URL())
	if !strings.Contains(text, "/v1/pipelines/first:infer") || strings.Contains(text, "stage.a") {
		t.Errorf("the first document is %s", text)
	}
	if _, again := read(t, client, g.URL()); again != tag {
		t.Error("the tag changes without a change")
	}

	apply(t, others, testbed.Pipeline("second", "a"))
	testbed.Eventually(t, "it has the other pipeline", func() bool {
		now, other := read(t, client, g.URL())
		return strings.Contains(now, "/v1/pipelines/second:infer") && other != tag
	})

	var busy atomic.Uint32
	started := timestamppb.Now()
	testbed.Background(t, func(ctx context.Context) error {
		return discovery.PublishHost(ctx, store, func() *meshv1.HostRecord {
			return &meshv1.HostRecord{Mesh: "test", Stage: "a", Host: "one", StartedAt: started, InFlight: busy.Load(), Spec: &stagev1.Spec{
				Inputs: []*stagev1.PartSpec{{Name: "order", Schema: `{"type": "object"}`, Body: &stagev1.PartSpec_Blob{Blob: &stagev1.BlobSpec{ContentTypes: []string{"application/json"}}}}},
			}}
		}, nil)
	})
	testbed.Eventually(t, "it has what the stage takes", func() bool {
		text, tag = read(t, client, g.URL())
		return strings.Contains(text, "stage.a.input.order")
	})
	busy.Store(100)
	if _, again := read(t, client, g.URL()); again != tag {
		t.Error("the tag changes with a host's load")
	}
}

func TestDocumentIsUnavailableBeforePipelinesLoad(t *testing.T) {
	t.Parallel()
	broker, other := testbed.StartBroker(t), testbed.StartBroker(t)
	other.Stop()
	store := table(t, other)
	g, err := gateway.New(settings(t, broker.URL(), func(s *gateway.Settings) {
		s.Registry = &gateway.Registry{Watcher: store, Table: store}
	}))
	if err != nil {
		t.Fatal(err)
	}
	testbed.Background(t, g.Run)
	testbed.Eventually(t, "it listens", func() bool { return g.Ready() != nil && !strings.Contains(g.Ready().Error(), "is starting") })
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	if status, reason := reasonOf(t, &http.Client{Transport: transport}, http.MethodGet, g.URL()+"/openapi.json"); status != http.StatusServiceUnavailable || reason != "REGISTRY_UNAVAILABLE" {
		t.Errorf("%d %s", status, reason)
	}
}
