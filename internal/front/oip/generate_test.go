package oip_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/transport"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/oip"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

const generatePath = "/v2/models/m/generate"

// mediaOf is the spec of a blob of those types.
func mediaOf(name string, types ...string) *stagev1.PartSpec {
	return &stagev1.PartSpec{Name: name, Body: &stagev1.PartSpec_Blob{Blob: &stagev1.BlobSpec{ContentTypes: types}}}
}

func takesOf(parts ...*stagev1.PartSpec) oip.Model { return oip.Model{Inputs: parts} }

// texts is a tensor of strings.
func texts(t *testing.T, name string, shape []int64, elements ...string) payload.Part {
	t.Helper()
	raw := make([][]byte, len(elements))
	for i, e := range elements {
		raw[i] = []byte(e)
	}
	out, err := tensor.FromBytes(shape, raw)
	if err != nil {
		t.Fatal(err)
	}
	return payload.OfTensor(name, out)
}

func floats(t *testing.T, name string, shape []int64, values ...float32) payload.Part {
	t.Helper()
	out, err := tensor.FromFP32(shape, values)
	if err != nil {
		t.Fatal(err)
	}
	return payload.OfTensor(name, out)
}

func TestBodyMembersBecomeInputsAndParameters(t *testing.T) {
	t.Parallel()
	text := func(name string) payload.Part { return payload.OfBlob(name, "text/plain", []byte("hi")) }
	for name, row := range map[string]struct {
		takes      oip.Model
		body       string
		inputs     []payload.Part
		parameters payload.Parameters
	}{
		"text by its name":        {takesOf(blobOf("prompt")), `{"prompt": "hi"}`, []payload.Part{text("prompt")}, nil},
		"the only text":           {takesOf(blobOf("prompt"), tensorOf("x", "FP32", -1)), `{"text_input": "hi"}`, []payload.Part{text("prompt")}, nil},
		"the only text, a tensor": {takesOf(tensorOf("prompt", "BYTES", 1, 1), mediaOf("image", "image/png")), `{"text_input": "hi"}`, []payload.Part{texts(t, "prompt", []int64{1, 1}, "hi")}, nil},
		"a model without a spec": {
			takesOf(), `{"text_input": "hi", "t": 0.5}`,
			[]payload.Part{payload.OfBlob("", "text/plain", []byte("hi"))},
			payload.Parameters{"t": payload.Double(0.5)},
		},
		"parameters of both kinds": {
			takesOf(blobOf("p")), `{"p": "hi", "stream": false, "n": 3, "s": "x", "timeout": 250000, "triton_enable_empty_final_response": true, "parameters": {"a": 1.5}}`,
			[]payload.Part{text("p")},
			payload.Parameters{"stream": payload.Bool(false), "n": payload.Int64(3), "s": payload.String("x"), "a": payload.Double(1.5)},
		},
		"numbers":                {takesOf(tensorOf("x", "FP32", -1)), `{"x": [1, 2.5]}`, []payload.Part{floats(t, "x", []int64{2}, 1, 2.5)}, nil},
		"a number":               {takesOf(tensorOf("x", "FP32", -1, 1)), `{"x": 7}`, []payload.Part{floats(t, "x", []int64{1, 1}, 7)}, nil},
		"a row":                  {takesOf(tensorOf("x", "FP32", -1, 3)), `{"x": [1, 2, 3]}`, []payload.Part{floats(t, "x", []int64{1, 3}, 1, 2, 3)}, nil},
		"strings":                {takesOf(tensorOf("x", "BYTES", -1)), `{"x": ["a", "", "c"]}`, []payload.Part{texts(t, "x", []int64{3}, "a", "", "c")}, nil},
		"no elements":            {takesOf(tensorOf("x", "FP32", -1)), `{"x": []}`, []payload.Part{floats(t, "x", []int64{0})}, nil},
		"a text of another kind": {takesOf(mediaOf("p", "text/markdown")), `{"text_input": "hi"}`, []payload.Part{payload.OfBlob("p", "text/markdown", []byte("hi"))}, nil},
		"JSON of its own":        {takesOf(mediaOf("j", "application/vnd.x+json")), `{"j": {"a": 1}}`, []payload.Part{payload.OfBlob("j", "application/vnd.x+json", []byte(`{"a": 1}`))}, nil},
		"JSON":                   {takesOf(mediaOf("j", "application/json")), `{"j": {"a": [1, null]}}`, []payload.Part{payload.OfBlob("j", "application/json", []byte(`{"a": [1, null]}`))}, nil},
		"a string that is JSON":  {takesOf(mediaOf("j", "application/json")), `{"j": "a"}`, []payload.Part{payload.OfBlob("j", "application/json", []byte(`"a"`))}, nil},
		"an input called id":     {takesOf(blobOf("id")), `{"id": "hi"}`, []payload.Part{text("id")}, nil},
	} {
		caller := &fronttest.Caller{}
		status, _, body := rest(t, caller, row.takes, transport.Settings{}).ask(http.MethodPost, generatePath, row.body)
		if status != http.StatusOK {
			t.Errorf("%s: %d %s", name, status, body)
			continue
		}
		got := caller.Last()
		if !reflect.DeepEqual(got.Inputs, row.inputs) || len(got.Parameters) != len(row.parameters) || got.Pipeline != "m" {
			t.Errorf("%s: the request is %+v with %v", name, got.Inputs, got.Parameters)
		}
		for key, want := range row.parameters {
			if got.Parameters[key] != want {
				t.Errorf("%s: the parameters are %v", name, got.Parameters)
			}
		}
		if strings.Contains(row.body, "timeout") && got.Timeout != 250*time.Millisecond {
			t.Errorf("%s: the timeout is %s", name, got.Timeout)
		}
	}
}

