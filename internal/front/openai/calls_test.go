package openai_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/openai"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// api calls a handler of the models llm, of chat and completions, and vec, of embeddings.
type api struct {
	t   *testing.T
	url string
}

func start(t *testing.T, caller call.Caller) api {
	t.Helper()
	config := openai.Config{
		Chat: map[string]string{"llm": "chat-pipeline"}, Completions: map[string]string{"llm": "text-pipeline"},
		Embeddings: map[string]string{"vec": "vectors", "org/a:b": "vectors"},
	}
	return api{t, fronttest.Serve(t, openai.NewCalls(caller, config, transport.Settings{MaxMessageBytes: 64 << 10}))}
}

// ask returns an answer as it came.
func (a api) ask(method, path, body string, headers ...string) (testbed.Response, string) {
	a.t.Helper()
	return testbed.Call(a.t, fronttest.Client(a.t, false), method, a.url+path, body, headers...)
}

type failure struct {
	Error struct {
		Message, Type, Code string
		Param               *string
	}
}

func decode[T any](t *testing.T, text string) (out T) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return out
}

const user = `"messages": [{"role": "user", "content": "x"}]`

func TestBadBodyIsRefusedByName(t *testing.T) {
	t.Parallel()
	caller := &fronttest.Caller{}
	a := start(t, caller)
	chat := func(members string) string { return `{"model": "llm", ` + user + `, ` + members + `}` }
	said := func(messages string) string { return `{"model": "llm", "messages": ` + messages + `}` }
	texts := func(members string) string { return `{"model": "vec", ` + members + `}` }
	for name, row := range map[string]struct{ path, body, param, message string }{
		"no JSON":            {openai.ChatPath, `{`, "", "ends early"},
		"a list":             {openai.ChatPath, `[]`, "", "not valid JSON"},
		"nothing":            {openai.ChatPath, ``, "", "ends early"},
		"a member twice":     {openai.ChatPath, chat(`"n": 1, "n": 1`), "n", "is there twice"},
		"no model":           {openai.ChatPath, `{` + user + `}`, "model", "is missing"},
		"null as a model":    {openai.ChatPath, `{"model": null, ` + user + `}`, "model", "is missing"},
		"a number as model":  {openai.ChatPath, `{"model": 1, ` + user + `}`, "model", "must be a string"},
		"no messages":        {openai.ChatPath, `{"model": "llm"}`, "messages", "is missing"},
		"a text as messages": {openai.ChatPath, said(`"x"`), "messages", "must be a list"},
		"an empty list":      {openai.ChatPath, said(`[]`), "messages", "at least one"},
		"a text as message":  {openai.ChatPath, said(`["x"]`), "messages[0]", "must be an object"},
		"no role":            {openai.ChatPath, said(`[{"content": "x"}]`), "messages[0].role", "is missing"},
		"no content":         {openai.ChatPath, said(`[{"role": "user"}]`), "messages[0].content", "is missing"},
		"null as content":    {openai.ChatPath, said(`[{"role": "user", "content": null}]`), "messages[0].content", "is missing"},
		"another role":       {openai.ChatPath, said(`[{"role": "tool", "content": "x"}]`), "messages[0].role", `system, developer, user, assistant, got "tool"`},
		"a picture": {
			openai.ChatPath, said(`[{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]`),
			"messages[1].content", "not text",
		},
		"a number as content":      {openai.ChatPath, said(`[{"role": "user", "content": 1}]`), "messages[0].content", "must be a string"},
		"a text in another part":   {openai.ChatPath, said(`[{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]`), "messages[0].content", "not text"},
		"calls of tools":           {openai.ChatPath, said(`[{"role": "assistant", "content": "x", "tool_calls": [{}]}]`), "messages[0].tool_calls", "is not supported"},
		"a prompt in a chat":       {openai.ChatPath, chat(`"prompt": "x"`), "prompt", "is not supported"},
		"two answers":              {openai.ChatPath, chat(`"n": 2`), "n", "leave it out, or send 1"},
		"tools":                    {openai.ChatPath, chat(`"tools": [{"type": "function"}]`), "tools", "is not supported"},
		"a choice of tools":        {openai.ChatPath, chat(`"tool_choice": "auto"`), "tool_choice", "is not supported"},
		"log probabilities":        {openai.ChatPath, chat(`"logprobs": true`), "logprobs", "is not supported"},
		"JSON as an answer":        {openai.ChatPath, chat(`"response_format": {"type": "json_object"}`), "response_format", "is not supported"},
		"audio":                    {openai.ChatPath, chat(`"audio": {"voice": "x"}`), "audio", "is not supported"},
		"an unknown object":        {openai.ChatPath, chat(`"guided": {"x": 1}`), "guided", "is not supported"},
		"an unknown list":          {openai.ChatPath, chat(`"ids": [1]`), "ids", "is not supported"},
		"no length":                {openai.ChatPath, chat(`"max_tokens": 0`), "max_tokens", "at least 1"},
		"a text as length":         {openai.ChatPath, chat(`"max_tokens": "9"`), "max_tokens", "whole number"},
		"half a length":            {openai.ChatPath, chat(`"max_completion_tokens": 1.5`), "max_completion_tokens", "whole number"},
		"two lengths":              {openai.ChatPath, chat(`"max_tokens": 1, "max_completion_tokens": 2`), "max_tokens", "is there twice"},
		"a number to stop at":      {openai.ChatPath, chat(`"stop": 1`), "stop", "must be a string"},
		"tokens to stop at":        {openai.ChatPath, chat(`"stop": ["x", [1]]`), "stop[1]", "must be a string"},
		"many stops":               {openai.ChatPath, chat(`"stop": ["x"` + strings.Repeat(`, "x"`, 16) + `]`), "stop", "more than 16"},
		"no stop":                  {openai.ChatPath, chat(`"stop": []`), "stop", "is empty"},
		"a text as stream":         {openai.ChatPath, chat(`"stream": "yes"`), "stream", "true or false"},
		"options of no stream":     {openai.ChatPath, chat(`"stream_options": {"include_usage": true}`), "stream_options", "is for streams"},
		"unknown stream options":   {openai.ChatPath, chat(`"stream": true, "stream_options": {"pace": true}`), "stream_options", "nothing else"},
		"a text as stream options": {openai.ChatPath, chat(`"stream": true, "stream_options": "x"`), "stream_options", "is an object"},
		"an unknown query":         {openai.ChatPath + "?api-version=1", chat(`"n": 1`), "api-version", "unknown key"},
		"messages to complete":     {openai.CompletionsPath, `{"model": "llm", ` + user + `}`, "messages", "is not supported"},
		"no prompt":                {openai.CompletionsPath, `{"model": "llm"}`, "prompt", "is missing"},
		"several prompts":          {openai.CompletionsPath, `{"model": "llm", "prompt": ["x", "y"]}`, "prompt", "requests of their own"},
		"a prompt of tokens":       {openai.CompletionsPath, `{"model": "llm", "prompt": [1, 2]}`, "prompt[0]", "tokens are not supported"},
		"an echo":                  {openai.CompletionsPath, `{"model": "llm", "prompt": "x", "echo": true}`, "echo", "is not supported"},
		"the best of two":          {openai.CompletionsPath, `{"model": "llm", "prompt": "x", "best_of": 2}`, "best_of", "is not supported"},
		"no texts":                 {openai.EmbeddingsPath, texts(`"user": "u"`), "input", "is missing"},
		"an empty list of texts":   {openai.EmbeddingsPath, texts(`"input": []`), "input", "is empty"},
		"texts of tokens":          {openai.EmbeddingsPath, texts(`"input": [[1, 2]]`), "input[0]", "tokens are not supported"},
		"many texts":               {openai.EmbeddingsPath, texts(`"input": ["x"` + strings.Repeat(`,"x"`, 2048) + `]`), "input", "more than 2048"},
		"another form":             {openai.EmbeddingsPath, texts(`"input": "x", "encoding_format": "int8"`), "encoding_format", "float or base64"},
		"no dimensions":            {openai.EmbeddingsPath, texts(`"input": "x", "dimensions": 0`), "dimensions", "at least 1"},
		"a stream of vectors":      {openai.EmbeddingsPath, texts(`"input": "x", "stream": true`), "stream", "is not supported"},
	} {
		t.Run(name, func(t *testing.T) {
			response, body := a.ask(http.MethodPost, row.path, row.body)
			f := decode[failure](t, body).Error
			param := ""
			if f.Param != nil {
				param = *f.Param
			}
			if response.StatusCode != http.StatusBadRequest || f.Type != "invalid_request_error" || param != row.param || !strings.Contains(f.Message, row.message) {
				t.Errorf("%s: %s", response.Status, body)
			}
			if response.Header.Get("X-Request-Id") == "" {
				t.Error("there is no ID of the request")
			}
		})
	}
	if last := caller.Last(); last != nil {
		t.Errorf("the mesh was asked: %+v", last)
	}
}

