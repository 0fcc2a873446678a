package clients

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// protocol is the file of the protocol's gRPC form, of the repository.
const protocol = "proto/third_party/oip/v2/inference.proto"

// run runs a client and returns what it prints.
func run(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	var out, said strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %v\n%s%s", filepath.Base(cmd.Path), err, &out, &said)
	}
	return out.String()
}

func TestTritonclientInfersAndStreams(t *testing.T) {
	t.Parallel()
	tools, mesh := installTools(t), startMesh(t)
	mesh.onEachPort(t, func(t *testing.T, address string) {
		cmd := exec.CommandContext(t.Context(), tools.python, "-B", "-W", "error::ResourceWarning", "-m", "unittest", "--verbose", "test_tritonclient")
		cmd.Dir, cmd.Env = "python", append(os.Environ(), "MESH="+address, "MESH_HTTP="+mesh.checkedAddress(t))
		said, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(said), "\nOK\n") {
			t.Errorf("%v\n%s", err, said)
		}
		for _, test := range []string{
			"GRPCTest.test_models_are_listed_loaded_and_unloaded", "HTTPTest.test_models_are_listed_loaded_and_unloaded",
			"GRPCTest.test_sums_and_differences_are_right", "HTTPTest.test_sums_and_differences_are_right",
			"StreamTest.test_requests_run_side_by_side_and_each_gets_its_words_in_order",
		} {
			if !strings.Contains(string(said), test+") ... ok") {
				t.Errorf("%s did not run:\n%s", test, said)
			}
		}
	})
}

func TestStubsForPythonInferAndStream(t *testing.T) {
	t.Parallel()
	tools, mesh := installTools(t), startMesh(t)
	mesh.onEachPort(t, func(t *testing.T, address string) {
		cmd := exec.CommandContext(t.Context(), tools.python, "-B", "-m", "unittest", "--verbose", "test_grpc")
		cmd.Dir, cmd.Env = "python", append(os.Environ(), "MESH="+address, "PYTHONPATH=../../../../proto/gen/python")
		if said, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(said), "Ran 4 tests") {
			t.Errorf("%v\n%s", err, said)
		}
	})
}

// The script of the guide runs as it stands, but for the address.
func TestScriptOfTheStubsReadsADigit(t *testing.T) {
	t.Parallel()
	tools := installTools(t)
	mesh := testMesh{meshtest.Start(t, meshtest.FromFile(t, meshtest.Load(t, "../../../examples/digits/mesh.yaml"), stagemesh.FileSettings{}))}
	for block := range strings.SplitSeq(read(t, "../../../docs/clients.md"), "```python\n") {
		script, _, _ := strings.Cut(block, "```")
		if !strings.Contains(script, "import inference_pb2_grpc") {
			continue
		}
		cmd := exec.CommandContext(t.Context(), tools.python, "-B", "-c", strings.ReplaceAll(script, "127.0.0.1:8080", mesh.address()))
		cmd.Dir, cmd.Env = "../../..", append(os.Environ(), "PYTHONPATH=proto/gen/python")
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), `raw: "\001\000\000\0009`) {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	t.Error("docs/clients.md has no script of the stubs")
}

func TestNodeClientInfersWithoutGeneratedCode(t *testing.T) {
	t.Parallel()
	tools, mesh := installTools(t), startMesh(t)
	node, err := exec.LookPath("node")
	if err != nil {
		t.Fatalf("%v; Debian: apt-get install nodejs npm", err)
	}
	mesh.onEachPort(t, func(t *testing.T, address string) {
		cmd := exec.CommandContext(t.Context(), node, "simple.js", address, filepath.Join(tools.repository, protocol))
		cmd.Dir, cmd.Env = "node", append(os.Environ(), "NODE_PATH="+tools.nodeModules)
		if said := run(t, cmd); said != "16 sums and 16 differences are right\n" {
			t.Errorf("it says %q", said)
		}
	})
}

func TestGrpcurlInfersByReflection(t *testing.T) {
	t.Parallel()
	tools, mesh := installTools(t), startMesh(t)
	grpcurl := func(args ...string) string {
		t.Helper()
		return run(t, exec.CommandContext(t.Context(), tools.grpcurl, append([]string{"-plaintext", "-max-time", "30"}, args...)...))
	}
	mesh.onEachPort(t, func(t *testing.T, address string) {
		if services := strings.Fields(grpcurl(address, "list")); !slices.Contains(services, "inference.GRPCInferenceService") {
			t.Errorf("it lists %v", services)
		}
		described := grpcurl(address, "describe", "inference.GRPCInferenceService")
		for _, method := range []string{"ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"} {
			if !strings.Contains(described, "rpc "+method+" ( .inference."+method+"Request ) returns ( .inference."+method+"Response );") {
				t.Errorf("it describes no %s:\n%s", method, described)
			}
		}
		var model struct {
			Platform string
			Inputs   []struct {
				Name, Datatype string
				Shape          []string
			}
		}
		parse(t, grpcurl("-d", `{"name": "simple"}`, address, "inference.GRPCInferenceService/ModelMetadata"), &model)
		if model.Platform != "stagemesh_pipeline" || len(model.Inputs) != 2 || model.Inputs[1].Name != "INPUT1" || model.Inputs[1].Datatype != "INT32" || !slices.Equal(model.Inputs[1].Shape, []string{"-1", "16"}) {
			t.Errorf("the model is %+v", model)
		}
		var answer struct {
			ID                string
			RawOutputContents []string
		}
		parse(t, grpcurl("-d", `{"model_name": "simple", "id": "7", "inputs": [
		{"name": "INPUT0", "datatype": "INT32", "shape": ["1", "16"], "contents": {"int_contents": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]}},
		{"name": "INPUT1", "datatype": "INT32", "shape": ["1", "16"], "contents": {"int_contents": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]}}
	]}`, address, "inference.GRPCInferenceService/ModelInfer"), &answer)
		if answer.ID != "7" || len(answer.RawOutputContents) != 2 {
			t.Fatalf("the answer is %+v", answer)
		}
		for output, offset := range []int32{1, -1} {
			raw, err := base64.StdEncoding.DecodeString(answer.RawOutputContents[output])
			if want := counting(offset); err != nil || !slices.Equal(int32s(raw), want) {
				t.Errorf("output %d is %v, not %v: %v", output, int32s(raw), want, err)
			}
		}
	})
}

