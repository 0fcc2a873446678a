// Package clients asks a mesh with clients that others have written for the Open
// Inference Protocol, unchanged. The mesh has the models
//
//	simple  INPUT0 and INPUT1, INT32 [-1, 16], to their sums OUTPUT0 and differences
//	        OUTPUT1: the model of the protocol's sample clients. A Python worker runs it.
//	words   text, to its words one by one as word, as a stream. testdata/words.py, a worker
//	        too, has the words with a meaning of their own
//	echo    its inputs
//	slow    no answer before the deadline
//	one     its inputs; registered, with the alias first, and loaded on demand. So are two and
//	        broken, which cannot be loaded
//
// The mesh of batches_test.go has files and batches for openai (folders python and node). The
// other clients are tritonclient (folder python), @grpc/grpc-js with @grpc/proto-loader
// (folder node), grpcurl, h2spec, schemathesis (folder python) and curl. MLServer is a server: it
// loads testdata/adder.py, again and again, for a modelserver.Runner. The files there pin the
// versions of all but the last two; `make clients` installs them outside the tree. Without them the
// tests fail. The client of sdk/python, with a mesh of its own (sdk_test.go), needs Python alone.
package clients

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/front/oiptest"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/internal/worker"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
	"github.com/stagemesh/stagemesh/sdk/python"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

func TestMain(m *testing.M) { testbed.Tests{Parallel: 4}.Main(m) }

// testMesh ends with its test.
type testMesh struct{ *stagemesh.Mesh }

