// Package reference compares the description of a gateway, its OpenAPI document and the
// page that shows it, with what it does: the tests run a mesh in their process, send what
// the document describes, and open the page in a real browser.
//
// The browser is Chromium, by any of its usual names, with a profile that ends with the
// test. Without it the tests of the page fail; -run Document selects the others.
package reference

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = built.Remove()
		os.Exit(code) //nolint:forbidigo // this is main
	}))
}

const digits = "../../../examples/digits"

// threadSchema is a JSON Schema with definitions of its own.
const threadSchema = `{
	"$schema": "https://json-schema.org/draft/2020-12/schema",
	"type": "object", "required": ["text"], "additionalProperties": false,
	"properties": {"text": {"type": "string"}, "replies": {"type": "array", "items": {"$ref": "#/$defs/reply"}}},
	"$defs": {"reply": {"type": "object", "required": ["text"], "additionalProperties": false, "properties": {"text": {"type": "string"}}}}
}`

const countSchema = `{"type": "object", "required": ["comments"], "properties": {"comments": {"type": "integer", "minimum": 1}}}`

// of returns a spec of one input and one output, with an example.
func of(input, output runner.PartSpec, example string) runner.Spec {
	return runner.Spec{
		Inputs: []runner.PartSpec{input}, Outputs: []runner.PartSpec{output},
		Examples: []runner.Example{{Name: "short", Inputs: []payload.Part{payload.OfBlob(input.Name, input.ContentTypes[0], []byte(example))}}},
	}
}

func text(name string) runner.PartSpec {
	return runner.PartSpec{Name: name, ContentTypes: []string{"text/plain"}, Description: "some text"}
}

func jsonPart(name, schema string) runner.PartSpec {
	return runner.PartSpec{Name: name, ContentTypes: []string{"application/json"}, Schema: []byte(schema)}
}

// threads returns a runner that counts the comments of a thread.
func threads() *inproc.Runner {
	return inproc.Each(inproc.Settings{Spec: of(jsonPart("thread", threadSchema), jsonPart("count", countSchema), `{"text": "first", "replies": [{"text": "second"}]}`)},
		func(_ context.Context, item runner.Item) ([]payload.Part, error) {
			n := strings.Count(string(item.Inputs[0].Blob.Data), `"text"`)
			return []payload.Part{payload.OfBlob("count", "application/json", []byte(`{"comments": `+string(rune('0'+n))+`}`))}, nil
		})
}

// shout returns a runner that says a text louder.
func shout() *inproc.Runner {
	return inproc.Each(inproc.Settings{Spec: of(text("text"), text("loud"), "hello")},
		func(_ context.Context, item runner.Item) ([]payload.Part, error) {
			return []payload.Part{payload.OfBlob("loud", "text/plain", []byte(strings.ToUpper(string(item.Inputs[0].Blob.Data))))}, nil
		})
}

// listen returns a runner that answers a chat with its messages.
func listen() *inproc.Runner {
	return inproc.Each(inproc.Settings{Spec: of(jsonPart("messages", `{"type": "array"}`), text("text"), "[]")},
		func(_ context.Context, item runner.Item) ([]payload.Part, error) {
			return []payload.Part{payload.OfBlob("text", "text/plain", item.Inputs[0].Blob.Data)}, nil
		})
}

// spell returns a runner that answers letter by letter, until there is one that is a
// digit.
func spell() *inproc.Runner {
	spec := of(text("word"), text("word"), "abc")
	spec.Stream = true
	return inproc.New(inproc.Settings{Spec: spec}, func(_ context.Context, b runner.Batch, sink runner.Sink) error {
		for i, item := range b.Items {
			word := item.Inputs[0].Blob.Data
			outcome := runner.Output(payload.OfBlob("whole", "text/plain", word))
			for at, letter := range word {
				if unicode.IsDigit(rune(letter)) {
					outcome = runner.Failed(fault.Newf(fault.InvalidInput, "%q is not a letter", letter))
					break
				}
				// Nobody may want more of it; the outcome ends the item all the same.
				_ = sink.Chunk(i, []payload.Part{payload.OfBlob("word", "text/plain", word[at:at+1])})
			}
			if err := sink.SetOutcome(i, outcome); err != nil {
				return err
			}
		}
		return nil
	})
}

