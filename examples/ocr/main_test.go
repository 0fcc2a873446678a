package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"image"
	"image/png"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
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

var printedLine = regexp.MustCompile(`^  ([01]\.\d{3})  (.*)\n$`)

// What the mesh reads in each picture of the example is what stands there, and what the package
// reads in one process. Lines that were padded would have other scores.
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
	texts, scores := map[string][]string{}, map[string][]float64{}
	name := ""
	for text := range strings.Lines(out.String()) {
		found := printedLine.FindStringSubmatch(text)
		if found == nil {
			name = strings.TrimSpace(text)
			texts[name] = []string{}
			continue
		}
		score, err := strconv.ParseFloat(found[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		texts[name], scores[name] = append(texts[name], found[2]), append(scores[name], score)
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
		var inOneProcess [][2]any // text and score
		if err := answers.Decode(&inOneProcess); err != nil {
			t.Fatal(err)
		}
		name := filepath.Base(path)
		if !slices.Equal(texts[name], written[name]) {
			t.Errorf("%s: the mesh reads\n%q, and there stands\n%q", name, texts[name], written[name])
		}
		same := len(inOneProcess) == len(texts[name])
		for i := 0; same && i < len(inOneProcess); i++ {
			score, _ := inOneProcess[i][1].(float64)
			same = texts[name][i] == inOneProcess[i][0] && math.Abs(scores[name][i]-score) < 0.001
		}
		if !same {
			t.Errorf("%s: the mesh reads\n%q %v, the package\n%v", name, texts[name], scores[name], inOneProcess)
		}
	}
}

func TestBadPicturesFailAlone(t *testing.T) {
	usePackage(t)
	var large bytes.Buffer
	if err := png.Encode(&large, image.NewGray(image.Rect(0, 0, 6000, 5000))); err != nil {
		t.Fatal(err)
	}
	var thin bytes.Buffer
	if err := png.Encode(&thin, image.NewGray(image.Rect(0, 0, 3000, 2))); err != nil {
		t.Fatal(err)
	}
	sign := filepath.Join("pictures", "sign.png")
	bad := map[string]struct{ data, want string }{
		"text.png":  {"this is no picture", "cannot identify image file"},
		"cut.png":   {string(testbed.ReadFile(t, sign)[:2000]), "image file is truncated"},
		"large.png": {large.String(), "it has 6000x5000 pixels, of at most 25000000 and sides of 1:100"},
		"thin.png":  {thin.String(), "it has 3000x2 pixels"},
	}
	pictures := []string{sign}
	for name, file := range bad {
		pictures = append(pictures, testbed.WriteFile(t, name, file.data))
	}
	var out bytes.Buffer
	err := run(t.Context(), &out, "error", pictures)
	for name, file := range bad {
		if !regexp.MustCompile(regexp.QuoteMeta(name) + `: INVALID_INPUT at stage decode: .*` + file.want).MatchString(fmt.Sprint(err)) {
			t.Errorf("%s: got %v", name, err)
		}
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
