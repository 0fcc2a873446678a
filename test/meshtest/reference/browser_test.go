package reference

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/stagemesh/stagemesh/internal/meshfile"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// browserPatience is how long a page may take; the machine may have other work.
const browserPatience = 3 * time.Minute

// page is one that a browser has open. Its problems and what it has asked for are
// collected until the test ends.
type page struct {
	ctx context.Context

	mu       sync.Mutex
	problems []string
	asked    []string
}

// browse opens a browser with a profile of its own.
func browse(t *testing.T) *page {
	t.Helper()
	options := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]),
		chromedp.ExecPath(chromium(t)), chromedp.UserDataDir(t.TempDir()), chromedp.NoSandbox, chromedp.DisableGPU,
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-component-update", true), chromedp.Flag("no-proxy-server", true),
		chromedp.WindowSize(1280, 1600),
	)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), browserPatience)
	t.Cleanup(cancel)
	ctx, closeBrowser := chromedp.NewExecAllocator(ctx, options...)
	t.Cleanup(closeBrowser)
	p := &page{}
	p.ctx, _ = chromedp.NewContext(ctx, chromedp.WithListener(p.hear))
	t.Cleanup(func() {
		// It ends the browser, and waits for that.
		if err := chromedp.Cancel(p.ctx); err != nil {
			t.Errorf("the browser's end: %v", err)
		}
	})
	p.do(t, "start")
	for _, err := range []error{
		enabled(chromedp.Call(p.ctx, network.Enable, network.EnableParams{})),
		enabled(chromedp.Call(p.ctx, log.Enable, cdp.Empty{})),
		enabled(chromedp.Call(p.ctx, runtime.Enable, cdp.Empty{})),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return p
}

func enabled(_ cdp.Empty, err error) error { return err }

// chromium returns the program of the browser.
func chromium(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	t.Fatal("there is no Chromium on the PATH (Debian: apt-get install chromium)")
	return ""
}

// hear collects what the page asks for, and what is wrong with it.
func (p *page) hear(event any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		p.asked = append(p.asked, e.Request.URL)
	case *log.EventEntryAdded:
		if e.Entry.Level == log.EntryLevelError || e.Entry.Level == log.EntryLevelWarning || e.Entry.Source == log.EntrySourceSecurity {
			p.problems = append(p.problems, fmt.Sprintf("%s: %s %s", e.Entry.Source, e.Entry.Text, e.Entry.URL))
		}
	case *runtime.EventConsoleAPICalled:
		if e.Type == "error" || e.Type == "warning" {
			p.problems = append(p.problems, fmt.Sprintf("console: %s", e.Args[0].Value))
		}
	case *runtime.EventExceptionThrown:
		p.problems = append(p.problems, e.ExceptionDetails.Text)
	}
}

func (p *page) do(t *testing.T, what string, actions ...chromedp.Action[chromedp.Void]) {
	t.Helper()
	if err := chromedp.Do(p.ctx, actions...); err != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		t.Fatalf("%s: %v; %q", what, err, p.problems)
	}
}

// ask returns what an action gives.
func ask[T any](t *testing.T, p *page, what string, action chromedp.Action[T]) T {
	t.Helper()
	out, err := chromedp.Run(p.ctx, action)
	if err != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		t.Fatalf("%s: %v; %q", what, err, p.problems)
	}
	return out
}

