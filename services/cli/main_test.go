package cli_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh"
	"github.com/stagemesh/stagemesh/internal/testbed"
	"github.com/stagemesh/stagemesh/services/cli"
	"github.com/stagemesh/stagemesh/test/meshtest"
)

// A broker that ends while a queue is being made forgets the clock that all
// brokers of a process share.
func TestMain(m *testing.M) {
	// The user who runs the tests may have contexts.
	home, err := os.MkdirTemp("", "")
	if err := errors.Join(err, os.Setenv("XDG_CONFIG_HOME", home)); err != nil {
		panic(err)
	}
	testbed.Tests{Parallel: 4, End: func() {
		if err := errors.Join(built.Remove(), os.RemoveAll(home)); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}}.Main(m, goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

const digits = "../../examples/digits"

func image(name string) string { return filepath.Join(digits, "images", name) }

// command runs the command in this process.
func command(ctx context.Context, in io.Reader, out, errOut io.Writer, args ...string) error {
	cmd := cli.New()
	cmd.SetArgs(args)
	cmd.SetIn(in)
	cmd.SetOut(out)
	cmd.SetErr(errOut)
	return cmd.ExecuteContext(ctx)
}

// run returns what the command prints.
func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out testbed.Log
	err := command(t.Context(), strings.NewReader(""), &out, t.Output(), args...)
	return out.String(), err
}

// mesh starts the digits mesh and returns the address of its gateway.
func mesh(t *testing.T) string {
	t.Helper()
	file := meshtest.Load(t, filepath.Join(digits, "mesh.yaml"))
	m := meshtest.FromFile(t, file, stagemesh.FileSettings{})
	return meshtest.Start(t, m).URL()
}