func TestUnknownModelIsNotFound(t *testing.T) {
	t.Parallel()
	a := start(t, &fronttest.Caller{})
	for _, row := range []struct{ method, path, body, message string }{
		{http.MethodPost, openai.ChatPath, `{"model": "none", ` + user + `}`, `there is no "none"`},
		{http.MethodPost, openai.ChatPath, `{"model": "vec", ` + user + `}`, "not of chat"},
		{http.MethodPost, openai.EmbeddingsPath, `{"model": "llm", "input": "x"}`, "not of embeddings"},
		{http.MethodGet, openai.ModelsPath + "/none", "", `there is no "none"`},
	} {
		response, body := a.ask(row.method, row.path, row.body)
		if f := decode[failure](t, body).Error; response.StatusCode != http.StatusNotFound || f.Code != "model_not_found" || !strings.Contains(f.Message, row.message) {
			t.Errorf("%s %s: %s %s", row.path, row.body, response.Status, body)
		}
	}
}

func TestModelsAreListed(t *testing.T) {
	t.Parallel()
	a := start(t, &fronttest.Caller{})
	type model struct {
		ID, Object string
		Created    int64
	}
	_, body := a.ask(http.MethodGet, openai.ModelsPath, "")
	var names []string
	for _, m := range decode[struct{ Data []model }](t, body).Data {
		names = append(names, m.ID)
	}
	if !slices.Equal(names, []string{"llm", "org/a:b", "vec"}) {
		t.Errorf("there are %s", body)
	}
	for _, path := range []string{"org/a:b", "org%2Fa:b"} {
		if _, body := a.ask(http.MethodGet, openai.ModelsPath+"/"+path, ""); decode[model](t, body).ID != "org/a:b" {
			t.Errorf("%s is %s", path, body)
		}
	}
	for _, row := range []struct{ method, path, allowed string }{
		{http.MethodGet, openai.ChatPath, "POST"}, {http.MethodPost, openai.ModelsPath, "GET, HEAD"}, {http.MethodDelete, openai.ModelsPath + "/llm", "GET, HEAD"},
	} {
		response, body := a.ask(row.method, row.path, "")
		if response.StatusCode != http.StatusMethodNotAllowed || response.Header.Get("Allow") != row.allowed || decode[failure](t, body).Error.Message == "" {
			t.Errorf("%s %s: %s %v %s", row.method, row.path, response.Status, response.Header, body)
		}
	}
}

