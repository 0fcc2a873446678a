package docstest

import (
	"os"
	"path/filepath"
	"regexp"
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

// metricName matches the name that an instrument is made with.
var metricName = regexp.MustCompile(`"(stagemesh\.[a-z]+\.[a-z_.]+)"`)

func TestEveryMetricIsDocumented(t *testing.T) {
	t.Parallel()
	const operations = "docs/operations.md"
	text := read(t, operations)
	for _, file := range []string{"stagehost/internal/item/metrics.go", "internal/call/metrics.go", "internal/jobs/dispatch/metrics.go"} {
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

var alert = regexp.MustCompile(`alert: (\w+)`)

func TestAlertsLinkToWhatToDo(t *testing.T) {
	t.Parallel()
	operations, alerts := read(t, "docs/operations.md"), read(t, "deploy/prometheus/alerts.yml")
	found := alert.FindAllStringSubmatch(alerts, -1)
	if len(found) == 0 {
		t.Error("there is no alert")
	}
	for _, match := range found {
		link := "runbook_url: https://github.com/stagemesh/stagemesh/blob/main/docs/operations.md#" + strings.ToLower(match[1]) + "\n"
		if !strings.Contains(alerts, link) || !strings.Contains(operations, "\n### "+match[1]+"\n") {
			t.Errorf("%s has no link to docs/operations.md, or that no section of it", match[1])
		}
	}
}
