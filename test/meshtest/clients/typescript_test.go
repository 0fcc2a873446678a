package clients

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh/internal/front/fronttest"
	"github.com/stagemesh/stagemesh/internal/front/port"
	"github.com/stagemesh/stagemesh/internal/request"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// The client for TypeScript keeps the promises of the one for Python, with fetch over HTTP/1.1 and over HTTP/2.
func TestClientOfTheTypeScriptSDKKeepsItsPromises(t *testing.T) {
	t.Parallel()
	for _, transport := range []string{"fetch", "http2"} {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			mesh := startSecureMesh(t)
			cmd := nodeTest(t, "promises.test.mjs", transport)
			cmd.Env = append(cmd.Env, "MESH=https://"+mesh.listen, "MESH_CA="+mesh.authority, "MESH_TOKEN=sesame")
			if transport == "fetch" {
				cmd.Env = append(cmd.Env, "NODE_EXTRA_CA_CERTS="+mesh.authority)
			}
			if said, err := mesh.run(t, cmd); err != nil {
				t.Errorf("%v\n%s", err, said)
			}
		})
	}
}

func TestTypeScriptClientRetriesWhatMayMend(t *testing.T) {
	t.Parallel()
	for _, transport := range []string{"fetch", "http2"} {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			root, err := testbed.Repository()
			if err != nil {
				t.Fatal(err)
			}
			cmd := nodeTest(t, "retries.test.mjs", transport)
			cmd.Env = append(cmd.Env, "FRONT="+serveScripts(t), "FAULTS="+filepath.Join(root, "docs", "faults.md"))
			if said, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, said)
			}
		})
	}
}

