package rest_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/transport"

	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/rest"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// ask is one request; the zero of each is left out.
type ask struct {
	method, path string
	body         io.Reader
	header       map[string]string
}

// reply is an answer, read whole.
type reply struct {
	status int
	header http.Header
	body   string
}

func (a ask) of(t *testing.T, caller call.Caller) reply {
	t.Helper()
	return a.at(t, fronttest.Serve(t, rest.New(caller, nil, transport.Settings{MaxMessageBytes: fronttest.LimitBytes})), false)
}

func (a ask) at(t *testing.T, url string, h2c bool) reply {
	t.Helper()
	if a.method == "" {
		a.method = http.MethodPost
	}
	if a.path == "" {
		a.path = "/v1/pipelines/photos:infer"
	}
	r := testbed.Request(t, a.method, url+a.path, a.body)
	for name, value := range a.header {
		r.Header.Set(name, value)
	}
	response, body := testbed.Do(t, fronttest.Client(t, h2c), r)
	return reply{status: response.StatusCode, header: response.Header, body: string(body)}
}

// post is a request with a body of the type.
func post(contentType, body string, header ...string) ask {
	out := ask{body: strings.NewReader(body), header: map[string]string{"Content-Type": contentType}}
	for i := 0; i+1 < len(header); i += 2 {
		out.header[header[i]] = header[i+1]
	}
	return out
}

// failed is the JSON of a failure.
type failed struct {
	Error struct {
		Code, Reason, Message, Stage, Step, Host string
		RequestID                                string `json:"request_id"`
		Violations                               []struct{ Field, Description string }
		RetryAfterMS                             int64 `json:"retry_after_ms"`
		Metadata                                 map[string]string
	}
}

// wantFailure checks that a reply is the failure of that reason.
func (r reply) wantFailure(t *testing.T, status int, reason fault.Reason, text string) failed {
	t.Helper()
	var out failed
	if err := json.Unmarshal([]byte(r.body), &out); err != nil {
		t.Fatalf("%q: %v", r.body, err)
	}
	if r.status != status || out.Error.Reason != string(reason) || !strings.Contains(out.Error.Message, text) {
		t.Errorf("got %d %s, want %d %s ... %s", r.status, r.body, status, reason, text)
	}
	if got := r.header.Get("Content-Type"); got != "application/json" {
		t.Errorf("Content-Type %q", got)
	}
	return out
}

// document is the JSON of an answer.
type document struct {
	RequestID string `json:"request_id"`
	ID        string `json:"id"`
	ModelName string `json:"model_name"`
	Outputs   []struct {
		Name, Datatype string
		Shape          []int64
		Data           json.RawMessage
		ContentType    string `json:"content_type"`
		Text           *string
		JSON           json.RawMessage
		DataBase64     *string `json:"data_base64"`
		Parameters     map[string]any
	}
	Metadata map[string]string
	Timeline map[string]any
}

func (r reply) document(t *testing.T) document {
	t.Helper()
	var out document
	if err := json.Unmarshal([]byte(r.body), &out); err != nil || r.status != http.StatusOK || r.header.Get("Content-Type") != "application/json" {
		t.Fatalf("%d %s %q: %v", r.status, r.header.Get("Content-Type"), r.body, err)
	}
	return out
}
