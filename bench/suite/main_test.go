package suite_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/bench/compare"
	"github.com/stagemesh/stagemesh/bench/suite"
	"github.com/stagemesh/stagemesh/internal/load"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "run" {
		// It is the program that the suite runs in a test.
		cmd := compare.NewCommand()
		cmd.SetArgs(os.Args[2:])
		if err := cmd.ExecuteContext(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // it is that program's main
		}
		os.Exit(0) //nolint:forbidigo // it is that program's main
	}
	goleak.VerifyTestMain(m)
}

// repository is the root, from this package's folder.
const repository = "../.."

// fake replaces the program. It runs the script in the folder.
const fake = "testdata/program.sh"

// scripted returns a folder with a script for the fake program, and a function that
// returns the arguments of its calls.
func scripted(t *testing.T, script string, reports map[string]compare.Report) (folder string, calls func() []string) {
	t.Helper()
	folder = t.TempDir()
	put := func(name string, text []byte) {
		if err := os.WriteFile(filepath.Join(folder, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("script", []byte(script))
	for name, r := range reports {
		text, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		put(name, text)
	}
	return folder, func() []string {
		text := testbed.ReadFile(t, filepath.Join(folder, "calls"))
		return strings.Split(strings.TrimSpace(string(text)), "\n")
	}
}

// reportOf is a report of one run per load, with a thousand answers per second.
func reportOf(loads ...load.Load) compare.Report {
	out := compare.Report{Report: load.Report{Version: load.ReportVersion, Product: "v1.2.3"}}
	for _, l := range loads {
		out.Runs = append(out.Runs, load.Run{
			Load: l, Answered: 100, ThroughputPerS: 1000, Latency: load.Distribution{Count: 100, P50MS: 2, P99MS: 5},
		})
	}
	return out
}

func callers(n int) load.Load { return load.Load{Kind: load.Closed, Concurrency: n} }

// command is a command of 10 ms.
func command(name string, callers ...int) suite.Command {
	return suite.Command{Name: name, Pipeline: "echo", Mesh: "echo.yaml", Payload: "1KiB", Concurrency: callers, Duration: 10 * time.Millisecond}
}
