package docstest

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = program.Remove()
		os.Exit(code) //nolint:forbidigo // this is main
	}))
}

// repository is the root, from this package's folder.
const repository = "../.."

// page is one Markdown file; its path is relative to the repository.
type page struct{ path, text string }

// pages returns every Markdown file that is ours.
func pages(t *testing.T) []page {
	t.Helper()
	var out []page
	err := filepath.WalkDir(repository, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() && path != repository && (strings.HasPrefix(name, ".") || name == "testdata" || name == "node_modules" || name == "third_party") {
			return filepath.SkipDir
		}
		if entry.IsDir() || filepath.Ext(name) != ".md" {
			return nil
		}
		relative, err := filepath.Rel(repository, path)
		if err != nil {
			return err
		}
		out = append(out, page{filepath.ToSlash(relative), read(t, relative)})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(out) == 0 {
		t.Fatal("no page was found")
	}
	return out
}

// read returns a file of the repository.
func read(t *testing.T, path string) string {
	t.Helper()
	data := testbed.ReadFile(t, filepath.Join(repository, path))
	return string(data)
}

// block is a fenced block of a page.
type block struct {
	language string
	line     int
	lines    []string
}

// blocks returns the fenced blocks of a page, and its text without them.
func blocks(text string) (found []block, prose string) {
	var rest strings.Builder
	var open *block
	for i, line := range strings.Split(text, "\n") {
		language, fence := strings.CutPrefix(strings.TrimSpace(line), "```")
		switch {
		case fence && open == nil:
			open = &block{language: language, line: i + 1}
		case fence:
			found = append(found, *open)
			open = nil
		case open != nil:
			open.lines = append(open.lines, line)
		default:
			rest.WriteString(line + "\n")
		}
	}
	return found, rest.String()
}
