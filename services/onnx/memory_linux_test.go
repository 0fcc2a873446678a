package onnx_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/services/runners"
)

// processWith returns the folder in /proc of the process that has a variable.
func processWith(t *testing.T, variable string) string {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, folder := range all {
		if text, err := os.ReadFile(filepath.Join(folder, "environ")); err == nil && bytes.Contains(text, []byte(variable)) {
			return folder
		}
	}
	t.Fatalf("no process has %s", variable)
	return ""
}

// resident returns the resident size of a process, in KiB.
func resident(t *testing.T, folder string) int64 {
	t.Helper()
	found := regexp.MustCompile(`(?m)^VmRSS:\s+(\d+) kB$`).FindSubmatch(testbed.ReadFile(t, filepath.Join(folder, "status")))
	n, err := strconv.ParseInt(string(found[1]), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestUnloadedModelsGiveTheirMemoryBack(t *testing.T) {
	t.Parallel()
	const extent, rows = 1024, 64
	f := identity(elementFloat, "n", "")
	f.inputs[0].shape[1], f.outputs[0].shape[1] = extent, extent
	from := "x"
	f.nodes = nil
	for i := range 3 { // 12 MiB of weights
		w, h := fmt.Sprint("w", i), fmt.Sprint("h", i)
		f.weights = append(f.weights, weight{name: w, shape: []int64{extent, extent}, values: make([]float32, extent*extent)})
		f.nodes = append(f.nodes, op{kind: "MatMul", in: []string{from, w}, out: []string{h}})
		from = h
	}
	f.nodes = append(f.nodes, op{kind: "Abs", in: []string{from}, out: []string{"y"}})
	root := t.TempDir()
	data := f.bytes()
	if err := os.WriteFile(filepath.Join(root, "m.onnx"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	e := runners.OnnxEngine{Engine: "onnxruntime", Python: python(t)}
	e.Threads = 1
	e.Replicas = []runners.WorkerReplica{{Env: map[string]string{"MEMORY_OF": t.Name()}}}
	r := startedModels(t, root, 0, e)
	process := processWith(t, "MEMORY_OF="+t.Name())
	x := item(t, "x", make([]float32, rows*extent), rows, extent)
	m := model.Model{ID: "m", Source: "m.onnx"}
	cycle := func() (unloaded int64) {
		t.Helper()
		loaded, err := r.Load(t.Context(), m)
		if err != nil {
			t.Fatal(err)
		}
		if size := loaded.Size.Host; size < int64(len(data)) || size > 2*int64(len(data)) {
			t.Fatalf("a model of %d bytes takes %d", len(data), size)
		}
		if o := run(t, r, m.ID, x)[0]; o.Fault != nil {
			t.Fatal(o.Fault)
		}
		if err := r.Unload(t.Context(), m.ID); err != nil {
			t.Fatal(err)
		}
		return resident(t, process)
	}
	first, most := cycle(), int64(0)
	for range 49 {
		most = max(most, cycle())
	}
	if most > first*6/5 {
		t.Errorf("the worker has up to %d KiB after 50 cycles, and had %d after the first", most, first)
	}
}
