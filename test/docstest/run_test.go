package docstest

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/sdk/python"
	"github.com/stagemesh/stagemesh/services/cli"
	"github.com/stagemesh/stagemesh/services/runners"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// frame is the mesh around blocks that are a part of one. A block replaces sections of it, such as
// jobs.pools; a block that is a list is steps.
const frame = `
mesh: page
gateway: {metadata: [user]}
stages:
  decode: {runner: {echo: {}}}
  classify: {runner: {echo: {}}}
  label: {runner: {echo: {}}}
  ocr: {runner: {echo: {}}}
  llm: {runner: {echo: {}}}
  template: {runner: {echo: {}}}
  rank: {runner: {echo_models: {}}, models: {}}
  score: {runner: {echo_models: {}}, models: {}}
pipelines:
  digits: {steps: [{name: decode, stage: decode}, {name: classify, stage: classify}, {name: label, stage: label}]}
jobs:
  pools: {main: {target: {pipelines: [digits]}}, llm: {target: {http: {url: "http://llm:8000"}}}}
  queues: {nightly: {pool: main}}
`

// program is the program that pages call stagemesh.
var program testbed.Program

// pageRun runs the blocks of one page in order, in a folder with the repository's files and those that
// blocks write.
type pageRun struct {
	page, folder string
	meshes       map[string]*stagemesh.Mesh
	printed      []string
	job          string // the last ID of a job that was printed
}

