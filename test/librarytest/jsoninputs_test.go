package librarytest

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/tinylib/msgp/msgp"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// fourNumbers is a mesh of stages that answer with their inputs.
const fourNumbers = `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages:
  rows: {runner: {echo: {}}, inputs: [{name: x, datatype: FP32, shape: [-1, 4]}], outputs: [{name: x, datatype: FP32, shape: [-1, 4]}]}
  say: {runner: {echo: {}}, inputs: [{name: text, content_types: [text/plain]}, {name: words, datatype: BYTES, shape: [-1], optional: true}]}
  free: {runner: {echo: {}}}
  note: {runner: {echo: {}}, inputs: [{name: x, datatype: FP32, shape: [-1, 4]}, {name: meta, content_types: [application/json], optional: true}]}
  tell: {runner: {echo: {}}, inputs: [{name: text, content_types: [text/plain]}]}
  style: {runner: {echo: {}}, inputs: [{name: text, content_types: [text/plain]}, {name: style, content_types: [text/plain], optional: true}]}
  any: {runner: {echo: {}}, inputs: [{name: doc, content_types: [application/json]}]}
pipelines:
  Re-named_v1.5: {steps: [{name: r, stage: rows, inputs: {x: pixels}}]}
  each: {steps: [{name: each, map: {over: {x: points}, steps: [{name: r, stage: rows}]}}]}
  both: {steps: [{name: both, parallel: {branches: {a: {steps: [{name: r, stage: rows}]}, b: {steps: [{name: s, stage: say}], give: {said: text}}}}}]}
  chosen: {steps: [{name: r, stage: rows}, {name: s, switch: [{when: {part: mode, equals: echo}, steps: [{name: t, stage: say}]}, {else: []}]}]}
  number: {steps: [{name: s, switch: [{when: {part: mode, equals: 9007199254740993, any: true}, fail: {reason: INVALID_INPUT, message: it is the number}}, {else: [{name: r, stage: rows}]}]}]}
  kept: {keep: [text], steps: [{name: r, stage: rows}, {name: s, stage: say, inputs: {words: missing}}]}
  noted: {keep: [meta], steps: [{name: r, stage: rows}, {name: n, stage: note}]}
  styled: {keep: [style], steps: [{name: s, stage: tell}, {name: t, stage: style}]}
  asked: {steps: [{name: s, switch: [{when: {parameter: mode, equals: none}, fail: {reason: INVALID_INPUT, message: it is none}}, {else: [{name: r, stage: rows}]}]}]}
  open: {steps: [{name: try, try: {steps: [{name: r, stage: free}], else: [{name: f, stage: rows}]}}]}
jobs: {pools: {main: {target: {pipelines: [Re-named_v1.5]}}}, queues: {nightly: {pool: main}}}
`