func TestCurlInfersWithJSONAndBinaryData(t *testing.T) {
	t.Parallel()
	mesh := startMesh(t)
	curl := curl(t)
	ask := func(args ...string) string {
		t.Helper()
		args = append([]string{"--silent", "--show-error", "--fail-with-body", "--max-time", "30"}, args...)
		return run(t, exec.CommandContext(t.Context(), curl, args...))
	}
	url := "http://" + mesh.checkedAddress(t) + "/v2/models/simple/infer"
	type output struct {
		Name       string
		Shape      []int
		Data       []int32
		Parameters map[string]int
	}
	var answer struct {
		ID      string
		Outputs []output
	}
	const row = `"datatype": "INT32", "shape": [1, 16]`
	parse(t, ask(url, "--json", `{"id": "7", "inputs": [
		{"name": "INPUT0", `+row+`, "data": [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]]},
		{"name": "INPUT1", `+row+`, "data": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]}
	]}`), &answer)
	if answer.ID != "7" || len(answer.Outputs) != 2 || !slices.Equal(answer.Outputs[0].Data, counting(1)) || !slices.Equal(answer.Outputs[1].Data, counting(-1)) {
		t.Errorf("the answer is %+v", answer)
	}
	const head = `{"parameters": {"binary_data_output": true}, "inputs": [{"name": "INPUT0", ` + row + `, "parameters": {"binary_data_size": 64}}, {"name": "INPUT1", ` + row + `, "parameters": {"binary_data_size": 64}}], "outputs": [{"name": "OUTPUT1"}]}`
	file := testbed.WriteFile(t, "body", append([]byte(head), raw(append(counting(0), counting(3)...))...))
	said := ask(url, "--data-binary", "@"+file, "-H", "Content-Type: application/octet-stream", "-H", "Inference-Header-Content-Length: "+strconv.Itoa(len(head)))
	if len(said) < 64 {
		t.Fatalf("it is answered %q", said)
	}
	text, bytes := said[:len(said)-64], said[len(said)-64:]
	answer.Outputs = nil
	parse(t, text, &answer)
	if out := answer.Outputs; len(out) != 1 || out[0].Name != "OUTPUT1" || out[0].Parameters["binary_data_size"] != 64 || slices.ContainsFunc(int32s([]byte(bytes)), func(v int32) bool { return v != -3 }) {
		t.Errorf("the answer is %+v and %v", out, int32s([]byte(bytes)))
	}
}

// The documentation says with which versions a mesh is tested.
func TestDocumentationNamesTheVersions(t *testing.T) {
	t.Parallel()
	docs := read(t, "../../../docs/clients.md")
	for file, pinned := range map[string]*regexp.Regexp{
		"python/requirements.txt":       regexp.MustCompile(`(?m)^(?:tritonclient|schemathesis)==(.+)$`),
		"node/package.json":             regexp.MustCompile(`"@grpc/[a-z-]+": "(.+)"`),
		"../../../tools/grpcurl/go.mod": regexp.MustCompile(`fullstorydev/grpcurl v(\S+)`),
		"../../../tools/h2spec/go.mod":  regexp.MustCompile(`summerwind/h2spec v(\S+)\+`),
	} {
		found := pinned.FindAllStringSubmatch(read(t, file), -1)
		if len(found) == 0 {
			t.Errorf("%s pins none", file)
		}
		for _, match := range found {
			if !regexp.MustCompile(`[ |]` + regexp.QuoteMeta(match[1]) + `[, |]`).MatchString(docs) {
				t.Errorf("%s pins %s, of which docs/clients.md has nothing", file, match[1])
			}
		}
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	text := testbed.ReadFile(t, file)
	return string(text)
}

func parse(t *testing.T, text string, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), into); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
}

// counting returns 1 to 16, each with the offset added.
func counting(offset int32) []int32 {
	out := make([]int32, 16)
	for i := range out {
		out[i] = int32(i) + 1 + offset
	}
	return out
}

func int32s(raw []byte) []int32 {
	out := make([]int32, len(raw)/4)
	for i := range out {
		out[i] = int32(binary.LittleEndian.Uint32(raw[4*i:]))
	}
	return out
}

func raw(values []int32) []byte {
	var out []byte
	for _, v := range values {
		out = binary.LittleEndian.AppendUint32(out, uint32(v))
	}
	return out
}
