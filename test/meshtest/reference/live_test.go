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
pipelines:
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
		"double.py": doubleWorker, "tokens": "all\nlook role=read\n", "mesh.yaml": fmt.Sprintf(liveMesh, p.public, p.admin, "tokens"),
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
	if len(row) != 5 {
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