func TestGenerateReturnsOneObject(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		outputs []payload.Part
		want    string
	}{
		"text":               {[]payload.Part{payload.OfBlob("answer", "text/plain", []byte("a \"b\""))}, `{"model_name": "m", "model_version": "1", "id": "mine", "answer": "a \"b\""}`},
		"text without name":  {[]payload.Part{payload.OfBlob("", "", []byte("a"))}, `{"model_name": "m", "model_version": "1", "id": "mine", "text_output": "a"}`},
		"JSON":               {[]payload.Part{payload.OfBlob("j", "application/json", []byte(`{"a": 1}`))}, `{"model_name": "m", "model_version": "1", "id": "mine", "j": {"a": 1}}`},
		"one element":        {[]payload.Part{texts(t, "t", []int64{1, 1}, "a")}, `{"model_name": "m", "model_version": "1", "id": "mine", "t": "a"}`},
		"several":            {[]payload.Part{floats(t, "t", []int64{1, 2}, 1, 2.5), floats(t, "u", []int64{1}, 3)}, `{"model_name": "m", "model_version": "1", "id": "mine", "t": [1, 2.5], "u": 3}`},
		"none":               {nil, `{"model_name": "m", "model_version": "1", "id": "mine"}`},
		"names that are had": {[]payload.Part{payload.OfBlob("id", "", []byte("a")), payload.OfBlob("", "", []byte("b")), payload.OfBlob("text_output", "", []byte("c"))}, `{"model_name": "m", "model_version": "1", "id": "a", "": "b", "text_output": "c"}`},
	} {
		status, h, body := rest(t, fronttest.AnswerWith(row.outputs...), oip.Model{}, transport.Settings{}).ask(http.MethodPost, "/v2/models/m/versions/1/generate", `{"text_input": "hi", "id": "mine"}`)
		if status != http.StatusOK || h.Get("Stagemesh-Request-Id") != fronttest.RequestID || h.Get("Content-Type") != "application/json" {
			t.Errorf("%s: %d %v %s", name, status, h, body)
		}
		sameJSON(t, name, body, row.want)
	}
}

