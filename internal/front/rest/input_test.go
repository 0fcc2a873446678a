package rest_test

import (
	"bytes"
	"fmt"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/envelope"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/tracing"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

const tensorBody = `{"id":"call-7","parameters":{"top":3,"from":"body"},"inputs":[{"name":"x","datatype":"INT32","shape":[1,2],"data":[[1,2]]}],"outputs":[{"name":"scores"}]}`

func TestContentTypeDecidesTheInput(t *testing.T) {
	t.Parallel()
	x := payload.OfTensor("x", tensor.Tensor{Datatype: tensor.Int32, Shape: []int64{1, 2}, Raw: []byte{1, 0, 0, 0, 2, 0, 0, 0}})
	for name, row := range map[string]struct {
		contentType, body string
		want              payload.Part
	}{
		"an image":              {"image/png", "\x89PNG", payload.OfBlob("", "image/png", []byte("\x89PNG"))},
		"text with a charset":   {"text/plain; charset=latin1", "\xe4", payload.OfBlob("", "text/plain; charset=latin1", []byte("\xe4"))},
		"no type":               {"", "?", payload.OfBlob("", "", []byte("?"))},
		"tensors":               {"application/json", tensorBody, x},
		"tensors with charset":  {"application/json; charset=utf-8", tensorBody, x},
		"tensors by demand":     {"application/json; form=tensors", tensorBody, x},
		"a blob as a tensor":    {"application/json", `{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"parameters":{"content_type":"image/png"},"data":["PNG"]}]}`, payload.OfBlob("x", "image/png", []byte("PNG"))},
		"of the stage's type":   {"application/json", `{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"parameters":{"content_type":""},"data":["PNG"]}]}`, payload.OfBlob("x", "", []byte("PNG"))},
		"a prompt":              {"application/json", `{"prompt": "hi"}`, payload.OfBlob("", "application/json", []byte(`{"prompt": "hi"}`))},
		"a blob by demand":      {"Application/JSON; form=blob", tensorBody, payload.OfBlob("", "application/json", []byte(tensorBody))},
		"inputs but no tensors": {"application/json", `{"inputs": ["a"]}`, payload.OfBlob("", "application/json", []byte(`{"inputs": ["a"]}`))},
		"other JSON":            {"application/ld+json", tensorBody, payload.OfBlob("", "application/ld+json", []byte(tensorBody))},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			caller := fronttest.AnswerWith()
			if got := post(row.contentType, row.body).of(t, caller); got.status != 200 {
				t.Fatalf("%d %s", got.status, got.body)
			}
			if got := caller.Last().Inputs; len(got) != 1 || !reflect.DeepEqual(got[0], row.want) {
				t.Errorf("got %+v, want %+v", got, row.want)
			}
		})
	}
}

func TestFormHasOneInputPerPart(t *testing.T) {
	t.Parallel()
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	_ = form.WriteField("prompt", "what is this?")
	file, _ := form.CreateFormFile("image", "cat.bin")
	_, _ = file.Write([]byte{1, 2, 3})
	untyped, _ := form.CreatePart(textproto.MIMEHeader{"Content-Disposition": {`form-data; name="photo"; filename="cat.png"`}}) // as Python's requests does
	_, _ = untyped.Write([]byte("\x89PNG"))
	typed, _ := form.CreatePart(textproto.MIMEHeader{"Content-Disposition": {`form-data; name="opts"`}, "Content-Type": {"application/json"}})
	_, _ = typed.Write([]byte(`{}`))
	_ = form.WriteField("empty", "")
	_ = form.Close()
	caller := fronttest.AnswerWith()
	if got := post(form.FormDataContentType(), body.String()).of(t, caller); got.status != 200 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	want := []payload.Part{
		payload.OfBlob("prompt", "text/plain", []byte("what is this?")),
		payload.OfBlob("image", "application/octet-stream", []byte{1, 2, 3}),
		payload.OfBlob("photo", "", []byte("\x89PNG")), // the stage's own type
		payload.OfBlob("opts", "application/json", []byte(`{}`)),
		payload.OfBlob("empty", "text/plain", []byte{}),
	}
	if got := caller.Last().Inputs; !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v", got)
	}
}