func TestBodyBecomesPartsAndParameters(t *testing.T) {
	t.Parallel()
	caller := fronttest.AnswerWith(payload.OfBlob("text", "text/plain", []byte("hello")))
	a := start(t, caller)
	chat := func(messages, more string) string { return `{"messages": ` + messages + more + `, "model": "llm"}` }
	for name, row := range map[string]struct{ path, body, pipeline, part, parameters string }{
		"a chat": {
			openai.ChatPath, chat(`[ {"content" : "s", "role": "system", "name": null}, {"role": "user", "name": "a", "content": "\u00e9\n<"} ]`, ""),
			"chat-pipeline", `messages application/json [{"role":"system","content":"s"},{"role":"user","content":"\u00e9\n<","name":"a"}]`, "map[]",
		},
		"parts of text": {
			openai.ChatPath, chat(`[{"role": "developer", "content": [{"type": "text", "text": "a\u0041"}, {"text": "b \"c\"", "type": "text"}]}, {"role": "assistant", "content": [], "refusal": null}]`, ""),
			"chat-pipeline", `messages application/json [{"role":"developer","content":"aAb \"c\""},{"role":"assistant","content":""}]`, "map[]",
		},
		"parameters": {
			openai.ChatPath, chat(`[{"role": "user", "content": "x"}]`, `, "temperature": 0.5, "top_p": 1, "seed": 7, "user": "u", "max_tokens": 9, "max_completion_tokens": 9, "top_k": null, "stop": ["\n", "é"]`),
			"chat-pipeline", `messages application/json [{"role":"user","content":"x"}]`, `map[max_tokens:9 seed:7 stop:["\n","é"] temperature:0.5 top_p:1 user:u]`,
		},
		"what asks for nothing": {
			openai.ChatPath, chat(`[{"role": "user", "content": "x"}]`, `, "n": 1, "tools": [ ], "response_format": {"type": "text"}, "logprobs": false, "logit_bias": {}, "stream": false, "modalities": ["text"], "store": null`),
			"chat-pipeline", `messages application/json [{"role":"user","content":"x"}]`, "map[]",
		},
		"a prompt":          {openai.CompletionsPath, `{"model": "llm", "prompt": "a\nb", "stop": "x"}`, "text-pipeline", "prompt text/plain a\nb", `map[stop:["x"]]`},
		"a list of one":     {openai.CompletionsPath, `{"model": "llm", "prompt": ["a"], "echo": false}`, "text-pipeline", "prompt text/plain a", "map[]"},
		"a query":           {openai.CompletionsPath + "?parameters.seed=3", `{"model": "llm", "prompt": "a", "seed": 2}`, "text-pipeline", "prompt text/plain a", "map[seed:3]"},
		"an unknown scalar": {openai.CompletionsPath, `{"model": "llm", "prompt": "a", "top_k": 3}`, "text-pipeline", "prompt text/plain a", "map[top_k:3]"},
	} {
		t.Run(name, func(t *testing.T) {
			response, body := a.ask(http.MethodPost, row.path, row.body, "Stagemesh-Priority", "3")
			if response.StatusCode != http.StatusOK {
				t.Fatalf("%s %s", response.Status, body)
			}
			got := caller.Last()
			part := got.Inputs[0]
			if is := fmt.Sprintf("%s %s %s", part.Name, part.Blob.ContentType, part.Blob.Data); is != row.part || len(got.Inputs) != 1 {
				t.Errorf("the part is %s", is)
			}
			if is := fmt.Sprint(map[string]payload.Value(got.Parameters)); is != row.parameters || got.Pipeline != row.pipeline || got.Priority != 3 || got.ID == "" {
				t.Errorf("the request is %+v with %s", got, is)
			}
		})
	}
}

