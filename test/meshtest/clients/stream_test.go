package clients

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestNodeClientStreamsAndLeaves(t *testing.T) {
	t.Parallel()
	tools, mesh := installTools(t), startMesh(t)
	node, err := exec.LookPath("node")
	if err != nil {
		t.Fatalf("%v; Debian: apt-get install nodejs npm", err)
	}
	mesh.onEachPort(t, func(t *testing.T, address string) {
		cmd := exec.CommandContext(t.Context(), node, "stream.js", address, filepath.Join(tools.repository, protocol))
		cmd.Dir, cmd.Env = "node", append(os.Environ(), "NODE_PATH="+tools.nodeModules)
		if said := run(t, cmd); said != "words came in order, and stopped when nobody listened\n" {
			t.Errorf("it says %q", said)
		}
	})
}

func TestGrpcurlPrintsChunksOnBothServices(t *testing.T) {
	t.Parallel()
	tools, mesh := installTools(t), startMesh(t)
	grpcurl := func(args ...string) string {
		t.Helper()
		return run(t, exec.CommandContext(t.Context(), tools.grpcurl, append([]string{"-plaintext", "-max-time", "30"}, args...)...))
	}
	mesh.onEachPort(t, func(t *testing.T, address string) {
		if methods := strings.Fields(grpcurl(address, "list", "inference.GRPCInferenceService")); !slices.Contains(methods, "inference.GRPCInferenceService.ModelStreamInfer") {
			t.Errorf("it lists %v", methods)
		}
		const both = "rpc ModelStreamInfer ( stream .inference.ModelInferRequest ) returns ( stream .inference.ModelStreamInferResponse );"
		if described := grpcurl(address, "describe", "inference.GRPCInferenceService"); !strings.Contains(described, both) {
			t.Errorf("it describes no streams both ways:\n%s", described)
		}

		type message struct {
			Seq   string
			Chunk struct{ Outputs []output }
			Final struct{ Outputs []output }
		}
		messages := documents[message](t, grpcurl("-d", `{"pipeline": "words", "inputs": [{"name": "text", "blob": {"contentType": "text/plain", "data": "b25lIHR3bw=="}}]}`,
			address, "stagemesh.inference.v1.InferenceService/InferStream"))
		if len(messages) != 3 {
			t.Fatalf("the messages are %+v", messages)
		}
		said := ""
		for i, m := range messages {
			said += fmt.Sprintf("%s:%s%s ", m.Seq, textOf(m.Chunk.Outputs), textOf(m.Final.Outputs))
			if last := i == len(messages)-1; last == (m.Final.Outputs == nil) {
				t.Errorf("message %d is %+v", i, m)
			}
		}
		if said != "1:one  2:two  3:one two  " {
			t.Errorf("they are %q", said)
		}

		type streamed struct {
			InferResponse struct {
				ID                string
				RawOutputContents [][]byte
			}
		}
		const asked = `{"model_name": "words", "id": "%s", "inputs": [{"name": "text", "datatype": "BYTES", "shape": ["1"], "contents": {"bytes_contents": ["%s"]}}]}`
		words := map[string]string{}
		for _, m := range documents[streamed](t, grpcurl("-d", fmt.Sprintf(asked, "1", "b25lIHR3bw==")+fmt.Sprintf(asked, "2", "dHdvIG9uZQ=="),
			address, "inference.GRPCInferenceService/ModelStreamInfer")) {
			const length = 4 // before the bytes of an element
			words[m.InferResponse.ID] += string(m.InferResponse.RawOutputContents[0][length:])
		}
		if words["1"] != "one two " || words["2"] != "two one " {
			t.Errorf("on one stream the words are %q", words)
		}
	})
}

// output is one of an answer of stagemesh's own service, in JSON.
type output struct {
	Name string
	Blob struct{ Data []byte }
}

func textOf(outputs []output) string {
	out := ""
	for _, o := range outputs {
		out += string(o.Blob.Data)
	}
	return out
}

// documents reads JSON documents that follow each other.
func documents[T any](t *testing.T, text string) []T {
	t.Helper()
	var out []T
	for in := json.NewDecoder(strings.NewReader(text)); ; {
		var one T
		switch err := in.Decode(&one); {
		case errors.Is(err, io.EOF):
			return out
		case err != nil:
			t.Fatalf("%v: %s", err, text)
		}
		out = append(out, one)
	}
}

