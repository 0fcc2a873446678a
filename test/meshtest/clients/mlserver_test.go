package clients

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stagemesh/stagemesh/internal/modelserver"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/stagehost/runner"
	"github.com/stagemesh/stagemesh/stagehost/runner/runnertest"
)

func TestMLServerIsAModelLoader(t *testing.T) {
	t.Parallel()
	repository := t.TempDir()
	address := startMLServer(t, repository)
	runnertest.TestRepository(t, func(t *testing.T, slots int) runner.Runner {
		r, err := modelserver.New(modelserver.Settings{Address: address, Control: modelserver.ControlRepository, Concurrency: slots})
		if err != nil {
			t.Fatal(err)
		}
		r.SetHost(runner.HostInfo{Models: &model.Size{}})
		return &mlServer{r, repository}
	})
}

// mlServer writes the models that it loads into the server's repository.
type mlServer struct {
	*modelserver.Runner
	repository string
}

// Load implements runner.ModelLoader.
func (r *mlServer) Load(ctx context.Context, m model.Model) (runner.LoadedModel, error) {
	settings, err := json.Marshal(map[string]any{
		"name": m.ID, "implementation": "adder.Adder",
		"parameters": map[string]any{"extra": map[string]string{"add": m.Options.Map()["add"], "source": m.Source}},
	})
	if err != nil {
		return runner.LoadedModel{}, err
	}
	folder := filepath.Join(r.repository, fmt.Sprintf("%x", m.ID))
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return runner.LoadedModel{}, err
	}
	if err := os.WriteFile(filepath.Join(folder, "model-settings.json"), settings, 0o600); err != nil {
		return runner.LoadedModel{}, err
	}
	return r.Runner.Load(ctx, m)
}

// startMLServer starts an MLServer until the test ends, and returns its address.
func startMLServer(t *testing.T, repository string) string {
	t.Helper()
	tools := installTools(t)
	ports, err := testbed.FreePorts(2)
	if err != nil {
		t.Fatal(err)
	}
	var log testbed.Log
	server := exec.CommandContext(t.Context(), filepath.Join(filepath.Dir(tools.python), "mlserver"), "start", repository)
	server.Stdout, server.Stderr = &log, &log
	server.Env = append(os.Environ(),
		"PYTHONPATH="+filepath.Join(tools.repository, "test/meshtest/clients/testdata"), "PYTHONDONTWRITEBYTECODE=1",
		"MLSERVER_HOST=127.0.0.1", "MLSERVER_HTTP_PORT="+strconv.Itoa(ports[0]), "MLSERVER_GRPC_PORT="+strconv.Itoa(ports[1]),
		"MLSERVER_METRICS_ENDPOINT=", "MLSERVER_PARALLEL_WORKERS=0", "MLSERVER_LOAD_MODELS_AT_STARTUP=false", "MLSERVER_DEBUG=false")
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = server.Wait() // the end of the test has killed it
		if t.Failed() {
			t.Logf("MLServer:\n%s", log.String())
		}
	})
	address := "127.0.0.1:" + strconv.Itoa(ports[1])
	testbed.Eventually(t, "MLServer listens", func() bool {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
		return err == nil && conn.Close() == nil
	})
	return address
}
