package meshtest_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/testbed"
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// stepping answers each item with a chunk for every step that the test takes, until
// there are no more of them or the item is cancelled, and then reports why it ended.
func stepping(steps <-chan string, ended chan<- string) runner.Runner {
	return inproc.New(inproc.Settings{}, func(_ context.Context, b runner.Batch, sink runner.Sink) error {
		for {
			select {
			case word, more := <-steps:
				if !more {
					ended <- "done"
					return sink.SetOutcome(0, runner.Output(text("all")...))
				}
				if err := sink.Chunk(0, text(word)); err != nil {
					return err
				}
			case <-b.Items[0].Cancelled:
				ended <- "cancelled"
				return sink.SetOutcome(0, runner.Failed(runner.FaultOf(context.Canceled)))
			}
		}
	})
}

// listening is an edit that opens the public port.
func listening(s *gateway.Settings) { s.Listen = "127.0.0.1:0" }

// askEvents asks for events, of which the first is made by then.
func askEvents(ctx context.Context, t *testing.T, g meshtest.Gateway, h2c bool, path, body string) *fronttest.Events {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, g.URL()+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "text/plain")
	response, err := fronttest.Client(t, h2c).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	if response.StatusCode != http.StatusOK || response.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("%s %v", response.Status, response.Header)
	}
	return fronttest.ReadEvents(response.Body)
}

func TestEventsArriveAsTheyAreEmitted(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		h2c              bool
		path, body, last string
	}{
		"HTTP/1":          {false, "/v1/pipelines/stage:steps:stream", "x", `"text":"all"`},
		"HTTP/2":          {true, "/v1/pipelines/stage:steps:stream", "x", `"text":"all"`},
		"generate_stream": {false, "/v2/models/stage:steps/generate_stream", `{"text_input": "x"}`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bed := meshtest.New(t)
			steps, ended := make(chan string, 1), make(chan string, 1)
			bed.Host("steps", stepping(steps, ended))
			g := bed.Gateway(nil, listening)
			steps <- "word 0"
			events := askEvents(t.Context(), t, g, row.h2c, row.path, row.body)
			for i := range 3 {
				e, err := events.Next()
				if err != nil || !strings.Contains(e.Data, fmt.Sprintf(`"word %d"`, i)) {
					t.Fatalf("event %d is %+v, %v", i, e, err)
				}
				if i < 2 {
					steps <- fmt.Sprintf("word %d", i+1)
				}
			}
			close(steps)
			rest, err := events.All()
			if err != nil || len(rest) != min(len(row.last), 1) || len(rest) == 1 && !strings.Contains(rest[0].Data, row.last) {
				t.Errorf("and then %+v, %v", rest, err)
			}
			if why := testbed.Receive(t, "the end of the run", ended); why != "done" {
				t.Errorf("the runner ended as it was %s", why)
			}
		})
	}
}

func TestLeavingAStreamCancelsItsRun(t *testing.T) {
	t.Parallel()
	for name, h2c := range map[string]bool{"HTTP/1": false, "HTTP/2": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bed := meshtest.New(t)
			steps, ended := make(chan string, 1), make(chan string, 1)
			bed.Host("steps", stepping(steps, ended))
			g := bed.Gateway(nil, listening)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			steps <- "word"
			events := askEvents(ctx, t, g, h2c, "/v1/pipelines/stage:steps:stream", "x")
			if _, err := events.Next(); err != nil {
				t.Fatal(err)
			}
			leave()
			if why := testbed.Receive(t, "the end of the run", ended); why != "cancelled" {
				t.Errorf("the runner ended as it was %s", why)
			}
		})
	}
}

func TestOpenStreamDoesNotDelayTheGatewaysStop(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	bed.Host("count", counting())
	g := bed.Gateway(nil, listening, func(s *gateway.Settings) { s.DrainTimeout = time.Minute })
	conn := testbed.Dial(t, g.Addr().String())
	s, err := oipv2.NewGRPCInferenceServiceClient(conn).ModelStreamInfer(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(&oipv2.ModelInferRequest{
		ModelName: "stage:count", Id: "mine", RawInputContents: [][]byte{{1, 0, 0, 0, '3'}},
		Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{Name: "text", Datatype: "BYTES", Shape: []int64{1}, Parameters: map[string]*oipv2.InferParameter{
			"content_type": {ParameterChoice: &oipv2.InferParameter_StringParam{StringParam: "text/plain"}},
		}}},
	}); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		m, err := s.Recv()
		if err != nil || m.GetInferResponse().GetId() != "mine" || string(m.GetInferResponse().GetRawOutputContents()[0][4:]) != fmt.Sprint(i+1) {
			t.Fatalf("message %d is %v, %v", i+1, m, err)
		}
	}
	begin := time.Now()
	g.Stop()
	if took := time.Since(begin); took > 30*time.Second {
		t.Errorf("it took %s", took)
	}
	if _, err := s.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("the stream ended with %v", err)
	}
}