// startMesh starts a mesh, and waits until its models are ready and described.
func startMesh(t *testing.T) testMesh {
	t.Helper()
	m, err := stagemesh.New(stagemesh.Settings{
		Gateway: gateway.Settings{
			Config:  gateway.Config{Listen: "127.0.0.1:0", GRPCListen: "127.0.0.1:0", ModelControl: true},
			Models:  []model.Model{{ID: "one", Stage: "score"}, {ID: "two", Stage: "score"}, {ID: "broken", Stage: "score"}},
			Aliases: []models.AliasChange{{Name: "first", Route: &meshv1.AliasRoute{Model: "one"}}},
		},
		Registry: &meshfile.RegistryConfig{},
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]runner.Runner{
		"simple": python3(t, "simple.py"),
		"words":  python3(t, "words.py"),
		"echo":   inproc.Each(inproc.Settings{}, echo),
		"slow":   inproc.Each(inproc.Settings{}, slow),
	} {
		add(t, m, name, r)
	}
	if err := m.AddStage(stagemesh.Stage{
		Name: "score", Runner: loadable(), Inputs: []runner.PartSpec{{Name: "x", Datatype: tensor.Int32, Shape: []int64{-1, 16}}},
		Config: stagehost.Config{DrainTimeout: time.Second, Models: &stagehost.ModelSettings{Capacity: 16 << 20, DefaultSize: 1 << 20}},
	}); err != nil {
		t.Fatal(err)
	}
	meshtest.Start(t, m)
	out := testMesh{m}
	for model, inputs := range map[string]int{"simple": 2, "words": 1, "first": 1} {
		testbed.Eventually(t, "the gateway knows the inputs of "+model+"", func() bool { return out.inputs(t, model) == inputs })
	}
	return out
}

// address is the public port's, host:port.
func (m testMesh) address() string { return strings.TrimPrefix(m.URL(), "http://") }

// onEachPort runs a test for the address of each port that serves gRPC.
func (m testMesh) onEachPort(t *testing.T, test func(t *testing.T, address string)) {
	t.Helper()
	for name, url := range map[string]string{"public": m.URL(), "gRPC": m.GRPCURL()} {
		t.Run(name, func(t *testing.T) { test(t, strings.TrimPrefix(url, "http://")) })
	}
}

// inputs returns the number of inputs of a model that the gateway knows.
func (m testMesh) inputs(t *testing.T, model string) int {
	t.Helper()
	r := testbed.Request(t, http.MethodGet, "http://"+m.address()+"/v2/models/"+model, nil)
	r.Close = true
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	var described struct{ Inputs []struct{ Name string } }
	if err := json.NewDecoder(answer.Body).Decode(&described); err != nil {
		return 0
	}
	return len(described.Inputs)
}

// add adds a stage, and the pipeline of that name which is this stage alone.
func add(t *testing.T, m *stagemesh.Mesh, name string, r runner.Runner) {
	t.Helper()
	stage := pipeline.StageName(name)
	if err := m.AddStage(stagemesh.Stage{Name: stage, Runner: r, Config: stagehost.Config{DrainTimeout: time.Second}}); err != nil {
		t.Fatal(err)
	}
	err := m.AddPipeline(pipeline.Pipeline{
		Name: pipeline.Name(name), Timeout: testbed.Patience,
		Steps: []pipeline.Step{{Name: pipeline.StepName(name), Stage: stage}},
	})
	if err != nil {
		t.Fatal(err)
	}
}

// python3 runs a file of testdata with the Python that has numpy.
func python3(t *testing.T, name string) runner.Runner {
	t.Helper()
	file, err := filepath.Abs(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	r, err := worker.New(worker.Settings{
		Command: []string{installTools(t).python, file}, Replicas: make([]worker.Replica, 1),
		Files: python.Files(), FilesPath: "PYTHONPATH",
		Limits: worker.Limits{StartLimit: testbed.Patience},
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// loadable returns a runner whose models answer their inputs.
func loadable() runner.Runner {
	return inproc.NewModels(inproc.Settings{}, inproc.Models{Load: func(_ context.Context, m model.Model) (any, runner.LoadedModel, error) {
		if m.ID == "broken" {
			return nil, runner.LoadedModel{}, errors.New("no such file")
		}
		return nil, runner.LoadedModel{Size: model.Size{Host: 1 << 20}}, nil
	}}, func(_ context.Context, _ any, b runner.Batch, sink runner.Sink) error {
		for i, item := range b.Items {
			if err := sink.SetOutcome(i, runner.Output(item.Inputs...)); err != nil {
				return err
			}
		}
		return nil
	})
}

func echo(_ context.Context, item runner.Item) ([]payload.Part, error) { return item.Inputs, nil }

// slow waits until its item is cancelled.
func slow(ctx context.Context, item runner.Item) ([]payload.Part, error) {
	deadline := time.NewTimer(time.Until(item.Deadline))
	defer deadline.Stop()
	select {
	case <-deadline.C:
	case <-item.Cancelled:
	case <-ctx.Done():
	}
	return nil, context.DeadlineExceeded
}

// checkedAddress returns the address, host:port, of a proxy that checks every REST answer
// of the public port against the protocol. The test fails for an invalid answer, and if
// there was no answer.
func (m testMesh) checkedAddress(t *testing.T) string {
	t.Helper()
	protocol, answers := oiptest.New(t), &atomic.Int64{}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: m.address()})
	transport := http.DefaultTransport.(*http.Transport).Clone()
	proxy.Transport = transport
	proxy.ModifyResponse = func(answer *http.Response) error {
		answers.Add(1)
		body, err := io.ReadAll(answer.Body)
		if err != nil {
			return err
		}
		answer.Body = io.NopCloser(bytes.NewReader(body))
		request, _ := answer.Request.Context().Value(bodyKey{}).([]byte)
		if err := protocol.Check(answer.Request, request, answer.StatusCode, answer.Header, body); err != nil {
			t.Error(err)
		}
		return nil
	}
	server := httptest.NewServer(keepBody(proxy))
	t.Cleanup(func() {
		server.Close()
		transport.CloseIdleConnections()
		if answers.Load() == 0 {
			t.Error("no request went through the proxy")
		}
	})
	return strings.TrimPrefix(server.URL, "http://")
}

// bodyKey is the key of a request's body in its context.
type bodyKey struct{}

// keepBody keeps the body of a request for the check of its answer.
func keepBody(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		r = r.WithContext(context.WithValue(r.Context(), bodyKey{}, body))
		r.Body = io.NopCloser(bytes.NewReader(body))
		next.ServeHTTP(w, r)
	})
}

// tools are the clients, outside the repository.
type tools struct {
	// repository is its root.
	repository string
	// python is the program that has tritonclient, MLServer, schemathesis and numpy, nodeModules the folder of
	// the packages for Node, and grpcurl and h2spec the programs.
	python, nodeModules, grpcurl, h2spec string
}

// installTools returns the clients, and installs them if they are missing.
func installTools(t *testing.T) tools {
	t.Helper()
	root, err := testbed.Repository()
	if err != nil {
		t.Fatal(err)
	}
	paths, err := testbed.Tools("clients")
	if err != nil {
		t.Fatal(err)
	}
	if len(paths) != 4 {
		t.Fatalf("make clients prints %q, not four paths", paths)
	}
	return tools{repository: root, python: paths[0], nodeModules: paths[1], grpcurl: paths[2], h2spec: paths[3]}
}
