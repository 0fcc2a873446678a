package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

// asProgram, in the environment, makes the test's binary the program.
const asProgram = "DIGITS_DEMO_AS_PROGRAM"

// A broker that ends while a queue is being made forgets the clock that all
// brokers of a process share.
func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

func free() options {
	return options{once: true, listen: "127.0.0.1:0", admin: "127.0.0.1:0", ops: "127.0.0.1:0", level: "error"}
}

func TestDemoReadsTheDigitsAndEnds(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := run(t.Context(), &out, free()); err != nil {
		t.Fatal(err)
	}
	for _, pattern := range []string{
		`(?m)^IMAGE +LABEL +READ +SCORE *$`,
		`(?m)^00-1\.png +1 +1 +0\.\d{3} *$`,
		`(?m)^50 of 50 right: accuracy 1\.00$`,
		`(?m)^Where the time of one request went \([0-9.]+ ms in all\):$`,
		`(?m)^  decode: queue .*\n  classify: queue .*\n  label: queue `,
	} {
		if !regexp.MustCompile(pattern).Match(out.Bytes()) {
			t.Errorf("no %s in\n%s", pattern, out.String())
		}
	}
	if rows := strings.Count(out.String(), ".png  "); rows != 50 {
		t.Errorf("got %d rows", rows)
	}
	if strings.Contains(out.String(), "curl") {
		t.Errorf("it says how to ask a mesh that is gone:\n%s", out.String())
	}
}

func TestDemoServesOnUntilItIsStopped(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	read, write := io.Pipe()
	o := free()
	o.once = false
	ended := make(chan error, 1)
	go func() { ended <- errors.Join(run(ctx, write, o), write.Close()) }()
	var out bytes.Buffer
	for !strings.Contains(out.String(), "The mesh keeps serving") {
		if _, err := io.CopyN(&out, read, 1); err != nil {
			t.Fatalf("%v after\n%s", err, out.String())
		}
	}
	if !regexp.MustCompile(`curl .* http://127\.0\.0\.1:\d+/v1/pipelines/digits:infer`).Match(out.Bytes()) {
		t.Errorf("it does not say how to ask it:\n%s", out.String())
	}
	go io.Copy(io.Discard, read) //nolint:errcheck // it ends with the demo
	cancel()
	if err := testbed.Receive(t, "the end", ended); err != nil {
		t.Error(err)
	}
}

func TestDemoFails(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { taken.Close() })
	stopped, stop := context.WithCancel(t.Context())
	stop()
	for name, test := range map[string]struct {
		ctx  context.Context
		edit func(*options)
		want string
	}{
		"its address is taken":           {t.Context(), func(o *options) { o.listen = taken.Addr().String() }, "gateway.listen: listen tcp " + taken.Addr().String() + ": bind: address already in use; is another mesh running? --listen, --admin and --ops "},
		"its admin port is taken":        {t.Context(), func(o *options) { o.admin = taken.Addr().String() }, "gateway.admin.listen: "},
		"its operations port is taken":   {t.Context(), func(o *options) { o.ops = taken.Addr().String() }, "ops.listen: "},
		"its log level is none":          {t.Context(), func(o *options) { o.level = "loud" }, "--log-level: "},
		"it is stopped before the table": {stopped, func(*options) {}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := free()
			test.edit(&o)
			if err := run(test.ctx, io.Discard, o); err == nil || !strings.HasPrefix(err.Error(), test.want) {
				t.Errorf("got %v, want %s", err, test.want)
			}
		})
	}
}

// runDemo runs the demo in a process of its own, with these after its flags.
func runDemo(t *testing.T, arguments ...string) (out string, err error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], append([]string{"--once", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--ops", "127.0.0.1:0"}, arguments...)...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	text, err := cmd.CombinedOutput()
	return string(text), err
}

func TestDemoExitsWithAStatus(t *testing.T) {
	t.Parallel()
	if out, err := runDemo(t); err != nil || !strings.Contains(out, "50 of 50 right") {
		t.Errorf("it fails: %v\n%s", err, out)
	}
	for name, test := range map[string]struct {
		arguments []string
		want      string
	}{
		"an address that is none": {[]string{"--ops", "nowhere"}, "digits: ops.listen: "},
		"an argument":             {[]string{"more"}, `digits: "more" is not a flag; see --help`},
	} {
		out, err := runDemo(t, test.arguments...)
		if failed, ok := errors.AsType[*exec.ExitError](err); !ok || failed.ExitCode() != 1 || !strings.HasPrefix(out, test.want) {
			t.Errorf("%s: got %v and\n%s", name, err, out)
		}
	}
}

func TestDemoFailsWithTheFirstRequest(t *testing.T) {
	t.Parallel()
	answer := func(status int, body string) string {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/proto")
			w.WriteHeader(status)
			io.WriteString(w, body) //nolint:errcheck // the client is the test's subject
		}))
		t.Cleanup(server.Close)
		return server.URL
	}
	for name, test := range map[string]struct{ address, want string }{
		"that nobody takes":      {"http://127.0.0.1:1", "connection refused"},
		"that is refused":        {answer(http.StatusServiceUnavailable, "no"), "images/"},
		"whose answer says less": {answer(http.StatusOK, ""), errNoAnswer.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			err := show(t.Context(), &out, test.address)
			if err == nil || !strings.Contains(err.Error(), test.want) || out.Len() != 0 {
				t.Errorf("got %v, want %s, and printed\n%s", err, test.want, out.String())
			}
		})
	}
}

// The working files of the demo are its own, and go with it.
func TestDemoLeavesNoFilesBehind(t *testing.T) {
	folder := t.TempDir()
	t.Setenv("TMPDIR", folder)
	if err := run(t.Context(), io.Discard, free()); err != nil {
		t.Fatal(err)
	}
	if left, err := filepath.Glob(filepath.Join(folder, "*")); err != nil || len(left) != 0 {
		t.Errorf("left are %v, %v", left, err)
	}
}
