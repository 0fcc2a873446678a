package docstest

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// readDigit asks over Connect; the address is http://host:port.
func readDigit(ctx context.Context, client *http.Client, address string, png []byte) (string, error) {
	mesh := inferencev1connect.NewInferenceServiceClient(client, address)
	response, err := mesh.Infer(ctx, connect.NewRequest(&inferencev1.InferRequest{
		Pipeline: "digits",
		Inputs: []*inferencev1.Part{{Name: "image", Body: &inferencev1.Part_Blob{
			Blob: &inferencev1.Blob{ContentType: "image/png", Data: png},
		}}},
		Timeout: durationpb.New(2 * time.Second),
	}))
	if err != nil {
		return "", err
	}
	return best(response.Msg.GetOutputs())
}

// best returns the first of the labels.
func best(outputs []*inferencev1.Part) (string, error) {
	for _, part := range outputs {
		if part.GetName() != "labels" {
			continue
		}
		t := part.GetTensor()
		labels, err := tensor.Tensor{
			Datatype: tensor.Datatype(t.GetDatatype()), Shape: t.GetShape(), Raw: t.GetRaw(),
		}.BytesElements()
		if err != nil || len(labels) == 0 {
			return "", errors.Join(err, errors.New("no label"))
		}
		return string(labels[0]), nil
	}
	return "", errors.New("the answer has no labels")
}

// reason returns what a client may branch on, and how long to wait before the
// next try where that is known.
func reason(err error) (reason string, pause time.Duration) {
	rpc, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return "", 0
	}
	for _, detail := range rpc.Details() {
		value, err := detail.Value()
		if err != nil {
			continue
		}
		switch d := value.(type) {
		case *errdetails.ErrorInfo:
			reason = d.GetReason()
		case *errdetails.RetryInfo:
			pause = d.GetRetryDelay().AsDuration()
		}
	}
	return reason, pause
}

// startExample starts an example with a port of its own.
func startExample(t *testing.T, name string) (url string) {
	t.Helper()
	return startFile(t, meshtest.Load(t, "../../examples/"+name+"/mesh.yaml")).URL()
}

func TestClientsOfTheGuideAreAnswered(t *testing.T) {
	t.Parallel()
	url := startExample(t, "digits")
	client := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(client.CloseIdleConnections)

	image := []byte(read(t, "examples/digits/images/07-9.png"))
	digit, err := readDigit(t.Context(), client, url, image)
	if err != nil || digit != "9" {
		t.Errorf("read %q, %v", digit, err)
	}
	_, err = readDigit(t.Context(), client, url, []byte("no image"))
	if got, _ := reason(err); got != "INVALID_INPUT" {
		t.Errorf("reason %q of %v", got, err)
	}
}