// answer answers with parts and metadata.
func answer(metadata map[string]string, parts ...payload.Part) func(context.Context, *request.Request) (*request.Response, error) {
	return func(context.Context, *request.Request) (*request.Response, error) {
		out := fronttest.Respond(parts...)
		out.Metadata = metadata
		return out, nil
	}
}

func blob(name, data string) payload.Part { return payload.OfBlob(name, "text/plain", []byte(data)) }

func TestAnswerHasTheFormOfTheAPI(t *testing.T) {
	t.Parallel()
	type choice struct {
		Message struct{ Role, Content string }
		Text    string
		Finish  string `json:"finish_reason"`
	}
	type completion struct {
		ID, Object, Model string
		Choices           []choice
		Usage             *struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
			Total      int `json:"total_tokens"`
		}
	}
	counted := map[string]string{"finish_reason": "length", "prompt_tokens": "3", "completion_tokens": "4"}
	caller := &fronttest.Caller{Answer: answer(counted, blob("text", "hello"), blob("more", "x"))}
	a := start(t, caller)
	response, body := a.ask(http.MethodPost, openai.ChatPath, `{"model": "llm", `+user+`}`)
	got := decode[completion](t, body)
	if got.ID != "chatcmpl-"+fronttest.RequestID || got.Object != "chat.completion" || got.Model != "llm" || len(got.Choices) != 1 ||
		got.Choices[0].Message.Role != "assistant" || got.Choices[0].Message.Content != "hello" || got.Choices[0].Finish != "length" || got.Usage == nil || got.Usage.Total != 7 {
		t.Errorf("chat: %s", body)
	}
	if response.Header.Get("X-Request-Id") != fronttest.RequestID || response.Header.Get("Server-Timing") == "" {
		t.Errorf("the header is %v", response.Header)
	}
	for name, metadata := range map[string]map[string]string{"none": nil, "one": {"prompt_tokens": "3"}, "no number": {"prompt_tokens": "3", "completion_tokens": "4.0"}} {
		caller := &fronttest.Caller{Answer: answer(metadata, blob("only", "hello"))}
		_, body := start(t, caller).ask(http.MethodPost, openai.CompletionsPath, `{"model": "llm", "prompt": "x"}`)
		if got := decode[completion](t, body); got.Object != "text_completion" || got.Choices[0].Text != "hello" || got.Choices[0].Finish != "stop" || got.Usage != nil {
			t.Errorf("%s: %s", name, body)
		}
	}
	for name, parts := range map[string][]payload.Part{
		"no text": {blob("a", "x"), blob("b", "y")}, "no UTF-8": {blob("text", "\xff")}, "a tensor": {payload.OfTensor("text", tensor.Tensor{Datatype: tensor.Bool, Shape: []int64{1}, Raw: []byte{1}})}, "nothing": nil,
	} {
		for _, more := range []string{"", `, "stream": true`} {
			caller := &fronttest.Caller{Answer: answer(nil, parts...)}
			response, body := start(t, caller).ask(http.MethodPost, openai.ChatPath, `{"model": "llm", `+user+more+`}`)
			if f := decode[failure](t, body).Error; response.StatusCode != http.StatusInternalServerError || f.Code != "runner_output_invalid" || response.Header.Get("X-Request-Id") != fronttest.RequestID {
				t.Errorf("%s: %s %s", name, response.Status, body)
			}
		}
	}
}

