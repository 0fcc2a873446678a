package main_test

import (
	"context"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	stagev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/stage/v1"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/runners"
)

// command runs the verb in this process, with runners that echo and decode.
func command(ctx context.Context, out, errOut io.Writer, args ...string) error {
	cmd := stagemesh.StageCommand(stagemesh.KindOf("echo", runners.NewEcho), stagemesh.KindOf("image_decode", runners.NewImageDecode))
	cmd.SetArgs(args)
	cmd.SetOut(out)
	cmd.SetErr(errOut)
	return cmd.ExecuteContext(ctx)
}

const file = `mesh: m
stages:
  a: {runner: {echo: {}}, hosts: 3}
  b: {runner: {onnx: {model: m.onnx}}}
  c: {runner: {image_decode: {width: 8}}, batch: {max_size: -1}}
`

func TestErrorsAreReportedBeforeTheStart(t *testing.T) {
	t.Parallel()
	path := testbed.MeshFile(t, file)
	bad := testbed.MeshFile(t, "mesh: M\nstages: {a: {runner: {echo: {}}}}\n")
	broken := testbed.MeshFile(t, "mesh: m\nstages: {a: {runner: {echo: {}}}\n")
	nothing := testbed.MeshFile(t, "")
	taken := testbed.Listen(t)
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"no file":             {[]string{"a"}, "--config: open mesh.yaml: no such file"},
		"another file":        {[]string{"a", "--config", "nowhere.yaml"}, "--config: open nowhere.yaml: no such file"},
		"a broken file":       {[]string{"a", "-c", broken}, broken + ":2:"},
		"a bad mesh":          {[]string{"a", "-c", bad, "--nats", "b"}, bad + `:1:1: mesh: mesh name "M": use`},
		"no stage":            {[]string{"-c", path, "--nats", "b"}, "give the NAME of a stage; " + path + " has a, b, c"},
		"nothing in the file": {[]string{"-c", nothing, "a", "--nats", "b"}, nothing + ": mesh: is missing"},
		"an unknown stage":    {[]string{"-c", path, "--nats", "b", "z"}, path + `:2:1: stages: there is no stage "z"; there are a, b, c`},
		"a stage of another":  {[]string{"-c", path, "--nats", "b", "b"}, path + ":4:16: stages.b.runner.onnx: this program has no such runner; it has echo or image_decode"},
		"a bad stage":         {[]string{"-c", path, "--nats", "b", "c"}, path + ":5:16: stages.c.runner.image_decode: height: 0 is not between 1 and 65535\n" + path + ":5:51: stages.c.batch.max_size: -1"},
		"no broker":           {[]string{"-c", path, "a"}, "--nats: is missing, and so is nats.url in the file; "},
		"a bad broker":        {[]string{"-c", path, "a", "--nats", "nats://"}, "--nats: expected the URL of a broker"},
		"a bad host":          {[]string{"-c", path, "a", "--nats", "b", "--host", "A.b"}, `--host: host name "A.b": use`},
		"a bad address":       {[]string{"-c", path, "a", "--nats", "b", "--listen", "8081"}, `--listen: "8081" is not an address`},
		"a bad port":          {[]string{"-c", path, "a", "--nats", "b", "--ops", "x"}, `--ops: "x" is not an address`},
		"a port that is taken": {
			[]string{"-c", path, "a", "--nats", "b", "--ops", taken.Addr().String()},
			"--ops: listen tcp " + taken.Addr().String() + ": bind: address already in use",
		},
		"a bad level":     {[]string{"-c", path, "a", "--nats", "b", "--log-level", "loud"}, `--log-level: "loud" is not`},
		"a bad format":    {[]string{"-c", path, "a", "--nats", "b", "--log-format", "xml"}, `--log-format: "xml" is not`},
		"an unknown flag": {[]string{"--nope"}, "unknown flag: --nope; see stage --help"},
		"a host of two":   {[]string{"-c", path, "a", "b", "--nats", "b", "--host", "h"}, "--host and --listen are for one NAME"},
		"a missing address": {
			[]string{"-c", path, "a", "--nats", "nats://127.0.0.1:1", "--listen", taken.Addr().String()},
			"stages.a.listen: listen tcp " + taken.Addr().String() + ": bind: address already in use",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out testbed.Log
			err := command(t.Context(), &out, io.Discard, test.args...)
			if err == nil || !strings.HasPrefix(err.Error(), test.want) || out.String() != "" {
				t.Errorf("got  %v, and printed %q\nwant %s", err, out.String(), test.want)
			}
		})
	}
}

