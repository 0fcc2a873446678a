package meshtest

import (
	"testing"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/services/runners"
)

// Parse returns the mesh file of a text, which may use all shipped stages.
func Parse(t testing.TB, text string) *meshfile.File {
	t.Helper()
	f, err := meshfile.Parse("m.yaml", []byte(text), "", runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// Load returns the mesh file at a path, with free ports for its gateway.
func Load(t testing.TB, path string) *meshfile.File {
	t.Helper()
	f, err := meshfile.Load(path, runners.All()...)
	if err != nil {
		t.Fatal(err)
	}
	f.Gateway.Listen, f.Gateway.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	return f
}

// FromFile returns the mesh of a file, which does not run.
func FromFile(t testing.TB, f *meshfile.File, s stagemesh.FileSettings) *stagemesh.Mesh {
	t.Helper()
	m, err := stagemesh.FromFile(f, s)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// Start starts a mesh, which ends with the test.
func Start(t testing.TB, m *stagemesh.Mesh) *stagemesh.Mesh {
	t.Helper()
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { Stop(t, m) })
	return m
}

// Stop stops a mesh.
func Stop(t testing.TB, m *stagemesh.Mesh) {
	t.Helper()
	if err := m.Stop(); err != nil {
		t.Errorf("stop: %v", err)
	}
}
