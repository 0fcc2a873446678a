package reference

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/gateway"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// built is the program, whose processes send their metrics.
var built testbed.Program

const liveMesh = `mesh: shop
gateway: {listen: %q, admin: {listen: %q, token_file: %q}}
ops: {listen: "127.0.0.1:0"}
nats: {store_dir: data}
stages:
  decode: {runner: {image_decode: {width: 8, height: 8}}}
  classify: {runner: {sleep: {base: 5ms, per_item: 1ms, concurrency: 2}}, hosts: 2}
  label: {runner: {echo: {}}}
  double: {runner: {worker: {command: [python3, double.py], workers: 2}}}
  fragile: {runner: {worker: {command: [python3, fragile.py]}}, crash_limit: 1}
pipelines:
  fragile: {steps: [{name: fragile, stage: fragile}]}
  photos:
    steps: [{name: decode, stage: decode}, {name: classify, stage: classify}, {name: label, stage: label}]
  both:
    steps:
      - {name: decode, stage: decode}
      - name: look
        parallel:
          branches:
            slow: {steps: [{name: classify, stage: classify}], give: {a: pixels}}
            fast: {steps: [{name: double, stage: double}], give: {b: x}, optional: true}
      - name: finish
        switch:
          - {when: {parameter: brief, equals: true}, steps: [{name: label, stage: label}]}
          - {else: []}
    outputs: [a, b]
jobs:
  pools: {spare: {target: {pipelines: [photos]}, gate: {constant: {value: 0}}}}
  queues: {night: {}}
`

const doubleWorker = `from stagemesh import Tensor, Worker, serve


class Double(Worker):
    inputs = {"x": Tensor("FP32", [-1, 4])}
    outputs = {"x": Tensor("FP32", [-1, 4])}

    def predict(self, batch):
        return {"x": [[2 * x for x in row] for row in batch["x"].tolist()]}


if __name__ == "__main__":
    serve(Double, arrays="buffer")
`

// It crashes on the text "fall", with or without a line end, and on bytes that are not UTF-8.
const fragileWorker = `import os

from stagemesh import Bytes, Text, Worker, serve


class Fragile(Worker):
    inputs = {"text": Bytes("text/plain", "application/octet-stream")}
    outputs = {"text": Text()}

    def predict_item(self, item):
        try:
            text = bytes(item["text"]).decode()
        except UnicodeDecodeError:
            os._exit(2)
        if text.rstrip() == "fall":
            os._exit(1)
        return {"text": text.upper()}


if __name__ == "__main__":
    serve(Fragile)
`

// liveProgram is a mesh in a process, with the token "all" for operators and "look" for readers.
type liveProgram struct {
	*testbed.Process

	t             *testing.T
	folder        string
	public, admin string
}

func startLive(t *testing.T) *liveProgram {
	t.Helper()
	ports, err := testbed.FreePorts(2)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	p := &liveProgram{t: t, folder: folder, public: fmt.Sprintf("127.0.0.1:%d", ports[0]), admin: fmt.Sprintf("127.0.0.1:%d", ports[1])}
	for name, text := range map[string]string{
		"double.py": doubleWorker, "fragile.py": fragileWorker, "tokens": "all\nlook role=read\n", "mesh.yaml": fmt.Sprintf(liveMesh, p.public, p.admin, "tokens"),
	} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p.start()
	return p
}

func (p *liveProgram) start() {
	p.t.Helper()
	cmd := exec.Command(built.Path(p.t), "up", "--config", filepath.Join(p.folder, "mesh.yaml"))
	cmd.Dir = p.folder
	p.Process = testbed.StartProcess(p.t, cmd)
	testbed.Eventually(p.t, "the mesh is ready", func() bool {
		if p.HasEnded() {
			p.t.Fatalf("it ended:\n%s", p.Err.String())
		}
		return p.Out.Has("is ready")
	})
}