// letters returns a runner that streams the letters of a word with their places, as two outputs.
func letters() *inproc.Runner {
	spec := of(text("word"), text("letter"), "ab")
	spec.Stream, spec.Outputs = true, append(spec.Outputs, jsonPart("place", `{"type": "integer"}`))
	return inproc.New(inproc.Settings{Spec: spec}, func(_ context.Context, b runner.Batch, sink runner.Sink) error {
		parts := func(letter string, place int) []payload.Part {
			return []payload.Part{payload.OfBlob("letter", "text/plain", []byte(letter)), payload.OfBlob("place", "application/json", []byte(strconv.Itoa(place)))}
		}
		for i, item := range b.Items {
			word := string(item.Inputs[0].Blob.Data)
			for at := range word {
				_ = sink.Chunk(i, parts(word[at:at+1], at))
			}
			if err := sink.SetOutcome(i, runner.Output(parts(word, len(word))...)); err != nil {
				return err
			}
		}
		return nil
	})
}

// mesh starts a mesh that knows digits, threads, shouting, spelling, letters and listening, and has a
// pipeline through a stage that nobody serves. The edits change its file first.
func mesh(t *testing.T, edits ...func(*meshfile.File)) *stagemesh.Mesh {
	t.Helper()
	file := meshtest.Load(t, filepath.Join(digits, "mesh.yaml"))
	for _, edit := range edits {
		edit(file)
	}
	file.OpenAI.Chat = map[string]string{"listen": "only-listen"}
	file.OpenAI.Completions = map[string]string{"spell": "only-spell"}
	m := meshtest.FromFile(t, file, stagemesh.FileSettings{})
	for name, r := range map[pipeline.StageName]runner.Runner{"threads": threads(), "shout": shout(), "spell": spell(), "letters": letters(), "listen": listen()} {
		if err := m.AddStage(stagemesh.Stage{Name: name, Runner: r}); err != nil {
			t.Fatal(err)
		}
	}
	for _, stage := range []pipeline.StageName{"threads", "shout", "spell", "letters", "listen", "nobody", "classify"} {
		p := pipeline.OfStage(stage)
		p.Name = pipeline.Name("only-" + stage)
		p.Steps[0].Parameters = payload.Parameters{"temperature": payload.Double(0.5)}
		if err := m.AddPipeline(p); err != nil {
			t.Fatal(err)
		}
	}
	meshtest.Start(t, m)
	return m
}

// client has no connections left when its test ends.
func client(t *testing.T) *http.Client {
	t.Helper()
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 30 * time.Second}
}

// get reads what is at a URL.
func get(t *testing.T, c *http.Client, url string, header ...string) (status int, body []byte) {
	t.Helper()
	response, text := testbed.Call(t, c, http.MethodGet, url, "", header...)
	return response.StatusCode, []byte(text)
}

// document returns the document of a mesh once it knows every stage.
func document(t *testing.T, c *http.Client, url string, header ...string) []byte {
	t.Helper()
	var data []byte
	testbed.Eventually(t, "hosts have said what their stages take and give", func() bool {
		_, data = get(t, c, url+"/openapi.json", header...)
		for _, known := range []string{"stage.label.answer", "stage.threads.input.thread", "stage.shout.answer", "only-spell:stream", "only-letters:stream", "stage.classify.request"} {
			if !strings.Contains(string(data), known) {
				return false
			}
		}
		return true
	})
	return data
}

func image(t *testing.T) []byte {
	t.Helper()
	data := testbed.ReadFile(t, filepath.Join(digits, "images", "01-7.png"))
	return data
}
