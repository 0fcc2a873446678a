package meshtest_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// failure is a failed request as a client sees it.
type failure struct {
	code, reason, message string
}

// client sends a request in one protocol and returns how it failed; nil is an
// answer.
type client func(ctx context.Context, r *inferencev1.InferRequest) (*failure, error)

func clients(t *testing.T, address string) map[string]client {
	t.Helper()
	conn := testbed.Dial(t, address)
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	web := &http.Client{Transport: transport}
	url := "http://" + address
	return map[string]client{
		"http":     overHTTP(web, url, ":infer"),
		"events":   overHTTP(web, url, ":stream"),
		"grpc":     overGRPC(inferencev1.NewInferenceServiceClient(conn)),
		"connect":  overConnect(inferencev1connect.NewInferenceServiceClient(web, url)),
		"grpc-web": overConnect(inferencev1connect.NewInferenceServiceClient(web, url, connect.WithGRPCWeb())),
		"json":     overConnect(inferencev1connect.NewInferenceServiceClient(web, url, connect.WithProtoJSON())),
	}
}

func overGRPC(c inferencev1.InferenceServiceClient) client {
	return func(ctx context.Context, r *inferencev1.InferRequest) (*failure, error) {
		_, err := c.Infer(ctx, r)
		if err == nil {
			return nil, nil
		}
		st := status.Convert(err)
		for _, d := range st.Details() {
			if info, ok := d.(*errdetails.ErrorInfo); ok {
				return &failure{codeName(st.Code()), info.GetReason(), st.Message()}, nil
			}
		}
		return &failure{codeName(st.Code()), "", st.Message()}, nil
	}
}

// codeName returns a code as google.rpc.Code writes it.
func codeName(c codes.Code) string {
	names := map[codes.Code]string{
		codes.NotFound: "NOT_FOUND", codes.Unavailable: "UNAVAILABLE", codes.InvalidArgument: "INVALID_ARGUMENT",
		codes.ResourceExhausted: "RESOURCE_EXHAUSTED", codes.DeadlineExceeded: "DEADLINE_EXCEEDED", codes.Unimplemented: "UNIMPLEMENTED",
	}
	if name, ok := names[c]; ok {
		return name
	}
	return c.String()
}

func overConnect(c inferencev1connect.InferenceServiceClient) client {
	return func(ctx context.Context, r *inferencev1.InferRequest) (*failure, error) {
		_, err := c.Infer(ctx, connect.NewRequest(r))
		if err == nil {
			return nil, nil
		}
		return &failure{code: codeName(codes.Code(connect.CodeOf(err))), reason: reasonOf(err), message: err.Error()}, nil
	}
}

// reasonOf returns the mesh's reason in an error of Connect; "" where there is none.
func reasonOf(err error) string {
	rpc, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return ""
	}
	for _, d := range rpc.Details() {
		if value, err := d.Value(); err == nil {
			if info, ok := value.(*errdetails.ErrorInfo); ok {
				return info.GetReason()
			}
		}
	}
	return ""
}