// load sends images, and now and then a text, until stop is called.
func (p *liveProgram) load() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	picture := image(p.t)
	transport := &http.Transport{}
	client := &http.Client{Transport: transport}
	var senders sync.WaitGroup
	for range 4 {
		senders.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				body, contentType := picture, "image/png"
				if n%20 == 19 {
					body = []byte("no picture")
				}
				r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+p.public+"/v1/pipelines/photos:infer", bytes.NewReader(body))
				if err != nil {
					return
				}
				r.Header.Set("Content-Type", contentType)
				if response, err := client.Do(r); err == nil { // the mesh is restarted meanwhile
					_ = response.Body.Close()
				}
			}
		})
	}
	return func() {
		cancel()
		senders.Wait()
		transport.CloseIdleConnections()
	}
}

// in has the page in light or dark.
func (p *page) in(t *testing.T, scheme string) {
	t.Helper()
	_, err := chromedp.Call(p.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}})
	if err != nil {
		t.Fatal(err)
	}
}

// pictures saves the page in light and dark.
func (p *page) pictures(t *testing.T, name string) {
	t.Helper()
	for _, scheme := range []string{"dark", "light"} {
		p.in(t, scheme)
		p.picture(t, name+"-"+scheme)
	}
}

// logIn opens the page and gives it a token.
func (p *page) logIn(t *testing.T, url, token string) {
	t.Helper()
	p.do(t, "open", chromedp.Navigate(url), chromedp.WaitVisible(chromedp.CSS("#token")))
	p.do(t, "give the token", chromedp.SendKeys(chromedp.CSS("#token"), token+"\r"), chromedp.WaitVisible(chromedp.CSS("#content")))
}

// awaitText waits until an element has all the parts, and returns its text.
func (p *page) awaitText(t *testing.T, css string, parts ...string) (text string) {
	t.Helper()
	testbed.Eventually(t, fmt.Sprintf("%s has %q", css, parts), func() bool {
		text = ask(t, p, "read "+css, chromedp.Evaluate[string](fmt.Sprintf("document.querySelector(%q)?.textContent ?? ''", css)))
		for _, part := range parts {
			if !strings.Contains(text, part) {
				return false
			}
		}
		return true
	})
	return text
}

// awaitOther waits until an element has another text.
func (p *page) awaitOther(t *testing.T, css, text string) {
	t.Helper()
	testbed.Eventually(t, css+" moves", func() bool { return p.awaitText(t, css) != text })
}

func node(name string) string { return fmt.Sprintf(`g.node[aria-label^=%q]`, name) }

