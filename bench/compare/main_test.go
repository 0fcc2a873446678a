package compare_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/cobra"
	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/bench/compare"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

// A broker that stops while a queue is created does not stop the clock that all brokers
// of a process share.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == "run" || os.Args[1] == compare.PartName) {
		// It is the program that a test started, or a process of that program's mesh.
		if err := execute(context.Background(), os.Stdout, os.Stderr, os.Args[1:]...); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // it is that program's main
		}
		os.Exit(0) //nolint:forbidigo // it is that program's main
	}
	if len(os.Args) > 1 && os.Args[1] == peerName {
		peer()
		os.Exit(0) //nolint:forbidigo // it is that program's main
	}
	testbed.Main(m, goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

// peerName is the command of this test binary that runs another server.
const peerName = "peer"

// peer returns the body of each request, until standard input ends.
func peer() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) }))
	defer server.Close()
	fmt.Fprintf(os.Stdout, "{\"url\": %q}\n", server.URL)
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// execute runs the program in this process.
func execute(ctx context.Context, out, errOut io.Writer, args ...string) error {
	root := &cobra.Command{Use: "bench", SilenceErrors: true, SilenceUsage: true}
	root.AddCommand(compare.NewCommand(), compare.NewPartCommand())
	root.SetArgs(args)
	root.SetOut(out)
	root.SetErr(errOut)
	return root.ExecuteContext(ctx)
}

// echoes is the file of a mesh.
const echoes = `mesh: echoes
nats: {store_dir: kept}
stages:
  one: {runner: {echo: {}}, hosts: 2, listen: "127.0.0.1:1"}
  two: {runner: {echo: {}}}
pipelines:
  both: {steps: [{name: one, stage: one}, {name: two, stage: two}]}
`

// measure returns the report and the text of bench run.
func measure(t *testing.T, args ...string) (compare.Report, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "report.json")
	var out bytes.Buffer
	if err := execute(t.Context(), &out, t.Output(), append(append([]string{"run"}, args...), "--json", path)...); err != nil {
		t.Fatal(err)
	}
	text := testbed.ReadFile(t, path)
	r, err := compare.ReadJSON(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return r, out.String()
}
