package fleet

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"testing"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/testbed"
	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
)

const (
	// large is the size of the tensor that goes in or out, in bytes; small is the size of the
	// other.
	large, small = 1 << 20, 4
	// requests is the number of requests that an allocation is averaged over.
	requests = 20
	// beside is what a request may cost beside its tensor, in bytes: headers, the route,
	// the state of the call, and the first buffer for the body.
	beside = 256 << 10
)

// allocations returns the bytes that a gateway allocates for one request of that many,
// made one after the other.
func (m *member) allocations(n int, request func()) int {
	// Buffers are kept from one request to the next.
	for range 5 {
		request()
	}
	const metric = "go_memstats_alloc_bytes_total"
	before := m.count(metric)
	for range n {
		request()
	}
	return (m.count(metric) - before) / n
}

// A tensor is copied at most twice on its way through a gateway, and twice on its way
// back: that is what the gateway allocates for it.
func TestGatewayCopiesATensorAtMostTwice(t *testing.T) {
	t.Parallel()
	f := newFleet(t, noRegistry)
	f.host(hostSpec{stage: "sink", tensor: small})
	f.host(hostSpec{stage: "source", tensor: large})
	// A collection would free the kept buffers, and the number of collections would count.
	// The requests of the test need a few hundred megabytes.
	g := f.gatewayOf(gatewaySpec{env: []string{"GOGC=off", "GOMEMLIMIT=1GiB"}})
	for name, send := range map[string]func(t *testing.T, model string, x []byte) []byte{
		"gRPC":                 overGRPC(t, g.address()),
		"REST, binary":         overREST(t, g.address(), fronttest.Client(t, false)),
		"REST, binary, HTTP/2": overREST(t, g.address(), fronttest.Client(t, true)),
	} {
		for model, sizes := range map[string][2]int{"stage:sink": {large, small}, "stage:source": {small, large}} {
			x := make([]byte, sizes[0])
			got := g.allocations(requests, func() {
				if y := send(t, model, x); len(y) != sizes[1] {
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

func overGRPC(t *testing.T, address string) func(t *testing.T, model string, x []byte) []byte {
	t.Helper()
	conn := testbed.Dial(t, address)
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

func overREST(t *testing.T, address string, client *http.Client) func(t *testing.T, model string, x []byte) []byte {
	t.Helper()
	return func(t *testing.T, model string, x []byte) []byte {
		t.Helper()
		head := fmt.Sprintf(`{"parameters": {"binary_data_output": true}, "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, %d], "parameters": {"binary_data_size": %d}}]}`, len(x)/4, len(x))
		r := testbed.Request(t, http.MethodPost, "http://"+address+"/v2/models/"+model+"/infer", bytes.NewReader(append([]byte(head), x...)))
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
