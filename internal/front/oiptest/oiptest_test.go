package oiptest_test

import (
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/front/oiptest"
)

func TestProtocolDocumentIsValid(t *testing.T) {
	t.Parallel()
	if err := oiptest.New(t).Valid(); err != nil {
		t.Error(err)
	}
}

// answer is an answer that a test constructs.
type answer struct {
	path, asked    string
	status         int
	text           string
	behind, length string
	mediaType      string
}

func (a answer) check(t *testing.T, p *oiptest.Protocol) error {
	t.Helper()
	method := http.MethodPost
	if a.asked == "" {
		method = http.MethodGet
	}
	r := httptest.NewRequestWithContext(t.Context(), method, a.path, strings.NewReader(a.asked))
	h := http.Header{}
	h.Set("Content-Type", "application/json")
	if a.behind != "" {
		h.Set("Content-Type", "application/octet-stream")
		h.Set("Inference-Header-Content-Length", strconv.Itoa(len(a.text)))
	}
	if a.length != "" {
		h.Set("Inference-Header-Content-Length", a.length)
	}
	if a.mediaType != "" {
		h.Set("Content-Type", a.mediaType)
	}
	return p.Check(r, []byte(a.asked), a.status, h, []byte(a.text+a.behind))
}

const (
	infer = "/v2/models/m/infer"
	one   = `{"model_name": "m", "outputs": [{"name": "y", "datatype": "INT16", "shape": [2], "data": [1, 2]}]}`
	bytes = `{"model_name": "m", "outputs": [{"name": "y", "datatype": "INT16", "shape": [2], "parameters": {"binary_data_size": 4}}]}`
	all   = `{"parameters": {"binary_data_output": true}, "inputs": []}`
)

func TestValidAnswersPass(t *testing.T) {
	t.Parallel()
	p := oiptest.New(t)
	for name, a := range map[string]answer{
		"live":           {path: "/v2/health/live", status: 200, text: `{"live": true}`},
		"not ready":      {path: "/v2/models/m/ready", status: 503, text: `{"name": "m", "ready": false}`},
		"a server":       {path: "/v2/", status: 200, text: `{"name": "s", "version": "", "extensions": []}`},
		"a model":        {path: "/v2/models/m/versions/1", status: 200, text: `{"name": "m", "platform": "p", "inputs": [{"name": "x", "datatype": "FP16", "shape": [-1]}], "outputs": []}`},
		"an inference":   {path: infer, asked: `{"inputs": []}`, status: 200, text: one},
		"of a version":   {path: "/v2/models/m/versions/1/infer", asked: `{"inputs": []}`, status: 200, text: one},
		"bytes":          {path: infer, asked: all, status: 200, text: bytes, behind: "\x01\x00\x02\x00"},
		"an error":       {path: infer, asked: `{"inputs": []}`, status: 418, text: `{"error": "tea"}`},
		"no such path":   {path: "/v2/tea", status: 404, text: `{"error": "tea"}`},
		"no such method": {path: infer, status: 405, text: `{"error": "tea"}`},
		"a stream":       {path: "/v2/models/m/generate_stream", asked: `{}`, status: 200, text: "data: {}\n\n", mediaType: "text/event-stream"},
	} {
		if err := a.check(t, p); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestInvalidAnswersAreFound(t *testing.T) {
	t.Parallel()
	p := oiptest.New(t)
	output := func(o string) answer {
		return answer{path: infer, asked: `{"inputs": []}`, status: 200, text: `{"model_name": "m", "outputs": [` + o + `]}`}
	}
	for name, a := range map[string]answer{
		"dead and fine":            {path: "/v2/health/live", status: 200, text: `{"live": false}`},
		"ready and not":            {path: "/v2/models/m/ready", status: 503, text: `{"name": "m", "ready": true}`},
		"no JSON":                  {path: infer, asked: `{}`, status: 200, text: `{`},
		"no JSON by its type":      {path: infer, asked: `{"inputs": []}`, status: 200, text: one, mediaType: "text/plain"},
		"a page for an error":      {path: infer, asked: `{}`, status: 500, text: `{"error": "x"}`, mediaType: "text/html"},
		"an error of another form": {path: infer, asked: `{}`, status: 500, text: `{"error": {"reason": "x"}}`},
		"an error without a word":  {path: infer, asked: `{}`, status: 500, text: `{"error": ""}`},
		"another at no path":       {path: "/v2/tea", status: 404, text: `{"detail": "x"}`},
		"an answer at no path":     {path: "/v2/tea", status: 200, text: `{"error": "x"}`},
		"a shape of text":          {path: "/v2/models/m", status: 200, text: `{"name": "m", "platform": "p", "inputs": [{"name": "x", "datatype": "FP16", "shape": ["1"]}], "outputs": []}`},
		"no such datatype":         output(`{"name": "y", "datatype": "FP8", "shape": [1], "data": [1]}`),
		"halves in JSON":           output(`{"name": "y", "datatype": "FP16", "shape": [1], "data": [1]}`),
		"text for numbers":         output(`{"name": "y", "datatype": "INT8", "shape": [1], "data": ["1"]}`),
		"numbers for text":         output(`{"name": "y", "datatype": "BYTES", "shape": [1], "data": [1]}`),
		"neither data nor bytes":   output(`{"name": "y", "datatype": "INT8", "shape": [1]}`),
		"a shape that is any":      output(`{"name": "y", "datatype": "INT8", "shape": [-1], "data": [1]}`),
		"too few elements":         output(`{"name": "y", "datatype": "INT8", "shape": [2], "data": [1]}`),
		"another member":           output(`{"name": "y", "datatype": "INT8", "shape": [1], "data": [1], "more": 1}`),
		"bytes without a request":  {path: infer, asked: `{"inputs": []}`, status: 200, text: bytes, behind: "\x01\x00\x02\x00"},
		"none that somebody did":   {path: infer, asked: all, status: 200, text: one},
		"too few bytes":            {path: infer, asked: all, status: 200, text: bytes, behind: "\x01\x00\x02"},
		"too many":                 {path: infer, asked: all, status: 200, text: bytes, behind: "\x01\x00\x02\x00\x00"},
		"a length that lies":       {path: infer, asked: all, status: 200, text: bytes, behind: "\x01\x00\x02\x00", length: "9999"},
		"a length for nothing":     {path: infer, asked: `{"inputs": []}`, status: 200, text: one, length: "1"},
		"another id":               {path: infer, asked: `{"id": "mine", "inputs": []}`, status: 200, text: one},
		"another model":            {path: "/v2/models/n/infer", asked: `{"inputs": []}`, status: 200, text: one},
		"another output":           {path: infer, asked: `{"inputs": [], "outputs": [{"name": "z"}]}`, status: 200, text: one},
		"too few outputs":          {path: infer, asked: `{"inputs": [], "outputs": [{"name": "y"}, {"name": "z"}]}`, status: 200, text: one},
	} {
		if err := a.check(t, p); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}
