package port_test

import (
	"context"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/request"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

const (
	traceParent  = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	serverTiming = `classify-queue;dur=0.120, classify-batch;dur=1.000, classify-run;dur=2.500;desc="batch 8, idle", total;dur=4.000`
)

func text(s string) *inferencev1.Value {
	return &inferencev1.Value{Kind: &inferencev1.Value_StringValue{StringValue: s}}
}

// whole is a request that says all that a request can say, and what it means.
func whole() (*inferencev1.InferRequest, *request.Request) {
	inputs := []payload.Part{
		payload.OfBlob("image", "image/png", []byte("\x89PNG")),
		payload.OfTensor("x", tensor.Tensor{Datatype: tensor.Int8, Shape: []int64{1, 2}, Raw: []byte{1, 2}}),
	}
	inputs[1].Parameters = payload.Parameters{"n": payload.Uint64(7)}
	message := &inferencev1.InferRequest{
		Pipeline:   "photos",
		Inputs:     payload.ToProto(inputs),
		Parameters: map[string]*inferencev1.Value{"p": text("v")},
		Steps: map[string]*inferencev1.StepOptions{"classify": {
			Model:      &inferencev1.ModelRef{Name: &inferencev1.ModelRef_Alias{Alias: "best"}, Version: "2"},
			Parameters: map[string]*inferencev1.Value{"top": text("3")},
		}},
		IdempotencyKey: "key", Timeout: durationpb.New(3 * time.Second),
		Durability: inferencev1.Durability_DURABILITY_FILE, Priority: -5, WaitForCapacity: new(false),
		Metadata: map[string]string{"user": "u"}, Outputs: []string{"labels"},
	}
	return message, &request.Request{
		Pipeline: "photos", Inputs: inputs,
		Parameters: payload.Parameters{"p": payload.String("v")},
		Steps: map[pipeline.StepName]pipeline.StepOptions{"classify": {
			Model:      payload.ModelRef{Alias: "best", Version: "2"},
			Parameters: payload.Parameters{"top": payload.String("3")},
		}},
		IdempotencyKey: "key", Timeout: 3 * time.Second,
		Durability: pipeline.File, Priority: -5, WaitForCapacity: new(false),
		Metadata: map[string]string{"user": "u"}, Outputs: []string{"labels"},
		Trace: envelope.Trace{Parent: traceParent, State: "a=1,b=2"},
	}
}

func TestRequestAndResponseAreConvertedFully(t *testing.T) {
	t.Parallel()
	for _, p := range protocols() {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			caller := &fronttest.Caller{}
			message, want := whole()
			request := connect.NewRequest(message)
			request.Header().Set("traceparent", traceParent)
			request.Header().Add("tracestate", "a=1")
			request.Header().Add("tracestate", "b=2")
			response, err := p.client(t, p.serve(t, caller)).Infer(t.Context(), request)
			if err != nil {
				t.Fatal(err)
			}
			got := caller.Last()
			if o := got.Origin; o.Protocol != "grpc" && o.Protocol != "connectrpc" || o.Method != "stagemesh.inference.v1.InferenceService/Infer" {
				t.Errorf("origin %+v", o)
			}
			if want.Origin = got.Origin; !reflect.DeepEqual(got, want) {
				t.Errorf("the caller was asked for\n%+v, want\n%+v", got, want)
			}
			wantAnswer := &inferencev1.InferResponse{
				RequestId: fronttest.RequestID, Outputs: message.GetInputs(),
				Metadata: map[string]string{"note": "from the runner"},
				Timeline: &inferencev1.Timeline{Total: durationpb.New(4 * time.Millisecond), Steps: []*inferencev1.StepTiming{{
					Step: "classify", Stage: "resnet", Host: "host-1", Attempt: 2,
					QueueWait: durationpb.New(120 * time.Microsecond), BatchWait: durationpb.New(time.Millisecond),
					Run: durationpb.New(2500 * time.Microsecond), Arrival: durationpb.New(time.Millisecond), BatchSize: 8, BatchRows: 16, Rows: 2, DispatchReason: "idle",
				}}},
			}
			if !proto.Equal(response.Msg, wantAnswer) {
				t.Errorf("answered\n%v, want\n%v", response.Msg, wantAnswer)
			}
			checkHeaders(t, p, response.Header())
		})
	}
}

func checkHeaders(t *testing.T, p protocol, h http.Header) {
	t.Helper()
	if got := h.Get("Stagemesh-Request-Id"); got != fronttest.RequestID {
		t.Errorf("header Stagemesh-Request-Id %q", got)
	}
	want := ""
	if p.connect {
		want = serverTiming
	}
	if got := h.Get("Server-Timing"); got != want {
		t.Errorf("header Server-Timing %q, want %q", got, want)
	}
}

func TestFaultHasItsDetails(t *testing.T) {
	t.Parallel()
	onEach(t, fronttest.FailWith(fronttest.Fault(fault.QueueFull)), func(t *testing.T, _ protocol, client inferencev1connect.InferenceServiceClient) {
		_, err := infer(t.Context(), client, blob(1))
		checkFault(t, err, fault.QueueFull)
		_, err = stream(t.Context(), client, blob(1))
		checkFault(t, err, fault.QueueFull)
	})
}

