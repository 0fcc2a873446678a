package importtriton_test

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/importtriton"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/runners"
)

var update = flag.Bool("update", false, "write the golden files")

// The repositories have the shapes of common ensembles, and each golden file is a valid mesh.
func TestRepositoriesBecomeMeshFiles(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"detect", "encoders", "recognise"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := importtriton.Import(filepath.Join("testdata", name), "testdata")
			if err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", name+".yaml")
			if *update {
				if err := os.WriteFile(golden, got, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if want := testbed.ReadFile(t, golden); string(got) != string(want) {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
			if _, err := meshfile.Parse(golden, got, "testdata", runners.All()...); err != nil {
				t.Error(err)
			}
		})
	}
}

// repository writes each file below a new folder.
func repository(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for path, text := range files {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

const ensemble = "platform: \"ensemble\"\ninput { name: \"x\" }\noutput { name: \"y\" }\nensemble_scheduling {\n"

// step is one of the ensemble, of the model a, from the tensor in to the tensor out.
func step(in, out string) string {
	return `  step { model_name: "a" input_map { key: "i" value: "` + in + `" } output_map { key: "o" value: "` + out + "\" } }\n"
}

func TestMistakesAreReportedWithTheirPlaces(t *testing.T) {
	t.Parallel()
	const a = `backend: "python"`
	for name, row := range map[string]struct {
		files map[string]string
		want  string
	}{
		"no folder":      {nil, ": no folder in it has a config.pbtxt; give the model repository"},
		"no config":      {map[string]string{"a/1/model.onnx": ""}, "a/config.pbtxt: no such file or directory; write one"},
		"no text format": {map[string]string{"a/config.pbtxt": "backend: \"python\"\ninput [ { name \"x\" } ]\n"}, "a/config.pbtxt:2:11: "},
		"no type":        {map[string]string{"a/config.pbtxt": "\ninput { data_type: TYPE_FLOAT }\n"}, "a/config.pbtxt:2:20: "},
		"an unknown model": {
			map[string]string{"e/config.pbtxt": ensemble + step("x", "y") + "}"},
			`e/config.pbtxt:5: the repository has no model "a"; add its folder`,
		},
		"an ensemble in one": {
			map[string]string{"a/config.pbtxt": ensemble + "}", "E/config.pbtxt": ensemble + step("x", "y") + "}"},
			"E/config.pbtxt:5: a is an ensemble, and pipelines do not nest",
		},
		"no step":       {map[string]string{"a/config.pbtxt": ensemble + "}"}, "a/config.pbtxt:1: an ensemble has steps"},
		"no scheduling": {map[string]string{"a/config.pbtxt": `platform: "ensemble"`}, "a/config.pbtxt:1: an ensemble has steps"},
		"a tensor of nobody": {
			map[string]string{"a/config.pbtxt": a, "e/config.pbtxt": ensemble + step("x", "m") + step("n", "y") + "}"},
			`e/config.pbtxt:6: no step makes the tensor "n", and it is no input of the ensemble; add it to an output_map`,
		},
		"an output of nobody": {
			map[string]string{"a/config.pbtxt": a, "e/config.pbtxt": ensemble + step("x", "m") + "}"},
			`e/config.pbtxt:3: no step makes the tensor "y"`,
		},
		"a tensor of two": {
			map[string]string{"a/config.pbtxt": a, "e/config.pbtxt": ensemble + step("x", "y") + step("x", "y") + "}"},
			`e/config.pbtxt:3: the tensor "y" is made twice; give that of a another name`,
		},
		"a cycle": {
			map[string]string{"a/config.pbtxt": a, "e/config.pbtxt": ensemble + step("x", "y") + step("n", "m") + step("m", "n") + "}"},
			"e/config.pbtxt:5: a cycle: the steps a and a wait for each other's tensors",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := repository(t, row.files)
			if out, err := importtriton.Import(dir, dir); err == nil || !strings.HasPrefix(strings.TrimPrefix(err.Error(), "open "), dir) || !strings.Contains(err.Error(), row.want) {
				t.Errorf("got  %v, %s\nwant %s", err, out, row.want)
			}
		})
	}
}

func TestNamesAreUsedOnceAndLinksFollowed(t *testing.T) {
	t.Parallel()
	elsewhere := repository(t, map[string]string{"a/config.pbtxt": "backend: \"python\"\n", "a/7/model.py": ""})
	dir := repository(t, map[string]string{"_e/config.pbtxt": ensemble + step("x", "y") + "}", "e/config.pbtxt": ensemble + step("x", "y") + "}"})
	if err := os.Symlink(filepath.Join(elsewhere, "a"), filepath.Join(dir, "a")); err != nil {
		t.Fatal(err)
	}
	out, err := importtriton.Import(dir, dir)
	if err != nil || !strings.Contains(string(out), "\n  e:\n") || !strings.Contains(string(out), "\n  e-2:\n") || !strings.Contains(string(out), "a/7/model.py") {
		t.Errorf("got %v\n%s", err, out)
	}
}

// Names of parts and of an answer are those that callers and models of Triton have.
func TestStepsGetTheTensorsOfTheEnsemble(t *testing.T) {
	t.Parallel()
	const models = "backend: \"python\"\ninput { name: \"i\" data_type: TYPE_FP32 }\noutput { name: \"o\" data_type: TYPE_FP32 }\n"
	named := func(in, out string) string {
		return strings.NewReplacer(`"i"`, `"`+in+`"`, `"o"`, `"`+out+`"`).Replace(models)
	}
	for name, row := range map[string]struct{ steps, want string }{
		"a chain": {
			`step { model_name: "xm" input_map { key: "x" value: "x" } output_map { key: "m" value: "m" } } ` +
				`step { model_name: "my" input_map { key: "m" value: "m" } output_map { key: "y" value: "y" } }`,
			"      - name: xm\n        stage: xm\n      - name: my\n        stage: my\n",
		},
		"an answer of another name": {
			step("x", "y"),
			"      - name: rename-a\n        parallel: {branches: {a: {steps: [{name: a, stage: a, inputs: {i: x}}], give: {y: o}}}}\n    outputs: [y]\n",
		},
		"an answer of an earlier step": {
			`step { model_name: "xy" input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } ` + step("y", "m"),
			"      - name: xy\n        stage: xy\n      - name: rename-a\n        parallel: {branches: {a: {steps: [{name: a, stage: a, inputs: {i: y}}], give: {m: o}}}}\n    outputs: [y]\n",
		},
		"a part that a later one hides": {
			step("x", "m") + step("m", "n") + `step { model_name: "two" input_map { key: "i" value: "m" } input_map { key: "j" value: "n" } output_map { key: "y" value: "y" } }`,
			"      - name: rename-a\n        parallel: {branches: {a: {steps: [{name: a, stage: a, inputs: {i: x}}], give: {m: o}}}}\n" +
				"      - name: rename-a-2\n        parallel: {branches: {a-2: {steps: [{name: a-2, stage: a, inputs: {i: m}}], give: {n: o}}}}\n" +
				"      - name: rename-two\n        parallel: {branches: {two: {steps: [{name: two, stage: two, inputs: {i: m, j: n}}], give: {y: y}}}}\n    outputs: [y]\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := repository(t, map[string]string{
				"a/config.pbtxt": models, "xm/config.pbtxt": named("x", "m"), "my/config.pbtxt": named("m", "y"), "xy/config.pbtxt": named("x", "y"),
				"two/config.pbtxt": `backend: "python"`, "e/config.pbtxt": ensemble + row.steps + "}",
			})
			out, err := importtriton.Import(dir, dir)
			if err != nil {
				out = []byte(err.Error())
			}
			if want := "\npipelines:\n  e:\n    steps:\n" + row.want; !strings.HasSuffix(string(out), want) {
				t.Errorf("got\n%s\nwant\n%s", out, want)
			}
			if err == nil {
				if _, err := meshfile.Parse("mesh.yaml", out, dir, runners.All()...); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
