package cli_test

import (
	"path/filepath"
	"strings"
	"testing"
)

const repositories = "../../internal/importtriton/testdata"

func TestImportedRepositoriesPassConfigCheck(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"detect", "encoders", "recognise"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "mesh.yaml")
			if out, err := run(t, "import", "triton", filepath.Join(repositories, name), "-o", path); err != nil || out != "" {
				t.Fatalf("got %q, %v", out, err)
			}
			if out, err := run(t, "config", "check", path); err != nil || !strings.Contains(out, "mesh "+name+" is fine") {
				t.Errorf("%v, %s", err, out)
			}
			if _, err := run(t, "import", "triton", filepath.Join(repositories, name), "-o", path); err == nil || !strings.Contains(err.Error(), "is there already") {
				t.Errorf("a file was overwritten: %v", err)
			}
		})
	}
}

func TestImportPrintsWithoutAFile(t *testing.T) {
	t.Parallel()
	out, err := run(t, "import", "triton", filepath.Join(repositories, "detect"))
	if want := `model: "` + filepath.ToSlash(filepath.Join(repositories, "detect/detector/3/model.onnx")); err != nil || !strings.Contains(out, want) {
		t.Errorf("%v, %s", err, out)
	}
	if _, err := run(t, "import", "triton", t.TempDir()); err == nil || !strings.Contains(err.Error(), "give the model repository of a Triton server") {
		t.Errorf("got %v", err)
	}
	if _, err := run(t, "import", "triton"); err == nil || err.Error() != "give one DIR, the model repository; see stagemesh import triton --help" {
		t.Errorf("got %v", err)
	}
}