func TestDocumentsBecomeWhatTheStageTakes(t *testing.T) {
	t.Parallel()
	m := meshtest.Start(t, meshtest.FromFile(t, meshtest.Parse(t, fourNumbers), stagemesh.FileSettings{}))
	send := func(path, contentType, body string) string {
		answer, text := testbed.Call(t, http.DefaultClient, http.MethodPost, m.URL()+path, body, "Content-Type", contentType)
		return fmt.Sprint(answer.StatusCode, " ", text)
	}
	post := func(path, body string) string { return send(path, "application/json", body) }
	testbed.Eventually(t, "the gateway knows the inputs of the stages", func() bool {
		return strings.HasPrefix(post("/v1/pipelines/stage:rows:infer", `{"x": [1,2,3,4]}`), "200")
	})
	const row, tensor = `"datatype":"FP32","shape":[1,4],"data":[1,2,3,6]`, `"data":[[1,2,3,6]]`
	const example = `send JSON such as {\"x\": [[0, 0, 0, 0]]}`
	for _, test := range []struct{ path, body, want string }{
		{"/v1/pipelines/stage:rows:infer", `{"x": [[1,2,3,6]]}`, row},
		{"/v1/pipelines/stage:rows:infer", `{"x": [1,2,3,6]}`, row},
		{"/v1/pipelines/stage:rows:stream", `{"x": [[1,2,3,6]]}`, row},
		{"/v1/pipelines/Re-named_v1.5:infer", `{"pixels": [[1,2,3,6]]}`, row},
		{"/v1/pipelines/stage:rows:infer", `{"id": "a", "inputs": [{"name": "x", ` + tensor + `}]}`, row},
		{"/v2/models/stage:rows/infer", `{"inputs": [{"name": "x", ` + tensor + `}]}`, row},
		{"/v2/models/stage:rows/infer", `{"inputs": [{"name": "x", "shape": [1,4], "data": [1,2,3,6]}]}`, row},
		{"/v2/models/stage:rows/generate", `{"x": [[1,2,3,6],[1,2,3,6]]}`, `"x":[1,2,3,6,1,2,3,6]`},
		{"/v1/pipelines/stage:say:infer", `{"text": "hi"}`, "200 hi"},
		{"/v1/pipelines/stage:say:infer", `{"text": "hi", "words": ["a", "b"]}`, `"shape":[2],"data":["a","b"]`},
		{"/v1/pipelines/stage:any:infer", `{"x": [[1,2,3,6]]}`, `200 {"x": [[1,2,3,6]]}`},
		{"/v1/pipelines/stage:any:infer", `{"inputs": [{"name": "x", ` + tensor + `}]}`, `200 {"inputs": [{"name": "x", ` + tensor + `}]}`},
		{"/v1/pipelines/stage:rows:infer", `{"x": []}`, `"shape":[0,4],"data":[]`},
		{"/v1/pipelines/each:infer", `{"points": [[[1,2,3,6]],[[1,2,3,6]]]}`, `"shape":[2,1,4],"data":[1,2,3,6,1,2,3,6]`},
		{"/v1/pipelines/each:infer", `{"points": []}`, `"datatype":"FP32","shape":[0,0,4],"data":[]`},
		{"/v1/pipelines/each:infer", `{"points": "text"}`, `send JSON such as {\"points\": [[[0, 0, 0, 0]]]}`},
		{"/v2/models/each/infer", `{"inputs": [{"name": "points", "data": [[[1,2,3,6]]]}]}`, `"shape":[1,1,4],"data":[1,2,3,6]`},
		{"/v1/pipelines/each:infer", `{"inputs": [{"name": "points", "data": [[[1,2,3,6]]]}]}`, `"shape":[1,1,4],"data":[1,2,3,6]`},
		{"/v2/models/both/infer", `{"inputs": [{"name": "x", ` + row + `}, {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["hi"]}, {"name": "more", ` + row + `}]}`, row},
		{"/v1/pipelines/both:infer", `{"x": [[1,2,3,6]], "text": "hi"}`, row},
		{"/v1/pipelines/both:infer", `{"x": [[1,2,3,6]], "text": 1}`, `send JSON such as {\"x\": [[0, 0, 0, 0]],\"text\": \"text\"}`},
		{"/v1/pipelines/open:infer", `"x"`, `x`},
		{"/v1/pipelines/chosen:infer", `{"x": [1,2,3,6], "mode": "quiet"}`, row},
		{"/v1/pipelines/chosen:infer", `{"x": [1,2,3,6], "mode": "echo", "text": "hi"}`, `200 hi`},
		{"/v1/pipelines/chosen:infer", `{"x": [1,2,3,6], "mode": "loud"}`, row},
		{"/v1/pipelines/number:infer", `{"mode": 9007199254740992, "x": [1,2,3,6]}`, row},
		{"/v1/pipelines/number:infer", `{"mode": 9007199254740993}`, `it is the number`},
		{"/v1/pipelines/number:infer", `{"mode": [1.5, 2], "x": [1,2,3,6]}`, row},
		{"/v1/pipelines/number:infer", `{"hello": "world"}`, `expected a tensor`},
		{"/v1/pipelines/stage:rows:infer", `{"y": [1,2,3,6]}`, example},
		{"/v1/pipelines/stage:rows:infer", `{"x": "text"}`, example},
		{"/v1/pipelines/stage:rows:infer", `{"x": [[1,2,3],[6]]}`, example},
		{"/v1/pipelines/stage:rows:infer", `{}`, example},
		{"/v1/pipelines/stage:rows:infer", `[1,2,3,6]`, example},
		{"/v1/pipelines/stage:say:infer", `{"inputs": [{"name": "text", "data": ["hi"]}]}`, `200 hi`},
		{"/v2/models/stage:say/infer", `{"inputs": [{"name": "text", "data": ["hi"]}]}`, `"data":["hi"]`},
		{"/v1/pipelines/stage:say:infer", `{"inputs": [{"name": "words", "data": ["a", "b"]}, {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["hi"], "parameters": {"content_type": "text/plain"}}]}`, `"shape":[2],"data":["a","b"]`},
		{"/v1/pipelines/both:infer", `{"inputs": [{"name": "x", ` + tensor + `}, {"name": "text", "data": ["hi"]}], "outputs": [{"name": "said"}]}`, `200 hi`},
		{"/v1/pipelines/both:infer", `{"inputs": [{"name": "x", ` + tensor + `}, {"name": "text", "data": ["hi"]}], "outputs": [{"name": "seen"}]}`, `the pipeline has no output \"seen\"`},
		{"/v1/pipelines/asked:infer", `{"inputs": [{"name": "x", ` + tensor + `}], "parameters": {"mode": "none"}}`, `it is none`},
		{"/v1/pipelines/kept:infer", `{"x": [1,2,3,6], "text": "hi"}`, `200 hi`},
		{"/v1/pipelines/noted:infer", `{"x": [1,2,3,6]}`, row},
		{"/v2/models/styled/generate", `{"text_input": "hi"}`, `"text":"hi"`},
		{"/v1/pipelines/kept:infer", `{"x": [1,2,3,6], "word": "hi"}`, `word: is not an input; the model takes x, text`},
		{"/v2/models/kept/generate", `{"x": [[1,2,3,6]], "text": "hi"}`, `"text":"hi"`},
		{"/v1/pipelines/stage:say:infer", `{"x": 1}`, `send JSON such as {\"text\": \"text\"}`},
	} {
		if got := post(test.path, test.body); !strings.Contains(got, test.want) || test.want == example && !strings.HasPrefix(got, "400") {
			t.Errorf("%s %s: %s, want %s", test.path, test.body, got, test.want)
		}
		packed, err := msgpack.AppendJSON(nil, []byte(test.body))
		if err != nil {
			t.Fatal(err)
		}
		unspaced := strings.NewReplacer(" ", "")
		if got := send(test.path, msgpack.Type, string(packed)); strings.HasPrefix(test.path, "/v1/") && !strings.Contains(unspaced.Replace(got), unspaced.Replace(test.want)) {
			t.Errorf("%s %s in MessagePack: %s, want %s", test.path, test.body, got, test.want)
		}
	}
	if _, got := testbed.Call(t, http.DefaultClient, http.MethodGet, m.URL()+"/v2/models/each", ""); !strings.Contains(got, `"inputs":[{"datatype":"FP32","name":"points","shape":[-1,-1,4]}]`) {
		t.Errorf("the model of a pipeline that begins with a block is %s", got)
	}
	bytes := msgp.AppendBytes(msgp.AppendString(msgp.AppendMapHeader(nil, 1), "x"), make([]byte, 16))
	if got := send("/v1/pipelines/stage:rows:infer", msgpack.Type, string(bytes)); !strings.HasPrefix(got, "400") || !strings.Contains(got, "x: is binary") || !strings.Contains(got, example) {
		t.Errorf("bytes without a datatype: %s", got)
	}
	rpc := inferencev1connect.NewInferenceServiceClient(http.DefaultClient, m.URL())
	ask := func(body string) (*inferencev1.InferResponse, error) {
		answer, err := rpc.Infer(t.Context(), connect.NewRequest(&inferencev1.InferRequest{Pipeline: "stage:rows", Inputs: []*inferencev1.Part{
			{Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{ContentType: "application/json", Data: []byte(body)}}},
		}}))
		if err != nil {
			return nil, err
		}
		return answer.Msg, nil
	}
	if got, err := ask(`{"x": [[1,2,3,6]]}`); err != nil || len(got.GetOutputs()) != 1 || len(got.GetOutputs()[0].GetTensor().GetRaw()) != 16 {
		t.Errorf("over RPC: %v, %v", got, err)
	}
	if _, err := ask(`[1]`); connect.CodeOf(err) != connect.CodeInvalidArgument || !strings.Contains(err.Error(), `{"x": [[0, 0, 0, 0]]}`) {
		t.Errorf("over RPC: %v", err)
	}
}
