package reference

import (
	"bytes"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/pb33f/libopenapi"
	validator "github.com/pb33f/libopenapi-validator/paths"
	v3 "github.com/pb33f/libopenapi/datamodel/high/v3"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/tinylib/msgp/msgp"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/internal/transport"
)

// contents holds bodies against the document that the validator does not look into:
// MessagePack and events, whose schemas describe what they contain.
type contents struct {
	paths    *v3.Document
	document any
}

func contentsOf(t *testing.T, text []byte) contents {
	t.Helper()
	parsed, err := libopenapi.NewDocument(text)
	if err != nil {
		t.Fatal(err)
	}
	model, err := parsed.BuildV3Model()
	if err != nil {
		t.Fatal(err)
	}
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return contents{paths: &model.Model, document: document}
}

// request holds a request's body, and answer an answer's.
func (c contents) request(t *testing.T, r *http.Request, body []byte) {
	t.Helper()
	c.hold(t, r, r.Header, body, "requestBody")
}

func (c contents) answer(t *testing.T, r *http.Request, response *http.Response, body []byte) {
	t.Helper()
	c.hold(t, r, response.Header, body, "responses", strconv.Itoa(response.StatusCode))
}

// hold holds a body against the schema that the request's operation has at a place.
func (c contents) hold(t *testing.T, r *http.Request, header http.Header, body []byte, place ...string) {
	t.Helper()
	media, _, err := mime.ParseMediaType(header.Get("Content-Type"))
	if err != nil || media != msgpack.Type && media != transport.EventStreamType {
		return
	}
	_, wrong, path := validator.FindPath(r, c.paths, nil)
	if len(wrong) > 0 {
		t.Fatalf("the document has no such path: %s", said(wrong))
	}
	pointer := append([]string{"paths", path, strings.ToLower(r.Method)}, append(place, "content", media, "schema")...)
	if err := c.schema(t, pointer).Validate(string(body)); err != nil {
		t.Errorf("the document does not have the body %q: %v", body, err)
	}
}

// schema returns the schema at a place of the document, which looks into what strings
// contain.
func (c contents) schema(t *testing.T, place []string) *jsonschema.Schema {
	t.Helper()
	const at = "https://example.com/openapi.json"
	compiler := jsonschema.NewCompiler()
	compiler.AssertContent()
	compiler.RegisterContentMediaType(mediaType(msgpack.Type, unpack))
	compiler.RegisterContentMediaType(mediaType(transport.EventStreamType, readEvents))
	if err := compiler.AddResource(at, c.document); err != nil {
		t.Fatal(err)
	}
	pointer := "#"
	for _, one := range place {
		pointer += "/" + strings.NewReplacer("~", "~0", "/", "~1", "{", "%7B", "}", "%7D").Replace(one)
	}
	out, err := compiler.Compile(at + pointer)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func mediaType(name string, read func([]byte) (any, error)) *jsonschema.MediaType {
	validate := func(data []byte) error {
		_, err := read(data)
		return err
	}
	return &jsonschema.MediaType{Name: name, Validate: validate, UnmarshalJSON: read}
}

// unpack returns a document of MessagePack as schemas look at it: its binary strings
// are strings.
func unpack(data []byte) (any, error) {
	value, rest, err := msgp.ReadIntfBytes(data)
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("%d bytes behind the document", len(rest))
	}
	return texts(value), err
}

func texts(value any) any {
	switch v := value.(type) {
	case []byte:
		return string(v)
	case []any:
		for i := range v {
			v[i] = texts(v[i])
		}
	case map[string]any:
		for key := range v {
			v[key] = texts(v[key])
		}
	}
	return value
}

// readEvents returns events as schemas look at them: their fields are strings.
func readEvents(data []byte) (any, error) {
	events, err := fronttest.ReadEvents(bytes.NewReader(data)).All()
	out := make([]any, len(events))
	for i, e := range events {
		one := map[string]any{"data": e.Data}
		if e.Name != "" {
			one["event"] = e.Name
		}
		if e.ID != "" {
			one["id"] = e.ID
		}
		out[i] = one
	}
	return out, err
}

// packed returns a request in MessagePack with the stage classify's tensor as bytes.
func packed(shape ...int64) string {
	size := 4
	dst := msgp.AppendArrayHeader(msgp.AppendString(msgp.AppendMapHeader(nil, 1), "inputs"), 1)
	dst = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(dst, 4), "name"), "x")
	dst = msgp.AppendString(msgp.AppendString(dst, "datatype"), "FP32")
	dst = msgp.AppendArrayHeader(msgp.AppendString(dst, "shape"), uint32(len(shape)))
	for _, n := range shape {
		dst, size = msgp.AppendInt64(dst, n), size*int(n)
	}
	return string(msgp.AppendBytes(msgp.AppendString(dst, "data"), make([]byte, size)))
}