func overHTTP(c *http.Client, url, verb string) client {
	return func(ctx context.Context, r *inferencev1.InferRequest) (*failure, error) {
		body, contentType, err := httpBody(r.GetInputs()[0])
		if err != nil {
			return nil, err
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/pipelines/"+r.GetPipeline()+verb, bytes.NewReader(body))
		if err != nil {
			return nil, err
		}
		request.Header.Set("Content-Type", contentType)
		if r.GetTimeout() != nil {
			request.Header.Set("Stagemesh-Timeout", r.GetTimeout().AsDuration().String())
		}
		response, err := c.Do(request)
		if err != nil {
			return nil, err
		}
		defer response.Body.Close()
		data, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode == http.StatusOK {
			return nil, err
		}
		var answer struct {
			Error struct{ Code, Reason, Message string }
		}
		if err := json.Unmarshal(data, &answer); err != nil {
			return nil, fmt.Errorf("%s: %w", data, err)
		}
		return &failure{fmt.Sprint(response.StatusCode), answer.Error.Reason, answer.Error.Message}, nil
	}
}

func httpBody(p *inferencev1.Part) (body []byte, contentType string, err error) {
	if p.GetTensor() == nil {
		return p.GetBlob().GetData(), p.GetBlob().GetContentType(), nil
	}
	t := p.GetTensor()
	values, err := tensor.Tensor{Datatype: tensor.Datatype(t.GetDatatype()), Shape: t.GetShape(), Raw: t.GetRaw()}.FP32Values()
	if err != nil {
		return nil, "", err
	}
	body, err = json.Marshal(map[string]any{"inputs": []any{map[string]any{
		"name": p.GetName(), "datatype": t.GetDatatype(), "shape": t.GetShape(), "data": values,
	}}})
	return body, "application/json", err
}

func blob(contentType string, data []byte) *inferencev1.Part {
	return &inferencev1.Part{Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: contentType, Data: data}}}
}

func fp32(t *testing.T, name string, shape ...int64) *inferencev1.Part {
	t.Helper()
	n, _ := tensor.Elements(shape)
	v, err := tensor.FromFP32(shape, make([]float32, n))
	if err != nil {
		t.Fatal(err)
	}
	return &inferencev1.Part{Name: name, Body: &inferencev1.Part_Tensor{
		Tensor: &inferencev1.Tensor{Datatype: string(v.Datatype), Shape: v.Shape, Raw: v.Raw},
	}}
}

// same returns a stage of [-1, 4] tensors that answers what it is sent.
func same() runner.Runner {
	return inproc.Rows(inproc.Settings{Spec: runner.Spec{
		Inputs:  []runner.PartSpec{{Name: "x", Datatype: tensor.FP32, Shape: []int64{-1, 4}}},
		Outputs: []runner.PartSpec{{Name: "y", Datatype: tensor.FP32, Shape: []int64{-1, 4}}},
	}}, func(_ context.Context, in map[string]tensor.Tensor) (map[string]tensor.Tensor, error) {
		return map[string]tensor.Tensor{"y": in["x"]}, nil
	})
}

// blocked returns a stage that answers nothing until its batch is cancelled.
func blocked() runner.Runner {
	return inproc.New(inproc.Settings{}, func(ctx context.Context, _ runner.Batch, _ runner.Sink) error {
		<-ctx.Done()
		return ctx.Err()
	})
}

const testPayload = 64 << 10

// atOnce is far below every timeout on the way, and far above what a refusal
// takes on a busy machine.
const atOnce = 2 * time.Second

