package port_test

import (
	"context"
	"net/http"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stagemesh/stagemesh/internal/request"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

func getResult(ctx context.Context, client inferencev1connect.InferenceServiceClient, wait *durationpb.Duration) (*connect.Response[inferencev1.GetResultResponse], error) {
	return client.GetResult(ctx, connect.NewRequest(&inferencev1.GetResultRequest{RequestId: fronttest.RequestID, Wait: wait}))
}

func cancel(ctx context.Context, client inferencev1connect.InferenceServiceClient) error {
	_, err := client.Cancel(ctx, connect.NewRequest(&inferencev1.CancelRequest{RequestId: fronttest.RequestID}))
	return err
}

func TestResultIsConvertedFully(t *testing.T) {
	t.Parallel()
	for _, p := range protocols() {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			caller := fronttest.AnswerWith(payload.OfBlob("caption", "text/plain", []byte("a cat")))
			client := p.client(t, p.serve(t, caller))
			for want, asked := range map[time.Duration]*durationpb.Duration{0: nil, 5 * time.Second: durationpb.New(5 * time.Second), -1: durationpb.New(-1)} {
				got, err := getResult(t.Context(), client, asked)
				if err != nil {
					t.Fatal(err)
				}
				r := got.Msg.GetResult()
				if r.GetRequestId() != fronttest.RequestID || string(r.GetOutputs()[0].GetBlob().GetData()) != "a cat" ||
					r.GetMetadata()["note"] == "" || len(r.GetTimeline().GetSteps()) != 1 {
					t.Errorf("got %v", r)
				}
				checkHeaders(t, p, got.Header())
				if id, wait := caller.LastResult(); id != fronttest.RequestID || wait != want {
					t.Errorf("asked for %q with a wait of %s, want %s", id, wait, want)
				}
			}
		})
	}
}

func TestRequestIsCancelled(t *testing.T) {
	t.Parallel()
	for _, p := range protocols() {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			caller := &fronttest.Caller{}
			if err := cancel(t.Context(), p.client(t, p.serve(t, caller))); err != nil || caller.LastCancelled() != fronttest.RequestID {
				t.Errorf("%v; the caller was asked for %q", err, caller.LastCancelled())
			}
		})
	}
}

func TestKeyNamesTheRequest(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{Keys: map[request.Key]string{{Pipeline: "p", Key: "k"}: fronttest.RequestID}}
	client := inferencev1connect.NewInferenceServiceClient(fronttest.Client(t, false), serve(t, caller))
	got, err := client.GetResult(t.Context(), connect.NewRequest(&inferencev1.GetResultRequest{Pipeline: "p", IdempotencyKey: "k"}))
	if id, _ := caller.LastResult(); err != nil || id != fronttest.RequestID {
		t.Errorf("result: %v, %v; the caller was asked for %q", got, err, id)
	}
	if _, err := client.Cancel(t.Context(), connect.NewRequest(&inferencev1.CancelRequest{Pipeline: "p", IdempotencyKey: "k"})); err != nil || caller.LastCancelled() != fronttest.RequestID {
		t.Errorf("cancel: %v; the caller was asked for %q", err, caller.LastCancelled())
	}
	_, err = client.Cancel(t.Context(), connect.NewRequest(&inferencev1.CancelRequest{Pipeline: "q", IdempotencyKey: "k"}))
	_ = wantReason(t, err, fault.NotFound)
	_, err = client.Cancel(t.Context(), connect.NewRequest(&inferencev1.CancelRequest{RequestId: fronttest.RequestID, IdempotencyKey: "k"}))
	_ = wantReason(t, err, fault.InvalidRequest)
}

func TestFailedResultIsItsFault(t *testing.T) {
	t.Parallel()
	onEach(t, &fronttest.Caller{Err: fronttest.Fault(fault.NotFound)}, func(t *testing.T, _ protocol, client inferencev1connect.InferenceServiceClient) {
		_, err := getResult(t.Context(), client, nil)
		checkFault(t, err, fault.NotFound)
		checkFault(t, cancel(t.Context(), client), fault.NotFound)
	})
}

func TestInvalidResultRequestIsRejected(t *testing.T) {
	t.Parallel()
	url := serve(t, &fronttest.Caller{})
	client := inferencev1connect.NewInferenceServiceClient(fronttest.Client(t, false), url)
	_, err := getResult(t.Context(), client, &durationpb.Duration{Seconds: 1, Nanos: -1})
	_ = wantReason(t, err, fault.InvalidRequest)
	for _, procedure := range []string{inferencev1connect.InferenceServiceGetResultProcedure, inferencev1connect.InferenceServiceCancelProcedure} {
		head, body := post(t, fronttest.Client(t, false), url+procedure, "application/json", `{"request": "x"}`)
		if head.StatusCode != http.StatusBadRequest || reasonOf(t, body) != string(fault.InvalidRequest) {
			t.Errorf("%s: %s %s", procedure, head.Status, body)
		}
	}
}