// The client for TypeScript tells what is wrong with a connection, and tries again what may mend.
func TestTypeScriptClientSaysWhatIsWrongWithAConnection(t *testing.T) {
	t.Parallel()
	mesh := startSecureMesh(t)
	trusted, foreign := testbed.NewAuthority(t), testbed.NewAuthority(t)
	folder := t.TempDir()
	keep := func(name string) func(cert, key string) {
		return func(cert, key string) {
			for from, suffix := range map[string]string{cert: ".pem", key: ".key"} {
				if err := os.WriteFile(filepath.Join(folder, name+suffix), testbed.ReadFile(t, from), 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	keep("good")(trusted.Certificate("127.0.0.1"))
	keep("old")(trusted.Expired("127.0.0.1"))
	keep("other")(trusted.Certificate("gateway.example"))
	keep("foreign")(foreign.Certificate("127.0.0.1"))
	for _, transport := range []string{"fetch", "http2"} {
		cmd := nodeTest(t, "connections.test.mjs", transport)
		cmd.Env = append(cmd.Env, "MESH=https://"+mesh.listen, "CA="+trusted.File, "FILES="+folder)
		if transport == "fetch" {
			cmd.Env = append(cmd.Env, "NODE_EXTRA_CA_CERTS="+trusted.File)
		}
		if said, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", transport, err, said)
		}
	}
}

// nodeTest returns a test of the folder typescript, which fails by its exit code.
func nodeTest(t *testing.T, name, transport string) *exec.Cmd {
	t.Helper()
	folder := meshtest.TypeScriptClient(t)
	for _, file := range []string{name, "support.mjs"} {
		if err := os.WriteFile(filepath.Join(folder, file), testbed.ReadFile(t, filepath.Join("typescript", file)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "node", name)
	cmd.Dir, cmd.Env = folder, os.Environ()
	if transport == "http2" {
		cmd.Env = append(cmd.Env, "HTTP2=1")
	}
	return cmd
}

// npm packs what was compiled, and what must be with it.
func TestPackageOfTheTypeScriptClientIsWhole(t *testing.T) {
	t.Parallel()
	packed := map[string]bool{}
	for _, file := range meshtest.PackedFiles(t) {
		packed[file] = true
	}
	root := filepath.Join("..", "..", "..")
	for _, wanted := range []string{"package.json", "README.md", "LICENSE", "dist/index.js", "dist/gen/stagemesh/inference/v1/inference_pb.js"} {
		if !packed[wanted] {
			t.Errorf("%s is not packed", wanted)
		}
	}
	for file := range packed {
		declarations, isCode := strings.CutSuffix(file, ".js")
		switch isDocument := filepath.Dir(file) == "."; {
		case isCode && !packed[declarations+".d.ts"]:
			t.Errorf("%s has no types", file)
		case !isDocument && !strings.HasPrefix(file, "dist/") || strings.HasSuffix(file, ".map"):
			t.Errorf("%s is packed", file)
		}
	}
	if own, all := read(t, filepath.Join(root, "sdk", "typescript", "LICENSE")), read(t, filepath.Join(root, "LICENSE")); own != all {
		t.Error("the licence of sdk/typescript is not the repository's")
	}
}

// The types of the client are those that the guide names: tsc accepts typescript/types.ts, and each
// line of it that is marked as an error is one.
func TestTypesOfTheTypeScriptClient(t *testing.T) {
	t.Parallel()
	paths, err := testbed.Tools("typescript-node")
	if err != nil {
		t.Fatal(err)
	}
	folder := meshtest.TypeScriptClient(t)
	if err := os.WriteFile(filepath.Join(folder, "types.mts"), []byte(read(t, "typescript/types.ts")), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "node", filepath.Join(paths[0], "typescript", "bin", "tsc"),
		"--noEmit", "--strict", "--exactOptionalPropertyTypes", "--noUncheckedIndexedAccess",
		"--target", "es2022", "--module", "nodenext", "--lib", "es2022,dom,dom.asynciterable", "types.mts")
	cmd.Dir = folder
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, said)
	}
}

// scripts is a call.Caller whose pipelines follow their names. The input "id" of a request names a series of tries.
//
//	fails:REASON     the fault of fronttest
//	flaky:N:REASON   fails N times, then answers the ID
//	final:N:REASON   the same, with faults that are final
//	paused:N:MS      the same, with QUEUE_FULL and a pause
//	late:N:REASON    flaky, after the chunks "one " and "two "
//	keyless          is NOT_SUPPORTED for requests with a key
//	waits            has no answer until the caller leaves
//	shuffled         answers even numbers later than odd ones
//	seen             what came of a series, without this request
type scripts struct {
	fronttest.Caller

	mu   sync.Mutex
	seen map[string][]map[string]any
}

func serveScripts(t *testing.T) string {
	t.Helper()
	s := &scripts{seen: map[string][]map[string]any{}}
	s.Answer = s.answer
	handler, err := port.PublicHandler(port.PublicSettings{Caller: s})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(nil)
	server.Config = port.NewServer(handler, slog.New(slog.DiscardHandler))
	server.Start()
	t.Cleanup(server.Close)
	return server.URL
}

// Stream is answer, after chunks where the pipeline has them.
func (s *scripts) Stream(ctx context.Context, r *request.Request, emit func(request.Chunk) error) (*request.Response, error) {
	if strings.HasPrefix(r.Pipeline, "late:") {
		for _, chunk := range fronttest.Words("one ", "two ") {
			if err := emit(chunk); err != nil {
				return nil, err
			}
		}
	}
	return s.Infer(ctx, r)
}

func (s *scripts) answer(ctx context.Context, r *request.Request) (*request.Response, error) {
	id := string(r.Inputs[0].Blob.Data)
	kind, rest, _ := strings.Cut(r.Pipeline, ":")
	if kind == "seen" {
		return s.report(id)
	}
	before := s.record(id, r)
	count, argument, _ := strings.Cut(rest, ":")
	n, _ := strconv.Atoi(count)
	answer := fronttest.Respond(payload.OfBlob("id", "text/plain", []byte(id)))
	switch {
	case kind == "fails":
		return nil, fronttest.Fault(fault.Reason(rest))
	case kind == "keyless" && r.IdempotencyKey != "":
		return nil, fault.New(fault.NotSupported, "there are no keys")
	case kind == "waits":
		<-ctx.Done()
		return nil, context.Cause(ctx)
	case kind == "shuffled":
		if number, err := strconv.Atoi(id); err == nil && number%2 == 0 {
			<-time.After(5 * time.Millisecond) // the answers of others overtake this one
		}
		return answer, nil
	case before >= n:
		return answer, nil
	case kind == "paused":
		pause, err := time.ParseDuration(argument + "ms")
		if err != nil {
			return nil, err
		}
		return nil, fault.New(fault.QueueFull, "wait").WithRetryAfter(pause)
	case kind == "final":
		return nil, fault.New(fault.Reason(argument), "again and again").WithMetadata("final", "true")
	}
	return nil, fault.Newf(fault.Reason(argument), "try %d", before)
}

// record notes a request, and returns how many of its series came before.
func (s *scripts) record(id string, r *request.Request) int {
	one := map[string]any{"key": r.IdempotencyKey, "timeout_ms": r.Timeout.Milliseconds()}
	if len(r.Outputs) > 0 {
		one["parameters"], one["steps"], one["outputs"] = plain(r.Parameters), map[string]any{}, r.Outputs
		one["priority"], one["durability"], one["metadata"] = r.Priority, r.Durability, r.Metadata
		one["wait_for_capacity"], one["complete"], one["trace"] = r.WaitForCapacity, r.IsComplete, r.Trace.Parent
		for step, options := range r.Steps {
			one["steps"].(map[string]any)[string(step)] = plain(options.Parameters)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen[id] = append(s.seen[id], one)
	return len(s.seen[id]) - 1
}

func (s *scripts) report(id string) (*request.Response, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := s.seen[id]
	if seen == nil {
		seen = []map[string]any{}
	}
	text, err := json.Marshal(seen)
	return fronttest.Respond(payload.OfBlob("seen", "application/json", text)), err
}

// plain returns parameters as JSON has them.
func plain(parameters payload.Parameters) map[string]any {
	out := map[string]any{}
	for name, value := range parameters {
		out[name] = value.Any()
	}
	return out
}
