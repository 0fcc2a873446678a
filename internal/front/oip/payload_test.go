package oip_test

import (
	"net/http"
	"strings"
	"testing"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/oip"
	"github.com/stagemesh/stagemesh/internal/transport"
)

func TestContentsOverMaxPayloadAreRejectedByName(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{}
	h := handler(caller, transport.Settings{MaxPayload: 100})
	h.pool = budget.NewPool(budget.Settings{Limit: 1 << 20})
	s := talk(t.Context(), t, h)
	for name, contents := range map[string]*oipv2.ModelInferRequest_InferInputTensor{
		"INT64": {Name: "x", Datatype: "INT64", Shape: []int64{13}, Contents: &oipv2.InferTensorContents{Int64Contents: make([]int64, 13)}},
		"BYTES": {Name: "x", Datatype: "BYTES", Shape: []int64{26}, Contents: &oipv2.InferTensorContents{BytesContents: make([][]byte, 26)}},
	} {
		send(t, s, &oipv2.ModelInferRequest{ModelName: "simple", Id: name, Inputs: []*oipv2.ModelInferRequest_InferInputTensor{contents}})
		if got := nextResponse(t, s); !strings.Contains(got, "PAYLOAD_TOO_LARGE") || !strings.Contains(got, "inputs.x takes 104 bytes") {
			t.Errorf("%s: %q", name, got)
		}
	}
	hangUp(t, s)
	if caller.Last() != nil {
		t.Error("the request reached the caller")
	}
}

func TestTensorsOverMaxPayloadAreRejectedInJSON(t *testing.T) {
	t.Parallel()
	takes := oip.Model{Inputs: []*stagev1.PartSpec{tensorOf("x", "FP64", -1)}}
	c := rest(t, &fronttest.Caller{}, takes, transport.Settings{MaxPayload: 15})
	for path, text := range map[string]string{
		"/v2/models/simple/infer":    `{"inputs": [{"name": "x", "datatype": "FP64", "shape": [2], "data": [0, 0]}]}`,
		"/v2/models/simple/generate": `{"x": [0, 0]}`,
	} {
		if code, _, got := c.ask(http.MethodPost, path, text); code != http.StatusRequestEntityTooLarge || !strings.Contains(got, "takes 16 bytes, gateway.max_payload is 15") {
			t.Errorf("%s: %d %s", path, code, got)
		}
	}
}