func TestEveryFaultIsTheSameOnEveryProtocol(t *testing.T) {
	t.Parallel()
	bed := meshtest.New(t)
	decode, err := runners.NewImageDecode(runners.ImageDecodeSettings{Width: 8, Height: 8})
	if err != nil {
		t.Fatal(err)
	}
	bed.Host("decode", decode)
	bed.Host("same", same())
	bed.Host("blocked", blocked(), func(s *stagehost.Settings) {
		s.Queue.MaxItems, s.DrainTimeout = fullAt, time.Millisecond
	})
	bed.Host("stuck", blocked(), func(s *stagehost.Settings) { s.DrainTimeout = time.Millisecond })
	g := bed.Gateway([]pipeline.Pipeline{
		testbed.Pipeline("decode", "decode"), testbed.Pipeline("same", "same"), testbed.Pipeline("blocked", "blocked"),
		testbed.Pipeline("stuck", "stuck"), testbed.Pipeline("vacant", "same", "vacant"),
	}, func(s *gateway.Settings) {
		s.Listen, s.MaxPayload = "127.0.0.1:0", testPayload
		unhurried(s)
	})
	fill(t, bed, g)

	tests := map[string]struct {
		request *inferencev1.InferRequest
		code    string
		http    int
		reason  string
		message string
	}{
		"unknown pipeline": {
			&inferencev1.InferRequest{Pipeline: "nothing", Inputs: []*inferencev1.Part{blob("text/plain", []byte("x"))}},
			"NOT_FOUND", 404, "UNKNOWN_PIPELINE", "nothing",
		},
		"stage without host": {
			&inferencev1.InferRequest{Pipeline: "vacant", Inputs: []*inferencev1.Part{fp32(t, "x", 1, 4)}},
			"UNAVAILABLE", 503, "NO_CAPACITY", "vacant",
		},
		"not an image": {
			&inferencev1.InferRequest{Pipeline: "decode", Inputs: []*inferencev1.Part{blob("image/png", []byte("no image"))}},
			"INVALID_ARGUMENT", 400, "INVALID_INPUT", "image",
		},
		"wrong shape": {
			&inferencev1.InferRequest{Pipeline: "same", Inputs: []*inferencev1.Part{fp32(t, "x", 1, 5)}},
			"INVALID_ARGUMENT", 400, "INVALID_INPUT", `"x"`,
		},
		"tensor where an image is due": {
			&inferencev1.InferRequest{Pipeline: "decode", Inputs: []*inferencev1.Part{fp32(t, "image", 1, 5)}},
			"INVALID_ARGUMENT", 400, "INVALID_INPUT", `"image"`,
		},
		"payload over the limit": {
			&inferencev1.InferRequest{Pipeline: "same", Inputs: []*inferencev1.Part{blob("text/plain", make([]byte, testPayload+1))}},
			"INVALID_ARGUMENT", 413, "PAYLOAD_TOO_LARGE", fmt.Sprint(testPayload),
		},
		"full queue": {
			&inferencev1.InferRequest{Pipeline: "blocked", Inputs: []*inferencev1.Part{blob("text/plain", []byte("x"))}},
			"RESOURCE_EXHAUSTED", 429, "QUEUE_FULL", "blocked",
		},
		"deadline": {
			&inferencev1.InferRequest{Pipeline: "stuck", Timeout: durationpb.New(50 * time.Millisecond), Inputs: []*inferencev1.Part{blob("text/plain", []byte("x"))}},
			"DEADLINE_EXCEEDED", 504, "DEADLINE_EXCEEDED", "50ms",
		},
	}
	for name, test := range tests {
		for protocol, send := range clients(t, g.Addr().String()) {
			t.Run(name+"/"+protocol, func(t *testing.T) {
				begin := time.Now()
				var got *failure
				var err error
				testbed.Returns(t, "the answer", func() { got, err = send(t.Context(), test.request) })
				took := time.Since(begin)
				if err != nil || got == nil {
					t.Fatalf("got %v, %v", got, err)
				}
				want := test.code
				if protocol == "http" || protocol == "events" {
					want = fmt.Sprint(test.http)
				}
				if got.code != want || got.reason != test.reason || !strings.Contains(got.message, test.message) {
					t.Errorf("got %+v, want %s, %s, a message about %s", *got, want, test.reason, test.message)
				}
				t.Logf("%s in %s: %s", got.reason, took.Round(10*time.Microsecond), got.message)
			})
		}
	}
}

// fullAt is the bound of the queue that fill fills.
const fullAt = 4

// fill sends as many requests as the queue of the blocked stage holds, and
// returns when it is full. They end with the test.
func fill(t *testing.T, bed *meshtest.Bed, g meshtest.Gateway) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	for range fullAt {
		go func() {
			defer func() { done <- struct{}{} }()
			_, _ = g.Service().Infer(ctx, &request.Request{Pipeline: "blocked", Inputs: text("fill")})
		}()
	}
	t.Cleanup(func() {
		cancel()
		for range fullAt {
			<-done
		}
	})
	conn := bed.Broker.Connect(meshtest.Mesh)
	testbed.Eventually(t, "the queue is full", func() bool {
		info, err := conn.Queue(t.Context(), "blocked", pipeline.Memory)
		return err == nil && info.Items == fullAt
	})
}