// The words come while the text is not at its end: that waits for another request.
func TestCurlReadsEventsAsTheyCome(t *testing.T) {
	t.Parallel()
	mesh := startMesh(t)
	curl := curl(t)
	url := "http://" + mesh.address() + "/v1/pipelines/words:stream"
	cmd := exec.CommandContext(t.Context(), curl, "-N", "--silent", "--show-error", "--fail-with-body", "--max-time", "30", "-H", "Content-Type: text/plain", "-d", "one meet:2 two", url)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(out)
	first := nextEvent(t, in)
	if first.id != "1" || first.kind != "chunk" || first.text() != "one " {
		t.Errorf("the first event is %+v", first)
	}
	if said := run(t, exec.CommandContext(t.Context(), curl, "--silent", "--show-error", "--max-time", "30", "-H", "Content-Type: text/plain", "-d", "meet:2", strings.Replace(url, ":stream", ":infer", 1))); !strings.Contains(said, "meet:2") {
		t.Errorf("the other request is answered %s", said)
	}
	for id, want := range []event{{"2", "chunk", nil}, {"3", "chunk", nil}, {"4", "done", nil}} {
		got := nextEvent(t, in)
		text := []string{"meet:2 ", "two ", "one meet:2 two "}[id]
		if got.id != want.id || got.kind != want.kind || got.text() != text || got.data["request_id"] != first.data["request_id"] {
			t.Errorf("event %s is %+v, want %s of %q", want.id, got, want.kind, text)
		}
	}
	if rest, err := io.ReadAll(in); err != nil || len(rest) > 0 {
		t.Errorf("behind the last event there are %q, %v", rest, err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

func TestCurlGetsAStreamFaultAsTheLastEvent(t *testing.T) {
	t.Parallel()
	mesh := startMesh(t)
	in := bufio.NewReader(strings.NewReader(run(t, exec.CommandContext(t.Context(), curl(t), "-N", "--silent", "--show-error", "--fail-with-body", "--max-time", "30",
		"-H", "Content-Type: text/plain", "-d", "one fail two", "http://"+mesh.address()+"/v1/pipelines/words:stream"))))
	if e := nextEvent(t, in); e.id != "1" || e.text() != "one " {
		t.Errorf("the first event is %+v", e)
	}
	e := nextEvent(t, in)
	fault, _ := e.data["error"].(map[string]any)
	if message, _ := fault["message"].(string); e.kind != "error" || fault["reason"] != "INVALID_INPUT" || !strings.Contains(message, "says fail") {
		t.Errorf("the last event is %+v", e)
	}
	if rest, err := io.ReadAll(in); err != nil || len(rest) > 0 {
		t.Errorf("behind the last event there are %q, %v", rest, err)
	}
}

func TestCurlGeneratesWholeAndAsEvents(t *testing.T) {
	t.Parallel()
	mesh := startMesh(t)
	curl, model := curl(t), "http://"+mesh.checkedAddress(t)+"/v2/models/words/"
	ask := func(path, body string) (said string, err error) {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), curl, "-N", "--silent", "--show-error", "--fail-with-body", "--max-time", "30", "-d", body, model+path).Output()
		return string(out), err
	}
	for _, path := range []string{"generate", "../words/versions/1/generate"} {
		said, err := ask(path, `{"id": "7", "text_input": "one two"}`)
		var answer map[string]string
		parse(t, said, &answer)
		if err != nil || answer["word"] != "one two " || answer["id"] != "7" || answer["model_name"] != "words" || answer["model_version"] != "1" {
			t.Errorf("%s: the answer is %v, %v", path, answer, err)
		}
	}
	said, err := ask("generate_stream", `{"id": "7", "text": "one two fail"}`)
	if err != nil {
		t.Errorf("%v: %s", err, said)
	}
	var words []string
	for _, e := range strings.Split(strings.TrimSuffix(said, "\n\n"), "\n\n") {
		data, ok := strings.CutPrefix(e, "data: ")
		if !ok {
			t.Fatalf("an event is %q", e)
		}
		var of map[string]string
		parse(t, data, &of)
		if of["error"] == "" && (of["id"] != "7" || of["model_name"] != "words") {
			t.Errorf("an event is of %v", of)
		}
		words = append(words, of["word"]+of["error"])
	}
	if len(words) != 3 || words[0] != "one " || words[1] != "two " || !strings.HasPrefix(words[2], "INVALID_INPUT: ") {
		t.Errorf("the events are %q", words)
	}
	// What fails before the first event has a status.
	for _, path := range []string{"generate", "generate_stream"} {
		if said, err := ask(path, `{"text": "fail"}`); err == nil || !strings.Contains(said, "INVALID_INPUT: ") {
			t.Errorf("%s: a fault is answered %s, %v", path, said, err)
		}
		if said, err := ask(path, `{"nothing": ["x"]}`); err == nil || !strings.Contains(said, "nothing") {
			t.Errorf("%s: an unknown input is answered %s, %v", path, said, err)
		}
	}
}

// event is one of those that a server sends.
type event struct {
	id, kind string
	data     map[string]any
}

// text is the text of the event's only output.
func (e event) text() string {
	outputs, _ := e.data["outputs"].([]any)
	if len(outputs) != 1 {
		return fmt.Sprintf("%d outputs", len(outputs))
	}
	one, _ := outputs[0].(map[string]any)
	text, _ := one["text"].(string)
	return text
}

// nextEvent reads an event, and makes sure that it counts as it says by seq.
func nextEvent(t *testing.T, in *bufio.Reader) event {
	t.Helper()
	var out event
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			t.Fatalf("in the middle of an event: %v", err)
		}
		field, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		switch field {
		case "id":
			out.id = value
		case "event":
			out.kind = value
		case "data":
			parse(t, value, &out.data)
		case "":
			if value != "" || out.data == nil {
				continue // a comment
			}
			if seq, ok := out.data["seq"]; ok && fmt.Sprint(seq) != out.id {
				t.Errorf("event %s has seq %v", out.id, seq)
			}
			return out
		default:
			t.Fatalf("a line of an event is %q", line)
		}
	}
}

func curl(t *testing.T) string {
	t.Helper()
	program, err := exec.LookPath("curl")
	if err != nil {
		t.Fatalf("%v; Debian: apt-get install curl", err)
	}
	return program
}
