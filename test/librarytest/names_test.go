package librarytest

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// closedNames is the file of a mesh whose stages are reached by its pipeline alone.
const closedNames = `
mesh: m
gateway:
  listen: "127.0.0.1:0"
  admin: {listen: "127.0.0.1:0"}
  stage_pipelines: false
  passthrough: {predict.Predictor/Predict: "1"}
stages:
  score: {runner: {echo_models: {}}, models: {capacity: 64MiB, default_size: 1MiB}}
models: {small: {stage: score}, inner: {stage: score}}
aliases: {prod: {model: small}}
pipelines:
  p: {steps: [{name: s, stage: score, alias: prod, locked: true}, {name: free, stage: score, alias: prod}]}
jobs:
  pools: {main: {target: {pipelines: [p]}}}
  queues: {nightly: {pool: main}}
  batches: {queue: nightly}
`

func TestWorkIsNamedByPipelinesAlone(t *testing.T) {
	t.Parallel()
	m := meshtest.FromFile(t, meshtest.Parse(t, closedNames), stagemesh.FileSettings{Dispatcher: true})
	meshtest.Start(t, m)
	conn := testbed.Dial(t, m.URL())
	oip, rpc := oipv2.NewGRPCInferenceServiceClient(conn), inferencev1connect.NewInferenceServiceClient(http.DefaultClient, m.URL())
	post := func(path, contentType, body string) error {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, m.URL()+path, strings.NewReader(body))
		if err != nil {
			return err
		}
		r.Header.Set("Content-Type", contentType)
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		if answer.StatusCode >= http.StatusMultipleChoices {
			return fmt.Errorf("%d %s", answer.StatusCode, text)
		}
		return err
	}
	const input = `{"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["to"]}]}`
	ways := map[string]func(name string) error{
		"the library": func(name string) error {
			_, err := ask(t, m, name, "to")
			return err
		},
		"HTTP":   func(name string) error { return post("/v1/pipelines/"+name+":infer", "text/plain", "to") },
		"events": func(name string) error { return post("/v1/pipelines/"+name+":stream", "text/plain", "to") },
		"RPC": func(name string) error {
			_, err := rpc.Infer(t.Context(), connect.NewRequest(&inferencev1.InferRequest{Pipeline: name, Inputs: textPart("to")}))
			return err
		},
		"OIP": func(name string) error { return post("/v2/models/"+name+"/infer", "application/json", input) },
		"generate": func(name string) error {
			return post("/v2/models/"+name+"/generate", "application/json", `{"text_input": "to"}`)
		},
		"OIP over gRPC": func(name string) error {
			_, err := oip.ModelInfer(t.Context(), &oipv2.ModelInferRequest{ModelName: name, Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{
				Name: "text", Datatype: "BYTES", Shape: []int64{1}, Contents: &oipv2.InferTensorContents{BytesContents: [][]byte{[]byte("to")}},
			}}})
			return err
		},
		"OIP metadata": func(name string) error {
			_, err := oip.ModelMetadata(t.Context(), &oipv2.ModelMetadataRequest{Name: name})
			return err
		},
		"a job": func(name string) error {
			return post("/v1/queues/nightly/jobs?pipeline="+name, "text/plain", "to")
		},
		"a job over RPC": func(name string) error {
			_, err := inferencev1connect.NewJobServiceClient(http.DefaultClient, m.URL()).SubmitJob(t.Context(), connect.NewRequest(&inferencev1.SubmitJobRequest{
				Queue: "nightly", Payload: &inferencev1.SubmitJobRequest_Infer{Infer: &inferencev1.InferRequest{Pipeline: name, Inputs: textPart("to")}},
			}))
			return err
		},
	}
	testbed.Eventually(t, "the pipeline answers", func() bool { return ways["the library"]("p") == nil })
	for way, use := range ways {
		if err := use("p"); err != nil {
			t.Errorf("%s, by the pipeline: %v", way, err)
		}
		for _, name := range []string{"stage:score", "model:inner", "alias:prod", "inner", "prod", "model:none"} {
			err := use(name)
			if err == nil || !strings.Contains(err.Error(), "UNKNOWN_PIPELINE") && fault.From(err).Reason != fault.UnknownPipeline && status.Code(err) != codes.NotFound && connect.CodeOf(err) != connect.CodeNotFound {
				t.Errorf("%s, by %s: %v", way, name, err)
			}
		}
	}
	for header, name := range map[string]string{"mm-model-id": "inner", "mm-vmodel-id": "prod", "x-none": ""} {
		var out wrapperspb.StringValue
		err := conn.Invoke(metadata.AppendToOutgoingContext(t.Context(), header, name), "/predict.Predictor/Predict", wrapperspb.String("inner"), &out)
		if status.Code(err) != codes.NotFound {
			t.Errorf("a call that is passed on by %s: %v", header, err)
		}
	}
}

func textPart(text string) []*inferencev1.Part {
	return []*inferencev1.Part{{Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: "text/plain", Data: []byte(text)}}}}
}

func TestBatchLinesNamePipelinesAlone(t *testing.T) {
	t.Parallel()
	b := startBatches(t, "{pipelines: [p]}", ", stage_pipelines: false")
	lines := ""
	for _, name := range []string{"p", "stage:echo", "model:inner", "alias:prod"} {
		lines += lineOf(name, `{"model": "`+name+`"}`)
	}
	batch := b.await(b.create("24h", lines), "completed")
	done, failed := b.lines(batch.OutputFile), b.lines(batch.ErrorFile)
	if len(done) != 1 || done["p"].Response == nil || len(failed) != 3 {
		t.Errorf("%v ran, %v failed", done, failed)
	}
	for name, line := range failed {
		if line.Error == nil || line.Error.Code != "UNKNOWN_PIPELINE" {
			t.Errorf("%s: %+v", name, line)
		}
	}
}

func TestLockedStepKeepsItsModel(t *testing.T) {
	t.Parallel()
	m := meshtest.Start(t, meshtest.FromFile(t, meshtest.Parse(t, closedNames), stagemesh.FileSettings{}))
	with := func(step pipeline.StepName, ref payload.ModelRef) error {
		_, err := m.Infer(t.Context(), &stagemesh.Request{
			Pipeline: "p", Inputs: []payload.Part{payload.OfBlob("", "text/plain", []byte("to"))},
			Steps: map[pipeline.StepName]pipeline.StepOptions{step: {Model: ref}},
		})
		return err
	}
	testbed.Eventually(t, "the models are registered", func() bool { return with("free", payload.ModelRef{Model: "inner"}) == nil })
	for _, ref := range []payload.ModelRef{{Model: "inner"}, {Alias: "prod"}, {Model: "small", Version: "2"}} {
		if err := with("s", ref); fault.From(err).Reason != fault.InvalidRequest || !strings.Contains(err.Error(), "steps.s.model: pipeline p locks it") {
			t.Errorf("%v: %v", ref, err)
		}
	}
}
