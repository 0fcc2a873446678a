package docstest

import (
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// Every Go block stands, line by line, in a test: so it compiles and runs.
// Indentation and empty lines do not count.
func TestGoCodeIsCodeOfATest(t *testing.T) {
	t.Parallel()
	tests := testCode(t)
	for _, p := range pages(t) {
		found, _ := blocks(p.text)
		for _, b := range found {
			if b.language != "go" {
				continue
			}
			if !strings.Contains(tests, plain(b.lines)) {
				t.Errorf("%s:%d: this block is not code of any _test.go file", p.path, b.line)
			}
		}
	}
}

// testCode returns all test files of the repository, plain.
func testCode(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	err := filepath.WalkDir(repository, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && path != repository && strings.HasPrefix(entry.Name(), ".") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		relative, err := filepath.Rel(repository, path)
		if err != nil {
			return err
		}
		out.WriteString(plain(strings.Split(read(t, relative), "\n")))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func plain(lines []string) string {
	var out strings.Builder
	for _, line := range lines {
		if line = strings.TrimSpace(line); line != "" {
			out.WriteString(line + "\n")
		}
	}
	return out.String()
}
