package librarytest

import (
	"encoding/binary"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/status"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

func TestPipelineIsAnOIPModel(t *testing.T) {
	t.Parallel()
	const digits = repository + "/examples/digits"
	file := meshtest.Load(t, filepath.Join(digits, "mesh.yaml"))
	m := meshtest.FromFile(t, file, stagemesh.FileSettings{})
	meshtest.Start(t, m)
	conn := testbed.Dial(t, m.URL())
	client := oipv2.NewGRPCInferenceServiceClient(conn)
	testbed.Eventually(t, "hosts have said what their stages take and give", func() bool {
		model, err := client.ModelMetadata(t.Context(), &oipv2.ModelMetadataRequest{Name: "digits"})
		return err == nil && len(model.GetInputs()) == 1 && len(model.GetOutputs()) == 2 && model.GetInputs()[0].GetDatatype() == "BYTES"
	})
	image := testbed.ReadFile(t, filepath.Join(digits, "images", "01-7.png"))
	raw := append(binary.LittleEndian.AppendUint32(nil, uint32(len(image))), image...)
	answer, err := client.ModelInfer(t.Context(), &oipv2.ModelInferRequest{
		ModelName: "digits", Id: "one", RawInputContents: [][]byte{raw},
		Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{Name: "image", Datatype: "BYTES", Shape: []int64{1}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	// The likeliest digit is the first label.
	if labels := answer.GetRawOutputContents()[0]; answer.GetId() != "one" || answer.GetOutputs()[0].GetName() != "labels" || string(labels[4:5]) != "7" {
		t.Errorf("it is answered by %v", answer)
	}
	if ready, err := client.ModelReady(t.Context(), &oipv2.ModelReadyRequest{Name: "stage:label"}); err != nil || !ready.GetReady() {
		t.Errorf("a stage is ready: %v, %v", ready, err)
	}
}

// Input names are those that callers of the pipeline use, and have to be right on the Open
// Inference Protocol alone.
func TestInputNamesOfPipelines(t *testing.T) {
	t.Parallel()
	m := meshtest.Start(t, meshtest.FromFile(t, meshtest.Parse(t, `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages:
  one: {runner: {echo: {}}, inputs: [{name: x, datatype: UINT8, shape: [1]}]}
  two: {runner: {echo: {}}}
pipelines:
  plain: {steps: [{name: s, stage: one}]}
  renamed: {steps: [{name: s, stage: one, inputs: {x: given}}]}
  wired: {keep: [later], steps: [{name: s, stage: one, inputs: {x: given}}, {name: t, stage: two, inputs: {y: later}}]}
`), stagemesh.FileSettings{}))
	conn := testbed.Dial(t, m.URL())
	client := oipv2.NewGRPCInferenceServiceClient(conn)
	for model, want := range map[string]string{"plain": "x", "wired": "given"} {
		testbed.Eventually(t, "the host has reported the inputs", func() bool {
			got, err := client.ModelMetadata(t.Context(), &oipv2.ModelMetadataRequest{Name: model})
			return err == nil && len(got.GetInputs()) == 1 && got.GetInputs()[0].GetName() == want
		})
	}
	for _, row := range []struct {
		model string
		names []string
		want  string
	}{
		{"plain", []string{"x"}, ""},
		{"plain", []string{"y"}, "inputs.y: the model has no input of this name; it takes x"},
		{"wired", []string{"given", "later"}, ""},
		{"wired", []string{"x", "later"}, "inputs.x: the model has no input of this name; it takes given, later"},
	} {
		in := &oipv2.ModelInferRequest{ModelName: row.model}
		for _, name := range row.names {
			in.Inputs = append(in.Inputs, &oipv2.ModelInferRequest_InferInputTensor{Name: name, Datatype: "UINT8", Shape: []int64{1}})
			in.RawInputContents = append(in.RawInputContents, []byte{1})
		}
		if _, err := client.ModelInfer(t.Context(), in); status.Convert(err).Message() != row.want {
			t.Errorf("%s with %v: %v", row.model, row.names, err)
		}
	}
	for path, body := range map[string]string{
		"/v1/pipelines/plain:infer":     `{"inputs": [{"name": "y", "datatype": "UINT8", "shape": [1], "data": [1]}]}`,
		"/v2/models/renamed/generate":   `{"given": 1}`,
		"/v2/models/stage:two/infer":    `{"inputs": [{"name": "any", "datatype": "UINT8", "shape": [1], "data": [1]}]}`,
		"/v2/models/plain/generate":     `{"x": 1}`,
		"/v1/pipelines/stage:one:infer": `{"inputs": [{"name": "", "datatype": "UINT8", "shape": [1], "data": [1]}]}`,
	} {
		answer, err := http.Post(m.URL()+path, "application/json", strings.NewReader(body)) //nolint:noctx // the mesh stops with the test
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			t.Errorf("%s: %d %s", path, answer.StatusCode, text)
		}
	}
}
