package stagemesh_test

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/runners"
)

func TestPipelineIsAnOIPModel(t *testing.T) {
	t.Parallel()
	const digits = "examples/digits"
	file, err := meshfile.Load(filepath.Join(digits, "mesh.yaml"), runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	file.Gateway.Listen, file.Gateway.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	m, err := stagemesh.FromFile(file, stagemesh.FileSettings{})
	if err != nil {
		t.Fatal(err)
	}
	start(t, m)
	conn, err := grpc.NewClient(strings.TrimPrefix(m.URL(), "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	client := oipv2.NewGRPCInferenceServiceClient(conn)
	testbed.Eventually(t, "hosts have said what their stages take and give", func() bool {
		model, err := client.ModelMetadata(t.Context(), &oipv2.ModelMetadataRequest{Name: "digits"})
		return err == nil && len(model.GetInputs()) == 1 && len(model.GetOutputs()) == 2 && model.GetInputs()[0].GetDatatype() == "BYTES"
	})
	image, err := os.ReadFile(filepath.Join(digits, "images", "01-7.png"))
	if err != nil {
		t.Fatal(err)
	}
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