// Every block of these pages passes its check and runs, or has a rule that says why it does not.
func TestBlocksOfThePagesRun(t *testing.T) {
	t.Parallel()
	modules := filepath.Join(meshtest.TypeScriptClient(t), "node_modules")
	program.Path(t)
	meshes := map[string]*stagemesh.Mesh{}
	for _, name := range []string{"digits", "text-stream", "nightly"} {
		meshes[name] = startFile(t, meshtest.Load(t, filepath.Join(repository, "examples", name, "mesh.yaml")))
	}
	digits := filepath.Join(repository, "examples", "digits")
	meshes["jobs"] = startFile(t, parse(t, digits, merge(t, read(t, "examples/digits/mesh.yaml"), firstBlock(t, "docs/jobs.md", "yaml", "main:"), firstBlock(t, "docs/jobs.md", "yaml", "queue: nightly\n"))))
	workers := t.TempDir()
	for name, text := range map[string]string{
		"ink.py":    firstBlock(t, "docs/tutorial.md", "python", "class Ink"),
		"linear.py": firstBlock(t, "docs/workers.md", "python", "class Linear"),
		"iris.json": "[2, 3]", "iris2.json": "[3, 4]", "iris3.json": "[4, 5]", "iris4.json": "[5, 6]",
	} {
		writeFile(t, filepath.Join(workers, name), text)
	}
	meshes["ink"] = startFile(t, parse(t, workers, firstBlock(t, "docs/tutorial.md", "yaml", "ink:")))
	meshes["models"] = startFile(t, parse(t, workers, merge(t, "mesh: m\n", firstBlock(t, "docs/models.md", "yaml", "linear.py"), firstBlock(t, "docs/models.md", "yaml", "aliases:"))))

	for _, p := range pages(t) {
		if filepath.Dir(p.path) != "docs" && p.path != "README.md" && p.path != "sdk/typescript/README.md" {
			continue
		}
		t.Run(p.path, func(t *testing.T) {
			t.Parallel()
			g := &pageRun{page: p.path, folder: t.TempDir(), meshes: meshes}
			g.prepare(t, modules)
			found, _ := blocks(p.text)
			for _, b := range found {
				g.check(t, b)
			}
			for _, r := range rules {
				if r.page == p.path && !slices.ContainsFunc(found, func(b block) bool { return ruleOf(p.path, b) == r }) {
					t.Errorf("rules_test.go: no block needs the rule with has %q: delete it, or correct its text", r.has)
				}
			}
		})
	}
	tests := testCode(t)
	for _, r := range rules {
		if _, err := os.Stat(filepath.Join(repository, r.page)); err != nil || r.mesh != "" && meshes[r.mesh] == nil {
			t.Errorf("a rule names the page %s and the mesh %q", r.page, r.mesh)
		}
		for _, word := range strings.FieldsFunc(r.skip, func(c rune) bool { return strings.ContainsRune(" ,;", c) }) {
			_, err := os.Stat(filepath.Join(repository, word))
			if strings.Contains(word, "/") && err != nil || testName.MatchString(word) && !strings.Contains(tests, "func "+word+"(") {
				t.Errorf("the rule for %q of %s names %s, which is not there", r.has, r.page, word)
			}
		}
	}
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// parse returns a mesh file whose paths are relative to a folder.
func parse(t *testing.T, folder, text string) *meshfile.File {
	t.Helper()
	f, err := meshfile.Parse("mesh.yaml", []byte(text), folder, runners.All()...)
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return f
}

// startFile starts the mesh of a file with ports of its own.
func startFile(t *testing.T, f *meshfile.File) *stagemesh.Mesh {
	t.Helper()
	f.Gateway.Listen, f.Gateway.Admin.Listen, f.NATS.Listen, f.NATS.StoreDir = "127.0.0.1:0", "127.0.0.1:0", "", ""
	return meshtest.Start(t, meshtest.FromFile(t, f, stagemesh.FileSettings{Dispatcher: true}))
}

// merge returns a mesh file whose sections, such as jobs.pools, the parts replace.
func merge(t *testing.T, file string, parts ...string) string {
	t.Helper()
	var out map[string]any
	err := yaml.Unmarshal([]byte(file), &out)
	for _, text := range parts {
		var part map[string]any
		if err == nil {
			err = yaml.Unmarshal([]byte(text), &part)
		}
		for name, section := range part {
			above, isSection := out[name].(map[string]any)
			below, hasSections := section.(map[string]any)
			if isSection && hasSections {
				maps.Copy(above, below)
			} else {
				out[name] = section
			}
		}
	}
	merged, failed := yaml.Marshal(out)
	if err != nil || failed != nil {
		t.Fatal(err, failed)
	}
	return string(merged)
}

// prepare fills the folder, in which the blocks find the files that their pages name.
func (g *pageRun) prepare(t *testing.T, modules string) {
	t.Helper()
	root, err := filepath.Abs(repository)
	if err != nil {
		t.Fatal(err)
	}
	links := map[string]string{
		"examples": filepath.Join(root, "examples"), "README.md": filepath.Join(root, "README.md"), "node_modules": modules,
		"models": filepath.Join(root, "internal", "importtriton", "testdata", "detect"), "stagemesh": program.Path(t),
		"digits.onnx": filepath.Join(root, "examples", "digits", "digits.onnx"), "classify.onnx": filepath.Join(root, "examples", "digits", "digits.onnx"),
	}
	for name, target := range links {
		if err := os.Symlink(target, filepath.Join(g.folder, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.CopyFS(filepath.Join(g.folder, "sdk"), python.Files()); err != nil {
		t.Fatal(err)
	}
	scores := `{"scores": [0, 0.1, 0, 0, 0.7, 0, 0, 0, 0, 0.2]}` + "\n"
	if g.page == "docs/jobs.md" {
		scores = `{"inputs": [{"name": "image", "content_type": "image/png", "data": "AA=="}]}` + "\n"
	}
	for name, text := range map[string]string{"requests.ndjson": scores, "webhook-secret": "whsec_" + strings.Repeat("A", 43) + "=", "llm-token": "token", ".curlrc": "silent\nshow-error\n"} {
		writeFile(t, filepath.Join(g.folder, name), text)
	}
}

// ruleOf returns the rule of a block, the first of its page that has a text of it, or none.
func ruleOf(page string, b block) rule {
	text := strings.Join(b.lines, "\n") + "\n"
	for _, r := range rules {
		if r.page == page && strings.Contains(text, r.has) {
			return r
		}
	}
	return rule{}
}

// interpreters run a file, their last argument with this ending.
var interpreters = map[string][]string{"python": {"python3", "-B", ".py"}, "js": {"node", ".mjs"}, "sh": {"bash", "-euo", "pipefail", ".sh"}}

// check checks a block in the way of its language.
func (g *pageRun) check(t *testing.T, b block) {
	t.Helper()
	r, text := ruleOf(g.page, b), strings.Join(b.lines, "\n")+"\n"
	at := fmt.Sprintf("%s:%d", g.page, b.line)
	if r.file != "" {
		writeFile(t, filepath.Join(g.folder, r.file), text)
	}
	if b.language == "sh" {
		checkFlags(t, at, b.lines)
	}
	if r.skip != "" {
		return
	}
	switch b.language {
	case "go": // TestGoCodeIsCodeOfATest has these
	case "yaml":
		if r.file == "" {
			g.checkMesh(t, at, text)
		}
	case "json":
		var document any
		if err := json.Unmarshal([]byte(text), &document); err != nil {
			t.Errorf("%s: %v", at, err)
		} else if !slices.ContainsFunc(g.printed, func(out string) bool { return hasKeys(out, document) }) {
			t.Errorf("%s: no command above prints such a document", at)
		}
	case "python", "js", "sh":
		g.run(t, at, b.language, text, r)
	default:
		commands := ""
		for _, command := range prompted.FindAllStringSubmatch(text, -1) {
			commands += command[1] + "\n"
		}
		if commands != "" {
			g.run(t, at, "sh", commands, r)
		}
		if want := matcherOf(text); !slices.ContainsFunc(g.printed, want) {
			t.Errorf("%s: no command above prints this; correct the block, or add a rule with skip to rules_test.go. Printed: %.4000q", at, g.printed)
		}
	}
}

// checkMesh has the program check a mesh file, or a part of one in its frame.
func (g *pageRun) checkMesh(t *testing.T, at, text string) {
	t.Helper()
	if !strings.Contains("\n"+text, "\nmesh:") {
		if strings.HasPrefix(text, "- ") {
			text = "pipelines:\n  page:\n    steps:\n" + strings.ReplaceAll("\n"+strings.TrimSuffix(text, "\n"), "\n", "\n      ") + "\n"
		}
		text = merge(t, frame, text)
	}
	for _, script := range scripts.FindAllStringSubmatch(text, -1) {
		if file, err := os.OpenFile(filepath.Join(g.folder, script[1]), os.O_CREATE, 0o600); err != nil || file.Close() != nil {
			t.Error(err)
		}
	}
	path := filepath.Join(g.folder, "checked.yaml")
	writeFile(t, path, text)
	cmd := cli.New()
	cmd.SetArgs([]string{"config", "check", path})
	cmd.SetOut(io.Discard)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Errorf("%s: %v", at, err)
	}
}

var (
	serving    = regexp.MustCompile(`(?m)^stagemesh (up|gateway|stage|serve)\b.*\n`)
	publicPort = regexp.MustCompile(`\b(localhost|127\.0\.0\.1):8080\b`)
	prompted   = regexp.MustCompile(`(?m)^\$ (.*)$`)
	scripts    = regexp.MustCompile(`python3[,\s-]+([a-z_]+\.py)`)
	words      = regexp.MustCompile(`'[^']*'|"[^"]*"|\S+`)
	uuid       = regexp.MustCompile(`\b[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}\b`)
	printedJob = regexp.MustCompile(`\bnightly\.` + uuid.String())
	isFault    = regexp.MustCompile(`"(reason|error)": ?["{]|HTTP/1.1 [45]`)
	jobID      = regexp.MustCompile(`\bID\b|` + printedJob.String())
)

// checkFlags checks commands of the program: there are such commands, with these flags.
func checkFlags(t *testing.T, at string, lines []string) {
	t.Helper()
	for _, line := range lines {
		var args []string
		for _, word := range words.FindAllString(line, -1) {
			if strings.ContainsAny(word[:1], "<>|#\\") || strings.HasPrefix(word, "2>") {
				break
			}
			args = append(args, strings.Trim(word, `'"`))
		}
		if len(args) < 2 || args[0] != "stagemesh" {
			continue
		}
		cmd, rest, err := cli.New().Find(args[1:])
		if err == nil {
			err = cmd.ParseFlags(rest)
		}
		if err != nil || !cmd.Runnable() {
			t.Errorf("%s: %s: %v", at, line, err)
		}
	}
}

// run runs a block on its mesh. Addresses and IDs are those that there are, and commands that serve until
// they are stopped are left out, because their mesh runs.
func (g *pageRun) run(t *testing.T, at, language, text string, r rule) {
	t.Helper()
	name := r.mesh
	if name == "" {
		name = "digits"
	}
	listen, err := url.Parse(g.meshes[name].URL())
	if err != nil {
		t.Fatal(err)
	}
	text = strings.ReplaceAll(text, "go run ./services/cmd/stagemesh", "stagemesh")
	text = publicPort.ReplaceAllLiteralString(serving.ReplaceAllLiteralString(text, ""), listen.Host)
	if g.job != "" {
		text = jobID.ReplaceAllLiteralString(text, g.job)
	} else if uuid.MatchString(text) {
		text = uuid.ReplaceAllLiteralString(text, inferDigit(t, g.meshes[name]))
	}
	with := interpreters[language]
	path := filepath.Join(g.folder, "block"+with[len(with)-1])
	writeFile(t, path, text)
	cmd := exec.CommandContext(t.Context(), with[0], append(with[1:len(with)-1:len(with)-1], path)...)
	cmd.Dir = g.folder
	cmd.Env = append(os.Environ(), "PATH="+g.folder+":"+os.Getenv("PATH"), "PYTHONPATH="+filepath.Join(g.folder, "sdk")+":"+g.folder,
		"STAGEMESH_ADDRESS="+g.meshes[name].URL(), "STAGEMESH_ADMIN="+g.meshes[name].AdminURL(), "XDG_CONFIG_HOME="+g.folder, "CURL_HOME="+g.folder)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), r.want) || r.want == "" && isFault.Match(out) {
		t.Errorf("%s: error %v, want output with %q; the block as it ran:\n%s\nits output:\n%.2000s", at, err, r.want, text, out)
	}
	g.printed = append(g.printed, string(out))
	if ids := printedJob.FindAllString(string(out), -1); len(ids) > 0 {
		g.job = ids[len(ids)-1]
	}
}

// inferDigit sends an image to digits and returns the request's ID.
func inferDigit(t *testing.T, mesh *stagemesh.Mesh) string {
	t.Helper()
	image := payload.OfBlob("image", "image/png", []byte(read(t, "examples/digits/images/07-9.png")))
	answer, err := mesh.Infer(t.Context(), &stagemesh.Request{Pipeline: "digits", Inputs: []payload.Part{image}})
	if err != nil {
		t.Fatal(err)
	}
	return answer.RequestID
}

var different = regexp.MustCompile(uuid.String() + `|[0-9a-f]{8}-(\\\.){3}|\d+(\\\.\d+)?|(\\\.){3}|\s+`)

// matcherOf returns a function that reports whether an output has all lines of a block. IDs, numbers, spaces
// and "..." match any others. Of a block that begins with a command, only table heads count.
func matcherOf(text string) func(out string) bool {
	var lines []*regexp.Regexp
	isCommand := strings.HasPrefix(text, "$ ")
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || line == "..." || isCommand && strings.ToUpper(line) != line {
			continue
		}
		pattern := different.ReplaceAllStringFunc(regexp.QuoteMeta(line), func(part string) string {
			if strings.TrimSpace(part) == "" {
				return `\s+`
			}
			return map[bool]string{true: `.*`, false: `[0-9a-f.-]+`}[strings.HasPrefix(part, `\.`)]
		})
		lines = append(lines, regexp.MustCompile("(?m)^\\s*"+pattern+"\\s*$"))
	}
	return func(out string) bool {
		return !slices.ContainsFunc(lines, func(line *regexp.Regexp) bool { return !line.MatchString(out) })
	}
}

// hasKeys returns whether an output is a document with all keys of another.
func hasKeys(out string, wanted any) bool {
	var document any
	// Headers may stand before it.
	return json.Unmarshal([]byte(out[max(0, strings.Index(out, "{")):]), &document) == nil && hasShape(document, wanted)
}

func hasShape(document, wanted any) bool {
	switch wanted := wanted.(type) {
	case map[string]any:
		members, isObject := document.(map[string]any)
		for key, value := range wanted {
			if !isObject || members[key] == nil || !hasShape(members[key], value) {
				return false
			}
		}
	case []any:
		elements, isList := document.([]any)
		return isList && (len(wanted) == 0 || len(elements) > 0 && hasShape(elements[0], wanted[0]))
	}
	return true
}
