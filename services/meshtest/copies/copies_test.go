package copies_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/gateway/front/fronttest"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/services/meshtest/copies"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
)

const (
	// large is the size of the tensor that goes in or out, in bytes, and small that of
	// the other.
	large, small = 1 << 20, 4
	// requests is over how many an allocation is averaged.
	requests = 20
	// beside is what a request may cost beside its tensor, in bytes: headers, the route,
	// the call's own state, and the first buffer that a body is read into.
	beside = 256 << 10
)

// of returns a tensor of so many bytes.
func of(name string, size int) payload.Part {
	return payload.OfTensor(name, tensor.Tensor{Datatype: tensor.FP32, Shape: []int64{1, int64(size / 4)}, Raw: make([]byte, size)})
}

// answering returns a runner that answers with a tensor of so many bytes.
func answering(size int) runner.Runner {
	return inproc.Each(inproc.Settings{}, func(context.Context, runner.Item) ([]payload.Part, error) {
		return []payload.Part{of("y", size)}, nil
	})
}

// A tensor is copied twice at most on its way through a gateway, and twice on its way
// back: what is allocated for it says so.
func TestATensorIsCopiedTwiceAtMostEachWay(t *testing.T) {
	t.Parallel()
	g := copies.Start(t)
	g.Host("sink", answering(small))
	g.Host("source", answering(large))
	for name, ask := range map[string]func(t *testing.T, model string, x []byte) []byte{
		"gRPC":                 overGRPC(t, g),
		"REST, binary":         overREST(t, g, fronttest.Client(t, false)),
		"REST, binary, HTTP/2": overREST(t, g, fronttest.Client(t, true)),
	} {
		for model, sizes := range map[string][2]int{"stage:sink": {large, small}, "stage:source": {small, large}} {
			x := make([]byte, sizes[0])
			got := g.Allocated(t, requests, func() {
				if y := ask(t, model, x); len(y) != sizes[1] {
					t.Fatalf("%s: %s answers %d bytes", name, model, len(y))
				}
			})
			t.Logf("%s, %s: %d bytes, %.2f of the tensor's", name, model, got, float64(got)/large)
			if got > 2*large+beside {
				t.Errorf("%s: for %d bytes in and %d out the gateway allocates %d", name, sizes[0], sizes[1], got)
			}
		}
	}
}

func overGRPC(t *testing.T, g copies.Gateway) func(t *testing.T, model string, x []byte) []byte {
	t.Helper()
	conn, err := grpc.NewClient(g.Address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	client := oipv2.NewGRPCInferenceServiceClient(conn)
	return func(t *testing.T, model string, x []byte) []byte {
		t.Helper()
		answer, err := client.ModelInfer(t.Context(), &oipv2.ModelInferRequest{
			ModelName: model, RawInputContents: [][]byte{x},
			Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "FP32", Shape: []int64{1, int64(len(x) / 4)}}},
		})
		if err != nil {
			t.Fatal(err)
		}
		return answer.GetRawOutputContents()[0]
	}
}

func overREST(t *testing.T, g copies.Gateway, client *http.Client) func(t *testing.T, model string, x []byte) []byte {
	t.Helper()
	return func(t *testing.T, model string, x []byte) []byte {
		t.Helper()
		head := fmt.Sprintf(`{"parameters": {"binary_data_output": true}, "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, %d], "parameters": {"binary_data_size": %d}}]}`, len(x)/4, len(x))
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+g.Address+"/v2/models/"+model+"/infer", bytes.NewReader(append([]byte(head), x...)))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Inference-Header-Content-Length", strconv.Itoa(len(head)))
		answer, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		data, err := io.ReadAll(answer.Body)
		if err != nil || answer.StatusCode != http.StatusOK {
			t.Fatalf("%d %.200s: %v", answer.StatusCode, data, err)
		}
		length, err := strconv.Atoi(answer.Header.Get("Inference-Header-Content-Length"))
		if err != nil || !json.Valid(data[:length]) {
			t.Fatalf("%v of %.200s", err, data)
		}
		return data[length:]
	}
}