// events returns the data of an answer in events.
func events(t *testing.T, body string) (out []string) {
	t.Helper()
	all, err := fronttest.ReadEvents(strings.NewReader(body)).All()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		out = append(out, e.Data)
	}
	return out
}

func TestChunksBecomeEvents(t *testing.T) {
	t.Parallel()
	type chunk struct {
		ID, Object string
		Choices    []struct {
			Delta  map[string]string
			Text   *string
			Finish *string `json:"finish_reason"`
		}
		Usage *struct{ Total_tokens int } //nolint:staticcheck // the API's name
	}
	counted := map[string]string{"prompt_tokens": "1", "completion_tokens": "2"}
	activating := request.Chunk{RequestID: fronttest.RequestID, Activating: &request.Activating{Stage: "s"}}
	other := request.Chunk{RequestID: fronttest.RequestID, Outputs: []payload.Part{blob("a", "x"), blob("b", "y")}}
	caller := &fronttest.Caller{Chunks: append([]request.Chunk{activating, other}, fronttest.Words("one ", "two")...), Answer: answer(counted)}
	a := start(t, caller)
	response, body := a.ask(http.MethodPost, openai.ChatPath, `{"model": "llm", "stream": true, "stream_options": {"include_usage": true, "include_obfuscation": false}, `+user+`}`)
	all := events(t, body)
	if len(all) != 5 || all[4] != "[DONE]" || response.Header.Get("X-Request-Id") != fronttest.RequestID || response.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("%v %s", response.Header, body)
	}
	for i, want := range []string{
		`[map[content:one  role:assistant]] <nil>`, `[map[content:two]] <nil>`, `[map[]] stop`, `[] 3`,
	} {
		c := decode[chunk](t, all[i])
		var deltas []map[string]string
		end := "<nil>"
		for _, choice := range c.Choices {
			deltas = append(deltas, choice.Delta)
			if choice.Finish != nil {
				end = *choice.Finish
			}
		}
		if c.Usage != nil {
			end = fmt.Sprint(c.Usage.Total_tokens)
		}
		if got := fmt.Sprint(deltas, " ", end); got != want || c.ID != "chatcmpl-"+fronttest.RequestID || c.Object != "chat.completion.chunk" {
			t.Errorf("event %d is %s: %s", i, got, all[i])
		}
	}
	_, body = a.ask(http.MethodPost, openai.CompletionsPath, `{"model": "llm", "stream": true, "prompt": "x"}`)
	all = events(t, body)
	if len(all) != 4 || *decode[chunk](t, all[1]).Choices[0].Text != "two" || strings.Contains(body, "usage") {
		t.Errorf("completions: %s", body)
	}
}

