package baseline_test

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"testing"

	"connectrpc.com/connect"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/bench/baseline"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func blob(data []byte) *inferencev1.Part {
	return &inferencev1.Part{Name: "in", Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: "text/plain", Data: data}}}
}

// started is a baseline that runs, and a client of it.
type started struct {
	client inferencev1connect.InferenceServiceClient
	hosts  []*baseline.Host
}

// start starts a baseline with a host for each stage, and stops it with the test.
func start(t *testing.T, broker *testbed.Broker, d pipeline.Durability, stages ...string) *started {
	t.Helper()
	at := baseline.Broker{URL: broker.URL()}
	route := baseline.NewRoute(stages, d)
	front, err := baseline.StartFront(t.Context(), at, route)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stopped(t, front.Stop()) })
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	out := &started{client: inferencev1connect.NewInferenceServiceClient(&http.Client{Transport: transport}, front.URL())}
	for _, stage := range route.StageNames() {
		host, err := baseline.StartHost(t.Context(), at, route, stage)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { stopped(t, host.Stop()) })
		out.hosts = append(out.hosts, host)
	}
	return out
}

func stopped(t *testing.T, err error) {
	t.Helper()
	if err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
		t.Error(err)
	}
}

func (s *started) ask(t *testing.T, parts ...*inferencev1.Part) (*connect.Response[inferencev1.InferResponse], error) {
	t.Helper()
	return s.client.Infer(t.Context(), connect.NewRequest(&inferencev1.InferRequest{Inputs: parts}))
}

func TestWhatIsSentComesBack(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		durability pipeline.Durability
		stages     []string
	}{
		"one stage":        {pipeline.Memory, []string{"a"}},
		"three stages":     {pipeline.Memory, []string{"a", "b", "c"}},
		"a stage twice":    {pipeline.Memory, []string{"a", "b", "a"}},
		"stages on a file": {pipeline.File, []string{"a", "b"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// A broker of its own: when a stream is deleted, NATS removes empty folders of its account,
			// and the creation of the account's first stream on file at that moment fails.
			s := start(t, testbed.StartBroker(t), test.durability, test.stages...)
			for _, size := range []int{0, 1, 1 << 10, 1 << 20} {
				data := bytes.Repeat([]byte("x"), size)
				answer, err := s.ask(t, blob(data))
				if err != nil {
					t.Fatal(err)
				}
				out := answer.Msg.GetOutputs()
				if len(out) != 1 || out[0].GetName() != "in" || !bytes.Equal(out[0].GetBlob().GetData(), data) || out[0].GetBlob().GetContentType() != "text/plain" {
					t.Errorf("%d bytes came back as %d", size, len(out[0].GetBlob().GetData()))
				}
				if got := answer.Header().Get("Content-Encoding"); got != "" {
					t.Errorf("the answer is compressed: %s", got)
				}
			}
			tensor := &inferencev1.Part{Name: "x", Body: &inferencev1.Part_Tensor{Tensor: &inferencev1.Tensor{Datatype: "UINT8", Shape: []int64{1, 2}, Raw: []byte{1, 2}}}}
			answer, err := s.ask(t, tensor)
			if err != nil {
				t.Fatal(err)
			}
			if got := answer.Msg.GetOutputs()[0].GetTensor(); got.GetDatatype() != "UINT8" || !bytes.Equal(got.GetRaw(), []byte{1, 2}) {
				t.Errorf("got %v", got)
			}
		})
	}
}

func TestAnswersReachWhoAsked(t *testing.T) {
	t.Parallel()
	s := start(t, testbed.StartBroker(t), pipeline.Memory, "a", "b")
	failed := make(chan error, 64)
	for i := range cap(failed) {
		go func() {
			data := bytes.Repeat([]byte{byte(i)}, 100)
			answer, err := s.client.Infer(t.Context(), connect.NewRequest(&inferencev1.InferRequest{Inputs: []*inferencev1.Part{blob(data)}}))
			if err == nil && !bytes.Equal(answer.Msg.GetOutputs()[0].GetBlob().GetData(), data) {
				err = errors.New("the answer is another's")
			}
			failed <- err
		}()
	}
	for range cap(failed) {
		if err := testbed.Receive(t, "an answer", failed); err != nil {
			t.Error(err)
		}
	}
}

func TestARequestWaitsForAHost(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	at, route := baseline.Broker{URL: broker.URL()}, baseline.NewRoute([]string{"a"}, pipeline.Memory)
	front, err := baseline.StartFront(t.Context(), at, route)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stopped(t, front.Stop()) })
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	client := inferencev1connect.NewInferenceServiceClient(&http.Client{Transport: transport}, front.URL())
	first, err := baseline.StartHost(t.Context(), at, route, "a")
	if err != nil {
		t.Fatal(err)
	}
	stopped(t, first.Stop())
	answered := make(chan error, 1)
	go func() {
		_, err := client.Infer(t.Context(), connect.NewRequest(&inferencev1.InferRequest{Inputs: []*inferencev1.Part{blob([]byte("x"))}}))
		answered <- err
	}()
	second, err := baseline.StartHost(t.Context(), at, route, "a")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stopped(t, second.Stop()) })
	if err := testbed.Receive(t, "the answer", answered); err != nil {
		t.Error(err)
	}
}

func TestWhatTheBaselineCannotDoIsRefused(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	s := start(t, broker, pipeline.Memory, "a")
	if _, err := s.ask(t, blob(nil), blob(nil)); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("two inputs: %v", err)
	}
	route := baseline.NewRoute([]string{"a"}, pipeline.Memory)
	if _, err := baseline.StartHost(t.Context(), baseline.Broker{URL: broker.URL()}, route, "b"); !errors.Is(err, baseline.ErrStage) {
		t.Errorf("another stage: %v", err)
	}
	if _, err := baseline.StartHost(t.Context(), baseline.Broker{URL: broker.URL()}, route, "a"); !errors.Is(err, jetstream.ErrStreamNotFound) {
		t.Errorf("no front: %v", err)
	}
}

func TestNothingIsLeftOnTheBroker(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	at, route := baseline.Broker{URL: broker.URL()}, baseline.NewRoute([]string{"a", "b"}, pipeline.Memory)
	front, err := baseline.StartFront(t.Context(), at, route)
	if err != nil {
		t.Fatal(err)
	}
	stopped(t, front.Stop())
	nc, err := nats.Connect(broker.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	for name := range js.StreamNames(context.WithoutCancel(t.Context())).Name() {
		t.Errorf("stream %s is left", name)
	}
}