func TestLivePageShowsARunningMesh(t *testing.T) {
	t.Parallel()
	m := startLive(t)
	stop := m.load()
	defer stop()
	p := browse(t)
	p.do(t, "size", chromedp.EmulateViewport(1440, 1000))
	p.logIn(t, "http://"+m.admin+"/", "all")
	p.awaitText(t, node("pipeline photos"), "photos", "requests/s", "INVALID_INPUT")
	row := awaitRow(t, p, "stages", "classify", "of 4")
	if len(row) != 6 {
		t.Errorf("the table has %q", row)
	}
	p.awaitText(t, node("stage decode"), "faults/s")
	p.awaitText(t, node("stage double"), "0.0 items/s") // nobody asks it for anything
	p.awaitText(t, "#graph", "slow", "fast", "brief = true")
	p.awaitText(t, "#state", "live")
	p.awaitOther(t, node("stage classify"), p.awaitText(t, node("stage classify"), "items/s"))
	p.pictures(t, "live")

	p.do(t, "click a stage", chromedp.Click(chromedp.CSS(node("stage decode"))), chromedp.WaitVisible(chromedp.CSS("#detail")))
	p.awaitText(t, "#detail", "stage decode", "ready", "INVALID_INPUT", "photos")
	p.pictures(t, "live-stage")
	p.do(t, "close it", chromedp.KeyEvent("\x1b"), chromedp.WaitNotVisible(chromedp.CSS("#detail")))
	p.do(t, "a stage by its keys", chromedp.Focus(chromedp.CSS(node("stage double"))), chromedp.KeyEvent("\r"), chromedp.WaitVisible(chromedp.CSS("#detail")))
	p.awaitText(t, "#detail", "stage double", "READY", "none is known")
	p.do(t, "close it", chromedp.Click(chromedp.CSS("#close")), chromedp.WaitNotVisible(chromedp.CSS("#detail")))
	if got := ask(t, p, "focus", chromedp.Evaluate[string]("document.activeElement.getAttribute('aria-label') ?? ''")); !strings.HasPrefix(got, "stage double") {
		t.Errorf("the focus goes back to %q", got)
	}

	p.do(t, "click a request", chromedp.Click(chromedp.CSS("#requests tbody button")), chromedp.WaitVisible(chromedp.CSS("#detail .waterfall")))
	p.awaitText(t, "#detail", "request ", "decode", "In brackets", "photos")
	if n := ask(t, p, "sentences", chromedp.Evaluate[int]("document.querySelectorAll('#summary li').length")); n < 1 {
		t.Errorf("%d sentences explain it", n)
	}
	p.pictures(t, "live-request")
	p.do(t, "close it", chromedp.KeyEvent("\x1b"))
	p.do(t, "failed ones", chromedp.Click(chromedp.CSS("#failed")))
	testbed.Eventually(t, "only failed requests are listed", func() bool {
		rows := table(t, p, "requests")
		return len(rows) > 1 && !strings.Contains(strings.Join(rows, "\n"), "\tOK\t")
	})
	p.do(t, "jobs", chromedp.Click(chromedp.CSS("#jobs summary")))
	awaitRow(t, p, "gates", "spare", "closed")
	awaitRow(t, p, "queues", "night", "Pause")
	p.do(t, "pause", chromedp.Click(chromedp.CSS("#queues button")))
	awaitRow(t, p, "queues", "night", "paused", "Resume")
	p.pictures(t, "live-jobs")

	m.Kill()
	testbed.Eventually(t, "old figures are stale", func() bool {
		return ask(t, p, "class", chromedp.Evaluate[bool]("document.body.classList.contains('stale')"))
	})
	p.awaitText(t, "#state", "stale since", "does not answer")
	p.pictures(t, "live-stale")
	m.start()
	p.awaitText(t, "#state", "live")
	p.awaitOther(t, node("stage classify"), p.awaitText(t, node("stage classify"), "items/s"))
	p.quiet(t, "http://"+m.admin, "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")
}

func TestLivePageOfAReaderChangesNothing(t *testing.T) {
	t.Parallel()
	m := startLive(t)
	p := browse(t)
	p.do(t, "open", chromedp.Navigate("http://"+m.admin+"/"), chromedp.WaitVisible(chromedp.CSS("#token")))
	p.do(t, "give a wrong token", chromedp.SendKeys(chromedp.CSS("#token"), "simsim\r"))
	p.awaitText(t, "#problem", "this is not a token")
	p.do(t, "give a token", chromedp.SendKeys(chromedp.CSS("#token"), "look\r"), chromedp.WaitVisible(chromedp.CSS("#content")))
	p.do(t, "jobs", chromedp.Click(chromedp.CSS("#jobs summary")))
	awaitRow(t, p, "queues", "night", "Pause")
	p.do(t, "pause", chromedp.Click(chromedp.CSS("#queues button")), chromedp.WaitVisible(chromedp.CSS("#ask")))
	p.awaitText(t, "#problem", "role read")
	p.picture(t, "live-reader")
	p.awaitText(t, "#state", "live")
	p.do(t, "give another token", chromedp.SendKeys(chromedp.CSS("#token"), "all\r"), chromedp.WaitNotVisible(chromedp.CSS("#ask")))
	p.do(t, "pause", chromedp.Click(chromedp.CSS("#queues button")))
	awaitRow(t, p, "queues", "night", "paused")
	p.quiet(t, "http://"+m.admin, "403")
}

