package reference

import (
	"bytes"
	"io"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"strings"
	"testing"

	"github.com/pb33f/libopenapi"
	validator "github.com/pb33f/libopenapi-validator"
	"github.com/pb33f/libopenapi-validator/errors"

	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/msgpack"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// held returns a validator of a document, which is itself held against the schema of
// OpenAPI 3.1.
func held(t *testing.T, text []byte) validator.Validator {
	t.Helper()
	parsed, err := libopenapi.NewDocument(text)
	if err != nil {
		t.Fatal(err)
	}
	v, errs := validator.NewValidator(parsed)
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	if valid, wrong := v.ValidateDocument(); !valid {
		t.Fatalf("the document is not OpenAPI 3.1: %s", said(wrong))
	}
	return v
}

func said(wrong []*errors.ValidationError) string {
	var b strings.Builder
	for _, one := range wrong {
		b.WriteString("\n" + one.Error())
		for _, schema := range one.SchemaValidationErrors {
			b.WriteString("\n  " + schema.Error())
		}
	}
	return b.String()
}

// message is a request to a mesh.
type message struct {
	method, path, contentType, body, accept string
}

func (m message) request(t *testing.T, url string) *http.Request {
	t.Helper()
	r := testbed.Request(t, m.method, url+m.path, strings.NewReader(m.body))
	if m.contentType != "" {
		r.Header.Set("Content-Type", m.contentType)
	}
	if m.accept != "" {
		r.Header.Set("Accept", m.accept)
	}
	return r
}

// form returns a form of one part, and its type.
func form(t *testing.T, name, partType string, data []byte) (body, contentType string) {
	t.Helper()
	var out bytes.Buffer
	w := multipart.NewWriter(&out)
	part, err := w.CreatePart(textproto.MIMEHeader{"Content-Disposition": {`form-data; name="` + name + `"; filename="one"`}, "Content-Type": {partType}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := part.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.String(), w.FormDataContentType()
}

func tensorOf(name, shape, data string) string {
	return `{"inputs": [{"name": "` + name + `", "datatype": "FP32", "shape": ` + shape + `, "data": ` + data + `}]}`
}

// zeros are the elements of one row that the stage classify takes.
var zeros = "[" + strings.Repeat("0, ", 63) + "0]"

func TestGatewayMatchesItsDocument(t *testing.T) {
	t.Parallel()
	m := mesh(t)
	c := client(t)
	text := document(t, c, m.URL())
	v, in := held(t, text), contentsOf(t, text)
	picture, formType := form(t, "image", "image/png", image(t))
	word, wordType := form(t, "word", "text/plain", []byte("abc"))
	const jsonType = "application/json"
	for name, row := range map[string]struct {
		message
		status int
	}{
		"an image":                     {message{http.MethodPost, "/v1/pipelines/digits:infer", "image/png", string(image(t)), ""}, 200},
		"an image in a form":           {message{http.MethodPost, "/v1/pipelines/digits:infer", formType, picture, ""}, 200},
		"rows":                         {message{http.MethodPost, "/v1/pipelines/only-classify:infer", jsonType, tensorOf("x", "[2, 64]", "["+zeros+", "+zeros+"]"), ""}, 200},
		"one row":                      {message{http.MethodPost, "/v1/pipelines/only-classify:infer", jsonType, tensorOf("x", "[64]", zeros), ""}, 200},
		"a parameter":                  {message{http.MethodPost, "/v1/pipelines/only-shout:infer?steps.shout.temperature=2", "text/plain", "hello", ""}, 200},
		"a parameter that is not read": {message{http.MethodPost, "/v1/pipelines/only-classify:infer?steps.classify.temperature=2", jsonType, tensorOf("x", "[64]", zeros), ""}, 400},
		"JSON":                         {message{http.MethodPost, "/v1/pipelines/only-threads:infer", jsonType, `{"text": "a", "replies": [{"text": "b"}]}`, "*/*"}, 200},
		"JSON, answered as a document": {message{http.MethodPost, "/v1/pipelines/only-threads:infer", jsonType, `{"text": "a"}`, jsonType}, 200},
		"text":                         {message{http.MethodPost, "/v1/pipelines/only-shout:infer", "text/plain", "hello", ""}, 200},
		"text, answered as a document": {message{http.MethodPost, "/v1/pipelines/only-shout:infer", "text/plain", "hello", jsonType}, 200},
		"an output that is wanted":     {message{http.MethodPost, "/v1/pipelines/digits:infer?outputs=labels", "image/png", string(image(t)), ""}, 200},
		"a stage alone":                {message{http.MethodPost, "/v1/pipelines/stage:shout:infer", "text/plain", "hello", jsonType}, 200},
		"tensors in MessagePack":       {message{http.MethodPost, "/v1/pipelines/only-classify:infer", msgpack.Type, packed(2, 64), ""}, 200},
		"a list in MessagePack":        {message{http.MethodPost, "/v1/pipelines/only-classify:infer", msgpack.Type, packedJSON(t, tensorOf("x", "[64]", zeros)), jsonType}, 200},
		"JSON in MessagePack":          {message{http.MethodPost, "/v1/pipelines/only-threads:infer", msgpack.Type, packedJSON(t, `{"text": "a"}`), ""}, 200},
		"JSON, answered packed":        {message{http.MethodPost, "/v1/pipelines/only-threads:infer", jsonType, `{"text": "a"}`, msgpack.Type}, 200},
		"text, answered packed":        {message{http.MethodPost, "/v1/pipelines/only-shout:infer", "text/plain", "hello", msgpack.Type}, 200},
		"an image, answered packed":    {message{http.MethodPost, "/v1/pipelines/digits:infer", "image/png", string(image(t)), msgpack.Type}, 200},
		"a stage alone, packed":        {message{http.MethodPost, "/v1/pipelines/stage:classify:infer", msgpack.Type, packed(64), ""}, 200},
		"a stream":                     {message{http.MethodPost, "/v1/pipelines/only-spell:stream", "text/plain", "abc", ""}, 200},
		"a stream that breaks":         {message{http.MethodPost, "/v1/pipelines/only-spell:stream", "text/plain", "ab1", ""}, 200},
		"a stream in a form":           {message{http.MethodPost, "/v1/pipelines/only-spell:stream", wordType, word, ""}, 200},
		"a stream of a stage alone":    {message{http.MethodPost, "/v1/pipelines/stage:spell:stream", "text/plain", "abc", ""}, 200},
		"a stream of a whole":          {message{http.MethodPost, "/v1/pipelines/digits:stream", "image/png", string(image(t)), ""}, 200},
		"a stream to no end":           {message{http.MethodPost, "/v1/pipelines/only-spell:stream", "text/plain", "1", ""}, 400},
		"the whole of a stream":        {message{http.MethodPost, "/v1/pipelines/only-spell:infer", "text/plain", "abc", ""}, 200},
		"that as a document":           {message{http.MethodPost, "/v1/pipelines/only-spell:infer", "text/plain", "abc", jsonType}, 200},
		"generating":                   {message{http.MethodPost, "/v2/models/only-spell/generate", jsonType, `{"text_input": "abc", "id": "mine", "pause": 1}`, ""}, 200},
		"generating from numbers":      {message{http.MethodPost, "/v2/models/only-classify/versions/1/generate", jsonType, `{"x": ` + zeros + `}`, ""}, 200},
		"generating in pieces":         {message{http.MethodPost, "/v2/models/only-spell/generate_stream", jsonType, `{"word": "abc"}`, ""}, 200},
		"generating until it breaks":   {message{http.MethodPost, "/v2/models/only-spell/versions/1/generate_stream", jsonType, `{"word": "ab1"}`, ""}, 200},
		"generating a whole":           {message{http.MethodPost, "/v2/models/only-shout/generate_stream", jsonType, `{"text_input": "abc"}`, ""}, 200},
		"a chat":                       {message{http.MethodPost, "/v1/chat/completions", jsonType, `{"model": "listen", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "n": 1}`, ""}, 200},
		"a chat in events":             {message{http.MethodPost, "/v1/chat/completions", jsonType, `{"model": "listen", "messages": [{"role": "user", "content": "a"}], "stream": true}`, ""}, 200},
		"a chat with no model":         {message{http.MethodPost, "/v1/chat/completions", jsonType, `{"model": "none", "messages": [{"role": "user", "content": "a"}]}`, ""}, 404},
		"a completion":                 {message{http.MethodPost, "/v1/completions", jsonType, `{"model": "spell", "prompt": "abc", "stop": null}`, ""}, 200},
		"a completion in events":       {message{http.MethodPost, "/v1/completions", jsonType, `{"model": "spell", "prompt": "abc", "stream": true}`, ""}, 200},
		"a completion that breaks":     {message{http.MethodPost, "/v1/completions", jsonType, `{"model": "spell", "prompt": "ab1", "stream": true}`, ""}, 200},
		"models of OpenAI":             {message{http.MethodGet, "/v1/models", "", "", ""}, 200},
		"a model of OpenAI":            {message{http.MethodGet, "/v1/models/listen", "", "", ""}, 200},
		"a model by its version":       {message{http.MethodGet, "/v2/models/digits/versions/1", "", "", ""}, 200},
		"no host":                      {message{http.MethodPost, "/v1/pipelines/only-nobody:infer", "text/plain", "hello", ""}, 503},
		"no image":                     {message{http.MethodPost, "/v1/pipelines/digits:infer", "image/png", "no image", ""}, 400},
		"no pipeline":                  {message{http.MethodPost, "/v1/pipelines/none:infer", "text/plain", "hello", ""}, 404},
		"no result":                    {message{http.MethodGet, "/v1/requests/01a1fc61-c602-7919-8f3a-1abcfc776362/result", "", "", ""}, 404},
		"cancel":                       {message{http.MethodDelete, "/v1/requests/01a1fc61-c602-7919-8f3a-1abcfc776362", "", "", ""}, 204},
		"the server":                   {message{http.MethodGet, "/v2", "", "", ""}, 200},
		"a model":                      {message{http.MethodGet, "/v2/models/digits", "", "", ""}, 200},
		"a model that is ready":        {message{http.MethodGet, "/v2/models/digits/ready", "", "", ""}, 200},
		"a model that is not":          {message{http.MethodGet, "/v2/models/only-nobody/ready", "", "", ""}, 503},
		"no model":                     {message{http.MethodGet, "/v2/models/none", "", "", ""}, 404},
		"asking a model":               {message{http.MethodPost, "/v2/models/only-classify/infer", jsonType, tensorOf("x", "[64]", zeros), ""}, 200},
		"the server lives":             {message{http.MethodGet, "/v2/health/live", "", "", ""}, 200},
		"the server is ready":          {message{http.MethodGet, "/v2/health/ready", "", "", ""}, 200},
		"live":                         {message{http.MethodGet, "/livez", "", "", ""}, 200},
		"ready":                        {message{http.MethodGet, "/readyz?pipeline=digits", "", "", ""}, 200},
		"ready, of none":               {message{http.MethodGet, "/readyz?pipeline=none", "", "", ""}, 404},
	} {
		t.Run(name, func(t *testing.T) {
			if valid, wrong := v.ValidateHttpRequest(row.request(t, m.URL())); !valid {
				t.Errorf("the document does not have the request: %s", said(wrong))
			}
			in.request(t, row.request(t, m.URL()), []byte(row.body))
			sent := row.request(t, m.URL())
			response, err := c.Do(sent)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			data, err := io.ReadAll(response.Body)
			if err != nil {
				t.Fatal(err)
			}
			if response.StatusCode != row.status {
				t.Fatalf("%s %s", response.Status, data)
			}
			response.Body = io.NopCloser(bytes.NewReader(data))
			if valid, wrong := v.ValidateHttpResponse(row.request(t, m.URL()), response); !valid {
				t.Errorf("the document does not have the answer %s: %s", data, said(wrong))
			}
			in.answer(t, row.request(t, m.URL()), response, data)
		})
	}
}

func TestDocumentRejectsWhatStagesReject(t *testing.T) {
	t.Parallel()
	m := mesh(t)
	v := held(t, document(t, client(t), m.URL()))
	const jsonType = "application/json"
	for name, one := range map[string]message{
		"no such datatype":          {http.MethodPost, "/v1/pipelines/only-classify:infer", jsonType, strings.Replace(tensorOf("x", "[64]", zeros), "FP32", "INT8", 1), ""},
		"another shape":             {http.MethodPost, "/v1/pipelines/only-classify:infer", jsonType, tensorOf("x", "[63]", zeros), ""},
		"another input":             {http.MethodPost, "/v1/pipelines/only-classify:infer", jsonType, tensorOf("y", "[64]", zeros), ""},
		"no tensors":                {http.MethodPost, "/v1/pipelines/only-classify:infer", jsonType, `{"inputs": []}`, ""},
		"JSON that breaks a schema": {http.MethodPost, "/v1/pipelines/only-threads:infer", jsonType, `{"text": 1}`, ""},
		"JSON that breaks it below": {http.MethodPost, "/v1/pipelines/only-threads:infer", jsonType, `{"text": "a", "replies": [{"txt": "b"}]}`, ""},
		"another type":              {http.MethodPost, "/v1/pipelines/digits:infer", "audio/wav", "x", ""},
	} {
		t.Run(name, func(t *testing.T) {
			if valid, _ := v.ValidateHttpRequest(one.request(t, m.URL())); valid {
				t.Error("the document has it")
			}
		})
	}
}

func TestDocumentNeedsATokenAndThePageDoesNot(t *testing.T) {
	t.Parallel()
	tokens := testbed.WriteFile(t, "tokens", "open-sesame\n")
	m := mesh(t, func(f *meshfile.File) { f.Gateway.TokenFile = tokens })
	c := client(t)
	for path, want := range map[string]int{
		"/openapi.json": 401, "/docs": 200, "/docs/docs.js": 200, "/docs/swagger-ui-bundle.js": 200, "/docsx": 401, "/v1/pipelines/digits:infer": 401, "/livez": 200,
	} {
		if status, data := get(t, c, m.URL()+path); status != want || want == 401 && !bytes.Contains(data, []byte("UNAUTHENTICATED")) {
			t.Errorf("%s: %d", path, status)
		}
	}
	text := document(t, c, m.URL(), "Authorization", "Bearer open-sesame")
	v := held(t, text)
	if valid, _ := v.ValidateHttpRequest(message{http.MethodGet, "/v2", "", "", ""}.request(t, m.URL())); valid {
		t.Error("a call without a token is as the document has it")
	}
	if valid, wrong := v.ValidateHttpRequest(message{http.MethodGet, "/livez", "", "", ""}.request(t, m.URL())); !valid {
		t.Errorf("a probe without a token is not: %s", said(wrong))
	}
}

func TestDisabledDocumentIsNotServed(t *testing.T) {
	t.Parallel()
	off := false
	m := mesh(t, func(f *meshfile.File) { f.Gateway.Docs = &off })
	for _, path := range []string{"/openapi.json", "/docs", "/docs/docs.js"} {
		if status, _ := get(t, client(t), m.URL()+path); status != http.StatusNotFound {
			t.Errorf("%s: %d", path, status)
		}
	}
}