func TestHeadersAndQueryAreTheOptions(t *testing.T) {
	t.Parallel()
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	caller := fronttest.AnswerWith()
	sent := post("image/png", "x", "Stagemesh-Timeout", "1500ms", "Stagemesh-Priority", "-3", "Stagemesh-Durability", "file",
		"Idempotency-Key", "key", "Stagemesh-Wait-For-Capacity", "true", "traceparent", parent, "tracestate", "a=1")
	sent.path = "/v1/pipelines/stage:echo:infer?parameters.top=3&parameters.p.q=0.5&steps.classify.mode=a%20b&steps.classify.on=true&outputs=a,%20b"
	if got := sent.of(t, caller); got.status != 200 {
		t.Fatalf("%d %s", got.status, got.body)
	}
	want := &request.Request{
		Pipeline: "stage:echo", Inputs: []payload.Part{payload.OfBlob("", "image/png", []byte("x"))},
		Parameters: payload.Parameters{"top": payload.Int64(3), "p.q": payload.Double(0.5)},
		Steps: map[pipeline.StepName]pipeline.StepOptions{"classify": {
			Parameters: payload.Parameters{"mode": payload.String("a b"), "on": payload.Bool(true)},
		}},
		IdempotencyKey: "key", Timeout: 1500 * time.Millisecond, Durability: pipeline.File, Priority: -3,
		WaitForCapacity: new(true),
		Outputs:         []string{"a", "b"}, Trace: envelope.Trace{Parent: parent, State: "a=1"},
	}
	got := caller.Last()
	want.Origin = tracing.Origin{
		Protocol: tracing.ProtocolHTTP, Method: http.MethodPost, Route: "/v1/pipelines/{pipeline}:infer", Path: "/v1/pipelines/stage:echo:infer",
		Server: got.Origin.Server, Client: got.Origin.Client,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%+v, want\n%+v", got, want)
	}
}

func TestTimeoutIsADurationOrMilliseconds(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]time.Duration{
		"250": 250 * time.Millisecond, "250ms": 250 * time.Millisecond, "1.5s": 1500 * time.Millisecond, "2m": 2 * time.Minute,
	} {
		caller := fronttest.AnswerWith()
		post("image/png", "x", "Stagemesh-Timeout", value).of(t, caller)
		if got := caller.Last(); got == nil || got.Timeout != want {
			t.Errorf("%s: got %+v", value, got)
		}
	}
}

func TestQueryWinsOverTheBody(t *testing.T) {
	t.Parallel()
	caller := fronttest.AnswerWith()
	post("application/json", tensorBody).of(t, caller)
	if got := caller.Last(); !slices.Equal(got.Outputs, []string{"scores"}) || got.Parameters["from"] != payload.String("body") {
		t.Errorf("of the body alone: %+v", got)
	}
	request := post("application/json", tensorBody)
	request.path = "/v1/pipelines/photos:infer?outputs=labels&parameters.from=query"
	request.of(t, caller)
	got := caller.Last()
	if !slices.Equal(got.Outputs, []string{"labels"}) || got.Parameters["from"] != payload.String("query") || got.Parameters["top"] != payload.Int64(3) {
		t.Errorf("of both: %+v", got)
	}
}

