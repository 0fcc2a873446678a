package docstest

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const architecture = "ARCHITECTURE.md"

// quoted matches what stands in backquotes.
var quoted = regexp.MustCompile("`([^`\n]+)`")

func quotations(text string) []string {
	_, prose := blocks(text)
	var out []string
	for _, match := range quoted.FindAllStringSubmatch(prose, -1) {
		out = append(out, match[1])
	}
	return out
}

var sourceFile = regexp.MustCompile(`^[a-z0-9_-]+(/[a-z0-9_.-]+)+\.(go|proto|yaml)$`)

func TestFilesThatAreNamedAreThere(t *testing.T) {
	t.Parallel()
	for _, p := range pages(t) {
		for _, name := range quotations(p.text) {
			if !sourceFile.MatchString(name) {
				continue
			}
			if _, err := os.Stat(filepath.Join(repository, filepath.FromSlash(name))); err != nil {
				t.Errorf("%s names %s: %v", p.path, name, err)
			}
		}
	}
}

var testName = regexp.MustCompile(`^(Test|Fuzz|Benchmark)[A-Z]\w+$`)

func TestTestsThatAreNamedAreThere(t *testing.T) {
	t.Parallel()
	code := testCode(t)
	for _, p := range pages(t) {
		for _, name := range quotations(p.text) {
			if testName.MatchString(name) && !strings.Contains(code, "func "+name+"(") && p.path == architecture {
				t.Errorf("%s names the test %s, which is not there", p.path, name)
			}
		}
	}
}

// packageRow matches a row of the table of packages.
var packageRow = regexp.MustCompile("(?m)^\\| `([a-z0-9_./-]+)` \\|")

func TestTheTableOfPackagesIsTheTrees(t *testing.T) {
	t.Parallel()
	_, prose := blocks(read(t, architecture))
	_, table, found := strings.Cut(prose, "## Packages")
	if !found {
		t.Fatal("there is no section Packages")
	}
	table, _, _ = strings.Cut(table, "\n## ")
	var listed []string
	for _, match := range packageRow.FindAllStringSubmatch(table, -1) {
		listed = append(listed, match[1])
	}
	there := packages(t)
	for _, pkg := range there {
		if !slices.Contains(listed, pkg) {
			t.Errorf("package %s has no row in the table of packages in %s", pkg, architecture)
		}
	}
	for _, pkg := range listed {
		if !slices.Contains(there, pkg) {
			t.Errorf("%s lists package %s, which is not there", architecture, pkg)
		}
	}
}

// packages returns the folders of Go files but for generated ones.
func packages(t *testing.T) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(repository, func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(repository, file)
		if err != nil {
			return err
		}
		relative = filepath.ToSlash(relative)
		if entry.IsDir() && relative != "." && (strings.HasPrefix(entry.Name(), ".") || entry.Name() == "testdata" || relative == "proto/gen") {
			return filepath.SkipDir
		}
		if folder := path.Dir(relative); path.Ext(relative) == ".go" && !slices.Contains(out, folder) {
			out = append(out, folder)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// metricName matches the name that an instrument is made with.
var metricName = regexp.MustCompile(`"(stagemesh\.[a-z]+\.[a-z_.]+)"`)

func TestEveryMetricIsDocumented(t *testing.T) {
	t.Parallel()
	const operations = "docs/operations.md"
	text := read(t, operations)
	for _, file := range []string{"stagehost/metrics.go", "gateway/call/metrics.go"} {
		found := metricName.FindAllStringSubmatch(read(t, file), -1)
		if len(found) == 0 {
			t.Errorf("%s makes no metric", file)
		}
		for _, match := range found {
			name := strings.ReplaceAll(match[1], ".", "_")
			if !strings.Contains(text, "`"+name) {
				t.Errorf("%s has no %s, which %s makes", operations, name, file)
			}
		}
	}
}