func TestHelpNamesTheFlags(t *testing.T) {
	t.Parallel()
	var out testbed.Log
	if err := command(t.Context(), &out, io.Discard, "--help"); err != nil {
		t.Fatal(err)
	}
	for _, flag := range []string{"--config", "--nats", "--host", "--listen", "--ops", "--log-level", "--log-format"} {
		if !out.Has(flag) {
			t.Errorf("%s is not in\n%s", flag, out.String())
		}
	}
}

// try runs the program in this process until the test ends, or stop is called.
func try(t *testing.T, args ...string) (out, errOut *testbed.Log, stop func()) {
	t.Helper()
	out, errOut = &testbed.Log{}, &testbed.Log{}
	return out, errOut, testbed.Background(t, func(ctx context.Context) error { return command(ctx, out, errOut, args...) })
}

func TestProgramReportsWaitingForItsBroker(t *testing.T) {
	t.Parallel()
	out, errOut, stop := try(t, "-c", testbed.MeshFile(t, "nats: {url: \"nats://user:hush@127.0.0.1:1\"}\n"+file), "a")
	testbed.Eventually(t, "it says what it waits for", func() bool {
		return errOut.Has(`msg="waiting for the broker" url=nats://user:xxxxx@127.0.0.1:1`) && errOut.Has(`msg="not ready; trying again"`)
	})
	operations := regexp.MustCompile(`msg="operations port listens" address=(\S+)`).FindStringSubmatch(errOut.String())
	if operations == nil {
		t.Fatalf("it does not say where operators may ask:\n%s", errOut.String())
	}
	if status, body := testbed.Get(t, "http://"+operations[1]+"/readyz"); status != http.StatusServiceUnavailable || !strings.Contains(body, "the broker is disconnected") {
		t.Errorf("got %d, %s", status, body)
	}
	stop()
	if out.String() != "" || errOut.Has("hush") {
		t.Errorf("it printed %q and logged\n%s", out.String(), errOut.String())
	}
}

// The file's broker and address serve where there is no flag.
func TestProgramServesTheStageAPI(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	text := strings.Replace(file, "hosts: 3", "listen: \"127.0.0.1:0\"", 1) + "nats: {url: \"" + broker.URL() + "\"}\n"
	out, errOut, _ := try(t, "-c", testbed.MeshFile(t, text), "a", "--host", "h")
	testbed.Eventually(t, "the stage is ready", func() bool { return readyLine.MatchString(out.String()) })
	address := regexp.MustCompile(`msg="stage service listens" .*address=(\S+)`).FindStringSubmatch(errOut.String())
	if address == nil {
		t.Fatalf("it does not say where it listens:\n%s", errOut.String())
	}
	conn := testbed.Dial(t, address[1])
	got, err := stagev1.NewStageServiceClient(conn).Describe(t.Context(), &stagev1.DescribeRequest{})
	if err != nil || got.GetMesh() != "m" || got.GetStage() != "a" || got.GetHost() != "h" || got.GetVersion() == "" {
		t.Errorf("got %v, %v", got, err)
	}
	health, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{})
	if err != nil || health.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		t.Errorf("got %v, %v", health, err)
	}
}

func TestProgramEndsWhenOutputFails(t *testing.T) {
	t.Parallel()
	broker := testbed.StartBroker(t)
	read, closed, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	read.Close()
	if err := command(t.Context(), closed, io.Discard, "-c", testbed.MeshFile(t, file), "a", "--nats", broker.URL()); err == nil {
		t.Error("it ends without an error")
	}
}