// fall sends durable requests that end as dead letters, from 1 on in this order.
func (p *liveProgram) fall(t *testing.T, texts ...string) {
	t.Helper()
	c := client(t)
	for _, text := range texts {
		contentType := "text/plain"
		if !utf8.ValidString(text) {
			contentType = "application/octet-stream"
		}
		_, answer := testbed.Call(t, c, http.MethodPost, "http://"+p.public+"/v1/pipelines/fragile:infer", text,
			"Content-Type", contentType, "Stagemesh-Durability", "file", "Stagemesh-Timeout", "60s")
		if !strings.Contains(answer, "RUNNER_CRASHED") {
			t.Fatalf("%q is answered by %s", text, answer)
		}
	}
}

// letters returns how many dead letters the admin port lists.
func (p *liveProgram) letters(t *testing.T) int {
	t.Helper()
	_, answer := testbed.Call(t, client(t), http.MethodPost, "http://"+p.admin+"/stagemesh.admin.v1.DeadLetterService/ListDeadLetters", "{}",
		"Content-Type", "application/json", "Authorization", "Bearer look")
	return strings.Count(answer, `"seq"`)
}

// press clicks the button of the panel with this label.
func (p *page) press(t *testing.T, label string) {
	t.Helper()
	p.do(t, "press "+label, chromedp.Click(chromedp.Search(fmt.Sprintf(`//aside//button[text()=%q]`, label))))
}

// openLetter opens a dead letter from the list.
func (p *page) openLetter(t *testing.T, number string) {
	t.Helper()
	awaitRow(t, p, "letters", number+"\t")
	p.do(t, "open dead letter "+number, chromedp.Click(chromedp.Search(fmt.Sprintf(`//table[@id="letters"]//button[text()=%q]`, number))))
	p.awaitText(t, "#detail-head", "dead letter "+number)
}

// answer has the page's questions answered by yes or no from now on.
func (p *page) answer(t *testing.T, yes bool) {
	t.Helper()
	ask(t, p, "answer", chromedp.Evaluate[bool](fmt.Sprintf("window.asked = ''; window.confirm = (question) => { window.asked = question; return %t; }; true", yes)))
}

// replayedAs returns the result of the request that the page says a dead letter runs as.
func (p *page) replayedAs(t *testing.T, m *liveProgram) string {
	t.Helper()
	words := strings.Fields(p.awaitText(t, "#outcome", "Replayed as request "))
	_, answer := testbed.Call(t, client(t), http.MethodGet, "http://"+m.public+"/v1/requests/"+strings.Trim(words[3], ".")+"/result?wait=60s", "", "Accept", "application/json")
	return answer
}

