package testbed

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// SecretFile returns the path of a file with the text.
func SecretFile(t testing.TB, text string) string {
	t.Helper()
	return WriteFile(t, "secret", text)
}

// WriteFile returns the path of a file of that name with the text, in a folder of its own.
func WriteFile[T string | []byte](t testing.TB, name string, text T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// MeshFile returns the path of a mesh file with the text.
func MeshFile(t testing.TB, text string) string {
	t.Helper()
	return WriteFile(t, "mesh.yaml", text)
}

// CopyFolder copies a folder, changes one of its files, and returns the path of that.
func CopyFolder(t testing.TB, from fs.FS, name string, change func(text string) string) string {
	t.Helper()
	folder := t.TempDir()
	path := filepath.Join(folder, name)
	if err := os.CopyFS(folder, from); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(change(string(ReadFile(t, path)))), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// ReadFile returns what a file has.
func ReadFile(t testing.TB, path string) []byte {
	t.Helper()
	out, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return out
}