func TestBadRequestNamesItsProblem(t *testing.T) {
	t.Parallel()
	form := func(body string) ask { return post("multipart/form-data; boundary=b", body) }
	at := func(query string) ask {
		out := post("image/png", "x")
		out.path = "/v1/pipelines/photos:infer?" + query
		return out
	}
	const part = "--b\r\nContent-Disposition: form-data; name=%q\r\n\r\nx\r\n"
	for name, row := range map[string]struct {
		ask    ask
		status int
		reason fault.Reason
		text   string
	}{
		"empty":                     {post("image/png", ""), 400, fault.InvalidRequest, "the body is empty"},
		"empty JSON":                {post("application/json", ""), 400, fault.InvalidRequest, "the body is empty"},
		"JSON cut off":              {post("application/json", `{"prompt": "hi"`), 400, fault.InvalidRequest, "is not valid JSON: it ends early"},
		"NaN in JSON":               {post("application/json", `{"score": NaN}`), 400, fault.InvalidRequest, "NaN"},
		"NaN in a tensor":           {post("application/json", strings.Replace(tensorBody, "[[1,2]]", "[[1,NaN]]", 1)), 400, fault.InvalidInput, "inputs.x.data[1]: NaN"},
		"JSON that is not UTF-8":    {post("application/json", "\"\xff\""), 400, fault.InvalidRequest, "not UTF-8"},
		"no tensors":                {post("application/json; form=tensors", "{}"), 400, fault.InvalidInput, "inputs: is missing"},
		"tensors that do not fit":   {post("application/json", strings.Replace(tensorBody, "[[1,2]]", "[1]", 1)), 400, fault.InvalidInput, "inputs.x.data: has 1 elements"},
		"tensor without data":       {post("application/json", `{"inputs":[{"name":"x","datatype":"INT8","shape":[1]}]}`), 400, fault.InvalidInput, "inputs.x.data: is missing"},
		"two blobs as one tensor":   {post("application/json", `{"inputs":[{"name":"x","datatype":"BYTES","shape":[2],"parameters":{"content_type":"image/png"},"data":["a","b"]}]}`), 400, fault.InvalidInput, "it has 2 elements"},
		"a name twice":              {post("application/json", `{"inputs":[{"name":"x","datatype":"INT8","shape":[0],"data":[]},{"name":"x","datatype":"INT8","shape":[0],"data":[]}]}`), 400, fault.InvalidInput, `"x"`},
		"an unknown form":           {post("application/json; form=rows", "{}"), 415, fault.UnsupportedMedia, `form="rows"`},
		"a broken media type":       {post("image/png; =", "x"), 415, fault.UnsupportedMedia, "is not a media type"},
		"curl's own type":           {post("application/x-www-form-urlencoded", "x"), 415, fault.UnsupportedMedia, "name the body's own type"},
		"a compressed body":         {post("image/png", "x", "Content-Encoding", "gzip"), 415, fault.UnsupportedMedia, `"gzip"`},
		"a form without boundary":   {post("multipart/form-data", "x"), 400, fault.InvalidRequest, "names no boundary"},
		"a form without end":        {form("--b\r\n"), 400, fault.InvalidRequest, "the body is empty"},
		"a part cut off":            {form(fmt.Sprintf(part, "x")), 400, fault.InvalidRequest, "the form cannot be read"},
		"a form without parts":      {form("--b--\r\n"), 400, fault.InvalidRequest, "the body is empty"},
		"a part without name":       {form(fmt.Sprintf(part, "") + "--b--\r\n"), 400, fault.InvalidRequest, "inputs[0]: the part has no name"},
		"two parts of a name":       {form(fmt.Sprintf(part, "x") + fmt.Sprintf(part, "x") + "--b--\r\n"), 400, fault.InvalidInput, `named "x"`},
		"too many parts":            {form(strings.Repeat(fmt.Sprintf(part, "x"), 257) + "--b--\r\n"), 400, fault.InvalidRequest, "more than 256 parts"},
		"a part with many headers":  {form("--b\r\n" + strings.Repeat("a:\r\n", 5000) + "\r\nx\r\n--b--\r\n"), 400, fault.InvalidRequest, "a part whose header takes more than 4096 bytes"},
		"text before a form":        {form(strings.Repeat("a\r\n", 5000)), 400, fault.InvalidRequest, "more than 4096 bytes"},
		"too many outputs":          {at("outputs=" + strings.Repeat("a,", 256) + "a"), 400, fault.InvalidRequest, "257 names, at most 256"},
		"too many query keys":       {at(strings.Repeat("a&", 256)), 400, fault.InvalidRequest, "257 query parameters"},
		"an unknown query key":      {at("timeout=3"), 400, fault.InvalidRequest, "timeout: unknown key"},
		"a parameter without name":  {at("parameters.=3"), 400, fault.InvalidRequest, "parameters.: unknown key"},
		"a step without parameter":  {at("steps.a=3"), 400, fault.InvalidRequest, "steps.a: unknown key"},
		"a query key twice":         {at("outputs=a&outputs=b"), 400, fault.InvalidRequest, "outputs: is there 2 times"},
		"an output without name":    {at("outputs=a,,b"), 400, fault.InvalidRequest, "without a name"},
		"a malformed query":         {at("parameters.a=%zz"), 400, fault.InvalidRequest, "the query cannot be read"},
		"a query that is not UTF-8": {at("parameters.a=%ff"), 400, fault.InvalidRequest, "is not UTF-8"},
		"too long a name":           {at("parameters." + strings.Repeat("n", 257) + "=1"), 400, fault.InvalidRequest, "at most 256 bytes"},
		"too long a step's name":    {at("steps.a." + strings.Repeat("n", 257) + "=1"), 400, fault.InvalidRequest, "at most 256 bytes"},
		"a type not in UTF-8":       {form("--b\r\nContent-Disposition: form-data; name=x\r\nContent-Type: a/\xff\r\n\r\nx\r\n--b--\r\n"), 400, fault.InvalidInput, "inputs.x: a content type"},
		"too long a query":          {at(manyParameters(257)), 400, fault.InvalidRequest, "257 query parameters"},
		"a timeout of words":        {post("image/png", "x", "Stagemesh-Timeout", "soon"), 400, fault.InvalidRequest, `Stagemesh-Timeout: "soon"`},
		"a negative timeout":        {post("image/png", "x", "Stagemesh-Timeout", "-3"), 400, fault.InvalidRequest, "must be more than 0"},
		"no timeout":                {post("image/png", "x", "Stagemesh-Timeout", "0s"), 400, fault.InvalidRequest, "must be more than 0"},
		"an endless timeout":        {post("image/png", "x", "Stagemesh-Timeout", "9223372036854775807"), 400, fault.InvalidRequest, "too many"},
		"a priority of words":       {post("image/png", "x", "Stagemesh-Priority", "high"), 400, fault.InvalidRequest, `Stagemesh-Priority: "high"`},
		"a priority of 64 bits":     {post("image/png", "x", "Stagemesh-Priority", "4294967296"), 400, fault.InvalidRequest, "32 bits"},
		"waiting, perhaps":          {post("image/png", "x", "Stagemesh-Wait-For-Capacity", "perhaps"), 400, fault.InvalidRequest, `"perhaps"`},
		"waiting, 1":                {post("image/png", "x", "Stagemesh-Wait-For-Capacity", "1"), 400, fault.InvalidRequest, `"1": use true or false`},
		"an unknown durability":     {post("image/png", "x", "Stagemesh-Durability", "stone"), 400, fault.InvalidRequest, `"stone"`},
		"a long key":                {post("image/png", "x", "Idempotency-Key", strings.Repeat("k", 257)), 400, fault.InvalidRequest, "at most 256 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			caller := fronttest.AnswerWith()
			row.ask.of(t, caller).wantFailure(t, row.status, row.reason, row.text)
			if caller.Last() != nil {
				t.Error("the caller was asked")
			}
		})
	}
}