func TestLivePageReplaysDeadLetters(t *testing.T) {
	t.Parallel()
	m := startLive(t)
	m.fall(t, "fall", "\xff\xfe", "fall", "fall", "fall\r\n")
	p := browse(t)
	p.do(t, "size", chromedp.EmulateViewport(1440, 1000))
	p.logIn(t, "http://"+m.admin+"/", "all")
	p.do(t, "dead letters", chromedp.Click(chromedp.CSS("#dead summary")))
	awaitRow(t, p, "letters", "1\t", "fragile", "RUNNER_CRASHED")

	p.openLetter(t, "1")
	p.awaitText(t, "#detail", "RUNNER_CRASHED", "stage fragile", "(no name): text/plain, 4 bytes")
	p.press(t, "Load payload")
	testbed.Eventually(t, "the payload is there", func() bool { return ask(t, p, "read", chromedp.Value(chromedp.CSS("#body"))) == "fall" })
	p.do(t, "edit", chromedp.SendKeys(chromedp.CSS("#body"), " no more, ☂"))
	p.pictures(t, "live-letter")
	p.press(t, "Replay with this payload")
	if answer := p.replayedAs(t, m); !strings.Contains(answer, `"FALL NO MORE, ☂"`) {
		t.Errorf("edited, it is answered by %s", answer)
	}
	if n := ask(t, p, "count", chromedp.Evaluate[int](`document.querySelectorAll("#detail-body button:enabled").length`)); n != 1 || m.letters(t) != 4 {
		t.Errorf("%d buttons of %d letters are left", n, m.letters(t))
	}
	p.pictures(t, "live-letter-replayed")
	p.do(t, "see the request", chromedp.Click(chromedp.CSS("#outcome button")), chromedp.WaitVisible(chromedp.CSS("#detail .waterfall")))
	p.awaitText(t, "#detail", "request ", "fragile")

	p.openLetter(t, "2")
	p.press(t, "Load payload")
	p.awaitText(t, "#body-note", "not text, but application/octet-stream")
	p.do(t, "choose a file", chromedp.SetUploadFiles(chromedp.CSS("#file"), []string{testbed.WriteFile(t, "large", strings.Repeat("x", 100<<10))}))
	p.press(t, "Replay with this payload")
	if answer := p.replayedAs(t, m); !strings.Contains(answer, strings.Repeat("X", 100<<10)) {
		t.Errorf("with a file it is answered by %.200s", answer)
	}

	p.openLetter(t, "5")
	p.press(t, "Load payload")
	testbed.Eventually(t, "the payload is there", func() bool { return ask(t, p, "read", chromedp.Value(chromedp.CSS("#body"))) == "fall\n" })
	p.do(t, "edit", chromedp.SendKeys(chromedp.CSS("#body"), "no more"))
	p.press(t, "Replay with this payload")
	if answer := p.replayedAs(t, m); !strings.Contains(answer, `"FALL\r\nNO MORE"`) {
		t.Errorf("with another line end it is answered by %s", answer)
	}

	p.openLetter(t, "3")
	p.answer(t, false)
	p.press(t, "Replay with this payload")
	if asked := ask(t, p, "asked", chromedp.Evaluate[string]("window.asked")); !strings.Contains(asked, "empty payload") || m.letters(t) != 2 {
		t.Errorf("it asks %q", asked)
	}
	p.press(t, "Delete")
	if asked := ask(t, p, "asked", chromedp.Evaluate[string]("window.asked")); !strings.Contains(asked, "Delete dead letter 3?") || m.letters(t) != 2 {
		t.Errorf("it asks %q", asked)
	}
	p.answer(t, true)
	p.press(t, "Delete")
	p.do(t, "it closes", chromedp.WaitNotVisible(chromedp.CSS("#detail")))
	testbed.Eventually(t, "it is deleted", func() bool { return m.letters(t) == 1 })

	p.openLetter(t, "4")
	p.press(t, "Replay")
	if answer := p.replayedAs(t, m); !strings.Contains(answer, "RUNNER_CRASHED") {
		t.Errorf("as it was, it is answered by %s", answer)
	}
	p.openLetter(t, "6") // it crashed again
	_, _ = testbed.Call(t, client(t), http.MethodPost, "http://"+m.admin+"/stagemesh.admin.v1.DeadLetterService/DeleteDeadLetter", `{"seq": 6}`,
		"Content-Type", "application/json", "Authorization", "Bearer all")
	p.press(t, "Replay")
	p.awaitText(t, "#problem", "there is no dead letter 6")
	p.quiet(t, "http://"+m.admin, "404")
}