func TestInvalidGenerateBodyIsRejected(t *testing.T) {
	t.Parallel()
	both := takesOf(blobOf("a"), blobOf("b"), mediaOf("image", "image/png"), tensorOf("x", "FP32", -1), tensorOf("h", "FP16", 1))
	for name, row := range map[string]struct {
		takes  oip.Model
		body   string
		status int
		want   string
	}{
		"no JSON":                     {both, `{`, 400, "INVALID_REQUEST"},
		"no object":                   {both, `[]`, 400, "INVALID_REQUEST"},
		"something behind it":         {both, `{"a": "x"} 1`, 400, "after the end"},
		"twice":                       {both, `{"a": "x", "a": "y"}`, 400, "a: is there twice"},
		"no input":                    {both, `{"t": 1}`, 400, "the model takes a, b, image, x"},
		"no input, naught known":      {takesOf(), `{"t": 1}`, 400, "text_input"},
		"one of several texts":        {both, `{"text_input": "x"}`, 400, "is one of several"},
		"no text":                     {takesOf(tensorOf("x", "FP32", -1)), `{"text_input": "x"}`, 400, "has no text input; the model takes x"},
		"text twice":                  {takesOf(blobOf("a")), `{"text_input": "x", "a": "y"}`, 400, "a: is there twice"},
		"an id that is none":          {both, `{"id": 7, "a": "x"}`, 400, "id: must be a string"},
		"parameters that are none":    {both, `{"parameters": [], "a": "x"}`, 400, "parameters: must be an object"},
		"a parameter that is none":    {both, `{"parameters": {"p": []}, "a": "x"}`, 400, "parameters.p"},
		"a parameter twice":           {both, `{"parameters": {"p": 1}, "p": 1, "a": "x"}`, 400, "p: is there twice"},
		"neither":                     {both, `{"a": "x", "inputs": []}`, 400, "inputs: is neither an input nor a parameter"},
		"null":                        {both, `{"a": "x", "n": null}`, 400, "n: is neither"},
		"text for numbers":            {both, `{"x": ["a"]}`, 400, "x[0]: is not FP32"},
		"nested":                      {both, `{"x": [[1], [2]]}`, 400, "x[0]: is a list"},
		"an object for numbers":       {both, `{"x": {}}`, 400, "x: must be a string"},
		"unrepresentable datatype":    {both, `{"h": 1}`, 400, "FP16 has no form"},
		"an image":                    {both, `{"image": "x"}`, 400, "the model takes image/png there"},
		"numbers for text":            {takesOf(mediaOf("a", "text/plain")), `{"a": 1}`, 400, "the model takes text/plain there"},
		"null for any text":           {takesOf(), `{"text_input": null}`, 400, "text_input: is null; send a string"},
		"null for the only text":      {takesOf(mediaOf("a", "text/plain")), `{"text_input": null}`, 400, "text_input: is null; send a string"},
		"a number for any text":       {takesOf(), `{"text_input": 1}`, 400, "text_input: must be a string"},
		"a timeout that is none":      {both, `{"a": "x", "timeout": -1}`, 400, "parameters.timeout"},
		"too large":                   {both, `{"a": "` + strings.Repeat("x", 1000) + `"}`, 413, "PAYLOAD_TOO_LARGE"},
		"a failure of the mesh's own": {takesOf(), `{"text_input": "x"}`, 500, "INTERNAL"},
	} {
		for _, path := range []string{generatePath, generatePath + "_stream"} {
			c := rest(t, fronttest.FailWith(fault.New(fault.Internal, "it was asked")), row.takes, transport.Settings{MaxMessageBytes: 1000})
			status, h, body := c.ask(http.MethodPost, path, row.body)
			var answer struct{ Error string }
			if err := json.Unmarshal([]byte(body), &answer); err != nil || status != row.status || !strings.Contains(answer.Error, row.want) || h.Get("Content-Type") != "application/json" {
				t.Errorf("%s, %s: %d %s", name, path, status, body)
			}
		}
	}
	c := rest(t, &fronttest.Caller{}, takesOf(), transport.Settings{})
	if status, _, body := c.ask(http.MethodPost, generatePath, "{"+members(600)+"}"); status != http.StatusBadRequest || !strings.Contains(body, "one member too many") {
		t.Errorf("600 members: %d %s", status, body)
	}
	if status, _, _ := c.ask(http.MethodGet, generatePath+"_stream", ""); status != http.StatusMethodNotAllowed {
		t.Errorf("GET: %d", status)
	}
	if status, _, body := c.ask(http.MethodPost, "/v2/models/nothing/generate", `{"text_input": "x"}`); status != http.StatusNotFound || !strings.Contains(body, "UNKNOWN_PIPELINE") {
		t.Errorf("an unknown model: %d %s", status, body)
	}
}

