package cli_test

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

const loud = `from stagemesh import Text, Worker


class Loud(Worker):
    inputs = {"x": Text()}
    outputs = {"y": Text()}
    examples = [{"x": "a"}]

    def setup(self, ctx):
        ctx.progress("loading shard 1 of 2")

    def predict_item(self, item):
        print("got", item["x"])
        if item["x"] != "a":
            raise ValueError("no such letter")
        return {"y": item["x"]}
`

func TestTerminalShowsWhatAWorkerWrites(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "my_adder.py")
	save(t, path, "def broken(:\n")
	p, s := onScreen(t, "up", path, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--ops", "127.0.0.1:0")
	testbed.Eventually(t, "the mistake is shown", func() bool { return s.Has("the worker does not start") })
	save(t, path, loud)
	testbed.Eventually(t, "the worker is served", func() bool { return p.Out.Has("\ncurl ") })
	line := p.Out.String()[strings.Index(p.Out.String(), "curl "):]
	if got := shell(t, strings.ReplaceAll(strings.TrimSpace(line), "'a'", "'b'")); !strings.Contains(got, "ValueError: no such letter") {
		t.Errorf("%s answers %s", line, got)
	}
	traceback := `(?s)\nmy-adder, request [0-9a-f-]{36}:\r\nTraceback \(most recent call last\):\r\n  File "[^\n]*my_adder.py", line 15, in predict_item\r\n.*\nValueError: no such letter\r\n`
	testbed.Eventually(t, "the traceback is shown", func() bool { return regexp.MustCompile(traceback).MatchString(s.String()) })
	for _, want := range []string{"\nmy-adder: loading shard 1 of 2\r\n", "\nmy-adder: got b\r\n"} {
		if !s.Has(want) {
			t.Errorf("it does not show %q", want)
		}
	}
	if n := strings.Count(s.String(), "SyntaxError"); n != 1 {
		t.Errorf("the mistake is shown %d times", n)
	}
	s.press(t, ctrlC)
	if err := p.Wait(); err != nil {
		t.Error(err)
	}
}
