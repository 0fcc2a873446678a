package clients

import (
	"context"
	"encoding/json"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/sdk/python"
	"github.com/stagemesh/stagemesh/stagehost"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/inproc"
	"github.com/stagemesh/stagemesh/stagehost/runner/worker"
)

// Mesh is a mesh under test. It ends with its test.
type Mesh struct{ *stagemesh.Mesh }

// Start starts a mesh and returns when its models are ready and described.
func Start(t *testing.T) Mesh {
	t.Helper()
	m, err := stagemesh.New(stagemesh.Settings{
		Gateway:  gateway.Settings{Config: gateway.Config{Listen: "127.0.0.1:0"}},
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
	ctx, cancel := context.WithTimeout(t.Context(), testbed.Patience)
	defer cancel()
	if err := m.Start(ctx); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	out := Mesh{m}
	for model, inputs := range map[string]int{"simple": 2, "words": 1} {
		testbed.Eventually(t, "the host of "+model+" has said what it takes", func() bool { return out.inputs(t, model) == inputs })
	}
	return out
}

// Address is the public port's, host:port.
func (m Mesh) Address() string { return strings.TrimPrefix(m.URL(), "http://") }

// inputs counts what a model takes, as the gateway has heard it so far.
func (m Mesh) inputs(t *testing.T, model string) int {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+m.Address()+"/v2/models/"+model, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Close = true
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close() //nolint:errcheck // it was read
	var said struct{ Inputs []struct{ Name string } }
	if err := json.NewDecoder(answer.Body).Decode(&said); err != nil {
		return 0
	}
	return len(said.Inputs)
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
		Command: []string{Tools(t).Python, file}, Replicas: make([]worker.Replica, 1),
		Files: python.Files(), FilesPath: "PYTHONPATH",
		Limits: worker.Limits{StartLimit: testbed.Patience},
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func echo(_ context.Context, item runner.Item) ([]payload.Part, error) { return item.Inputs, nil }

// slow waits until nobody wants its answer any more.
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
