package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// A broker that ends while a queue is being made forgets the clock that all brokers of a
// process share.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

// usePackage makes the Python that has rapidocr the first one of the PATH.
func usePackage(t *testing.T) {
	t.Helper()
	python, err := testbed.Tools("models-python")
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", filepath.Dir(python[0])+string(os.PathListSeparator)+os.Getenv("PATH"))
}

var printedLine = regexp.MustCompile(`^  [01]\.\d{3}  (.*)$`)

func TestTextsAreThoseOfThePackageInOneProcess(t *testing.T) {
	usePackage(t)
	pictures, err := filepath.Glob(filepath.Join("pictures", "*.*"))
	if err != nil || len(pictures) != 10 {
		t.Fatalf("there are %d pictures, %v", len(pictures), err)
	}
	var out bytes.Buffer
	if err := run(t.Context(), &out, "error", nil); err != nil {
		t.Fatal(err)
	}
	got := map[string][]string{}
	name := ""
	for text := range strings.Lines(out.String()) {
		text = strings.TrimSuffix(text, "\n")
		if found := printedLine.FindStringSubmatch(text); found != nil {
			got[name] = append(got[name], found[1])
		} else {
			name = text
			got[name] = []string{}
		}
	}
	whole, err := exec.CommandContext(t.Context(), "python3", append([]string{"testdata/whole.py"}, pictures...)...).Output()
	if err != nil {
		t.Fatal(err)
	}
	var written map[string][]string
	if err := json.Unmarshal(testbed.ReadFile(t, filepath.Join("testdata", "texts.json")), &written); err != nil {
		t.Fatal(err)
	}
	answers := json.NewDecoder(bytes.NewReader(whole))
	for _, path := range pictures {
		var inOneProcess []string
		if err := answers.Decode(&inOneProcess); err != nil {
			t.Fatal(err)
		}
		name := filepath.Base(path)
		if !slices.Equal(got[name], inOneProcess) {
			t.Errorf("%s: the mesh reads\n%q, the package\n%q", name, got[name], inOneProcess)
		}
		if !slices.Equal(got[name], written[name]) {
			t.Errorf("%s: the mesh reads\n%q, and there stands\n%q", name, got[name], written[name])
		}
	}
}

func TestFileThatIsNoPictureFailsAlone(t *testing.T) {
	usePackage(t)
	text := testbed.WriteFile(t, "text.png", "this is no picture")
	var out bytes.Buffer
	err := run(t.Context(), &out, "error", []string{text, filepath.Join("pictures", "sign.png")})
	if err == nil || !strings.Contains(err.Error(), "text.png: ") || !strings.Contains(err.Error(), "cannot identify image file") {
		t.Errorf("got %v", err)
	}
	if !strings.Contains(out.String(), "PLATFORM 9") {
		t.Errorf("the other picture is\n%s", out.String())
	}
}

func TestMissingPackageIsNamedWithTheCommand(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	err := run(t.Context(), &bytes.Buffer{}, "error", nil)
	if err == nil || !strings.Contains(err.Error(), "python3 -m pip install -r examples/ocr/requirements.txt") {
		t.Errorf("got %v", err)
	}
}
