package oip_test

import (
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/oip"
	"github.com/stagemesh/stagemesh/internal/front/oiptest"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// restful is a client of the REST form that validates every answer against the
// protocol.
type restful struct {
	t        *testing.T
	url      string
	protocol *oiptest.Protocol
}

func rest(t *testing.T, caller call.Caller, model oip.Model, s transport.Settings) restful {
	t.Helper()
	return restful{t, fronttest.Serve(t, oip.NewREST(caller, shelf{model}, s)), oiptest.New(t)}
}

// ask returns the status, the headers and the body of an answer.
func (c restful) ask(method, path, body string, headers ...string) (int, http.Header, string) {
	c.t.Helper()
	r, err := http.NewRequestWithContext(c.t.Context(), method, c.url+path, strings.NewReader(body))
	if err != nil {
		c.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	answer, data := testbed.Do(c.t, fronttest.Client(c.t, false), r)
	if err := c.protocol.Check(r, []byte(body), answer.StatusCode, answer.Header, data); err != nil {
		c.t.Error(err)
	}
	return answer.StatusCode, answer.Header, string(data)
}

// sameJSON compares two JSON texts.
func sameJSON(t *testing.T, what, got, want string) {
	t.Helper()
	var a, b any
	if err := json.Unmarshal([]byte(want), &b); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(got), &a); err != nil || !reflect.DeepEqual(a, b) {
		t.Errorf("%s: got %s, want %s: %v", what, got, want, err)
	}
}

func TestRESTReportsServerAndModelState(t *testing.T) {
	t.Parallel()
	c := rest(t, &fronttest.Caller{}, oip.Model{Inputs: []*stagev1.PartSpec{tensorOf("x", "FP32", -1, 64), blobOf("image")}, Outputs: []*stagev1.PartSpec{tensorOf("y", "INT64", -1)}}, transport.Settings{})
	const simple = `{"name": "simple", "versions": ["1"], "platform": "stagemesh_pipeline", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 64]}, {"name": "image", "datatype": "BYTES", "shape": [1]}], "outputs": [{"name": "y", "datatype": "INT64", "shape": [-1]}]}`
	for path, want := range map[string]struct {
		status int
		body   string
	}{
		"/v2":                                {200, `{"name": "stagemesh", "version": "1.2.3", "extensions": ["binary_tensor_data", "generate", "model_configuration", "statistics"]}`},
		"/v2/":                               {200, `{"name": "stagemesh", "version": "1.2.3", "extensions": ["binary_tensor_data", "generate", "model_configuration", "statistics"]}`},
		"/v2/health/live":                    {200, `{"live": true}`},
		"/v2/health/ready":                   {200, `{"ready": true}`},
		"/v2/models/simple":                  {200, simple},
		"/v2/models/simple/versions/1":       {200, simple},
		"/v2/models/simple/ready":            {200, `{"name": "simple", "ready": true}`},
		"/v2/models/simple/versions/1/ready": {200, `{"name": "simple", "ready": true}`},
		"/v2/models/idle/ready":              {503, `{"name": "idle", "ready": false}`},
		"/v2/models/unknown/ready":           {404, `{"error": "UNKNOWN_PIPELINE: there is none"}`},
		"/v2/models/nothing":                 {404, `{"error": "UNKNOWN_PIPELINE: there is none"}`},
		"/v2/models/simple/versions/2":       {404, `{"error": "NOT_FOUND: model \"simple\" has no version \"2\"; its only one is 1"}`},
		"/v2/explain":                        {404, `{"error": "NOT_FOUND: there is nothing at \"/v2/explain\"; a model is at /v2/models/<pipeline>"}`},
		"/v2/models/":                        {404, `{"error": "NOT_FOUND: there is nothing at \"/v2/models/\"; a model is at /v2/models/<pipeline>"}`},
		"/v2/models/simple/infer":            {405, `{"error": "INVALID_REQUEST: \"/v2/models/simple/infer\" is POST, not GET"}`},
	} {
		status, _, body := c.ask(http.MethodGet, path, "")
		if status != want.status {
			t.Errorf("%s: status %d, want %d", path, status, want.status)
		}
		sameJSON(t, path, body, want.body)
	}
}

func int32s(values ...byte) []byte {
	var out []byte
	for _, v := range values {
		out = append(out, v, 0, 0, 0)
	}
	return out
}

func TestTensorsTravelAsJSONOrBinary(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{}
	c := rest(t, caller, oip.Model{}, transport.Settings{})
	one, two := string(int32s(1, 2)), string(int32s(3))
	const head = `{"id": "mine", "parameters": {"timeout": 250000, "k": "v"%s}, "inputs": [{"name": "a", "datatype": "INT32", "shape": [1, 2]%s}, {"name": "b", "datatype": "INT32", "shape": [1]%s}]%s}`
	const answered = `{"model_name": "simple", "model_version": "1", "id": "mine", "outputs": [{"name": "a", "datatype": "INT32", "shape": [1, 2]%s}, {"name": "b", "datatype": "INT32", "shape": [1]%s}]}`
	for name, test := range map[string]struct {
		text, binary string
		want         string
		behind       string
	}{
		"JSON": {fmt.Sprintf(head, "", `, "data": [[1, 2]]`, `, "data": [3]`, ""), "", fmt.Sprintf(answered, `, "data": [1, 2]`, `, "data": [3]`), ""},
		"bytes": {
			fmt.Sprintf(head, `, "binary_data_output": true`, `, "parameters": {"binary_data_size": 8}`, `, "parameters": {"binary_data_size": 4}`, ""), one + two,
			fmt.Sprintf(answered, `, "parameters": {"binary_data_size": 8}`, `, "parameters": {"binary_data_size": 4}`), one + two,
		},
		"one of each": {
			fmt.Sprintf(head, "", `, "data": [1, 2]`, `, "parameters": {"binary_data_size": 4}`, `, "outputs": [{"name": "a", "parameters": {"binary_data": true}}, {"name": "b"}]`), two,
			fmt.Sprintf(answered, `, "parameters": {"binary_data_size": 8}`, `, "data": [3]`), one,
		},
		"all but one": {
			fmt.Sprintf(head, `, "binary_data_output": true`, `, "data": [1, 2]`, `, "data": [3]`, `, "outputs": [{"name": "a", "parameters": {"binary_data": false}}, {"name": "b"}]`), "",
			fmt.Sprintf(answered, `, "data": [1, 2]`, `, "parameters": {"binary_data_size": 4}`), two,
		},
	} {
		headers := []string{"Content-Type", "application/octet-stream", "Inference-Header-Content-Length", fmt.Sprint(len(test.text))}
		if test.binary == "" {
			headers = nil
		}
		status, h, body := c.ask(http.MethodPost, "/v2/models/simple/infer", test.text+test.binary, headers...)
		if status != http.StatusOK {
			t.Errorf("%s: %d %s", name, status, body)
			continue
		}
		end := len(body)
		if length := h.Get("Inference-Header-Content-Length"); (length == "") != (test.behind == "") {
			t.Errorf("%s: the length header is %q", name, length)
		} else if length != "" {
			_, _ = fmt.Sscan(length, &end)
		}
		sameJSON(t, name, body[:end], test.want)
		if body[end:] != test.behind || h.Get("Stagemesh-Request-Id") != fronttest.RequestID {
			t.Errorf("%s: the bytes are %q, headers %v", name, body[end:], h)
		}
		asked := caller.Last()
		if asked.Pipeline != "simple" || asked.Timeout != 250*time.Millisecond || !reflect.DeepEqual(asked.Parameters, payload.Parameters{"k": payload.String("v")}) {
			t.Errorf("%s: the request is %+v", name, asked)
		}
		if len(asked.Inputs) != 2 || string(asked.Inputs[0].Tensor.Raw) != one || string(asked.Inputs[1].Tensor.Raw) != two || len(asked.Inputs[1].Parameters) > 0 {
			t.Errorf("%s: the inputs are %+v", name, asked.Inputs)
		}
	}
}

func TestBlobIsBytesTensorInJSON(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{}
	c := rest(t, caller, oip.Model{Inputs: []*stagev1.PartSpec{blobOf("text")}}, transport.Settings{})
	status, _, body := c.ask(http.MethodPost, "/v2/models/m/infer", `{"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"content_type": "text/plain"}, "data": ["hello"]}]}`)
	if got := caller.Last().Inputs[0]; status != http.StatusOK || got.Tensor != nil || string(got.Blob.Data) != "hello" || got.Blob.ContentType != "text/plain" {
		t.Errorf("%d: the request is %+v", status, got)
	}
	sameJSON(t, "a blob", body, `{"model_name": "m", "model_version": "1", "outputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"content_type": "text/plain"}, "data": ["hello"]}]}`)
}

func TestInvalidBodyIsRejected(t *testing.T) {
	t.Parallel()
	caller := fronttest.FailWith(fault.New(fault.Internal, "it was asked"))
	c := rest(t, caller, oip.Model{}, transport.Settings{MaxMessageBytes: 1000})
	const one = `{"inputs": [{"name": "a", "datatype": "INT32", "shape": [1], "parameters": {"binary_data_size": 4}}]}`
	for name, test := range map[string]struct {
		body    string
		length  string
		headers []string
		status  int
		want    string
	}{
		"no JSON":                     {"{", "", nil, 400, "INVALID_REQUEST"},
		"no inputs":                   {"{}", "", nil, 400, "inputs"},
		"a length that lies":          {one, "999", nil, 400, "Inference-Header-Content-Length"},
		"a length that is none":       {one, "x", nil, 400, "Inference-Header-Content-Length"},
		"a negative length":           {one, "-1", nil, 400, "Inference-Header-Content-Length"},
		"too few bytes behind it":     {one + "123", fmt.Sprint(len(one)), nil, 400, "inputs[0].parameters.binary_data_size"},
		"too many":                    {one + "12345", fmt.Sprint(len(one)), nil, 400, "1 bytes after the JSON belong to no input"},
		"bytes and data":              {strings.Replace(one, `"parameters"`, `"data": [1], "parameters"`, 1) + "1234", fmt.Sprint(len(one) + len(`"data": [1], `)), nil, 400, "it has data in the JSON too"},
		"a negative size":             {strings.Replace(one, ": 4}", ": -4}", 1), fmt.Sprint(len(one) + 1), nil, 400, "binary_data_size"},
		"a size that is none":         {strings.Replace(one, ": 4}", `: "4"}`, 1), fmt.Sprint(len(one) + 2), nil, 400, "binary_data_size"},
		"too few for its shape":       {strings.Replace(one, "[1]", "[2]", 1) + "1234", fmt.Sprint(len(one)), nil, 400, "inputs.a"},
		"no data at all":              {strings.Replace(one, `"binary_data_size": 4`, "", 1), "", nil, 400, "inputs.a.data: is missing"},
		"invalid binary option":       {`{"parameters": {"binary_data_output": 1}, "inputs": []}`, "", nil, 400, "binary_data_output"},
		"an output's that is none":    {`{"inputs": [], "outputs": [{"name": "x", "parameters": {"binary_data": "yes"}}]}`, "", nil, 400, "outputs[0].parameters.binary_data"},
		"classes":                     {`{"inputs": [], "outputs": [{"name": "x", "parameters": {"classification": 3}}]}`, "", nil, 501, "NOT_SUPPORTED"},
		"an unknown encoding":         {one, "", []string{"Content-Encoding", "br"}, 415, "gzip, deflate, or as it is"},
		"bytes that are not gzip":     {one, "", []string{"Content-Encoding", "gzip"}, 400, "cannot be decompressed"},
		"half of a deflate":           {compress(t, "deflate", one)[:20], "", []string{"Content-Encoding", "deflate"}, 400, "cannot be decompressed"},
		"too large":                   {strings.Repeat(" ", 1001), "", nil, 413, "PAYLOAD_TOO_LARGE"},
		"a failure of the mesh's own": {strings.Replace(one, `"parameters": {"binary_data_size": 4}`, `"data": [1]`, 1), "", nil, 500, "INTERNAL"},
	} {
		headers := test.headers
		if test.length != "" {
			headers = append(slices.Clone(headers), "Inference-Header-Content-Length", test.length)
		}
		status, _, body := c.ask(http.MethodPost, "/v2/models/simple/infer", test.body, headers...)
		var answer struct{ Error string }
		if err := json.Unmarshal([]byte(body), &answer); err != nil || status != test.status || !strings.Contains(answer.Error, test.want) {
			t.Errorf("%s: %d %s", name, status, body)
		}
	}
}

// compress returns the body in an encoding.
func compress(t *testing.T, encoding, body string) string {
	t.Helper()
	var out bytes.Buffer
	w := io.WriteCloser(gzip.NewWriter(&out))
	if encoding == "deflate" {
		w = zlib.NewWriter(&out)
	}
	if _, err := io.WriteString(w, body); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestBodiesMayBeCompressed(t *testing.T) {
	t.Parallel()
	const head = `{"inputs": [{"name": "a", "datatype": "INT32", "shape": [30000], "parameters": {"binary_data_size": 120000}}]}`
	body := head + strings.Repeat("1234", 30000)
	pool := budget.NewPool(budget.Settings{Limit: 1 << 20})
	caller := &fronttest.Caller{Answer: func(ctx context.Context, r *request.Request) (*request.Response, error) {
		if held := pool.Held(); held < int64(len(body)) {
			t.Errorf("%d bytes are reserved of a body of %d", held, len(body))
		}
		return fronttest.Echo(ctx, r)
	}}
	handler := oip.NewREST(caller, shelf{}, transport.Settings{MaxMessageBytes: 4 << 20})
	ask := func(url, path, encoding, body string) int {
		r := testbed.Request(t, http.MethodPost, url+path, strings.NewReader(compress(t, encoding, body)))
		r.Header.Set("Content-Encoding", encoding)
		if strings.HasPrefix(body, head) {
			r.Header.Set("Inference-Header-Content-Length", strconv.Itoa(len(head)))
		}
		answer, _ := testbed.Do(t, fronttest.Client(t, false), r)
		return answer.StatusCode
	}
	url := fronttest.Serve(t, fronttest.WithMemory(handler, pool))
	for _, encoding := range []string{"gzip", "deflate", "GZip", "x-gzip"} {
		if status := ask(url, "/v2/models/simple/infer", encoding, body); status != http.StatusOK {
			t.Errorf("infer in %s: %d", encoding, status)
		}
		if got := caller.Last().Inputs[0].Tensor.Raw; string(got) != body[len(head):] {
			t.Errorf("infer in %s: the tensor has %d bytes", encoding, len(got))
		}
		if status := ask(url, "/v2/repository/index", encoding, `{"ready": true}`); status != http.StatusOK {
			t.Errorf("the index in %s: %d", encoding, status)
		}
		// It fits the limit of a body, and not the memory that there is.
		if status := ask(url, "/v2/models/simple/infer", encoding, head+strings.Repeat(" ", 2<<20)); status != http.StatusTooManyRequests && status != http.StatusRequestEntityTooLarge {
			t.Errorf("more than there is in %s: %d", encoding, status)
		}
	}
	testbed.Eventually(t, "the memory is free again", func() bool { return pool.Held() == 0 })
}

func TestUnrepresentableOutputIsAvailableAsBinary(t *testing.T) {
	t.Parallel()
	half := payload.OfTensor("h", tensor.Tensor{Datatype: tensor.FP16, Shape: []int64{1}, Raw: []byte{0, 0x3c}})
	c := rest(t, &fronttest.Caller{Answer: func(context.Context, *request.Request) (*request.Response, error) {
		return fronttest.Respond(half), nil
	}}, oip.Model{}, transport.Settings{})
	const in = `"inputs": [{"name": "a", "datatype": "INT32", "shape": [1], "data": [1]}]}`
	if status, h, body := c.ask(http.MethodPost, "/v2/models/m/infer", `{`+in); status != http.StatusNotImplemented || h.Get("Stagemesh-Request-Id") == "" {
		t.Errorf("as JSON: %d %s", status, body)
	}
	if status, _, body := c.ask(http.MethodPost, "/v2/models/m/infer", `{"parameters": {"binary_data_output": true}, `+in); status != http.StatusOK || !strings.HasSuffix(body, "\x00\x3c") {
		t.Errorf("as bytes: %d %q", status, body)
	}
}