// What a caller makes up is repeated to it only so far.
func TestRejectionIsShort(t *testing.T) {
	t.Parallel()
	const most = 2 << 10
	long := strings.Repeat("x", 20_000)
	at := func(query string) ask {
		out := post("image/png", "x")
		out.path = "/v1/pipelines/photos:infer?" + query
		return out
	}
	path, method := post("image/png", "x"), post("image/png", "x")
	path.path, method.method = "/v1/"+long, long
	for name, request := range map[string]ask{
		"path": path, "method": method,
		"query key":   at(long),
		"step":        at("steps." + long),
		"output":      at("outputs=" + long + ",,"),
		"timeout":     post("image/png", "x", "Stagemesh-Timeout", long),
		"priority":    post("image/png", "x", "Stagemesh-Priority", long),
		"durability":  post("image/png", "x", "Stagemesh-Durability", long),
		"key":         post("image/png", "x", "Idempotency-Key", long),
		"encoding":    post("image/png", "x", "Content-Encoding", long),
		"type":        post(long+"; =", "x"),
		"form":        post("application/json; form="+long, "x"),
		"part's name": post("multipart/form-data; boundary=b", "--b\r\nContent-Disposition: form-data; name="+long+"\r\n\r\nx\r\n--b--\r\n"),
		"form's line": post("multipart/form-data; boundary=b", "--b\r\nContent-Disposition: form-data; name=x\r\n\r\nx\r\n--b"+long[:4000]+"\r\n"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := request.of(t, fronttest.AnswerWith())
			if got.status < 400 || len(got.body) > most {
				t.Errorf("%d: %d bytes: %.200s", got.status, len(got.body), got.body)
			}
		})
	}
}

func manyParameters(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "parameters.p%d=1&", i)
	}
	return strings.TrimSuffix(b.String(), "&")
}