func checkFault(t *testing.T, err error, reason fault.Reason) {
	t.Helper()
	got := wantReason(t, err, reason)
	if want := "what went wrong: " + string(reason); got.Message() != want {
		t.Errorf("message %q, want %q", got.Message(), want)
	}
	info := detail[*errdetails.ErrorInfo](t, got).GetMetadata()
	if want := map[string]string{"stage": "resnet", "step": "classify", "host": "host-1", "request_id": fronttest.RequestID}; !reflect.DeepEqual(info, want) {
		t.Errorf("ErrorInfo has %v, want %v", info, want)
	}
	if retry := detail[*errdetails.RetryInfo](t, got); retry.GetRetryDelay().AsDuration() != 1500*time.Millisecond {
		t.Errorf("RetryInfo is %v", retry)
	}
	if bad := detail[*errdetails.BadRequest](t, got).GetFieldViolations(); len(bad) != 1 || bad[0].GetField() != "inputs.pixels.shape" {
		t.Errorf("BadRequest is %v", bad)
	}
	if id := got.Meta().Get("Stagemesh-Request-Id"); id != fronttest.RequestID {
		t.Errorf("Stagemesh-Request-Id is %q", id)
	}
}

func TestRunnerCodeIsKept(t *testing.T) {
	t.Parallel()
	chosen := fault.New(fault.RunnerFailed, "the label is taken")
	chosen.Code = fault.Classify(fault.IdempotencyMismatch).Code
	onEach(t, fronttest.FailWith(chosen), func(t *testing.T, _ protocol, client inferencev1connect.InferenceServiceClient) {
		_, err := infer(t.Context(), client, blob(1))
		if got := connectError(t, err).Code(); got != connect.CodeAlreadyExists {
			t.Errorf("code %v", got)
		}
	})
}

func TestInvalidRequestIsRejected(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		message *inferencev1.InferRequest
		reason  fault.Reason
		field   string
	}{
		"durability":      {&inferencev1.InferRequest{Durability: 99}, fault.InvalidRequest, "durability"},
		"timeout":         {&inferencev1.InferRequest{Timeout: &durationpb.Duration{Seconds: 1, Nanos: -1}}, fault.InvalidRequest, "timeout"},
		"parameter":       {&inferencev1.InferRequest{Parameters: map[string]*inferencev1.Value{"p": {}}}, fault.InvalidRequest, "parameters"},
		"step parameter":  {&inferencev1.InferRequest{Steps: map[string]*inferencev1.StepOptions{"s": {Parameters: map[string]*inferencev1.Value{"p": {}}}}}, fault.InvalidRequest, "steps.s.parameters"},
		"part of nothing": {&inferencev1.InferRequest{Inputs: []*inferencev1.Part{{Name: "x"}}}, fault.InvalidInput, "inputs.x"},
		"unknown datatype": {&inferencev1.InferRequest{Inputs: []*inferencev1.Part{{Name: "x", Body: &inferencev1.Part_Tensor{
			Tensor: &inferencev1.Tensor{Datatype: "FLOAT", Shape: []int64{1}, Raw: []byte{1}},
		}}}}, fault.InvalidInput, "inputs.x"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client := protocols()[3].client(t, serve(t, &fronttest.Caller{}))
			_, err := infer(t.Context(), client, row.message)
			got := wantReason(t, err, row.reason)
			if bad := detail[*errdetails.BadRequest](t, got).GetFieldViolations(); len(bad) != 1 || bad[0].GetField() != row.field {
				t.Errorf("violations %v, want %s", bad, row.field)
			}
			_, err = stream(t.Context(), client, row.message)
			_ = wantReason(t, err, row.reason)
		})
	}
}

// What a caller makes up is repeated to it only so far.
func TestRejectionIsShort(t *testing.T) {
	t.Parallel()
	const most = 1 << 10
	long := strings.Repeat("x", 20_000)
	step, parameter := blob(1), blob(1)
	step.Steps = map[string]*inferencev1.StepOptions{long: {Parameters: map[string]*inferencev1.Value{"p": {}}}}
	parameter.Parameters = map[string]*inferencev1.Value{long: {}}
	onEach(t, &fronttest.Caller{}, func(t *testing.T, _ protocol, client inferencev1connect.InferenceServiceClient) {
		for _, m := range []*inferencev1.InferRequest{step, parameter} {
			_, err := infer(t.Context(), client, m)
			got := wantReason(t, err, fault.InvalidRequest)
			if len(got.Message()) > most {
				t.Errorf("%d bytes: %.200s", len(got.Message()), got.Message())
			}
			for _, v := range detail[*errdetails.BadRequest](t, got).GetFieldViolations() {
				if len(v.GetField()) > most || len(v.GetDescription()) > most {
					t.Errorf("%.200v", v)
				}
			}
		}
	})
}

func TestEarlierDeadlineWins(t *testing.T) {
	t.Parallel()
	for _, p := range protocols() {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			caller := &fronttest.Caller{}
			client := p.client(t, p.serve(t, caller))
			ask := func(deadline, timeout time.Duration) time.Duration {
				ctx := t.Context()
				if deadline != 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, deadline)
					defer cancel()
				}
				m := blob(1)
				if timeout != 0 {
					m.Timeout = durationpb.New(timeout)
				}
				if _, err := infer(ctx, client, m); err != nil {
					t.Fatal(err)
				}
				return caller.Last().Timeout
			}
			if got := ask(0, 0); got != 0 {
				t.Errorf("without any: %v", got)
			}
			if got := ask(time.Hour, 0); got <= 59*time.Minute || got > time.Hour {
				t.Errorf("of an hour's deadline alone: %v", got)
			}
			if got := ask(time.Hour, time.Minute); got != time.Minute {
				t.Errorf("of a minute's timeout within an hour: %v", got)
			}
			if got := ask(time.Minute, time.Hour); got <= 59*time.Second || got > time.Minute {
				t.Errorf("of an hour's timeout within a minute: %v", got)
			}
			if got := ask(0, -time.Second); got != -time.Second {
				t.Errorf("a negative timeout must reach the caller, got %v", got)
			}
		})
	}
}