// picture saves what the page looks like in the folder that the environment names, for
// people to see.
func (p *page) picture(t *testing.T, name string) {
	t.Helper()
	folder := os.Getenv("STAGEMESH_PICTURES")
	if folder == "" {
		return
	}
	data := ask(t, p, "picture", chromedp.FullScreenshot(100))
	if err := os.WriteFile(filepath.Join(folder, name+".png"), data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// quiet checks that nothing was wrong but what is expected, and that nobody was asked
// but the gateway.
func (p *page) quiet(t *testing.T, gateway string, expected ...string) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, problem := range p.problems {
		if !slices.ContainsFunc(expected, func(part string) bool { return strings.Contains(problem, part) }) {
			t.Errorf("the page is not well: %s", problem)
		}
	}
	for _, asked := range p.asked {
		u, err := url.Parse(asked)
		if err != nil || u.Scheme != "data" && u.Scheme != "blob" && !strings.HasPrefix(asked, gateway+"/") {
			t.Errorf("the page asks %.200s", asked)
		}
	}
}

// operation is the part of the page that an operation is in.
func operation(tag, id string) string { return fmt.Sprintf("#operations-%s-%s", tag, id) }

func TestPageShowsAndCallsPipelines(t *testing.T) {
	t.Parallel()
	m := mesh(t)
	document(t, client(t), m.URL())
	p := browse(t)
	at := operation("only-threads", "infer_only-threads")
	p.do(t, "open", chromedp.Navigate(m.URL()+"/docs"), chromedp.WaitVisible(chromedp.CSS(at)))
	p.picture(t, "page")
	shown := ask(t, p, "read", chromedp.Text(chromedp.CSS("#document")))
	for _, part := range []string{"mesh digits", "decode → classify → label", "/v1/pipelines/digits:infer", "/v1/pipelines/only-spell:stream", "/v1/requests/{request_id}", "/v2/models/{model}/infer", "/readyz"} {
		if !strings.Contains(shown, part) {
			t.Errorf("the page does not show %s", part)
		}
	}
	p.do(t, "open the operation", chromedp.Click(chromedp.CSS(at+" button.opblock-summary-control")), chromedp.WaitVisible(chromedp.CSS(at+" .try-out__btn")))
	p.picture(t, "operation")
	p.do(t, "try it", chromedp.Click(chromedp.CSS(at+" .try-out__btn")), chromedp.WaitVisible(chromedp.CSS(at+" .execute")))
	p.picture(t, "form")
	p.do(t, "execute", chromedp.Click(chromedp.CSS(at+" .execute")), chromedp.WaitVisible(chromedp.CSS(at+" .live-responses-table .highlight-code")))
	answer := ask(t, p, "read", chromedp.Text(chromedp.CSS(at+" .live-responses-table")))
	p.picture(t, "answer")
	if !strings.Contains(answer, "200") || !strings.Contains(answer, `"comments": 2`) || !strings.Contains(answer, "stagemesh-request-id") {
		t.Errorf("the stage's own example is answered by %s", answer)
	}
	p.quiet(t, m.URL())
}

func TestPageSendsAFile(t *testing.T) {
	t.Parallel()
	m := mesh(t)
	document(t, client(t), m.URL())
	p := browse(t)
	at := operation("digits", "infer_digits")
	file, err := filepath.Abs(filepath.Join(digits, "images", "01-7.png"))
	if err != nil {
		t.Fatal(err)
	}
	p.do(t, "open", chromedp.Navigate(m.URL()+"/docs"), chromedp.WaitVisible(chromedp.CSS(at)),
		chromedp.Click(chromedp.CSS(at+" button.opblock-summary-control")), chromedp.WaitVisible(chromedp.CSS(at+" .try-out__btn")), chromedp.Click(chromedp.CSS(at+" .try-out__btn")))
	p.picture(t, "upload")
	p.do(t, "send", chromedp.SetUploadFiles(chromedp.CSS(at+` input[type="file"]`), []string{file}), chromedp.Click(chromedp.CSS(at+" .execute")),
		chromedp.WaitVisible(chromedp.CSS(at+" .live-responses-table .highlight-code")))
	answer := ask(t, p, "read", chromedp.Text(chromedp.CSS(at+" .live-responses-table")))
	p.picture(t, "uploaded")
	if !strings.Contains(answer, `"7"`) {
		t.Errorf("the image of a seven is answered by %s", answer)
	}
	p.quiet(t, m.URL())
}

func TestPageShowsTheEventsOfAStream(t *testing.T) {
	t.Parallel()
	m := mesh(t)
	document(t, client(t), m.URL())
	p := browse(t)
	at := operation("only-spell", "stream_only-spell")
	p.do(t, "open", chromedp.Navigate(m.URL()+"/docs"), chromedp.WaitVisible(chromedp.CSS(at)),
		chromedp.Click(chromedp.CSS(at+" button.opblock-summary-control")), chromedp.WaitVisible(chromedp.CSS(at+" .try-out__btn")))
	p.picture(t, "stream")
	p.do(t, "try it", chromedp.Click(chromedp.CSS(at+" .try-out__btn")), chromedp.WaitVisible(chromedp.CSS(at+" .execute")), chromedp.Click(chromedp.CSS(at+" .execute")),
		chromedp.WaitVisible(chromedp.CSS(at+" .live-responses-table .highlight-code")))
	answer := ask(t, p, "read", chromedp.Text(chromedp.CSS(at+" .live-responses-table")))
	p.picture(t, "streamed")
	for _, event := range []string{"id: 1\nevent: chunk", "id: 3\nevent: chunk", "id: 4\nevent: done"} {
		if !strings.Contains(answer, event) {
			t.Errorf("the answer does not show %q: %s", event, answer)
		}
	}
	p.quiet(t, m.URL())
}

func TestPageAsksForARequiredToken(t *testing.T) {
	t.Parallel()
	tokens := testbed.WriteFile(t, "tokens", "open-sesame\n")
	m := mesh(t, func(f *meshfile.File) { f.Gateway.TokenFile = tokens })
	document(t, client(t), m.URL(), "Authorization", "Bearer open-sesame")
	p := browse(t)
	at := operation("only-shout", "infer_only-shout")
	p.do(t, "open", chromedp.Navigate(m.URL()+"/docs"), chromedp.WaitVisible(chromedp.CSS("#token")))
	p.do(t, "give another token", chromedp.SendKeys(chromedp.CSS("#token"), "simsim\r"), chromedp.WaitVisible(chromedp.CSS("#problem")))
	problem := ask(t, p, "read", chromedp.Text(chromedp.CSS("#problem")))
	p.picture(t, "token")
	if problem != "The gateway does not know this token." {
		t.Errorf("of another token it says %q", problem)
	}
	p.do(t, "give the token", chromedp.SendKeys(chromedp.CSS("#token"), "open-sesame\r"), chromedp.WaitVisible(chromedp.CSS(at)))
	p.do(t, "ask", chromedp.Click(chromedp.CSS(at+" button.opblock-summary-control")), chromedp.WaitVisible(chromedp.CSS(at+" .try-out__btn")), chromedp.Click(chromedp.CSS(at+" .try-out__btn")),
		chromedp.WaitVisible(chromedp.CSS(at+" .execute")), chromedp.Click(chromedp.CSS(at+" .execute")),
		chromedp.WaitVisible(chromedp.CSS(at+" .live-responses-table .highlight-code")))
	answer := ask(t, p, "read", chromedp.Text(chromedp.CSS(at+" .live-responses-table")))
	p.picture(t, "authorized")
	if !strings.Contains(answer, "HELLO") {
		t.Errorf("it is answered by %s", answer)
	}
	p.quiet(t, m.URL(), "401")
}
