package docstest

import (
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

var (
	requestIDs = regexp.MustCompile(`"request_id":"[^"]*"`)
	timelines  = regexp.MustCompile(`"timeline":\{.*\}`)
)

// alike is a streamed answer without what is different each time.
func alike(text string) string {
	return timelines.ReplaceAllString(requestIDs.ReplaceAllString(strings.TrimSpace(text), `"request_id":""`), `"timeline":{}}`)
}

// The commands that stream ask the mesh that their pages start, and it answers what the
// pages say.
func TestTheCommandsThatStreamAreAnswered(t *testing.T) {
	t.Parallel()
	address := ports.FindString(up(t, 1, "--config", repository+"/examples/text-stream/mesh.yaml"))
	run := func(name string, args ...string) string {
		out, err := exec.CommandContext(t.Context(), name, args...).Output()
		if err != nil {
			t.Errorf("%s %q: %v", name, args, err)
		}
		return string(out)
	}
	at := func(path, language, has string) string {
		return strings.ReplaceAll(firstBlock(t, path, language, has), "127.0.0.1:8080", address)
	}
	want := alike(firstBlock(t, "docs/http.md", "", "event: done"))
	if got := alike(run("bash", "-c", at("docs/http.md", "sh", "tale:stream"))); got != want {
		t.Errorf("it answers\n%s\nand the page has\n%s", got, want)
	}
	if got := run("bash", "-c", at("docs/clients.md", "sh", "/generate_stream")); !strings.Contains(got, `"text":" said"`) || strings.Count(got, "data: ") != 4 {
		t.Errorf("generated is %s", got)
	}
}
