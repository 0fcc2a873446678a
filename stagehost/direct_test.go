package stagehost_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/batch"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

func listening(s *stagehost.Settings) { s.Listen = "127.0.0.1:0" }

// dial returns a connection to the host's stage service.
func dial(t *testing.T, h *host) *grpc.ClientConn {
	t.Helper()
	testbed.Eventually(t, "the stage service listens", func() bool { return h.Addr() != nil })
	conn, err := grpc.NewClient(h.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func TestStageServiceDescribesItsStage(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	spec := outputSpec()
	spec.Examples = []runner.Example{{Name: "ones", Inputs: []payload.Part{ints(t, "x", []int64{1, 2}, 1, 1)}}}
	h := b.host(inproc.New(inproc.Settings{Spec: spec, Concurrency: 3}, nil), listening, func(s *stagehost.Settings) { s.MaxInFlight = 77 })
	got, err := stagev1.NewStageServiceClient(dial(t, h)).Describe(t.Context(), &stagev1.DescribeRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if got.GetMesh() != string(mesh) || got.GetStage() != string(stage) || got.GetHost() == "" || got.GetVersion() != "v1" {
		t.Errorf("it is %v", got)
	}
	if l := got.GetLimits(); l.GetMaxSize() != 32 || l.GetMaxInFlight() != 77 || l.GetConcurrency() != 3 {
		t.Errorf("its limits are %v", l)
	}
	in := got.GetSpec().GetInputs()
	if len(in) != 1 || in[0].GetName() != "x" || in[0].GetTensor().GetDatatype() != "INT64" || !slices.Equal(in[0].GetTensor().GetShape(), []int64{-1, 2}) {
		t.Errorf("its inputs are %v", in)
	}
	if got.GetSpec().GetBatchAxis() != stagev1.BatchAxis_BATCH_AXIS_ROWS || len(got.GetSpec().GetExamples()) != 1 {
		t.Errorf("its spec is %v", got.GetSpec())
	}
}

func textPart(text string) []*inferencev1.Part {
	return payload.ToProto([]payload.Part{payload.OfBlob("", "text/plain", []byte(text))})
}

func TestStageServiceAnswersPastTheQueue(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	h := b.host(inproc.Each(inproc.Settings{}, func(_ context.Context, item runner.Item) ([]payload.Part, error) {
		return []payload.Part{payload.OfBlob("", "text/plain", []byte(first(item.Inputs)+"!"+item.Metadata["k"]))}, nil
	}), listening, func(s *stagehost.Settings) { s.Queue.MaxItems = 1 })
	client := stagev1.NewStageServiceClient(dial(t, h))
	out, err := client.Infer(t.Context(), &stagev1.InferRequest{Inputs: textPart("hello"), Metadata: map[string]string{"k": "v"}})
	if err != nil {
		t.Fatal(err)
	}
	if got := string(out.GetOutputs()[0].GetBlob().GetData()); got != "hello!v" {
		t.Errorf("answered %q", got)
	}
	if timing := out.GetTiming(); timing.GetDispatchReason() != "direct" || timing.GetBatchSize() != 1 || timing.GetQueueWait().AsDuration() != 0 {
		t.Errorf("timing %v", timing)
	}
	if n := h.counts.Of("stagemesh.stage.pulled"); n != 0 {
		t.Errorf("%d items were pulled", n)
	}
}

func TestStageServiceFaultsHaveTheirDetails(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	g := newGate()
	h := b.host(inproc.Each(inproc.Settings{Spec: outputSpec()}, func(context.Context, runner.Item) ([]payload.Part, error) {
		return nil, errors.New("broken")
	}), listening)
	slow := b.host(g, listening)
	readsK := b.host(inproc.Each(inproc.Settings{Spec: runner.Spec{Parameters: []runner.ParameterSpec{{Name: "k", Type: payload.TypeInt}}}}, echo), listening)
	client, slowClient := stagev1.NewStageServiceClient(dial(t, h)), stagev1.NewStageServiceClient(dial(t, slow))
	declaring := stagev1.NewStageServiceClient(dial(t, readsK))
	for _, test := range []struct {
		name   string
		client stagev1.StageServiceClient
		in     *stagev1.InferRequest
		code   codes.Code
		reason fault.Reason
		field  string
	}{
		{"an input of another kind", client, &stagev1.InferRequest{Inputs: textPart("x")}, codes.InvalidArgument, fault.UnsupportedMedia, "inputs.x"},
		{"no inputs", client, &stagev1.InferRequest{}, codes.InvalidArgument, fault.InvalidInput, "inputs.x"},
		{"an input that is nothing", client, &stagev1.InferRequest{Inputs: []*inferencev1.Part{{Name: "x"}}}, codes.InvalidArgument, fault.InvalidInput, "inputs.x"},
		{"the runner's", client, &stagev1.InferRequest{Inputs: payload.ToProto([]payload.Part{ints(t, "x", []int64{1, 2}, 1, 2)})}, codes.Internal, fault.RunnerFailed, ""},
		{"a parameter that is not read", declaring, &stagev1.InferRequest{Inputs: textPart("x"), Parameters: payload.Parameters{"kk": payload.Int64(3)}.ToProto()}, codes.InvalidArgument, fault.InvalidRequest, "parameters.kk"},
		{"a parameter of another type", declaring, &stagev1.InferRequest{Inputs: textPart("x"), Parameters: payload.Parameters{"k": payload.String("x")}.ToProto()}, codes.InvalidArgument, fault.InvalidRequest, "parameters.k"},
		{"the deadline", slowClient, &stagev1.InferRequest{Inputs: textPart("x"), Timeout: durationpb.New(50 * time.Millisecond)}, codes.DeadlineExceeded, fault.DeadlineExceeded, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := test.client.Infer(t.Context(), test.in)
			st := status.Convert(err)
			if st.Code() != test.code {
				t.Fatalf("status %v: %v", st.Code(), err)
			}
			var info *errdetails.ErrorInfo
			var bad *errdetails.BadRequest
			for _, detail := range st.Details() {
				switch d := detail.(type) {
				case *errdetails.ErrorInfo:
					info = d
				case *errdetails.BadRequest:
					bad = d
				}
			}
			if info.GetReason() != string(test.reason) || info.GetDomain() != fault.Domain {
				t.Errorf("error info %v, want reason %s", info, test.reason)
			}
			if test.field != "" && (len(bad.GetFieldViolations()) != 1 || bad.GetFieldViolations()[0].GetField() != test.field) {
				t.Errorf("violations %v, want one of %s", bad, test.field)
			}
		})
	}
}

func TestBatchByHasParametersThatTheRunnerReads(t *testing.T) {
	t.Parallel()
	s := stagehost.Settings{
		Mesh: mesh, Stage: stage, Host: "h", Config: stagehost.Config{Batch: batch.Settings{MaxSize: 1, By: []string{"k", "kk"}}},
		Runner: inproc.Each(inproc.Settings{Spec: runner.Spec{Parameters: []runner.ParameterSpec{{Name: "k", Type: payload.TypeInt}}}}, echo),
	}
	if err := s.Validate(); err == nil || err.Error() != "batch.by: kk: the runner reads no such parameter; it reads k" {
		t.Errorf("got %v", err)
	}
}

func TestStageServiceHealthFollowsTheHost(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	g := newGate()
	const own = "0d3c0c0e-5a4b-4b52-9d3c-5f0b8c1d2e3f"
	h := b.host(g, listening, func(s *stagehost.Settings) { s.Host = own })
	conn := dial(t, h)
	health := healthv1.NewHealthClient(conn)
	for _, service := range []string{"", stagev1.StageService_ServiceDesc.ServiceName, own} {
		testbed.Eventually(t, "the health service says that it serves", func() bool {
			out, err := health.Check(t.Context(), &healthv1.HealthCheckRequest{Service: service})
			return err == nil && out.GetStatus() == healthv1.HealthCheckResponse_SERVING
		})
	}
	if _, err := health.Check(t.Context(), &healthv1.HealthCheckRequest{Service: uuid.NewString()}); status.Code(err) != codes.NotFound {
		t.Errorf("the health of another host: %v", err)
	}
	busy := b.ask("busy")
	g.ran(t)
	h.cancel()
	testbed.Eventually(t, "the health service says that it drains", func() bool {
		out, err := health.Check(t.Context(), &healthv1.HealthCheckRequest{})
		return err == nil && out.GetStatus() == healthv1.HealthCheckResponse_NOT_SERVING
	})
	_, err := stagev1.NewStageServiceClient(conn).Infer(t.Context(), &stagev1.InferRequest{Inputs: textPart("late")})
	if status.Code(err) != codes.Unavailable {
		t.Errorf("a direct call to a host that drains: %v", err)
	}
	close(g.release)
	checkEcho(t, busy)
	h.stop()
}

func TestStageServiceLostWithTheBrokerIsNotServing(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	h := b.host(inproc.Each(inproc.Settings{}, echo), listening)
	health := healthv1.NewHealthClient(dial(t, h))
	awaitHealth := func(want healthv1.HealthCheckResponse_ServingStatus) {
		t.Helper()
		testbed.Eventually(t, "health "+want.String(), func() bool {
			out, err := health.Check(t.Context(), &healthv1.HealthCheckRequest{})
			return err == nil && out.GetStatus() == want
		})
	}
	awaitHealth(healthv1.HealthCheckResponse_SERVING)
	b.broker.Stop()
	awaitHealth(healthv1.HealthCheckResponse_NOT_SERVING)
	if h.Ready() == nil {
		t.Error("ready without a broker")
	}
	b.broker.Restore()
	awaitHealth(healthv1.HealthCheckResponse_SERVING)
}

func TestStageServiceIsReflected(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	h := b.host(inproc.Each(inproc.Settings{}, echo), listening)
	stream, err := reflectionv1.NewServerReflectionClient(dial(t, h)).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	answer, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, service := range answer.GetListServicesResponse().GetService() {
		names = append(names, service.GetName())
	}
	for _, want := range []string{stagev1.StageService_ServiceDesc.ServiceName, "grpc.health.v1.Health"} {
		if !slices.Contains(names, want) {
			t.Errorf("%v lacks %s", names, want)
		}
	}
	if err := stream.CloseSend(); err != nil {
		t.Error(err)
	}
}

// maxDirectCalls is how many direct calls a host takes at a time.
const maxDirectCalls = 16

// A runner that ignores its context keeps its item, which counts until it is finished: or direct
// calls could fill the host. Items that wait leave with their callers.
func TestDirectCallsAreCancelledWithTheirCallers(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	entered, cancelled, release := make(chan struct{}, roomy), make(chan struct{}, roomy), make(chan struct{})
	h := b.host(batches(func(ctx context.Context, batch runner.Batch, sink runner.Sink) error {
		entered <- struct{}{}
		<-ctx.Done()
		cancelled <- struct{}{}
		<-release
		return settleAll(batch, sink)
	}))
	gone, leave := context.WithCancel(t.Context())
	answers := make(chan stagehost.Response, 2*maxDirectCalls)
	call := func(ctx context.Context) {
		go func() { answers <- h.Infer(ctx, stagehost.Request{Inputs: chunkOf("x")}) }()
	}
	for range maxDirectCalls {
		call(gone)
	}
	testbed.Receive(t, "a direct call at the runner", entered)
	leave()
	for range maxDirectCalls {
		if r := testbed.Receive(t, "answer to a caller that left", answers); r.Fault == nil || r.Fault.Reason != fault.Cancelled {
			t.Errorf("answered with %+v", r)
		}
	}
	testbed.Receive(t, "the runner's cancelled context", cancelled)
	staying, end := context.WithCancel(t.Context())
	defer end()
	testbed.Eventually(t, "all but the running item are dropped", func() bool {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		r := h.Infer(ctx, stagehost.Request{Inputs: chunkOf("more")})
		return r.Fault != nil && r.Fault.Reason == fault.Cancelled
	})
	refused := 0
	for range maxDirectCalls {
		call(staying)
	}
	if r := testbed.Receive(t, "one call too many", answers); r.Fault != nil && r.Fault.Reason == fault.Overloaded {
		refused++
	}
	if refused != 1 {
		t.Error("the running item does not count")
	}
	end()
	close(release)
}

// A client that sends nothing needs no token.
func TestSilentClientDoesNotHoldUpStop(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	h := b.host(inproc.Each(inproc.Settings{}, echo), listening)
	conn, err := (&net.Dialer{Timeout: testbed.Patience}).DialContext(t.Context(), "tcp", h.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		t.Fatal(err) // the server speaks first
	}
	h.stop()
}