// members returns n parameters as members of a body.
func members(n int) string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf(`"p%d": %d`, i, i)
	}
	return strings.Join(out, ",")
}

func TestGenerateRejectsNonTextOutput(t *testing.T) {
	t.Parallel()
	c := rest(t, fronttest.AnswerWith(payload.OfBlob("p", "image/png", []byte{0xff})), oip.Model{}, transport.Settings{})
	if status, h, body := c.ask(http.MethodPost, generatePath, `{"text_input": "x"}`); status != http.StatusNotImplemented || h.Get("Stagemesh-Request-Id") == "" {
		t.Errorf("%d %s", status, body)
	}
}

// stream returns the events of generate_stream.
func (c restful) stream(body string) ([]fronttest.Event, http.Header) {
	c.t.Helper()
	status, h, answer := c.ask(http.MethodPost, generatePath+"_stream", body)
	events, err := fronttest.ReadEvents(strings.NewReader(answer)).All()
	if err != nil || status != http.StatusOK || h.Get("Content-Type") != "text/event-stream" {
		c.t.Fatalf("%d %v %s: %v", status, h, answer, err)
	}
	return events, h
}

func TestGenerateStreamSendsEventPerChunk(t *testing.T) {
	t.Parallel()
	caller := fronttest.AnswerWith(payload.OfBlob("text", "text/plain", []byte("one two")))
	caller.Chunks = fronttest.Words("one", "two")
	events, h := rest(t, caller, oip.Model{}, transport.Settings{}).stream(`{"text_input": "hi", "id": "mine"}`)
	if len(events) != 2 || events[0].Name != "" || events[0].ID != "" {
		t.Fatalf("got %+v", events)
	}
	sameJSON(t, "the first", events[0].Data, `{"model_name": "m", "model_version": "1", "id": "mine", "text": "one"}`)
	sameJSON(t, "the second", events[1].Data, `{"model_name": "m", "model_version": "1", "id": "mine", "text": "two"}`)
	if h.Get("Stagemesh-Request-Id") != fronttest.RequestID {
		t.Errorf("headers are %v", h)
	}
}

func TestGenerateStreamWithoutChunksSendsOneEvent(t *testing.T) {
	t.Parallel()
	events, _ := rest(t, fronttest.AnswerWith(payload.OfBlob("text", "text/plain", []byte("all"))), oip.Model{}, transport.Settings{}).stream(`{"text_input": "hi"}`)
	if len(events) != 1 {
		t.Fatalf("got %+v", events)
	}
	sameJSON(t, "it", events[0].Data, `{"model_name": "m", "model_version": "1", "text": "all"}`)
}

func TestGenerateStreamReportsLateFailure(t *testing.T) {
	t.Parallel()
	caller := fronttest.FailWith(fault.New(fault.StreamInterrupted, "the host died"))
	caller.Chunks = fronttest.Words("one")
	events, _ := rest(t, caller, oip.Model{}, transport.Settings{}).stream(`{"text_input": "hi"}`)
	if len(events) != 2 {
		t.Fatalf("got %+v", events)
	}
	sameJSON(t, "the failure", events[1].Data, `{"error": "STREAM_INTERRUPTED: the host died"}`)
}