func TestLivePageOfAReaderShowsDeadLetters(t *testing.T) {
	t.Parallel()
	m := startLive(t)
	m.fall(t, "fall")
	p := browse(t)
	p.do(t, "size", chromedp.EmulateViewport(1280, 800))
	p.logIn(t, "http://"+m.admin+"/", "look")
	p.do(t, "dead letters", chromedp.Click(chromedp.CSS("#dead summary")))
	p.openLetter(t, "1")
	p.awaitText(t, "#detail", "RUNNER_CRASHED", "(no name): text/plain, 4 bytes")
	p.answer(t, true)
	p.do(t, "write another payload", chromedp.SendKeys(chromedp.CSS("#body"), "safe"))
	for button, method := range map[string]string{"Load payload": "see payloads", "Replay with this payload": "call ReplayDeadLetter", "Replay": "call ReplayDeadLetter", "Delete": "call DeleteDeadLetter"} {
		p.press(t, button)
		p.awaitText(t, "#problem", "role read, which may not "+method)
		// It is in view, and has the focus.
		if seen := ask(t, p, "see", chromedp.Evaluate[bool](`(() => {
			const {left, top, width, height} = document.activeElement.getBoundingClientRect();
			return document.activeElement.id === "token" && document.elementFromPoint(left + width / 2, top + height / 2) === document.activeElement;
		})()`)); !seen {
			t.Errorf("%s: the field for a token is not seen", button)
		}
		if button == "Delete" {
			p.pictures(t, "live-letter-reader")
		}
		p.do(t, "cancel", chromedp.Click(chromedp.CSS("#dismiss")), chromedp.WaitNotVisible(chromedp.CSS("#ask")))
		if focused := ask(t, p, "see the focus", chromedp.Evaluate[string](`document.activeElement.textContent`)); focused != button {
			t.Errorf("after %s and Cancel the focus is at %q", button, focused)
		}
	}
	if body := ask(t, p, "read", chromedp.Value(chromedp.CSS("#body"))); body != "safe" || m.letters(t) != 1 {
		t.Errorf("there are %d dead letters, and the text is %q", m.letters(t), body)
	}
	p.press(t, "Replay with this payload")
	p.do(t, "give another token", chromedp.SendKeys(chromedp.CSS("#token"), "all\r"), chromedp.WaitNotVisible(chromedp.CSS("#ask")))
	p.press(t, "Replay with this payload")
	if answer := p.replayedAs(t, m); !strings.Contains(answer, `"SAFE"`) || m.letters(t) != 0 {
		t.Errorf("of %d it is answered by %s", m.letters(t), answer)
	}
	p.quiet(t, "http://"+m.admin, "403")
}

func TestLivePageDrawsSixtyStagesInTime(t *testing.T) {
	t.Parallel()
	const pipelines, steps = 20, 3
	m, err := stagemesh.New(stagemesh.Settings{Gateway: gateway.Settings{Config: gateway.Config{Admin: gateway.Admin{Listen: "127.0.0.1:0"}}}})
	if err != nil {
		t.Fatal(err)
	}
	for i := range pipelines {
		var stages []pipeline.StageName
		for j := range steps {
			// The pipelines share some stages, in another order.
			stages = append(stages, pipeline.StageName(fmt.Sprintf("stage-%d-%d", (i+j*j)%pipelines, j)))
		}
		if err := m.AddPipeline(testbed.Pipeline(pipeline.Name(fmt.Sprintf("pipeline-%d", i)), stages...)); err != nil {
			t.Fatal(err)
		}
	}
	meshtest.Start(t, m)
	p := browse(t)
	p.do(t, "open", chromedp.Navigate(m.AdminURL()+"/"), chromedp.WaitVisible(chromedp.CSS("#content")))
	count := func(css string) int {
		return ask(t, p, "count "+css, chromedp.Evaluate[int](fmt.Sprintf("document.querySelectorAll(%q).length", css)))
	}
	if nodes, edges := count("g.node"), count("path.edge"); nodes != pipelines*(1+steps) || edges != pipelines*steps {
		t.Errorf("it draws %d nodes and %d edges", nodes, edges)
	}
	p.picture(t, "live-sixty")
	ask(t, p, "measure", chromedp.Evaluate[bool](`(() => {
		window.longest = 0;
		new PerformanceObserver((list) => { window.longest = Math.max(window.longest, ...list.getEntries().map((e) => e.duration)); }).observe({type: "longtask"});
		return true;
	})()`))
	begin := time.Now()
	p.awaitText(t, "#state", "live")
	testbed.Eventually(t, "several updates", func() bool { return time.Since(begin) > 5*time.Second })
	// Updates come each second, and the machine may have other work.
	if longest := ask(t, p, "longest task", chromedp.Evaluate[float64]("window.longest")); longest > 250 {
		t.Errorf("an update takes %.0f ms", longest)
	}
	p.quiet(t, m.AdminURL())
}
