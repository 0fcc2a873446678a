package suite_test

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/internal/load"

	"github.com/stagemesh/stagemesh/bench/compare"
	"github.com/stagemesh/stagemesh/bench/suite"
)

func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	cmd := suite.NewCommand()
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

// compared is a report of one load in two pairs, with this ratio.
func compared(ratio float64) compare.Report {
	r := reportOf(callers(64))
	c, _ := compare.Compare([]load.Run{{ThroughputPerS: 1000 * ratio}, {ThroughputPerS: 1000 * ratio}}, []load.Run{{ThroughputPerS: 1000}, {ThroughputPerS: 1000}})
	r.Comparisons = []compare.Comparison{c}
	return r
}

func TestShortFailsOnlyOnGrossRegression(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		ratio float64
		slow  bool
	}{"as ever": {2, false}, "at the bound": {1, false}, "far too slow": {0.99, true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			folder, calls := scripted(t, `cat "$folder/report"`, map[string]compare.Report{"report": compared(test.ratio)})
			out, err := run(t, "--short", "--program", fake, "--folder", folder)
			if errors.Is(err, suite.ErrSlow) != test.slow || !test.slow && err != nil {
				t.Errorf("got %v", err)
			}
			if test.slow && !strings.Contains(err.Error(), "the mesh has 0.99x of the baseline's throughput, and at least 1.00x is required") {
				t.Errorf("got %v", err)
			}
			if !strings.HasPrefix(out, fmt.Sprintf("three stages in one process, 64 in flight: %.2fx ", test.ratio)) || len(calls()) != 1 {
				t.Errorf("it prints %q and asks %q", out, calls())
			}
		})
	}
}

func TestShortReportsErrors(t *testing.T) {
	t.Parallel()
	folder, _ := scripted(t, `cat "$folder/report"`, map[string]compare.Report{"report": reportOf(callers(64))})
	if _, err := run(t, "--short", "--program", fake, "--folder", folder); err == nil || !strings.Contains(err.Error(), "the report has no comparison") {
		t.Errorf("got %v", err)
	}
	folder, _ = scripted(t, "echo broken >&2; exit 1", nil)
	if _, err := run(t, "--short", "--program", fake, "--folder", folder); err == nil || !strings.Contains(err.Error(), "exit status 1: broken") {
		t.Errorf("got %v", err)
	}
}

func TestSuiteWritesResultsAndPage(t *testing.T) {
	t.Parallel()
	several := reportOf(callers(1), callers(32), callers(64))
	folder, calls := scripted(t, `cat "$folder/report"`, map[string]compare.Report{"report": several})
	docs := t.TempDir()
	results := filepath.Join(t.TempDir(), "results.json")
	args := []string{"--quick", "--only", "6", "--program", fake, "--folder", folder, "--results", results, "--docs", docs}
	for range 2 { // the second time there are results already
		if out, err := run(t, args...); err != nil || !strings.Contains(out, "item 6: A worker") {
			t.Fatalf("got %q, %v", out, err)
		}
	}
	if got := calls(); len(got) != 4 {
		t.Errorf("it calls %q", got)
	}
	text := read(t, filepath.Join(docs, "performance.md"))
	if !strings.Contains(text, "| 32 | 1000 | 2.00 ms |") || !strings.Contains(text, "are from a trial") || strings.Contains(read(t, results), folder) {
		t.Errorf("got\n%s", text)
	}
	if _, err := run(t, "--render", "--results", results, "--docs", t.TempDir()); err != nil {
		t.Error(err)
	}
}

func TestResultsOfAnotherMachineAreRejected(t *testing.T) {
	t.Parallel()
	results := filepath.Join(t.TempDir(), "results.json")
	other := known(1, 1, 1000, 0)
	other.Machine.CPU = "another"
	if err := other.Write(results); err != nil {
		t.Fatal(err)
	}
	if _, err := run(t, "--only", "11", "--program", "there-is-no-such-program", "--results", results); !errors.Is(err, suite.ErrMachine) {
		t.Errorf("got %v", err)
	}
}

func TestCommandNamesWrongArguments(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"no such item":    {[]string{"--only", "18"}, "--only: there is no item 18; there are 1 to 17"},
		"no results":      {[]string{"--render", "--results", "nowhere.json"}, "--results: open nowhere.json: "},
		"two things":      {[]string{"--render", "--short"}, "if any flags in the group ["},
		"only some words": {[]string{"words"}, "unknown command"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := run(t, test.args...); err == nil || !strings.HasPrefix(err.Error(), test.want) {
				t.Errorf("got %v", err)
			}
		})
	}
}