// vectors answers each text with its length and 0.5, unless it is bad.
func vectors(_ context.Context, r *request.Request) (*request.Response, error) {
	text := string(r.Inputs[0].Blob.Data)
	if text == "bad" {
		return nil, fronttest.Fault(fault.InvalidInput)
	}
	vector, err := tensor.FromFP32([]int64{1, 2}, []float32{float32(len(text)), 0.5})
	if err != nil {
		return nil, err
	}
	out := fronttest.Respond(payload.OfTensor("embedding", vector))
	out.Metadata = map[string]string{"prompt_tokens": "2"}
	return out, nil
}

func TestEachTextIsARequest(t *testing.T) {
	t.Parallel()
	var lock sync.Mutex
	keys := map[string]string{}
	caller := &fronttest.Caller{Answer: func(ctx context.Context, r *request.Request) (*request.Response, error) {
		lock.Lock()
		keys[string(r.Inputs[0].Blob.Data)] = r.IdempotencyKey
		lock.Unlock()
		return vectors(ctx, r)
	}}
	a := start(t, caller)
	for _, row := range []struct{ body, want string }{
		{`"input": "abc"`, `{"data":[{"embedding":[3,0.5],"index":0,"object":"embedding"}],"model":"vec","object":"list","usage":{"prompt_tokens":2,"total_tokens":2}}`},
		{`"input": ["a", "abcd"], "dimensions": 2`, `{"data":[{"embedding":[1,0.5],"index":0,"object":"embedding"},{"embedding":[4,0.5],"index":1,"object":"embedding"}],"model":"vec","object":"list","usage":{"prompt_tokens":4,"total_tokens":4}}`},
		{`"input": "a", "encoding_format": "base64"`, `{"data":[{"embedding":"AACAPwAAAD8=","index":0,"object":"embedding"}],"model":"vec","object":"list","usage":{"prompt_tokens":2,"total_tokens":2}}`},
	} {
		if _, body := a.ask(http.MethodPost, openai.EmbeddingsPath, `{"model": "vec", `+row.body+`}`, "Idempotency-Key", "k"); strings.TrimSpace(body) != row.want {
			t.Errorf("%s: %s", row.body, body)
		}
	}
	if keys["abc"] != "k" || keys["abcd"] != "k/2" {
		t.Errorf("the keys are %v", keys)
	}
	response, body := a.ask(http.MethodPost, openai.EmbeddingsPath, `{"model": "vec", "input": ["a", "bad", "b"]}`)
	if f := decode[failure](t, body).Error; response.StatusCode != http.StatusBadRequest || f.Code != "invalid_input" || !strings.HasPrefix(f.Message, "input[1]: ") || response.Header.Get("X-Request-Id") != fronttest.RequestID {
		t.Errorf("%s %s", response.Status, body)
	}
}

