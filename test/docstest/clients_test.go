package docstest

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
	"github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1/inferencev1connect"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/sdk/python"
	"github.com/stagemesh/stagemesh/services/cli"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// readDigit asks over Connect; the address is http://host:port.
func readDigit(ctx context.Context, client *http.Client, address string, png []byte) (string, error) {
	mesh := inferencev1connect.NewInferenceServiceClient(client, address)
	response, err := mesh.Infer(ctx, connect.NewRequest(&inferencev1.InferRequest{
		Pipeline: "digits",
		Inputs: []*inferencev1.Part{{Name: "image", Body: &inferencev1.Part_Blob{
			Blob: &inferencev1.Blob{ContentType: "image/png", Data: png},
		}}},
		Timeout: durationpb.New(2 * time.Second),
	}))
	if err != nil {
		return "", err
	}
	return best(response.Msg.GetOutputs())
}

// best returns the first of the labels.
func best(outputs []*inferencev1.Part) (string, error) {
	for _, part := range outputs {
		if part.GetName() != "labels" {
			continue
		}
		t := part.GetTensor()
		labels, err := tensor.Tensor{
			Datatype: tensor.Datatype(t.GetDatatype()), Shape: t.GetShape(), Raw: t.GetRaw(),
		}.BytesElements()
		if err != nil || len(labels) == 0 {
			return "", errors.Join(err, errors.New("no label"))
		}
		return string(labels[0]), nil
	}
	return "", errors.New("the answer has no labels")
}

// reason returns what a client may branch on, and how long to wait before the
// next try where that is known.
func reason(err error) (reason string, pause time.Duration) {
	rpc, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return "", 0
	}
	for _, detail := range rpc.Details() {
		value, err := detail.Value()
		if err != nil {
			continue
		}
		switch d := value.(type) {
		case *errdetails.ErrorInfo:
			reason = d.GetReason()
		case *errdetails.RetryInfo:
			pause = d.GetRetryDelay().AsDuration()
		}
	}
	return reason, pause
}

// startExample starts an example with a port of its own.
func startExample(t *testing.T, name string) (url string) {
	t.Helper()
	file, err := meshfile.Load("../../examples/"+name+"/mesh.yaml", runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	file.Gateway.Listen, file.Gateway.Admin.Listen, file.NATS.StoreDir = "127.0.0.1:0", "127.0.0.1:0", ""
	mesh := meshtest.FromFile(t, file, stagemesh.FileSettings{Dispatcher: true})
	meshtest.Start(t, mesh)
	return mesh.URL()
}

func TestClientsOfTheGuideAreAnswered(t *testing.T) {
	t.Parallel()
	url := startExample(t, "digits")
	client := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(client.CloseIdleConnections)

	image := []byte(read(t, "examples/digits/images/07-9.png"))
	digit, err := readDigit(t.Context(), client, url, image)
	if err != nil || digit != "9" {
		t.Errorf("read %q, %v", digit, err)
	}
	_, err = readDigit(t.Context(), client, url, []byte("no image"))
	if got, _ := reason(err); got != "INVALID_INPUT" {
		t.Errorf("reason %q of %v", got, err)
	}
}

// writeTypedClient writes the typed client of the digits mesh, once all of its stages are known.
func writeTypedClient(t *testing.T, path, url string) {
	t.Helper()
	testbed.Eventually(t, "the stages are known", func() bool {
		var out bytes.Buffer
		cmd := cli.New()
		cmd.SetArgs([]string{"client", "python", "digits", "--address", url})
		cmd.SetOut(&out)
		if err := errors.Join(cmd.ExecuteContext(t.Context()), os.WriteFile(path, out.Bytes(), 0o600)); err != nil {
			t.Fatal(err)
		}
		return strings.Contains(out.String(), "image: Bytes") && strings.Contains(out.String(), "class DigitsAnswer")
	})
}

// scripts are pages whose blocks call a mesh, and how many there are by language.
var scripts = map[string]map[string]int{
	"docs/clients.md":          {"python": 8, "js": 6, "sh": 3},
	"docs/http.md":             {"js": 1, "sh": 5},
	"sdk/typescript/README.md": {"js": 2},
}

// script returns what runs of a block, on the mesh of which example, and a part of what it prints. Of
// commands only those of curl run; other tests have those that stream, and grpcurl.
func script(b block) (text, example, want string) {
	for _, line := range b.lines {
		if b.language != "sh" || !strings.HasPrefix(line, "go run ") {
			text += line + "\n"
		}
	}
	isOther := map[string]bool{
		"python": !strings.Contains(text, "stagemesh.client"),
		"js":     false,
		"sh":     !strings.Contains(text, "curl ") || !strings.Contains(text, "http://127.0.0.1:8080") || strings.Contains(text, "curl -N -d") || strings.Contains(text, "curl -N -H"),
	}
	if other, known := isOther[b.language]; other || !known {
		return "", "", ""
	}
	for _, c := range []struct{ has, example, want string }{
		{`console.log(chunk.get("text"))`, "text-stream", "said"},
		{`"tale"`, "text-stream", "tell"},
		{"tale:stream", "text-stream", "said"},
		{"jobs.submit", "nightly", "9"},
		{"except", "digits", ""},
		{"catch (fault)", "digits", "INVALID_INPUT decode"},
		{"connect-node", "digits", "-7"}, // the ID of a request
		{"'no image'", "digits", `"reason":"INVALID_INPUT"`},
		{"call-7", "digits", `"id":"call-7"`},
		{"in_order=true", "digits", `{"line":2,"error":{`},
		{`'{"scores"`, "digits", `"4"`},
		{"order-4711", "digits", "NOT_FOUND"},
	} {
		if strings.Contains(text, c.has) {
			return text, c.example, c.want
		}
	}
	return text, "digits", "9"
}

// Scripts and commands of these pages run as they stand, but for the address, and print what they should.
func TestScriptsOfTheClientsRun(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	if err := os.CopyFS(folder, python.Files()); err != nil {
		t.Fatal(err)
	}
	urls := map[string]string{}
	for _, example := range []string{"digits", "text-stream", "nightly"} {
		urls[example] = startExample(t, example)
	}
	writeTypedClient(t, filepath.Join(folder, "digits_mesh.py"), urls["digits"])
	programs := map[string][]string{
		"python": {"python3", "-B", filepath.Join(folder, "script.py")},
		"js":     {"node", filepath.Join(meshtest.TypeScriptClient(t), "script.mjs")},
		"sh":     {"bash", "-e", filepath.Join(folder, "script.sh")},
	}
	for path, wanted := range scripts {
		ran := map[string]int{}
		found, _ := blocks(read(t, path))
		for _, b := range found {
			text, example, want := script(b)
			if text == "" {
				continue
			}
			ran[b.language]++
			program := programs[b.language]
			if err := os.WriteFile(program[len(program)-1], []byte(strings.ReplaceAll(text, "http://127.0.0.1:8080", urls[example])), 0o600); err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), program[0], program[1:]...)
			cmd.Dir, cmd.Env = repository, append(os.Environ(), "PYTHONPATH="+folder)
			if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), want) {
				t.Errorf("%s:%d prints %s, %v, and not %q", path, b.line, out, err, want)
			}
		}
		if !maps.Equal(ran, wanted) {
			t.Errorf("%s has so many scripts: %v, want %v", path, ran, wanted)
		}
	}
}
