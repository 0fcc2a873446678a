package cli_test

import (
	"encoding/json"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// changing is a mesh under test whose pipelines are changed.
type changing struct {
	*process
	t      *testing.T
	admin  string
	folder string
}

const twoStages = `mesh: m
gateway: {listen: "127.0.0.1:0", admin: {listen: "127.0.0.1:0"}}
ops: {listen: "127.0.0.1:0"}
stages:
  decode: {runner: {image_decode: {width: 8, height: 8, channels: grey, layout: flat}}}
  label: {runner: {top_k: {k: 3, labels: [a, b, c]}}}
  echo: {runner: {echo: {}}, queue: {durabilities: [memory]}}
pipelines:
  first: {steps: [{name: one, stage: echo}]}
`

func newChanging(t *testing.T) *changing {
	t.Helper()
	c := &changing{t: t, folder: t.TempDir()}
	c.process = up(t, "--config", c.file("mesh.yaml", twoStages))
	c.admin = c.process.admin(t)
	testbed.Eventually(t, "all hosts are known", func() bool { return strings.Count(c.run("status"), " ready ") == 7 })
	return c
}

func (c *changing) file(name, text string) string {
	c.t.Helper()
	path := filepath.Join(c.folder, name)
	save(c.t, path, text)
	return path
}

// try runs the command against the mesh.
func (c *changing) try(args ...string) (string, error) {
	c.t.Helper()
	return run(c.t, append(args, "--admin", c.admin)...)
}

func (c *changing) run(args ...string) string {
	c.t.Helper()
	out, err := c.try(args...)
	if err != nil {
		c.t.Fatalf("%v: %v", args, err)
	}
	return out
}

// fails runs the command, which has to fail with those words.
func (c *changing) fails(want string, args ...string) string {
	c.t.Helper()
	out, err := c.try(args...)
	if err == nil || !strings.Contains(err.Error(), want) {
		c.t.Errorf("%v ended with %v, wanted is %s", args, err, want)
	}
	return out
}

func (c *changing) shows(got, want string) {
	c.t.Helper()
	if !regexp.MustCompile(want).MatchString(got) {
		c.t.Errorf("it prints\n%swanted is %s", got, want)
	}
}

func TestUnreadParameterIsRejected(t *testing.T) {
	t.Parallel()
	c := newChanging(t)
	address, _ := c.ready(t)
	c.run("pipelines", "apply", c.file("both.yaml", "pipelines: {both: {steps: [{name: one, stage: echo}, {name: two, stage: label}]}}\n"))
	for query, want := range map[string]string{
		"stage:label:infer":                  `"labels"`,
		"stage:label:infer?parameters.kk=3":  `"message":"parameters.kk: the stage label reads no such parameter; it reads none"`,
		"stage:label:infer?steps.label.kk=3": `"message":"steps.label.parameters.kk: the stage label reads no such parameter; it reads none"`,
		"stage:label:infer?parameters.k=":    `"reason":"INVALID_REQUEST"`,
		"first:infer?parameters.k=3":         `"scores"`, // echo takes anything
		"both:infer?parameters.k=3":          `"scores"`,
		"both:infer?steps.two.k=3":           `"reason":"INVALID_REQUEST"`,
	} {
		body := `{"inputs":[{"name":"scores","datatype":"FP32","shape":[1,3],"data":[1,2,3]}]}`
		if got := post(t, address+"/v1/pipelines/"+query, body); !strings.Contains(got, want) {
			t.Errorf("%s: got %s", query, got)
		}
	}
	c.fails("would not be applied", "pipelines", "plan", c.file("p.yaml", "pipelines: {bad: {steps: [{name: one, stage: label, parameters: {k: 5}}]}}\n"))
	if err := c.end(t); err != nil {
		t.Error(err)
	}
}

func post(t *testing.T, url, body string) string {
	t.Helper()
	r := testbed.Request(t, http.MethodPost, url, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	r.Close = true
	_, text := testbed.Do(t, http.DefaultClient, r)
	return string(text)
}

func TestPipelinesArePlannedAppliedShownAndDeleted(t *testing.T) {
	t.Parallel()
	c := newChanging(t)
	file := c.file("p.yaml", "pipelines:\n  first: {timeout: 2s, steps: [{name: one, stage: echo, parameters: {n: 1}}]}\n  second: {steps: [{name: one, stage: echo}, {name: two, stage: label}]}\n")
	c.shows(c.run("pipelines", "plan", file), `^first: would be updated\n  \+ steps\[0\]\.parameters\.n: 1\n  \+ timeout: 2s\nsecond: would be created\n$`)
	c.shows(c.run("pipelines", "list"), `(?m)^first +echo +ready +file +\d+ +\d+s$`)
	c.shows(c.run("pipelines", "apply", file), `^pipeline first updated, revision \d+\npipeline second created, revision \d+\n$`)
	c.shows(c.run("pipelines", "apply", file, "second", "second"), `^pipeline second unchanged, revision \d+\n$`)
	c.shows(c.run("pipelines", "plan", file), `^first: unchanged\nsecond: unchanged\n$`)
	c.shows(c.run("pipelines", "list"), `(?m)^first +echo +ready +file, changed +\d+ +\d+s\nsecond +echo > label +ready +applied +\d+ +\d+s$`)

	// What is shown can be applied.
	text := c.run("pipelines", "get", "first")
	c.shows(c.run("pipelines", "plan", c.file("again.yaml", text)), `^first: unchanged\n$`)
	c.shows(c.run("pipelines", "plan", c.file("less.yaml", strings.Replace(text, "timeout: 2s", "timeout: 3s", 1))), `^first: would be updated\n  ~ timeout: 2s -> 3s\n$`)

	address, _ := c.ready(t)
	out, err := run(t, "infer", "first", c.file("hello.txt", "hello"), "--address", address)
	if err != nil || !strings.Contains(out, "hello") {
		t.Errorf("a request is answered by %s, %v", out, err)
	}
	c.shows(c.run("pipelines", "delete", "first", "second"), `^pipeline first deleted\npipeline second deleted\n$`)
	c.shows(c.run("pipelines", "list"), `^there is no pipeline\n$`)
	c.fails("there is no pipeline", "pipelines", "get", "first")
	c.fails("there is no pipeline", "pipelines", "delete", "first")
	if err := c.end(t); err != nil {
		t.Error(err)
	}
}

func TestUnfitPipelinesAreReportedAndNotApplied(t *testing.T) {
	t.Parallel()
	c := newChanging(t)
	file := c.file("p.yaml", "pipelines:\n  fine: {steps: [{name: one, stage: echo}]}\n  wrong: {durability: file, steps: [{name: one, stage: decode}, {name: two, stage: label, inputs: {x: y}}, {name: three, stage: nowhere}, {name: four, stage: echo}]}\n")
	problems := `  error: wrong\.steps\[1\]\.inputs\.x: .*\n  error: wrong\.steps\[1\]\.inputs\.scores: .*given pixels, a tensor FP32.*\n  error: wrong\.steps\[2\]\.stage: the stage nowhere is unknown; known stages are decode, echo, label\n  error: wrong\.steps\[3\]\.stage: .*durability.*\n`
	c.shows(c.fails("some pipelines would not be applied", "pipelines", "plan", file), `(?s)^fine: would be created\nwrong: would be created\n.*`+problems+`$`)
	c.fails("some pipelines would not be applied", "pipelines", "plan", "--json", file)
	c.shows(c.fails("nothing was applied; use --force", "pipelines", "apply", file), problems)
	c.shows(c.run("pipelines", "list"), `(?m)^first .*\n$`)
	c.shows(c.run("pipelines", "apply", "--force", file), `pipeline wrong created, revision \d+\n$`)
	c.shows(c.run("pipelines", "list"), `(?m)^wrong +decode > label > nowhere > echo +not ready +applied +\d+ +\d+s +stage nowhere has no live host.*$`)
	c.shows(c.run("pipelines", "list"), `(?m)^fine +echo +ready .* -$`)
	var listed struct{ Pipeline struct{ Name string } }
	for line := range strings.Lines(c.run("pipelines", "list", "--json")) {
		if err := json.Unmarshal([]byte(line), &listed); err != nil || listed.Pipeline.Name == "" {
			t.Errorf("a line is %s: %v", line, err)
		}
	}
	if err := c.end(t); err != nil {
		t.Error(err)
	}
}

func TestWrongRevisionChangesNothing(t *testing.T) {
	t.Parallel()
	c := newChanging(t)
	file := c.file("p.yaml", "pipelines: {first: {timeout: 2s, steps: [{name: one, stage: echo}]}}\n")
	c.fails("none was expected", "pipelines", "apply", file, "--expect", "0")
	c.fails("get it again", "pipelines", "delete", "first", "--expect", "9999")
	c.shows(c.run("pipelines", "plan", file), "would be updated")
	for want, args := range map[string][]string{
		"give the FILE":                 {"pipelines", "plan"},
		"no such file":                  {"pipelines", "plan", "nowhere.yaml"},
		`there is no pipeline "x"`:      {"pipelines", "apply", file, "x"},
		"is the revision of one":        {"pipelines", "delete", "a", "b", "--expect", "1"},
		"give the NAME of one":          {"pipelines", "get"},
		"give the NAME of at least one": {"pipelines", "delete"},
		"pipelines: there are none":     {"pipelines", "plan", c.file("none.yaml", "mesh: m\n")},
	} {
		c.fails(want, args...)
	}
	if err := c.end(t); err != nil {
		t.Error(err)
	}
}