func TestBadVectorIsRefused(t *testing.T) {
	t.Parallel()
	floats := func(shape []int64, values ...float32) payload.Part {
		out, err := tensor.FromFP32(shape, values)
		if err != nil {
			t.Fatal(err)
		}
		return payload.OfTensor("embedding", out)
	}
	for name, row := range map[string]struct {
		part    payload.Part
		more    string
		code    string
		message string
	}{
		"a text":           {blob("embedding", "x"), "", "runner_output_invalid", "FP32"},
		"two vectors":      {floats([]int64{2, 1}, 1, 2), "", "runner_output_invalid", "[2 1]"},
		"a number":         {floats(nil, 1), "", "runner_output_invalid", "shape"},
		"NaN":              {floats([]int64{1}, float32(math.NaN())), "", "runner_output_invalid", "NaN at 0"},
		"other dimensions": {floats([]int64{2}, 1, 2), `, "dimensions": 3`, "invalid_request", "gives 2 numbers"},
	} {
		caller := fronttest.AnswerWith(row.part)
		response, body := start(t, caller).ask(http.MethodPost, openai.EmbeddingsPath, `{"model": "vec", "input": "x"`+row.more+`}`)
		if f := decode[failure](t, body).Error; f.Code != row.code || !strings.Contains(f.Message, row.message) || response.Header.Get("X-Request-Id") != fronttest.RequestID {
			t.Errorf("%s: %s %s", name, response.Status, body)
		}
	}
}

// refusal is what a caller gets while all places are taken.
var refusal = fault.New(fault.Overloaded, "all places are taken").WithRetryAfter(time.Millisecond)

// list is a call of embeddings with so many texts.
func list(n int) string {
	return `{"model": "vec", "input": ["x"` + strings.Repeat(`,"x"`, n-1) + `]}`
}

func TestTextsBeyondCapacityWaitForOthers(t *testing.T) {
	t.Parallel()
	const texts, most = 500, 4
	places := make(chan struct{}, most)
	var refused atomic.Int64
	a := start(t, &fronttest.Caller{Answer: func(ctx context.Context, r *request.Request) (*request.Response, error) {
		select {
		case places <- struct{}{}:
			defer func() { <-places }()
			runtime.Gosched() // so that others come meanwhile
			return vectors(ctx, r)
		default:
			refused.Add(1)
			return nil, refusal
		}
	}})
	response, body := a.ask(http.MethodPost, openai.EmbeddingsPath, list(texts))
	if response.StatusCode != http.StatusOK {
		t.Fatalf("%s %s", response.Status, body)
	}
	data := decode[struct{ Data []struct{ Index int } }](t, body).Data
	if len(data) != texts || data[texts-1].Index != texts-1 {
		t.Errorf("%d vectors", len(data))
	}
	// The next call knows how many places there are.
	refused.Store(0)
	if response, body := a.ask(http.MethodPost, openai.EmbeddingsPath, list(texts)); response.StatusCode != http.StatusOK {
		t.Fatalf("%s %s", response.Status, body)
	}
	if n := refused.Load(); n > texts/20 {
		t.Errorf("%d texts were refused", n)
	}
}