// packedJSON returns JSON as MessagePack.
func packedJSON(t *testing.T, text string) string {
	t.Helper()
	out, err := msgpack.AppendJSON(nil, []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func TestEventsFollowTheDocument(t *testing.T) {
	t.Parallel()
	m := mesh(t)
	c := client(t)
	document(t, c, m.URL())
	for path, row := range map[string]struct{ body, want string }{
		"/v1/pipelines/only-spell:stream":  {"abc", "1 chunk, 2 chunk, 3 chunk, 4 done"},
		"/v1/pipelines/stage:spell:stream": {"ab1", "1 chunk, 2 chunk, 2 error"},
		"/v1/pipelines/only-shout:stream":  {"abc", "1 done"},
	} {
		response, err := c.Do(message{http.MethodPost, path, "text/plain", row.body, ""}.request(t, m.URL()))
		if err != nil {
			t.Fatal(err)
		}
		events, err := fronttest.ReadEvents(response.Body).All()
		if closed := response.Body.Close(); err != nil || closed != nil {
			t.Fatal(err, closed)
		}
		var names []string
		for _, e := range events {
			names = append(names, fmt.Sprint(e.ID, " ", e.Name))
		}
		if got := strings.Join(names, ", "); got != row.want {
			t.Errorf("%s: got %s; want %s", path, got, row.want)
		}
	}
}

func TestDocumentHasTheErrorsOfUndescribedRequests(t *testing.T) {
	t.Parallel()
	m := mesh(t)
	c := client(t)
	text := document(t, c, m.URL())
	v := held(t, text)
	for name, row := range map[string]struct {
		message
		header, value string
		status        int
	}{
		"a form of a page":        {message{http.MethodPost, "/v1/pipelines/only-shout:infer", "application/x-www-form-urlencoded", "hello", ""}, "", "", 415},
		"a compressed body":       {message{http.MethodPost, "/v1/pipelines/only-shout:stream", "text/plain", "hello", ""}, "Content-Encoding", "gzip", 415},
		"a stream that broke":     {message{http.MethodPost, "/v1/pipelines/only-spell:stream", "text/plain", "abc", ""}, "Last-Event-ID", "2", 400},
		"no MessagePack":          {message{http.MethodPost, "/v1/pipelines/only-classify:infer", msgpack.Type, "\xc1", ""}, "", "", 400},
		"no thread":               {message{http.MethodPost, "/v1/pipelines/only-threads:infer", msgpack.Type, packedJSON(t, `{"text": 1}`), msgpack.Type}, "", "", 422},
		"what no input is":        {message{http.MethodPost, "/v2/models/only-classify/generate", "application/json", `{"y": [1]}`, ""}, "", "", 400},
		"another version":         {message{http.MethodPost, "/v2/models/only-spell/versions/2/generate", "application/json", `{"text_input": "a"}`, ""}, "", "", 404},
		"half of a binary tensor": {message{http.MethodPost, "/v1/pipelines/only-classify:infer", msgpack.Type, strings.TrimSuffix(packed(64), "\x00"), ""}, "", "", 400},
	} {
		t.Run(name, func(t *testing.T) {
			asked := func() *http.Request {
				r := row.request(t, m.URL())
				if row.header != "" {
					r.Header.Set(row.header, row.value)
				}
				return r
			}
			response, err := c.Do(asked())
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			if response.StatusCode != row.status {
				data, err := io.ReadAll(response.Body)
				t.Fatalf("%s %s %v", response.Status, data, err)
			}
			if valid, wrong := v.ValidateHttpResponse(asked(), response); !valid {
				t.Errorf("the document does not have the answer: %s", said(wrong))
			}
		})
	}
}

func TestDocumentDescribesMessagePackAndEvents(t *testing.T) {
	t.Parallel()
	m := mesh(t)
	in := contentsOf(t, document(t, client(t), m.URL()))
	body := func(path, media string) []string {
		return []string{"paths", path, "post", "requestBody", "content", media, "schema"}
	}
	events := func(path string) []string {
		return []string{"paths", path, "post", "responses", "200", "content", transport.EventStreamType, "schema"}
	}
	chunk := func(seq, outputs string) string {
		return "id: 1\nevent: chunk\ndata: {\"request_id\": \"r\", \"seq\": " + seq + ", \"outputs\": [" + outputs + "]}\n\n"
	}
	const spelling, word = "/v1/pipelines/only-spell:stream", `{"name": "word", "content_type": "text/plain", `
	for name, row := range map[string]struct {
		at   []string
		body string
		has  bool
	}{
		"a tensor":              {body("/v1/pipelines/only-classify:infer", msgpack.Type), packed(2, 64), true},
		"a tensor in a list":    {body("/v1/pipelines/only-classify:infer", msgpack.Type), packedJSON(t, tensorOf("x", "[64]", zeros)), true},
		"another shape":         {body("/v1/pipelines/only-classify:infer", msgpack.Type), packed(2, 63), false},
		"text for numbers":      {body("/v1/pipelines/only-classify:infer", msgpack.Type), packedJSON(t, tensorOf("x", "[64]", `["0"]`)), false},
		"JSON that fits":        {body("/v1/pipelines/only-threads:infer", msgpack.Type), packedJSON(t, `{"text": "a"}`), true},
		"JSON that does not":    {body("/v1/pipelines/only-threads:infer", msgpack.Type), packedJSON(t, `{"text": 1}`), false},
		"no MessagePack":        {body("/v1/pipelines/only-threads:infer", msgpack.Type), "\xc1", false},
		"a piece":               {events(spelling), chunk("1", word+`"text": "a"}`), true},
		"a piece with more":     {events(spelling), chunk("1", `{"name": "log", "content_type": "text/plain", "text": "a"}`), true},
		"a piece of no kind":    {events(spelling), chunk("1", word+`"json": {}}`), false},
		"a number that is none": {events(spelling), chunk("0", word+`"text": "a"}`), false},
		"another event":         {events(spelling), strings.Replace(chunk("1", ""), "chunk", "delta", 1), false},
		"no JSON":               {events(spelling), chunk("1", "{"), false},
		"an object":             {events("/v2/models/{model}/generate_stream"), "data: {\"model_name\": \"m\", \"model_version\": \"1\", \"text\": \"a\"}\n\n", true},
		"an object of nothing":  {events("/v2/models/{model}/generate_stream"), "data: {\"text\": \"a\"}\n\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			if err := in.schema(t, row.at).Validate(row.body); (err == nil) != row.has {
				t.Errorf("%q: %v", row.body, err)
			}
		})
	}
}
