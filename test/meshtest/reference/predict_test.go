package reference

import (
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// predict opens the form of a pipeline.
func predict(t *testing.T, gateway, pipeline string) *page {
	t.Helper()
	document(t, client(t), gateway)
	return predictForm(t, gateway, pipeline)
}

// predictForm is predict of a mesh whose stages are known.
func predictForm(t *testing.T, gateway, pipeline string) *page {
	t.Helper()
	p := browse(t)
	p.do(t, "open", chromedp.Navigate(gateway+"/docs/predict#"+url.PathEscape(pipeline)), chromedp.WaitVisible(chromedp.CSS("#send")))
	return p
}

// send sends the form, and returns the outputs as the page shows them.
func (p *page) send(t *testing.T) string {
	t.Helper()
	p.do(t, "send", chromedp.Click(chromedp.CSS("#send")), chromedp.WaitVisible(chromedp.CSS("#timeline tr")))
	return ask(t, p, "read the outputs", chromedp.Text(chromedp.CSS("#outputs")))
}

// programs run code in a language, their last argument.
var programs = map[string][]string{"curl": {"bash", "-c"}, "python": {"python3", "-c"}, "typescript": {"node", "--input-type=module", "-e"}}

// code runs the call in code that the page shows, in a folder, and returns its output.
func (p *page) code(t *testing.T, language, folder string, program ...string) string {
	t.Helper()
	text := ask(t, p, "read the code", chromedp.Text(chromedp.CSS("#code-"+language)))
	cmd := exec.CommandContext(t.Context(), program[0], append(program[1:], text)...)
	sdk, err := filepath.Abs("../../../sdk/python")
	if err != nil {
		t.Fatal(err)
	}
	cmd.Dir, cmd.Env = folder, append(os.Environ(), "PYTHONPATH="+sdk, "PYTHONDONTWRITEBYTECODE=1", "STAGEMESH_TOKEN=open-sesame")
	if language == "typescript" {
		modules := filepath.Join(folder, "node_modules")
		if err := os.Symlink(filepath.Join(meshtest.TypeScriptClient(t), "node_modules"), modules); err != nil {
			t.Fatal(err)
		}
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v\n%s\n%s", language, err, text, out)
	}
	return string(out)
}

func TestPredictPageSendsAPicture(t *testing.T) {
	t.Parallel()
	m := mesh(t)
	p := predict(t, m.URL(), "digits")
	folder := t.TempDir()
	if err := os.CopyFS(folder, os.DirFS(filepath.Join(digits, "images"))); err != nil {
		t.Fatal(err)
	}
	p.do(t, "choose", chromedp.SetUploadFiles(chromedp.CSS(`#inputs input[type="file"]`), []string{filepath.Join(folder, "01-7.png")}), chromedp.WaitVisible(chromedp.CSS("#inputs img")))
	shown := p.send(t)
	p.picture(t, "predict")
	if words := strings.Fields(shown); len(words) < 3 || !strings.Contains(shown, "labels") || !strings.Contains(shown, "scores") || !strings.Contains(shown, "7\t") {
		t.Errorf("of the image of a seven it shows %q", shown)
	}
	steps := strings.Join(table(t, p, "timeline"), " ")
	if !regexp.MustCompile(`^decode\tqueue .* classify\tqueue .* label\tqueue .* gateway and hops\t.* whole answer\t`).MatchString(steps) {
		t.Errorf("the time went to %q", steps)
	}
	for language, program := range programs {
		if out := p.code(t, language, folder, program...); !strings.Contains(out, "labels") || !strings.Contains(out, "7") {
			t.Errorf("%s prints %s", language, out)
		}
	}
	p.quiet(t, m.URL())
}

func TestPredictPageHasAnExamplePicture(t *testing.T) {
	t.Parallel()
	m := mesh(t)
	p := predict(t, m.URL(), "digits")
	p.do(t, "choose it", chromedp.Click(chromedp.CSS("#examples button")), chromedp.WaitVisible(chromedp.CSS(`#inputs img`)), chromedp.WaitVisible(chromedp.CSS(`#inputs a[download="example.png"]`)))
	if shown := p.send(t); !strings.Contains(shown, "labels") {
		t.Errorf("of the example it shows %q", shown)
	}
	p.picture(t, "predict-example")
	p.quiet(t, m.URL())
}

func TestPredictPageSendsExamplesStreamsAndTensors(t *testing.T) {
	t.Parallel()
	m := mesh(t)
	for pipeline, row := range map[string]struct{ shown, bash, python string }{
		"only-threads":  {`"comments": 2`, `"comments": 2`, "2"},
		"only-spell":    {"abc", "event: done", "abc"},
		"only-shout":    {"HELLO", "HELLO", "HELLO"},
		"only-classify": {"0.", `"datatype":"FP32"`, "FP32"},
	} {
		t.Run(pipeline, func(t *testing.T) {
			t.Parallel()
			p := predict(t, m.URL(), pipeline)
			shown := p.send(t)
			p.picture(t, "predict-"+pipeline)
			if !strings.Contains(shown, row.shown) {
				t.Errorf("it shows %q", shown)
			}
			if out := p.code(t, "curl", t.TempDir(), "bash", "-c"); !strings.Contains(out, row.bash) {
				t.Errorf("curl prints %s", out)
			}
			for _, language := range []string{"python", "typescript"} {
				if out := p.code(t, language, t.TempDir(), programs[language]...); !strings.Contains(out, row.python) {
					t.Errorf("%s prints %s", language, out)
				}
			}
			p.quiet(t, m.URL())
		})
	}
}

// Pieces of a stream with several outputs are printed by name.
func TestPredictPageStreamsSeveralOutputs(t *testing.T) {
	t.Parallel()
	m := mesh(t)
	p := predict(t, m.URL(), "only-letters")
	if shown := p.send(t); !strings.Contains(shown, "letter") || !strings.Contains(shown, "place") {
		t.Errorf("it shows %q", shown)
	}
	for language, wanted := range map[string]string{"python": `letter +'b'\n +place +1`, "typescript": `letter +"b"\n +place +1`} {
		if out := p.code(t, language, t.TempDir(), programs[language]...); !regexp.MustCompile(wanted).MatchString(out) {
			t.Errorf("%s prints %s", language, out)
		}
	}
	p.quiet(t, m.URL())
}

func TestPredictPageShowsFailures(t *testing.T) {
	t.Parallel()
	m := mesh(t)
	p := predict(t, m.URL(), "only-spell")
	p.do(t, "write", chromedp.SetValue(chromedp.CSS("#inputs textarea"), "ab1"), chromedp.Click(chromedp.CSS("#send")), chromedp.WaitVisible(chromedp.CSS("#problem")))
	if problem := ask(t, p, "read", chromedp.Text(chromedp.CSS("#problem"))); !strings.Contains(problem, "INVALID_INPUT: ") || !strings.Contains(problem, "is not a letter") {
		t.Errorf("of a letter that is none it says %q", problem)
	}
	p.quiet(t, m.URL(), "400")

	p = predict(t, m.URL(), "only-threads")
	p.do(t, "write", chromedp.SetValue(chromedp.CSS("#inputs textarea"), "{"), chromedp.Click(chromedp.CSS("#send")), chromedp.WaitVisible(chromedp.CSS("#problem")))
	if problem := ask(t, p, "read", chromedp.Text(chromedp.CSS("#problem"))); !strings.HasPrefix(problem, "The input thread is not JSON") {
		t.Errorf("of half a document it says %q", problem)
	}
	p.quiet(t, m.URL())
}

func TestPredictPageAsksForARequiredToken(t *testing.T) {
	t.Parallel()
	tokens := testbed.WriteFile(t, "tokens", "open-sesame\n")
	m := mesh(t, func(f *meshfile.File) { f.Gateway.TokenFile = tokens })
	document(t, client(t), m.URL(), "Authorization", "Bearer open-sesame")
	p := browse(t)
	p.do(t, "open", chromedp.Navigate(m.URL()+"/docs/predict#only-shout"), chromedp.WaitVisible(chromedp.CSS("#token")))
	p.do(t, "give another token", chromedp.SendKeys(chromedp.CSS("#token"), "simsim\r"), chromedp.WaitVisible(chromedp.CSS("#problem")))
	p.do(t, "give the token", chromedp.SendKeys(chromedp.CSS("#token"), "open-sesame\r"), chromedp.WaitVisible(chromedp.CSS("#send")))
	if shown := p.send(t); !strings.Contains(shown, "HELLO") {
		t.Errorf("it shows %q", shown)
	}
	for language, program := range programs {
		if out := p.code(t, language, t.TempDir(), program...); !strings.Contains(out, "HELLO") {
			t.Errorf("%s prints %s", language, out)
		}
	}
	p.quiet(t, m.URL(), "401")
}

const named = `
mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
stages:
  say: {runner: {echo: {}}, inputs: [{name: text, content_types: [text/plain]}, {name: more, content_types: [text/plain], optional: true}]}
  count: {runner: {echo: {}}, inputs: [{name: x, datatype: INT64, shape: [-1]}], outputs: [{name: x, datatype: INT64, shape: [-1]}]}
pipelines:
  say: {steps: [{name: s, stage: say}]}
  count: {steps: [{name: c, stage: count}]}
`

// An input beside an optional one has its name, and whole numbers that a double cannot hold stay as they are.
func TestPredictPageKeepsNamesAndWholeNumbers(t *testing.T) {
	t.Parallel()
	m := meshtest.Start(t, meshtest.FromFile(t, meshtest.Parse(t, named), stagemesh.FileSettings{}))
	testbed.Eventually(t, "the stages are known", func() bool {
		_, data := get(t, client(t), m.URL()+"/openapi.json")
		return strings.Contains(string(data), `"more"`) && strings.Contains(string(data), "stage.count.answer")
	})
	for pipeline, text := range map[string]string{"say": "hello", "count": "[9007199254740993]"} {
		t.Run(pipeline, func(t *testing.T) {
			t.Parallel()
			p := predictForm(t, m.URL(), pipeline)
			ask(t, p, "empty the input", chromedp.Evaluate[string](`document.querySelector("#inputs textarea").value = ""`))
			p.do(t, "write", chromedp.SendKeys(chromedp.CSS("#inputs textarea"), text))
			if shown := p.send(t); !strings.Contains(shown, text) {
				t.Errorf("it shows %q", shown)
			}
			for language, program := range programs {
				if out := p.code(t, language, t.TempDir(), program...); !strings.Contains(out, strings.Trim(text, "[]")) {
					t.Errorf("%s prints %s", language, out)
				}
			}
			p.quiet(t, m.URL())
		})
	}
}