func TestCallWithoutPlacesIsRefused(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		// places is how many texts have one before others take them, for so many tries or for ever.
		places, tries int
		want          int
	}{
		"never":        {0, math.MaxInt, http.StatusTooManyRequests},
		"for a moment": {70, 3, http.StatusOK},
		"no more":      {70, math.MaxInt, http.StatusTooManyRequests},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var lock sync.Mutex
			a := start(t, &fronttest.Caller{Answer: func(ctx context.Context, r *request.Request) (*request.Response, error) {
				lock.Lock()
				defer lock.Unlock()
				switch {
				case row.places > 0:
					row.places--
				case row.tries > 0:
					row.tries--
					return nil, refusal
				}
				return vectors(ctx, r)
			}})
			response, body := a.ask(http.MethodPost, openai.EmbeddingsPath, list(100))
			if response.StatusCode != row.want || row.want != http.StatusOK && decode[failure](t, body).Error.Code != "overloaded" {
				t.Errorf("%s %s", response.Status, body)
			}
		})
	}
}

func TestTimeoutHoldsForTheWholeCall(t *testing.T) {
	t.Parallel()
	first := make(chan struct{}, 1)
	a := start(t, &fronttest.Caller{Answer: func(ctx context.Context, r *request.Request) (*request.Response, error) {
		select {
		case first <- struct{}{}:
			return vectors(ctx, r)
		default:
			return nil, refusal.WithRetryAfter(time.Minute)
		}
	}})
	response, body := a.ask(http.MethodPost, openai.EmbeddingsPath, list(2), "Stagemesh-Timeout", "100ms")
	if response.StatusCode != http.StatusGatewayTimeout {
		t.Errorf("%s %s", response.Status, body)
	}
}

// weighed measures the heap, and what is reserved, when the first bytes of an answer are written.
type weighed struct {
	*httptest.ResponseRecorder
	account    *budget.Account
	heap, held int64
}

func (w *weighed) Write(data []byte) (int, error) {
	if w.heap == 0 {
		w.heap, w.held = heap(), w.account.Held()
	}
	return len(data), nil
}

// heap returns the bytes that are in use; the second collection frees what pools keep.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// It is not parallel: it measures the heap.
func TestVectorsTakeWhatIsReserved(t *testing.T) {
	for name, row := range map[string]struct {
		texts, numbers int
		limit          int64
		want           int
	}{
		"large vectors":                  {64, 1 << 16, 1 << 30, http.StatusOK},
		"many vectors":                   {2048, 1, 1 << 30, http.StatusOK},
		"more vectors than memory holds": {2048, 1, 1 << 20, http.StatusTooManyRequests},
	} {
		values := make([]float32, row.numbers)
		for i := range values {
			values[i] = -1 / float32(i+3)
		}
		caller := &fronttest.Caller{Answer: func(context.Context, *request.Request) (*request.Response, error) {
			vector, err := tensor.FromFP32([]int64{int64(row.numbers)}, values)
			return fronttest.Respond(payload.OfTensor("embedding", vector)), err
		}}
		handler := openai.NewCalls(caller, openai.Config{Embeddings: map[string]string{"vec": "vectors"}}, transport.Settings{})
		account := budget.NewAccount(budget.NewPool(budget.Settings{Limit: row.limit}), "")
		r := httptest.NewRequestWithContext(budget.NewContext(t.Context(), account), http.MethodPost, openai.EmbeddingsPath, strings.NewReader(list(row.texts)))
		before, w := heap(), &weighed{ResponseRecorder: httptest.NewRecorder(), account: account}
		handler.ServeHTTP(w, r)
		if taken := w.heap - before; w.Code != row.want || w.Code == http.StatusOK && taken > w.held {
			t.Errorf("%s: %d with %d bytes, of which %d are reserved", name, w.Code, taken, w.held)
		}
		account.Close()
	}
}
