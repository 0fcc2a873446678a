package suite_test

import (
	"encoding/xml"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/bench/suite"
	"github.com/stagemesh/stagemesh/internal/testbed"
)

func page(t *testing.T, r suite.Results) string {
	t.Helper()
	out, err := suite.Page(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// To update them: make bench-page.
func TestCommittedPageMatchesResults(t *testing.T) {
	t.Parallel()
	r, err := suite.Read(repository + "/bench/results.json")
	if err != nil {
		t.Fatal(err)
	}
	docs := t.TempDir()
	if err := suite.Render(r, docs); err != nil {
		t.Fatal(err)
	}
	for _, pattern := range []string{"performance.md", "performance/*"} {
		want, err := filepath.Glob(filepath.Join(docs, pattern))
		if err != nil || len(want) == 0 {
			t.Fatalf("%q, %v", want, err)
		}
		there, err := filepath.Glob(filepath.Join(repository, "docs", pattern))
		if err != nil || len(there) != len(want) {
			t.Errorf("there are %q, %v, and the results have %q; run make bench-page", there, err, want)
		}
		for _, path := range want {
			relative, err := filepath.Rel(docs, path)
			if err != nil {
				t.Fatal(err)
			}
			if read(t, path) != read(t, filepath.Join(repository, "docs", relative)) {
				t.Errorf("docs/%s does not match bench/results.json; run make bench-page", relative)
			}
		}
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text := testbed.ReadFile(t, path)
	return string(text)
}

// private matches what identifies a machine or a user.
var private = regexp.MustCompile(`/tmp|/home|/root|/work|/Users|[A-Z]:\\\\`)

func TestCommittedResultsAreSmallAndAnonymous(t *testing.T) {
	t.Parallel()
	const most = 250_000
	text := read(t, repository+"/bench/results.json")
	if len(text) > most {
		t.Errorf("they are %d bytes, and at most %d are kept in the repository", len(text), most)
	}
	if found := private.FindString(text); found != "" {
		t.Errorf("they have %s", found)
	}
	if host, err := os.Hostname(); err == nil && len(host) > 3 && strings.Contains(text, host) {
		t.Errorf("they have the name of this machine, %s", host)
	}
}

func TestProgramAcceptsCommandsOfPage(t *testing.T) {
	t.Parallel()
	lines := 0
	for line := range strings.Lines(read(t, repository+"/docs/performance.md")) {
		words := strings.Fields(strings.ReplaceAll(line, "'", ""))
		if len(words) == 0 || words[0] != "bin/bench" {
			continue
		}
		lines++
		if cmd, err := parse(words[1:]); err != nil || cmd.Name() != words[1] {
			t.Errorf("%s: %v", line, err)
		}
	}
	if lines == 0 {
		t.Error("the page has no command")
	}
}

func TestEveryItemHasFiguresAndCommands(t *testing.T) {
	t.Parallel()
	got := page(t, known(0.85, 1.2, 900, 0))
	for _, want := range []string{
		"With 64 requests in flight, a mesh of three stages in processes has 0.85x of the baseline's throughput.",
		"each stage adds 500 us to P50, and 250 us to the baseline's.",
		"each stage costs the machine 100 us per request, and 50 us in the baseline.",
		"| 64 | 1700 | 2000 | 0.85x (0.77x-0.94x) |",
		"| 8 | 64 | 1000 | 1667 | 0.60x (0.54x-0.66x) |",
		"| 2 | 64 | 2000 | 2500 | 0.80x (0.72x-0.88x) |",
		"| 32 | 2520 (2400-2640) | 89.8 % (85.5 %-94.0 %) | 6.00 ms | 12.0 ms | 16.0 |",
		"| 1 | 315 (300-330) | 3.00 ms | 6.00 ms | 1.00 |",
		"| 5 times the peak | 5000 | 900 | 90 % | 100 ms | 200 ms | 20 % | 1.00 ms | 4.00 ms |",
		"| 1MiB | 8 | 100 | 110 |",
		"| file | 8 | 200 | 250 |",
		"| the heap | 100 MB | 100 MB |",
		"| context carried | 64 | 945 (900-990) | 0.90x | 6.00 ms | 1.20x |",
		"| loaded | plain P50 | 1.1 |",
		"| 15 | seconds to register 20,000 models from one file | at most 20 | 5 (4-19) | reached |",
		"| mapped | 40 | 630 (600-660) | 66.0 ms | 132 ms |", "| 17 | mean time that a switch adds to the plain pipeline: 1 in flight | at most 60 us |",
		"| Ray Serve 2.60.0 | 64 | 850 | 1000 | 0.85x (0.77x-0.94x) |",
		"2 cores of Some <CPU>, linux/amd64", "Measured on 2026-11-22, commit 0a1b2c3d.", "2026-11-21 to 2026-11-22", "nats-server v2.15.2", "nats.go v1.55.0", "| v1.2.3 |", "| 3.11.7 |",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("there is no %q in\n%s", want, got)
		}
	}
	for _, bad := range []string{"not measured", "from a trial", "NaN", "Inf", "<no value>", "failed."} {
		if strings.Contains(got, bad) {
			t.Errorf("there is %q in\n%s", bad, got)
		}
	}
	if blocks := strings.Count(got, "```sh\nbin/bench "); blocks != 17 {
		t.Errorf("%d items have their commands", blocks)
	}
}

func TestPageNamesMissingFigures(t *testing.T) {
	t.Parallel()
	nothing := page(t, suite.Results{Version: suite.Version})
	if n := strings.Count(nothing, "It was not measured."); n != 17 {
		t.Errorf("%d items are reported as not measured", n)
	}
	r := known(1, 1, 1000, 0)
	r.Items[4].Quick = true
	r.Items[5].Commands[0].Loads[0].Trials[1].Failed = 3
	r.Items[6].Commands[2].Loads[0].Trials[0].Failed = 251
	r.Items[9].Commands[1].Loads[0].Trials[0].Samples = nil
	got := page(t, r)
	for _, want := range []string{"are from a trial", "Of the 2003 requests, 3 failed.", "Of the 6001 requests that were not refused, 1 failed.", "The report has no samples of the process."} {
		if !strings.Contains(got, want) {
			t.Errorf("there is no %q in\n%s", want, got)
		}
	}
}

func TestPicturesNeedFigures(t *testing.T) {
	t.Parallel()
	all, err := suite.Pictures(known(1, 1, 1000, 0))
	if err != nil || len(all) != 6 {
		t.Fatalf("got %d, %v", len(all), err)
	}
	shown := page(t, known(1, 1, 1000, 0))
	for name, svg := range all {
		var any struct{ XMLName xml.Name }
		if err := xml.Unmarshal(svg, &any); err != nil || any.XMLName.Local != "svg" || strings.Contains(string(svg), "NaN") {
			t.Errorf("%s is %s, %v", name, svg, err)
		}
		if strings.Contains(string(svg), "There is nothing to draw") || !strings.Contains(shown, fmt.Sprintf("](performance/%s)", name)) {
			t.Errorf("%s has nothing, or is not on the page", name)
		}
	}
	if none, err := suite.Pictures(suite.Results{}); err != nil || len(none) != 0 {
		t.Errorf("of nothing there are %v, %v", none, err)
	}
}

func TestOldPicturesAreRemoved(t *testing.T) {
	t.Parallel()
	docs := t.TempDir()
	if err := suite.Render(known(1, 1, 1000, 0), docs); err != nil {
		t.Fatal(err)
	}
	if err := suite.Render(suite.Results{}, docs); err != nil {
		t.Fatal(err)
	}
	if left, err := filepath.Glob(filepath.Join(docs, "performance", "*")); err != nil || len(left) != 0 {
		t.Errorf("there are %q, %v", left, err)
	}
}
